"""Schedules: exact at every corner, against numbers worked by hand and against torch's and DeepSpeed's classes."""

import math

import pytest
import torch
from deepspeed.runtime import lr_schedules

from recipes.config.scheduler_section import resolve_scheduler
from recipes.training.schedule import build_schedule

EXACT = 1e-12  # double precision, a few operations


def build(name, max_steps=100, tokens_at_step=None, total_tokens=None, **params):
    resolved, faults = resolve_scheduler(
        {"type": name, "params": params},
        source="f.json",
        max_steps=max_steps,
        total_tokens=total_tokens or max_steps,
        optimizer_lr=1e-3,
    )
    assert not faults, faults
    return build_schedule(resolved.section, max_steps, tokens_at_step=tokens_at_step).multiplier


CORNERS = [
    # name, params, {step: multiplier}; 100 steps, worked by hand
    ("constant", dict(warmup_num_steps=10), {0: 0.0, 5: 0.5, 10: 1.0, 55: 1.0, 100: 1.0, 101: 1.0}),
    ("constant", dict(warmup_num_steps=0), {0: 1.0, 100: 1.0}),
    ("constant", dict(warmup_num_steps=10, warmup_min_ratio=0.2), {0: 0.2, 5: 0.6, 10: 1.0}),
    ("linear", dict(warmup_num_steps=20, min_ratio=0.2), {0: 0.0, 20: 1.0, 60: 0.6, 100: 0.2, 101: 0.2}),
    ("cosine", dict(warmup_num_steps=20, min_ratio=0.2), {0: 0.0, 20: 1.0, 60: 0.6, 100: 0.2, 101: 0.2}),
    # a third of the way down: (1 + cos(pi / 3)) / 2 = 3/4 of the fall is left
    ("cosine", dict(warmup_num_steps=10, min_ratio=0.0), {40: 0.75, 70: 0.25}),
    ("wsd", dict(warmup_num_steps=10, decay_share=0.2, min_ratio=0.0),
     {0: 0.0, 10: 1.0, 80: 1.0, 90: 0.5, 99: 0.05, 100: 0.0, 101: 0.0}),
    ("wsd", dict(warmup_num_steps=10, decay_share=0.2, min_ratio=0.1, decay_type="cosine"),
     {80: 1.0, 90: 0.55, 100: 0.1, 101: 0.1}),
    ("wsd", dict(warmup_num_steps=10, decay_share=0.2, min_ratio=0.0, decay_type="sqrt"),
     {80: 1.0, 85: 0.5, 100: 0.0, 101: 0.0}),
    ("one_cycle", dict(), {0: 1 / 25, 10: 1.0, 55: (1 + 4e-6) / 2, 100: 4e-6, 101: 4e-6}),
    ("one_cycle", dict(pct_start=0.2, div_factor=10, final_div_factor=5),
     {0: 0.1, 10: 0.55, 20: 1.0, 60: 0.51, 100: 0.02, 101: 0.02}),
    # LLM sec. 2.3, and V2 sec. 3.1 with its own two milestones
    ("multi_step", dict(warmup_num_steps=10),
     {0: 0.0, 5: 0.5, 10: 1.0, 79: 1.0, 80: 0.316, 89: 0.316, 90: 0.1, 100: 0.1, 101: 0.1}),
    ("multi_step", dict(warmup_num_steps=0, milestones=[0.6, 0.9], ratios=[0.316, 0.316**2]),
     {0: 1.0, 59: 1.0, 60: 0.316, 89: 0.316, 90: 0.099856, 101: 0.099856}),
    ("triangular", dict(first_num_steps=40, second_num_steps=60, min_ratio=0.1),
     {0: 0.1, 20: 0.55, 40: 1.0, 70: 0.55, 100: 0.1, 101: 0.1}),
    ("triangular", dict(first_num_steps=10, second_num_steps=10, min_ratio=0.1, decay_rate=1.0, decay_num_steps=10),
     {20: 0.1, 30: 0.05, 50: 0.025}),
    ("range_test", dict(step_size=10, step_rate=2.0), {0: 1.0, 5: 2.0, 10: 3.0, 200: 41.0}),
    ("range_test", dict(step_size=10, step_rate=2.0, staircase=True), {0: 1.0, 9: 1.0, 10: 3.0}),
]  # fmt: skip


@pytest.mark.parametrize("name, params, expected", CORNERS, ids=lambda value: str(value)[:40])
def test_corners(name, params, expected):
    schedule = build(name, **params)
    for step, value in expected.items():
        assert schedule(step) == pytest.approx(value, rel=EXACT, abs=1e-15), step


def test_log_warm_up_is_deepspeeds():
    schedule = build("constant", warmup_num_steps=10, warmup_type="log")
    for step in range(10):
        assert schedule(step) == pytest.approx(math.log(step + 1) / math.log(10), rel=EXACT)
    assert schedule(9) == pytest.approx(1.0) and schedule(10) == 1.0


# V3 sec. 4.2 at its own constant 4K sequences: 15,360 sequences of 4,096 tokens a step
V3_STEP_TOKENS = 15360 * 4096


def test_deepseek_v3_in_tokens():
    schedule = build("deepseek_v3", max_steps=250_000, tokens_at_step=lambda step: step * V3_STEP_TOKENS)

    def rate_at(tokens):
        return 2.2e-4 * schedule(math.ceil(tokens / V3_STEP_TOKENS))

    assert schedule(0) == 0.0 and schedule(1000) == 0.5 and schedule(2000) == 1.0
    assert rate_at(5e12) == 2.2e-4 and rate_at(9.9999e12) == 2.2e-4
    # one step is 6.3e7 tokens of 4.3e12, so the middle of the cosine is met to about 2e-5
    assert rate_at(10e12 + 4.3e12 / 2) == pytest.approx((2.2e-4 + 2.2e-5) / 2, rel=1e-4)
    assert rate_at(14.3e12) == pytest.approx(2.2e-5, rel=EXACT)
    assert rate_at(14.3e12 + 332e9) == pytest.approx(2.2e-5, rel=EXACT)
    assert rate_at(14.3e12 + 333e9) == pytest.approx(7.3e-6, rel=EXACT)
    assert rate_at(14.8e12) == rate_at(15e12) == pytest.approx(7.3e-6, rel=EXACT)


