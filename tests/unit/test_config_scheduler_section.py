"""The scheduler section: DeepSpeed's names are taken, their traps refused or mended, and it is said."""

import pytest

from recipes.config.scheduler_section import SCHEDULES, resolve_scheduler


def resolve(section, lr=1e-3, max_steps=100):
    return resolve_scheduler(section, source="f.json", max_steps=max_steps, total_tokens=6400, optimizer_lr=lr)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_complete_without_params_and_stays_as_resolved(name):
    resolved, faults = resolve({"type": name}, max_steps=5000)
    assert not faults
    assert set(resolved.section["params"]) == set(SCHEDULES[name])
    assert "auto" not in resolved.section["params"].values()
    assert resolve(resolved.section, max_steps=5000)[0].section == resolved.section


def test_milestones_are_shares_of_the_runs_tokens():
    assert resolve({"type": "multi_step"})[0].section["params"]["total_tokens"] == 6400


@pytest.mark.parametrize(
    "section, fault",
    [
        ({"type": "cosin"}, 'scheduler.type: \'cosin\' is no schedule; did you mean "cosine"?'),
        ({"type": "cosine", "params": {"min_rate": 0}}, 'min_rate: cosine has no such param; did you mean "min_ratio"'),
        ({"type": "cosine", "params": {"min_ratio": -1}}, "min_ratio: -1 must be a number of at least 0"),
        ({"type": "cosine", "params": {"warmup_num_steps": 2.5}}, "2.5 must be a whole number, or \"auto\""),
        ({"type": "cosine", "params": {"warmup_type": "lin"}}, 'did you mean "linear"?'),
        ({"type": "cosine", "params": {"warmup_num_steps": 30, "total_num_steps": 20}}, "more than total_num_steps 20"),
        ({"type": "wsd", "params": {"decay_share": 20}}, "must be between 0 and 1"),
        ({"type": "one_cycle", "params": {"div_factor": 0}}, "div_factor: must be above 0"),
        ({"type": "multi_step", "params": {"milestones": [0.9, 0.8]}}, "must ascend"),
        ({"type": "multi_step", "params": {"milestones": [0.9]}}, "one ratio for each"),
        ({"type": "multi_step", "params": {"ratios": [3, 4]}}, "between 0 and 1"),
        ({"type": "deepseek_v3"}, "warmup_num_steps: 2000 is longer than the run of 100 steps"),
        ("cosine", 'must be a section with "type" and "params"'),
        ({"type": "WarmupLR", "params": {"warmup_steps": 1}}, 'did you mean "warmup_num_steps"?'),
        ({"type": "OneCycle", "params": {"cycle_max_lr": 1e-3}}, "cycle_min_lr: missing"),
        ({"type": "WarmupLR", "params": {"warmup_max_lr": [1e-3, 1e-4]}}, "one number for all parameter groups"),
    ],
)  # fmt: skip
def test_faults(section, fault):
    faults = resolve(section)[1]
    assert len(faults) == 1 and fault in faults[0] and faults[0].startswith("f.json: scheduler"), faults


CYCLE = {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3}


def test_an_ignored_learning_rate_is_refused():
    # DeepSpeed's WarmupDecayLR and OneCycle overwrite the optimizer's rate with their own
    for section in (
        {"type": "WarmupDecayLR", "params": {"warmup_max_lr": 2e-3, "total_num_steps": 100, "warmup_num_steps": 5}},
        {"type": "OneCycle", "params": CYCLE},
        {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 2e-3}},
    ):
        (fault,) = resolve(section, lr=5e-3)[1]
        assert "optimizer.params.lr 0.005 differ" in fault and "write one value" in fault


def test_a_rate_stated_by_the_schedule_alone_is_the_peak():
    resolved, faults = resolve({"type": "OneCycle", "params": CYCLE}, lr=None)
    assert not faults and resolved.peak_learning_rate == 1e-3
    assert resolved.section["params"]["min_ratio"] == pytest.approx(0.1)


def test_one_cycles_momentum_is_left_out_and_said_or_refused():
    resolved, _ = resolve({"type": "OneCycle", "params": CYCLE})
    assert any("betas stay" in note for note in resolved.notes)
    (fault,) = resolve({"type": "OneCycle", "params": {**CYCLE, "cycle_momentum": True}})[1]
    assert "would overwrite the optimizer's betas" in fault and "write false" in fault
    assert not resolve({"type": "OneCycle", "params": {**CYCLE, "cycle_momentum": False}})[1]
    assert "not supported here" in resolve({"type": "OneCycle", "params": {**CYCLE, "decay_mom_rate": 0.1}})[1][0]


def test_the_second_first_step_is_mended_and_said():
    for name in ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR"):
        resolved, faults = resolve({"type": name, "params": {"warmup_num_steps": 10}})
        assert not faults and any("two steps" in note for note in resolved.notes)
        assert resolved.section["params"]["warmup_type"] == "log"  # DeepSpeed's default stays its default


def test_another_length_than_the_runs_is_said():
    resolved, _ = resolve({"type": "cosine", "params": {"total_num_steps": 50}})
    assert any("50, the run has 100 steps" in note for note in resolved.notes)


def test_no_section():
    resolved, faults = resolve(None)
    assert not faults and resolved.section["type"] == "constant"
    assert resolved.section["params"]["warmup_num_steps"] == 0
