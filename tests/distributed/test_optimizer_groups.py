"""Weight decay reaches matrices alone, and Muon the hidden matrices, at every ZeRO stage."""

import json

import pytest
import torch
from launching import run_ranks

from model.config import ModelConfig
from model.transformer import DeepseekForCausalLM
from recipes.training.optimizer import parameter_groups

STAGES = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def report(tmp_path_factory, small_model):
    """Every case in one process: a start costs more than the steps. DeepSpeed's Muon would compile its kernels."""
    output = tmp_path_factory.mktemp("optimizers") / "report.json"
    words = ["tests/distributed/train_optimizers.py", str(small_model), str(output)]
    run_ranks(words, ranks=1, PYTHONPATH=".", TORCHDYNAMO_DISABLE="1", OMP_NUM_THREADS="1")
    return json.loads(output.read_text())


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_without_gradients_only_decays_matrices(report, stage):
    ratios = report[f"AdamW {stage}"]["result"]
    for name, (low, high) in ratios.items():
        # lr 0.5, decay 0.1: decayed weights shrink to 1 - 0.05; float32 rounds the product and the ratio
        kept = "norm" in name or "embed_tokens" in name
        expected = 1.0 if kept else 0.95
        assert low == pytest.approx(expected, abs=1e-6) and high == pytest.approx(expected, abs=1e-6), name
    assert any("embed_tokens" in name for name in ratios) and any("experts.down_proj" in name for name in ratios)


@pytest.mark.parametrize("stage", STAGES)
def test_groups_survive_each_stage(report, stage):
    assert report[f"AdamW {stage}"]["groups"] == [["decayed_0", 0.1, False], ["not_decayed_0", 0.0, False]]
    if stage:
        assert report[f"Muon {stage}"]["groups"] == [
            ["decayed_0-muon-params", 0.1, True],
            ["decayed_0-adam-params", 0.1, False],
            ["not_decayed_0-adam-params", 0.0, False],
        ]


@pytest.mark.parametrize("stage", STAGES[1:])
def test_muon_learns_alike_at_each_stage(report, stage):
    losses = report[f"Muon {stage}"]["result"]
    assert losses[-1] < losses[0] / 3
    # its orthogonalisation runs in bfloat16, whose last digit is 1/128
    assert losses == pytest.approx(report["Muon 1"]["result"], rel=0.05, abs=0.05)


def test_names_and_frozen_parameters(small_model):
    model = DeepseekForCausalLM(ModelConfig.from_file(small_model))
    model.lm_head.weight.requires_grad_(False)
    groups = parameter_groups(model.named_parameters(), 0.1)
    named = dict(model.named_parameters())
    assert [named[n] is p for g in groups for n, p in zip(g["names"], g["params"], strict=True)].count(False) == 0
    assert {n for g in groups for n in g["names"]} == set(named) - {"lm_head.weight"}


def test_no_group_is_empty(small_model):
    model = DeepseekForCausalLM(ModelConfig.from_file(small_model))
    only_norms = [(n, p) for n, p in model.named_parameters() if p.dim() == 1]
    assert [g["name"] for g in parameter_groups(only_norms, 0.1)] == ["not_decayed_0"]


def test_a_large_model_has_groups_of_a_part_of_it():
    million = 1 << 20
    with torch.device("meta"):
        named = [
            (f"{i}.weight", torch.nn.Parameter(torch.empty(million, width))) for i, width in enumerate([3] * 6 + [9])
        ]
        named += [(f"{i}.norm", torch.nn.Parameter(torch.empty(2 * million))) for i in range(5)]
    groups = parameter_groups(named, 0.1)
    # at most 8 million elements each, but for a parameter that has more
    assert {group["name"]: [name.split(".")[0] for name in group["names"]] for group in groups} == {
        "decayed_0": ["0", "1"],
        "decayed_1": ["2", "3"],
        "decayed_2": ["4", "5"],
        "decayed_3": ["6"],
        "not_decayed_0": ["0", "1", "2", "3"],
        "not_decayed_1": ["4"],
    }
    # of a model 16 times as large a sixteenth
    with torch.device("meta"):
        named = [(f"{i}.weight", torch.nn.Parameter(torch.empty(million, 8))) for i in range(64)]
    assert [len(group["names"]) for group in parameter_groups(named, 0.1)] == [4] * 16
