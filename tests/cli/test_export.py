"""export.py: what transformers loads, from a checkpoint's weights and from another Hugging Face folder."""

import dataclasses
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from model.config import load_model_config
from model.moe import iter_routers
from model.transformer import DeepseekForCausalLM
from recipes import export
from recipes.config.errors import UserError
from recipes.data.tokenizer import train_tokenizer
from recipes.training import trained_model

PROMPT = "def f(x):\n    return x\n"


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([PROMPT * 20], 300).save_pretrained(folder)
    return folder


@pytest.fixture
def model():
    model = DeepseekForCausalLM(dataclasses.replace(load_model_config("tiny"), num_nextn_predict_layers=1)).eval()
    model.init_weights(0)
    for _, router in iter_routers(model):
        router.e_score_correction_bias.uniform_(-0.1, 0.1, generator=torch.Generator().manual_seed(1))
    return model


@pytest.fixture
def run(model, tokenizer_folder, tmp_path, monkeypatch):
    """A run's folder whose newest checkpoint holds the model."""
    folder = tmp_path / "run"
    folder.mkdir()

    def load_model_state(path):
        assert path == folder
        return model.config, model.state_dict(), tokenizer_folder

    monkeypatch.setattr(trained_model, "load_model_state", load_model_state)
    return folder


def test_transformers_loads_the_export(run, model, tmp_path, capsys):
    out = tmp_path / "out"
    assert export.main([str(run), str(out), "--max_shard_bytes", "4000000", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["num_nextn_predict_layers"] == 0 and result["files"] > 3
    assert not out.with_name("out.partial").exists()

    theirs, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert theirs.dtype == torch.float32
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert theirs.generation_config.eos_token_id == theirs.config.eos_token_id == tokenizer.eos_token_id
    assert theirs.generation_config.bos_token_id == tokenizer.bos_token_id
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        ours, other = model(ids)["logits"], theirs(ids).logits
    # float32 on both sides, sums in another order
    assert ((ours - other).abs().max() / ours.abs().max()).item() < 1e-5
    assert tokenizer.decode(theirs.generate(ids, max_new_tokens=3)[0]).startswith("def f(x)")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_dtype_asked_for(run, tmp_path, dtype):
    assert export.main([str(run), str(tmp_path / "out"), "--dtype", dtype]) == 0
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert theirs.model.layers[0].mlp.up_proj.weight.dtype == getattr(torch, dtype)
    assert theirs.model.layers[1].mlp.gate.e_score_correction_bias.dtype == torch.float32


def test_mtp_is_kept_or_dropped_and_the_config_says_so(run, model, tmp_path):
    for choice, depth in (("keep", 1), ("drop", 0)):
        assert export.main([str(run), str(tmp_path / choice), "--mtp", choice]) == 0
        config = json.loads((tmp_path / choice / "config.json").read_text())
        assert config["num_nextn_predict_layers"] == depth
    # An export is a checkpoint too: from one folder to another, MTP and all, to the bit.
    assert export.main([str(tmp_path / "keep"), str(tmp_path / "again"), "--mtp", "keep"]) == 0
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("keep", "again"))
    assert first == second
    with pytest.raises(UserError, match="model.layers.4.enorm.weight is missing"):
        (tmp_path / "drop" / "config.json").write_text(json.dumps(model.config.to_dict()))
        export.main([str(tmp_path / "drop"), str(tmp_path / "fails"), "--mtp", "keep"])
    assert not (tmp_path / "fails").exists() and not (tmp_path / "fails.partial").exists()


def test_users_mistakes(run, tmp_path):
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").write_text("x")
    with pytest.raises(UserError, match="is there already and not empty"):
        export.main([str(run), str(full)])
    with pytest.raises(UserError, match="no such folder"):
        export.main([str(tmp_path / "nowhere"), str(tmp_path / "out")])
    with pytest.raises(UserError, match="--max_shard_bytes 0"):
        export.main([str(run), str(tmp_path / "out"), "--max_shard_bytes", "0"])
    with pytest.raises(SystemExit) as exit_info:
        export.main([str(run), str(tmp_path / "out"), "--dtype", "int8"])
    assert exit_info.value.code == 2
    assert not (tmp_path / "out").exists()


def test_a_model_is_loaded_in_the_dtype_asked_for_without_mtp(run):
    weights = trained_model.open_weights(run)
    loaded = trained_model.load_trained_model(weights, device="cpu", dtype=torch.bfloat16)
    assert loaded.lm_head.weight.dtype == torch.bfloat16
    assert loaded.config.num_nextn_predict_layers == 0 and len(loaded.model.layers) == 4
    assert all(router.e_score_correction_bias.dtype == torch.float32 for _, router in iter_routers(loaded))
