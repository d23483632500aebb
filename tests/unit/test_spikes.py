"""Spikes of the loss by hand-worked medians; which sequences a rewind passes over; how runs are told to repeat."""

import math

import pytest
import torch

from recipes.config.errors import UserError
from recipes.config.run_config import parse_pretrain_config
from recipes.training.determinism import limits, make_deterministic
from recipes.training.group_norms import kind_of
from recipes.training.spikes import find_spike, next_sample, remember

RECENT = [3.0, 3.1, 2.9, 3.2, 2.8]  # median 3.0; distances 0, 0.1, 0.1, 0.2, 0.2 with median 0.1


def test_the_bound_is_median_and_scaled_deviations():
    bound = 3.0 + 6 * 1.4826 * 0.1  # 3.88956
    assert find_spike(bound - 1e-6, RECENT, 10, 6.0) is None
    spike = find_spike(bound + 1e-6, RECENT, 10, 6.0)
    assert spike and spike.median == 3.0 and spike.deviation == pytest.approx(0.14826)
    assert find_spike(2.0, RECENT, 10, 6.0) is None, "a loss that falls is no spike"


@pytest.mark.parametrize(
    "loss, recent, window",
    [(9.0, RECENT[:4], 10), (9.0, RECENT, 0), (math.nan, RECENT, 10), (math.inf, RECENT, 10), (9.0, [], 1)],
)
def test_no_spike_without_history_window_or_number(loss, recent, window):
    assert find_spike(loss, recent, window, 6.0) is None


def test_equal_losses_make_no_spike_of_a_last_digit():
    assert find_spike(2.001, [2.0] * 10, 10, 6.0) is None
    assert find_spike(2.1, [2.0] * 10, 10, 6.0) is not None


def test_memory_is_the_window_and_finite():
    recent: list[float] = []
    for loss in (1.0, math.nan, 2.0, math.inf, 3.0, 4.0):
        remember(recent, loss, 3)
    assert recent == [2.0, 3.0, 4.0]
    remember(recent, 5.0, 0)
    assert recent == []


def test_batches_step_over_what_was_excluded():
    excluded = [[24, 8, 2], [8, 8, 0]]
    assert next_sample(0, 8, excluded) == 0
    assert next_sample(8, 8, excluded) == 16
    assert next_sample(16, 8, excluded) == 16
    assert next_sample(4, 8, excluded) == 16, "a batch of other bounds that touches it begins after it"
    assert next_sample(12, 12, excluded) == 32, "from the first into the second"
    assert next_sample(32, 8, excluded) == 32


def test_kinds_of_parameters(small_model):
    from model.config import ModelConfig
    from model.transformer import DeepseekForCausalLM

    kinds = {
        name: kind_of(name) for name, _ in DeepseekForCausalLM(ModelConfig.from_file(small_model)).named_parameters()
    }
    assert kinds["model.layers.1.mlp.gate.weight"] == "router"
    assert kinds["model.layers.1.mlp.experts.gate_up_proj"] == "experts"
    assert kinds["model.layers.0.mlp.gate_proj.weight"] == "dense_mlp"
    assert kinds["model.layers.0.self_attn.kv_a_layernorm.weight"] == "norm"
    assert kinds["model.layers.0.self_attn.kv_b_proj.weight"] == "attention"
    assert [name for name, kind in kinds.items() if kind == "other"] == ["model.layers.3.eh_proj.weight"]


def test_deterministic_switches_and_says_its_limits(capsys, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    try:
        make_deterministic("cuda", speaks=True)
        assert torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.deterministic
        assert not torch.backends.cudnn.benchmark
    finally:
        torch.use_deterministic_algorithms(False)
    said = capsys.readouterr().out
    assert "CUBLAS_WORKSPACE_CONFIG=:4096:8" in said and "NCCL" in said
    assert len(limits("cpu")) == 1


@pytest.mark.parametrize(
    "words, fault",
    [
        ("--spike_window -1", "--spike_window -1: must be at least 0"),
        ("--spike_deviations 0", "--spike_deviations 0.0: must be above 0"),
        ("--max_nonfinite_steps 0", "--max_nonfinite_steps 0: must be at least 1"),
        ("--on_spike skip --spike_window 0", "no spike is ever found"),
        ("--on_spike stop", "--on_spike"),
    ],
)
def test_mistakes_are_named(words, fault):
    with pytest.raises(UserError, match=fault):
        parse_pretrain_config(words.split())