def test_milestones_count_tokens_where_steps_differ():
    # 50 steps of 1 token, then 50 steps of 3: half of the 200 tokens is reached at step 67, not 50
    def tokens_at_step(step):
        return min(step, 50) + 3 * max(0, step - 50)

    schedule = build(
        "multi_step",
        warmup_num_steps=0,
        milestones=[0.5],
        ratios=[0.5],
        tokens_at_step=tokens_at_step,
        total_tokens=200,
    )
    assert [schedule(step) for step in (50, 66, 67, 100)] == [1.0, 1.0, 0.5, 0.5]


@pytest.mark.parametrize("pct_start", [0.1, 0.3])
def test_one_cycle_is_torchs_on_the_way_down_and_at_the_ends(pct_start):
    max_steps, lr = 50, 0.3
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=lr, betas=(0.9, 0.95))
    theirs = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=lr, total_steps=max_steps + 1, pct_start=(pct_start * max_steps + 1) / (max_steps + 1),
        anneal_strategy="cos", cycle_momentum=False,
    )  # fmt: skip
    ours = build("one_cycle", max_steps, pct_start=pct_start)
    for step in range(max_steps + 1):
        if step in (0,) or step >= pct_start * max_steps:  # torch rises along a cosine, DeepSeek's warm-up is linear
            assert lr * ours(step) == pytest.approx(theirs.get_last_lr()[0], rel=1e-9), step
        optimizer.step()
        if step < max_steps:
            theirs.step()


def deepspeed_rates(name, steps, lr, **params):
    """The rate at which each update would be made by DeepSpeed's own scheduler."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=lr, betas=(0.9, 0.95))
    scheduler = getattr(lr_schedules, name)(optimizer, **params)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    return rates, optimizer.param_groups[0]["betas"]


@pytest.mark.parametrize("warmup_type", ["linear", "log"])
@pytest.mark.parametrize(
    "name, params",
    [
        ("WarmupLR", dict(warmup_max_lr=0.1, warmup_min_lr=0.01, warmup_num_steps=10)),
        ("WarmupDecayLR", dict(warmup_max_lr=0.1, warmup_num_steps=10, total_num_steps=40)),
        ("WarmupCosineLR", dict(warmup_num_steps=10, total_num_steps=40, cos_min_ratio=0.1)),
    ],
)
def test_deepspeeds_names_give_its_curve_without_the_second_first_step(name, params, warmup_type):
    lr, steps = 0.1, 40
    theirs, _ = deepspeed_rates(name, steps, lr, warmup_type=warmup_type, **params)
    ours = build_from_deepspeed(name, dict(warmup_type=warmup_type, **params), lr, steps)
    assert theirs[0] == theirs[1]  # the trap: two steps at the lowest rate
    if name == "WarmupCosineLR":
        assert max(theirs) < lr == lr * ours(10)  # the other trap: its fall begins one step early, short of the peak
    for step in range(steps - 1):
        same = step if name == "WarmupCosineLR" and step > 10 else step + 1
        if name != "WarmupCosineLR" or step != 10:
            assert lr * ours(step) == pytest.approx(theirs[same], rel=1e-9, abs=1e-12), step


def build_from_deepspeed(name, params, lr, max_steps):
    resolved, faults = resolve_scheduler(
        {"type": name, "params": params}, source="f.json", max_steps=max_steps, total_tokens=1, optimizer_lr=lr
    )
    assert not faults, faults
    return build_schedule(resolved.section, max_steps).multiplier


def test_deepspeeds_one_cycle_keeps_its_lines_and_the_betas():
    lr, steps = 0.1, 30
    params = dict(
        cycle_min_lr=0.01, cycle_max_lr=lr, cycle_first_step_size=10, cycle_second_step_size=15,
        decay_step_size=5, decay_lr_rate=0.5,
    )  # fmt: skip
    theirs, betas = deepspeed_rates("OneCycle", steps, lr, **params)
    assert betas != (0.9, 0.95)  # the trap
    ours = build_from_deepspeed("OneCycle", params, lr, steps)
    assert lr * ours(0) == pytest.approx(0.01) and lr * ours(10) == pytest.approx(0.1)
    for step in range(1, steps):
        assert lr * ours(step) == pytest.approx(theirs[step], rel=1e-9), step


def test_deepspeeds_range_test():
    params = dict(lr_range_test_min_lr=0.1, lr_range_test_step_size=5, lr_range_test_step_rate=1.0)
    theirs, _ = deepspeed_rates("LRRangeTest", 20, 0.1, **params)
    ours = build_from_deepspeed("LRRangeTest", params, 0.1, 20)
    for step in range(20):
        assert 0.1 * ours(step) == pytest.approx(theirs[step], rel=1e-9)


def test_no_section_is_a_constant_rate():
    assert build_schedule(None, 10).multiplier(0) == 1.0


def test_token_schedules_need_tokens():
    with pytest.raises(ValueError, match="tokens_at_step"):
        build("deepseek_v3", max_steps=10_000)
    with pytest.raises(ValueError, match="no schedule 'cosin'"):
        build_schedule({"type": "cosin", "params": {}}, 10)
