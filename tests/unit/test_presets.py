"""The named runs say what DeepSeek's papers say, and their scaled twins draw the same curves."""

import dataclasses
import re
from pathlib import Path

import pytest
import yaml

from model.config import load_model_config
from recipes.config.batch_plan import BatchPlan, BatchRamp
from recipes.config.ds_config import DS_CONFIGS, RunFacts, apply_overrides, load_ds_config, resolve_ds_config
from recipes.config.run_config import PretrainConfig
from recipes.training.schedule import build_schedule
from recipes.training.token_schedules import bias_update_speed_at, mtp_loss_weight_at, parse_later_weight

PRESETS = Path(__file__).resolve().parents[2] / "recipes" / "presets"
NAMES = ("v3", "v2", "v2_lite", "moe_16b", "llm_7b")
EXTENSIONS = ("v3_32k", "v3_128k")
ALL = [*NAMES, *(f"{name}_scaled" for name in NAMES), *EXTENSIONS]


def read(name):
    return yaml.safe_load((PRESETS / f"{name}.yaml").read_text())


def run_of(name):
    """A preset as the pretrain command resolves it, on one rank: (preset, resolved ds_config, rate at a step)."""
    preset = read(name)
    ramp = BatchRamp.parse(preset["batch_ramp"]) if "batch_ramp" in preset else None
    facts = RunFacts(
        world_size=1,
        device_type="cpu",
        device_dtypes=frozenset({"fp32"}),
        model=load_model_config(preset.get("model", "tiny")),
        seq_length=preset["seq_length"],
        global_batch_size=preset["global_batch_size"],
        train_tokens=preset.get("train_tokens"),
        max_steps=preset.get("max_steps"),
        lr_scaling=preset["lr_scaling"],
        output_dir=Path("runs"),
        batch_ramp=ramp,
    )
    config = apply_overrides(load_ds_config(DS_CONFIGS / "cpu.json"), preset["set"])
    resolved = resolve_ds_config(config, source=name, facts=facts)
    plan = resolved.batch_plan
    schedule = build_schedule(resolved.scheduler, resolved.max_steps, tokens_at_step=plan.tokens_before)
    return preset, resolved, lambda step: resolved.peak_learning_rate * schedule.multiplier(step)


# Typed from the table of the papers' numbers: tokens, final batch, (first batch, ramp tokens), peak rate
TABLE = {
    "v3": (14.8e12, 15360, (3072, 469e9), 2.2e-4),
    "v2": (8.1e12, 9216, (2304, 225e9), 2.4e-4),
    "v2_lite": (5.7e12, 4608, None, 4.2e-4),
    "moe_16b": (2e12, 4608, None, 4.2e-4),
    "llm_7b": (2e12, 2304, None, 4.2e-4),
}
# share of the tokens -> rate over the peak, just before and just after; from the same table
FALLS = {
    "v2": [(0.6, 1.0, 0.316), (0.9, 0.316, 0.316 * 0.316)],
    "v2_lite": [(0.8, 1.0, 0.316), (0.9, 0.316, 0.316 * 0.316)],
    "moe_16b": [(0.8, 1.0, 0.316), (0.9, 0.316, 0.316 * 0.316)],
    "llm_7b": [(0.8, 1.0, 0.316), (0.9, 0.316, 0.1)],
}


@pytest.mark.parametrize("name", NAMES)
def test_numbers_of_the_papers(name):
    tokens, batch, ramp, peak = TABLE[name]
    preset, resolved, rate = run_of(name)
    assert preset["train_tokens"] == tokens and preset["seq_length"] == 4096
    assert resolved.global_batch_size == batch
    assert resolved.batch_plan.batch_at(0) == (ramp[0] if ramp else batch)
    if ramp:
        assert BatchRamp.parse(preset["batch_ramp"]) == BatchRamp(*ramp)
    assert resolved.peak_learning_rate == peak
    assert rate(0) == 0.0 and rate(1000) == pytest.approx(peak / 2) and rate(2000) == pytest.approx(peak)
    params = resolved.config["optimizer"]["params"]
    assert resolved.config["optimizer"]["type"] == "AdamW"
    assert params["betas"] == [0.9, 0.95] and params["weight_decay"] == 0.1
    assert resolved.config["gradient_clipping"] == 1.0
    assert 0 <= resolved.batch_plan.tokens_before(resolved.max_steps) - tokens < batch * 4096


@pytest.mark.parametrize("name", FALLS)
def test_the_rate_falls_where_the_papers_say(name):
    preset, resolved, rate = run_of(name)
    for share, before, after in FALLS[name]:
        step = resolved.batch_plan.steps_for_tokens(share * preset["train_tokens"])
        assert rate(step - 1) == pytest.approx(before * resolved.peak_learning_rate, rel=1e-3)
        assert rate(step) == pytest.approx(after * resolved.peak_learning_rate, rel=1e-3)


