"""Ranks that share a model: what is refused, and that the table of what goes together is what the tests train."""

import re
import sys
from pathlib import Path

import pytest
from test_config_ds_check import faults_of

from model.config import load_model_config
from recipes.config.ds_config import DS_CONFIGS, RunFacts, apply_overrides, load_ds_config, resolve_ds_config

sys.path.append(str(Path(__file__).resolve().parents[1] / "distributed"))
from test_expert_parallel import CASES, CLIP, EXACT  # noqa: E402


def table():
    """(ranks, settings and words, result) of each row of the README's table."""
    rows = re.findall(r"^\| (\d+) \| (.*) \| (.*) \|$", (DS_CONFIGS / "README.md").read_text(), re.MULTILINE)
    return [(int(ranks), " ".join(re.findall("`(.*?)`", cell)).split(), result) for ranks, cell, result in rows]


def test_every_row_that_is_called_equal_is_trained():
    rows = [(ranks, set(words)) for ranks, words, result in table() if result == "equal"]
    trained = [(ranks, set(CASES[ranks][name]) - {CLIP, "save"}) for ranks, name in EXACT]
    assert len(rows) == 8
    for row in rows:
        assert row in trained
    for case in trained:
        assert case in rows


REFUSED = [(ranks, words) for ranks, words, result in table() if result != "equal"]


@pytest.mark.parametrize("ranks, words", REFUSED)
def test_every_row_that_is_called_refused_is(ranks, words):
    key = words[-1].partition("=")[0] if len(words) == 1 else "expert_parallel.autoep_size"
    faults = faults_of(words, world_size=ranks)
    assert len(faults) == 1 and faults[0].startswith(f"f.json: {key}: "), faults


EXPERTS = ["expert_parallel.enabled=true", "expert_parallel.autoep_size=2"]


@pytest.mark.parametrize(
    "overrides, fault, way_out",
    [
        (["zero_optimization.contiguous_gradients=false"], "zero_optimization.contiguous_gradients", "write true"),
        (["zero_optimization.reduce_scatter=false"], "zero_optimization.reduce_scatter", "write true"),
        (["expert_parallel.top_k=4"], "expert_parallel.top_k", "delete it"),
        (["expert_parallel.score_apply=pre"], "expert_parallel.score_apply", "delete it"),
        (["optimizer.type=Muon", "gradient_clipping=0.0", "zero_optimization.stage=2"], "optimizer.type", "AdamW"),
        (["use_data_before_expert_parallelism=true"], "use_data_before_expert_parallelism", "delete"),
    ],
)
def test_what_autoep_does_not_go_with(overrides, fault, way_out):
    found = faults_of([*EXPERTS, *overrides])
    assert len(found) == 1 and found[0].startswith(f"f.json: {fault}: ") and way_out in found[0], found


@pytest.mark.parametrize("name", ["deepseek_moe_16b", "v2_lite", "v2", "v3"])
def test_one_preset_of_autoeps_is_named_for_every_model(name):
    """DeepSeekMoE's model_type is none of AutoEP's, and several of its presets would match the modules."""
    facts = RunFacts(
        world_size=8,
        device_type="cuda",
        device_dtypes={"bf16"},
        model=load_model_config(name),
        seq_length=128,
        max_steps=9,
        output_dir=Path("unused"),
    )
    config = apply_overrides(load_ds_config(DS_CONFIGS / "256gpu_ep32_bf16.json"), ["expert_parallel.autoep_size=8"])
    resolved = resolve_ds_config(config, source="f.json", facts=facts).config
    assert resolved["expert_parallel"] == {"enabled": True, "autoep_size": 8, "preset_model": "deepseek_v3"}
