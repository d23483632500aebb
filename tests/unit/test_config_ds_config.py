"""Loading, overriding and resolving a ds_config: what goes in and what `deepspeed.initialize` gets."""

import copy
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from recipes.config.batch_plan import BatchRamp
from recipes.config.ds_config import (
    DS_CONFIGS,
    RunFacts,
    apply_overrides,
    choose_ds_config,
    load_ds_config,
    resolve_ds_config,
)
from recipes.config.errors import UserError

FILE = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 1.0,
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": "auto"}},
    "scheduler": {"type": "cosine", "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"}},
    "tensorboard": {"enabled": True, "output_path": "auto", "job_name": "auto"},
}


def facts(**changes):
    values = dict(
        world_size=2,
        device_type="cpu",
        device_dtypes=frozenset({"fp32", "bf16", "fp16"}),
        model=SimpleNamespace(hidden_size=64, n_routed_experts=8),
        seq_length=128,
        max_steps=100,
        output_dir=Path("/runs/one"),
    )
    return RunFacts(**(values | changes))


def resolve(config=FILE, **changes):
    return resolve_ds_config(config, source="f.json", facts=facts(**changes))


# --- loading and overriding ------------------------------------------------------------------------------------------


def test_a_missing_file_names_the_nearest_shipped_one(tmp_path):
    with pytest.raises(UserError) as error:
        load_ds_config(tmp_path / "1gpu_bf.json")
    assert "cannot be read" in str(error.value) and "did you mean ds_configs/1gpu_bf16.json?" in str(error.value)


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"a": 1,}', "line 1 column "),
        ("[1]", "must be a JSON object"),
        ('{"fp16": {"enabled": true, "enabled": false}}', "enabled: stands there twice"),
    ],
)
def test_unreadable_files(tmp_path, text, message):
    path = tmp_path / "f.json"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        load_ds_config(path)
    assert str(path) in str(error.value) and message in str(error.value)


def test_overrides():
    config = apply_overrides(
        {"optimizer": {"params": {"lr": 1}}, "x": 1},
        ["optimizer.params.lr=3e-4", "fp16.enabled=true", "a.b.c=[1, 2]", "optimizer.type=AdamW"],
    )
    assert config == {
        "optimizer": {"params": {"lr": 3e-4}, "type": "AdamW"},
        "x": 1,
        "fp16": {"enabled": True},
        "a": {"b": {"c": [1, 2]}},
    }


def test_overrides_leave_their_input_alone_and_report_all_faults():
    original = {"x": 1, "o": {"p": 2}}
    apply_overrides(original, ["o.p=3"])
    assert original["o"]["p"] == 2
    with pytest.raises(UserError) as error:
        apply_overrides(original, ["x", "x.y=1", ".z=1"])
    assert len(error.value.faults) == 3


# --- choosing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "device, world_size, bf16, name",
    [
        ("cpu", 1, False, "cpu"),
        ("cpu", 4, False, "cpu"),
        ("cpu", 2, True, "cpu_bf16"),
        ("cuda", 1, True, "1gpu_bf16"),
        ("cuda", 1, False, "1gpu_fp16"),
        ("cuda", 8, True, "8gpu_zero2_bf16"),
        ("cuda", 2, False, "8gpu_zero2_fp16"),
        ("cuda", 32, True, "32gpu_zero2_bf16"),
        ("cuda", 16, True, "32gpu_zero2_bf16"),
        ("cuda", 64, True, "64gpu_zero3_bf16"),
        ("cuda", 512, True, "64gpu_zero3_bf16"),
        ("cuda", 64, False, "8gpu_zero3_fp16"),
    ],
)
def test_choosing(device, world_size, bf16, name):
    chosen = choose_ds_config(device, world_size, bf16)
    assert chosen == DS_CONFIGS / f"{name}.json" and chosen.exists()


# --- resolving -------------------------------------------------------------------------------------------------------


def test_every_auto_is_filled_in():
    resolved = resolve()
    config = resolved.config
    assert (config["train_batch_size"], config["train_micro_batch_size_per_gpu"]) == (64, 8)
    assert config["gradient_accumulation_steps"] == 4 == resolved.gradient_accumulation_steps
    zero = config["zero_optimization"]
    # hidden 64: 64 * 64, 0.9 of it, 10 * 64
    assert zero["reduce_bucket_size"] == 4096
    assert zero["stage3_prefetch_bucket_size"] == 3686
    assert zero["stage3_param_persistence_threshold"] == 640
    assert config["optimizer"]["params"]["torch_adam"] is True and config["optimizer"]["params"]["fused"] is True
    assert config["scheduler"]["params"]["warmup_num_steps"] == 10  # a tenth of the 100 steps
    assert config["scheduler"]["params"]["total_num_steps"] == 100
    assert config["tensorboard"] == {"enabled": True, "output_path": "/runs/one", "job_name": "tensorboard"}
    assert '"auto"' not in json.dumps({k: v for k, v in config.items() if k != "recipe"})


def test_warm_up_is_deepseeks_2000_steps_where_the_run_is_long_enough():
    assert resolve(max_steps=50_000).config["scheduler"]["params"]["warmup_num_steps"] == 2000


@pytest.mark.parametrize(
    "device, offload, torch_adam",
    [("cpu", False, True), ("cuda", False, True), ("cpu", True, False), ("cuda", True, False)],
)
def test_which_adam(device, offload, torch_adam):
    config = copy.deepcopy(FILE)
    if offload:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    params = resolve(config, device_type=device).config["optimizer"]["params"]
    assert params["torch_adam"] is torch_adam
    assert params.get("fused", False) is torch_adam