def test_v3s_rate_gamma_and_lambda():
    preset, resolved, rate = run_of("v3")
    at = resolved.batch_plan.steps_for_tokens
    assert rate(at(9.99e12)) == 2.2e-4
    assert rate(at(14.3e12)) == pytest.approx(2.2e-5) and rate(at(14.632e12)) == pytest.approx(2.2e-5)
    assert rate(at(14.634e12)) == pytest.approx(7.3e-6) and rate(resolved.max_steps) == pytest.approx(7.3e-6)
    model = load_model_config("v3")
    until, later = float(preset["bias_update_until_tokens"]), parse_later_weight(preset["mtp_loss_weight_later"])
    speeds = [bias_update_speed_at(tokens, model.bias_update_speed, until) for tokens in (0, 14.29e12, 14.3e12)]
    assert speeds == [0.001, 0.001, 0.0]
    weights = [mtp_loss_weight_at(tokens, model.mtp_loss_weight, later) for tokens in (0, 9.99e12, 10e12)]
    assert weights == [0.3, 0.3, 0.1]
    assert preset["fim_rate"] == 0.1 and preset["document_mask"] is False


@pytest.mark.parametrize("name", NAMES)
def test_a_twin_draws_the_same_curves_over_a_thousandth_of_the_tokens(name):
    full, full_run, full_rate = run_of(name)
    twin, twin_run, twin_rate = run_of(f"{name}_scaled")
    assert twin["train_tokens"] <= full["train_tokens"] / 1000
    step_share = twin_run.global_batch_size * twin["seq_length"] / twin["train_tokens"]
    for percent in range(2, 100):
        share = percent / 100
        full_step = full_run.batch_plan.steps_for_tokens(share * full["train_tokens"])
        twin_step = twin_run.batch_plan.steps_for_tokens(share * twin["train_tokens"])
        twin_batch, full_batch = twin_run.batch_plan.batch_at(twin_step), full_run.batch_plan.batch_at(full_step)
        assert twin_batch / twin_run.global_batch_size == full_batch / full_run.global_batch_size
        if percent in (60, 80, 90):
            continue  # the step itself falls on one side or the other
        # along the steepest cosine the rate changes by pi / 2 * its share of the run; a twin's step is that much longer
        slope = 1.6 / 0.29 * step_share if full_run.scheduler["type"] == "deepseek_v3" else 1e-9
        assert twin_rate(twin_step) / twin_run.peak_learning_rate == pytest.approx(
            full_rate(full_step) / full_run.peak_learning_rate, abs=slope
        ), share
    # warm-up takes its share of the tokens, to the step
    warm = [
        run.batch_plan.tokens_before(run.scheduler["params"]["warmup_num_steps"]) / preset["train_tokens"]
        for preset, run in ((full, full_run), (twin, twin_run))
    ]
    assert warm[1] == pytest.approx(warm[0], abs=step_share)


def test_v3s_twin_scales_gamma_and_lambda():
    full, twin = read("v3"), read("v3_scaled")
    scale = full["train_tokens"] / twin["train_tokens"]
    assert scale == pytest.approx(1e7)
    assert float(full["bias_update_until_tokens"]) / float(twin["bias_update_until_tokens"]) == pytest.approx(scale)
    full_later, twin_later = (parse_later_weight(p["mtp_loss_weight_later"]) for p in (full, twin))
    assert full_later[0] == twin_later[0] and full_later[1] / twin_later[1] == pytest.approx(scale)


@pytest.mark.parametrize("name", ALL)
def test_every_key_is_a_flag(name):
    assert set(read(name)) <= {field.name for field in dataclasses.fields(PretrainConfig)}


@pytest.mark.parametrize("name, length, batch", [("v3_32k", 32 * 1024, 1920), ("v3_128k", 128 * 1024, 480)])
def test_v3s_extensions_of_the_context(name, length, batch):
    preset, resolved, rate = run_of(name)
    assert (preset["seq_length"], resolved.global_batch_size, resolved.max_steps) == (length, batch, 1000)
    assert {rate(step) for step in (0, 1, 500, 1000)} == {7.3e-6}
    model = load_model_config(preset["model"])
    scaling = model.rope_scaling
    assert scaling["factor"] * scaling["original_max_position_embeddings"] == model.max_position_embeddings >= length
    assert bias_update_speed_at(0, model.bias_update_speed, preset["bias_update_until_tokens"]) == 0
    assert mtp_loss_weight_at(0, model.mtp_loss_weight, parse_later_weight(preset["mtp_loss_weight_later"])) == 0.1
    assert preset["gradient_checkpointing"] == "full" and resolved.micro_batch_size == 1


@pytest.mark.parametrize("name", [*NAMES, *EXTENSIONS])
def test_every_number_carries_its_source(name):
    """A line with a number names a paper's section, in itself or in the comment above it."""
    comment = ""
    for line in (PRESETS / f"{name}.yaml").read_text().splitlines():
        setting, _, remark = line.partition(" #") if not line.lstrip().startswith("#") else ("", "", line)
        if not setting.strip():
            comment += remark
        elif re.search(r"\d", setting.partition(":")[2] + setting.partition("=")[2]) and "model:" not in setting:
            assert re.search(r"\b(V3|V2|MoE|LLM)\b", remark or comment), line
        if remark and setting.strip():
            comment = ""  # a comment above holds until a line brings its own


def test_there_is_nothing_else():
    assert sorted(path.stem for path in PRESETS.glob("*.yaml")) == sorted(ALL)


def test_plan_counts_samples_as_the_ramp_says():
    # V3's first stair: 3,072 sequences until a quarter of 469B tokens
    plan = BatchPlan(15360, 4096, BatchRamp(3072, 469e9))
    first = plan.steps_for_tokens(469e9 / 4)
    assert plan.batch_at(first - 1) == 3072 and plan.batch_at(first) == 6144
