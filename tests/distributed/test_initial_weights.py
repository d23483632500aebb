"""Every rank begins with the same weights, whatever the ZeRO stage; weights of a folder are taken over whole."""

import json

import pytest
import torch
from launching import PRETRAIN, metrics, run_python, run_ranks

from model.config import load_model_config
from model.transformer import DeepseekForCausalLM
from recipes.training.checkpoint_weights import load_model_state


def test_a_differing_rank_is_named(small_model):
    first, second = run_ranks(["tests/distributed/differing_rank.py", str(small_model)], ranks=2)
    for said in (first.stdout, second.stdout):
        assert "model.layers.1.mlp.experts.down_proj: rank 1 begins with other values than rank 0" in said


@pytest.fixture(scope="module")
def barely_trained(tmp_path_factory, small_model, small_corpus):
    """Runs on two ranks at stages 1 and 3 of one step too small to change a float32: they end as they began."""
    folder = tmp_path_factory.mktemp("initial")
    flags = (
        f"--deepspeed_config ds_configs/cpu.json --model {small_model} --data {small_corpus} --max_steps 1 "
        "--seq_length 32 --global_batch_size 4 --seed 9"
    )
    runs = [
        [*flags.split(), "--output_dir", str(folder / f"stage{stage}"), "--set", "optimizer.params.lr=1e-30",
         f"zero_optimization.stage={stage}"]
        for stage in (1, 3)
    ]  # fmt: skip
    listing = folder / "runs.json"
    listing.write_text(json.dumps(runs))
    run_ranks(["tests/distributed/train_runs.py", str(listing)], ranks=2)
    alone = [word.replace("stage1", "alone") for word in runs[0]]
    assert run_python([PRETRAIN, *alone]).code == 0
    return folder


def test_heldout_loss_does_not_depend_on_world_size(barely_trained):
    """Every held-out token is predicted once, whoever does it, so that the same weights have the same loss."""
    losses = [metrics(barely_trained / name, evaluation=True)[-1] for name in ("alone", "stage1", "stage3")]
    for other in losses[1:]:
        # the sums are float64; 1e-6 is for float32 rows that were computed beside other rows
        assert other["eval_loss"] == pytest.approx(losses[0]["eval_loss"], rel=1e-6)
        assert other["eval_bits_per_byte"] == pytest.approx(losses[0]["eval_bits_per_byte"], rel=1e-6)


def test_initial_weights_do_not_depend_on_world_size_or_stage(barely_trained, small_model):
    alone = DeepseekForCausalLM(load_model_config(str(small_model)))
    alone.init_weights(9)
    for stage in (1, 3):
        _, state, _ = load_model_state(barely_trained / f"stage{stage}")
        for name, parameter in alone.named_parameters():
            assert torch.equal(state[name], parameter.data), (stage, name)


def test_init_from_export_and_run(barely_trained, small_model, small_corpus, tmp_path):
    source, exported = barely_trained / "stage3", tmp_path / "exported"
    assert run_python(["recipes/export.py", str(source), str(exported), "--mtp", "keep"]).code == 0
    flags = f"--model {small_model} --data {small_corpus} --max_steps 1 --seq_length 32 --global_batch_size 4 --seed 10"
    losses = {}
    for name, origin in (("run", source), ("export", exported), ("none", None)):
        words = [PRETRAIN, *flags.split(), "--output_dir", str(tmp_path / name)]
        result = run_python([*words, "--init_from", str(origin)] if origin else words)
        assert result.code == 0, result.output
        losses[name] = metrics(tmp_path / name)[0]["loss"]
    assert losses["run"] == losses["export"] != losses["none"]
    refused = run_python([PRETRAIN, "--model", "tiny", "--data", str(small_corpus), "--init_from", str(exported),
                          "--output_dir", str(tmp_path / "other")])  # fmt: skip
    assert refused.code == 2 and "another architecture" in refused.stderr and "hidden_size" in refused.stderr