@pytest.mark.parametrize("timers, name", [(5, "timers"), ({"throughput": 5}, "timers.throughput")])
def test_what_is_no_section_is_named_and_not_filled_in(timers, name):
    with pytest.raises(UserError, match=f"{name}: 5 must be a section"):
        resolve(FILE | {"timers": timers})


def test_deepspeeds_throughput_timer_is_off_unless_asked_for():
    assert resolve().config["timers"] == {"throughput": {"enabled": False}}
    asked = {"throughput": {"enabled": True}}
    assert resolve(FILE | {"timers": asked}).config["timers"] == asked


@pytest.mark.parametrize(
    "device, stage, experts, contiguous",
    [("cpu", 1, False, False), ("cuda", 1, False, True), ("cpu", 2, False, True), ("cpu", 1, True, True)],
)
def test_gradients_lie_apart_where_that_saves_a_copy_and_nothing_needs_them_together(
    device, stage, experts, contiguous
):
    config = copy.deepcopy(FILE)
    config["zero_optimization"] = {"stage": stage, "contiguous_gradients": "auto"}
    if experts:
        config["expert_parallel"] = {"enabled": True, "autoep_size": 1}
    zero = resolve(config, device_type=device).config["zero_optimization"]
    assert zero["contiguous_gradients"] is contiguous


@pytest.mark.parametrize("rule, factor", [("sqrt", math.sqrt(64 / 256)), ("linear", 64 / 256), ("none", 1.0)])
def test_the_learning_rate_scales_with_the_batch_and_shows_how(rule, factor):
    resolved = resolve(lr_scaling=rule)
    assert resolved.peak_learning_rate == pytest.approx(1e-3 * factor, rel=1e-12)
    assert resolved.config["optimizer"]["params"]["lr"] == resolved.peak_learning_rate
    worked = {"sqrt": "= 0.001 * sqrt(64 / 256)", "linear": "= 0.001 * (64 / 256)", "none": "not scaled"}[rule]
    assert worked in resolved.lr_line and f"{resolved.peak_learning_rate:.4g}" in resolved.lr_line


def test_the_resolved_file_reproduces_itself():
    first = resolve()
    assert resolve(json.loads(json.dumps(first.config))).config == first.config
    # whatever the flags say then: the rate was scaled once
    again = resolve(first.config, lr_scaling="linear", reference_batch_size=512)
    assert again.peak_learning_rate == first.peak_learning_rate


@pytest.mark.parametrize("world_size", [1, 4, 16, 64])
def test_another_world_size_keeps_batch_and_rate_and_accumulation_follows(world_size):
    first = resolve()
    moved = resolve(first.config, world_size=world_size)
    assert moved.global_batch_size == 64 and moved.peak_learning_rate == first.peak_learning_rate
    assert moved.micro_batch_size * moved.gradient_accumulation_steps * world_size == 64
    assert moved.micro_batch_size == min(8, 64 // world_size)


def test_another_batch_scales_the_resolved_rate_from_its_own_batch():
    moved = resolve(resolve().config, global_batch_size=256)
    assert moved.peak_learning_rate == pytest.approx(1e-3, rel=1e-12)  # 1e-3 * sqrt(64/256) * sqrt(256/64)


def test_what_the_user_changes_in_a_resolved_file_stays():
    config = apply_overrides(
        resolve().config, ["optimizer.params.lr=7e-4", "zero_optimization.reduce_bucket_size=5000"]
    )
    again = resolve(config)
    assert again.peak_learning_rate == 7e-4
    assert again.config["zero_optimization"]["reduce_bucket_size"] == 5000


def test_the_length_of_a_run_in_tokens():
    assert resolve(max_steps=None, train_tokens=64 * 128 * 7).max_steps == 7
    assert resolve(max_steps=None, train_tokens=64 * 128 * 7 + 1).max_steps == 8
    with pytest.raises(UserError, match="give --max_steps or --train_tokens"):
        resolve(max_steps=None)
    with pytest.raises(UserError, match="give one"):
        resolve(max_steps=7, train_tokens=7)


def test_a_ramp_lengthens_a_run_counted_in_tokens():
    # 16, 32, 48 and 64 sequences of 128 tokens, a stair at each third of 3 * 16 * 128 * 10 tokens
    ramp = BatchRamp(16, 3 * 16 * 128 * 10)
    resolved = resolve(max_steps=None, train_tokens=16 * 128 * 100, batch_ramp=ramp)
    # 10 steps of 16, 5 of 32, 4 of 48 (past 480 samples in the last), then 64 each to 1,600
    assert resolved.batch_plan.batches == [16, 32, 48, 64]
    assert [resolved.batch_plan.samples_before(step) for step in (10, 15, 19)] == [160, 320, 512]
    assert resolved.max_steps == 19 + math.ceil((1600 - 512) / 64)
    assert resolved.config["train_batch_size"] == 64


def test_input_is_left_alone():
    before = copy.deepcopy(FILE)
    resolve()
    assert FILE == before


def test_deepspeeds_last_word_is_a_users_fault():
    config = copy.deepcopy(FILE) | {"gradient_allreduce_op": "sum"}  # each is valid; stage 3 and a sum are not
    with pytest.raises(UserError, match="f.json: .*'sum' is not supported with ZeRO stage 3"):
        resolve(config)
