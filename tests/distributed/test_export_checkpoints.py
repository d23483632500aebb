"""A run's checkpoint, from every ZeRO stage over two ranks, becomes a folder that transformers loads."""

import json

import pytest
import torch
from launching import run_python, run_ranks
from transformers import AutoModelForCausalLM

from recipes import export

STEPS = 4
KINDS = {
    "stage0": ["zero_optimization.stage=0"],
    "stage1": ["zero_optimization.stage=1"],
    "stage3": ["zero_optimization.stage=3"],
    "bf16_stage2": ["bf16.enabled=true", "zero_optimization.stage=2"],
    "tied_stage1": ["zero_optimization.stage=1"],
    "tied_stage3": ["zero_optimization.stage=3"],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, small_corpus, small_model):
    """One run of each kind, trained in the same two processes."""
    folder = tmp_path_factory.mktemp("runs")
    tied = folder / "tied.json"
    tied.write_text(json.dumps(json.loads(small_model.read_text()) | {"tie_word_embeddings": True}))
    arguments = []
    for kind, settings in KINDS.items():
        model = tied if kind.startswith("tied") else small_model
        words = f"--deepspeed_config ds_configs/cpu.json --model {model} --data {small_corpus} --max_steps {STEPS} "
        words += "--seq_length 32 --global_batch_size 8"
        arguments.append([*words.split(), "--output_dir", str(folder / kind), "--set", *settings])
    listing = folder / "runs.json"
    listing.write_text(json.dumps(arguments))
    run_ranks(["tests/distributed/train_runs.py", str(listing)], ranks=2)
    return folder


def exported(runs, kind, folder):
    assert export.main([str(runs / kind), str(folder)]) == 0
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return model


def saved_biases(runs, kind):
    buffers = torch.load(runs / kind / f"checkpoints/step_{STEPS:08d}/buffers.pt", weights_only=True)
    return {name: value for name, value in buffers.items() if name.endswith("e_score_correction_bias")}


def test_stage_0_to_the_bit(runs, tmp_path):
    """Stage 0 keeps the whole model in one file, which says what must come out."""
    theirs = exported(runs, "stage0", tmp_path / "out").state_dict()
    file = runs / "stage0" / f"checkpoints/step_{STEPS:08d}/mp_rank_00_model_states.pt"
    saved = torch.load(file, weights_only=False)["module"]
    for name, tensor in theirs.items():
        assert torch.equal(tensor, saved[name]), name


@pytest.mark.parametrize(
    ("kind", "reference"), [("stage1", "stage0"), ("stage3", "stage0"), ("tied_stage3", "tied_stage1")]
)
def test_every_stage_gives_the_same_model(runs, tmp_path, kind, reference):
    one, other = exported(runs, kind, tmp_path / "one"), exported(runs, reference, tmp_path / "other")
    for (name, a), (_, b) in zip(one.state_dict().items(), other.state_dict().items(), strict=True):
        # Adam's first steps turn rounding in tiny gradients into steps of the learning rate's size; a tensor taken from
        # the wrong place would differ by its own size, 0.02 and more.
        assert (a - b).abs().mean() < 1e-4, name
    for name, bias in saved_biases(runs, kind).items():
        if name in one.state_dict():  # the MTP layer's is dropped
            assert torch.equal(one.state_dict()[name], bias) and bias.abs().sum() > 0


def test_half_precision_runs_export_their_master_weights(runs, tmp_path):
    """float32 masters, not the bfloat16 copies: some element is no bfloat16."""
    model = exported(runs, "bf16_stage2", tmp_path / "out")
    weight = model.model.layers[0].mlp.up_proj.weight
    assert weight.dtype == torch.float32 and not torch.equal(weight, weight.bfloat16().float())
    for name, bias in saved_biases(runs, "bf16_stage2").items():
        assert bias.dtype == torch.float32
        if name in model.state_dict():
            assert torch.equal(model.state_dict()[name], bias)


def test_commands_take_a_run_a_checkpoint_or_an_export(runs, tmp_path):
    assert export.main([str(runs / "stage1" / f"checkpoints/step_{STEPS:08d}"), str(tmp_path / "out")]) == 0
    texts = []
    for path in (runs / "stage1", tmp_path / "out"):
        words = ["recipes/generate.py", str(path), "--prompt", "def ", "--max_new_tokens", "12", "--json"]
        done = run_python(words)
        assert done.code == 0, done.output
        texts.append(json.loads(done.stdout)["text"])
    assert texts[0] == texts[1]
    done = run_python(["recipes/export.py", str(tmp_path / "nowhere"), str(tmp_path / "x")])
    assert done.code == 2 and done.stderr.startswith("error: ") and "Traceback" not in done.stderr
