"""Counts: the published totals exactly, the model's own parameters, and torch's FLOP counter."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from model.config import load_model_config, preset_names
from model.flops import count_parameters, flops_per_token, main, training_flops_per_token
from model.transformer import DeepseekForCausalLM


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("v3", 671_026_404_352, 37_552_282_624),
        ("v2", 235_741_434_880, 21_375_800_320),
        ("v2_lite", 15_706_484_224, 2_661_150_208),
    ],
)
def test_published_counts(name, total, active):
    """Totals and active parameters as counted on transformers' classes, all embeddings included."""
    assert count_parameters(load_model_config(name))[:2] == (total, active)


def test_deepseek_moe_16b_is_about_what_its_paper_says():
    count = count_parameters(load_model_config("deepseek_moe_16b"))
    assert round(count.total / 1e9, 1) == 16.4
    assert round(count.active / 1e9, 1) == 2.8


@pytest.mark.parametrize("name", preset_names())
def test_counts_are_the_modules_own(name):
    config = load_model_config(name)
    with torch.device("meta"):
        model = DeepseekForCausalLM(config)
    extra = tuple(f"model.layers.{config.num_hidden_layers + k}." for k in range(config.num_nextn_predict_layers))
    main_parameters = sum(p.numel() for n, p in model.named_parameters() if not n.startswith(extra or "\0"))
    mtp_parameters = sum(p.numel() for n, p in model.named_parameters() if extra and n.startswith(extra))
    count = count_parameters(config)
    assert (count.total, count.mtp) == (main_parameters, mtp_parameters)


def test_tiny_and_small_are_the_size_they_promise():
    assert 6.5e6 < count_parameters(load_model_config("tiny")).total < 7.5e6
    assert 90e6 < count_parameters(load_model_config("small")).total < 130e6


@pytest.mark.parametrize("length", [128, 256])
def test_forward_and_backward_of_tiny_agree_with_torch(length):
    """Within 2%: torch counts the products as run, and the blocks on attention's diagonal hold some masked pairs."""
    config = dataclasses.replace(load_model_config("tiny"), num_nextn_predict_layers=1)
    model = DeepseekForCausalLM(config)
    model.init_weights(0)
    ids = torch.randint(0, config.vocab_size, (2, length))
    with FlopCounterMode(display=False) as counter:
        model(ids, ids)["loss"].backward()
    ours = training_flops_per_token(config, length) * ids.numel()
    assert ours == pytest.approx(counter.get_total_flops(), rel=0.02)


@pytest.mark.parametrize("length", [64, 256])
def test_the_forward_of_tiny_agrees_with_deepspeeds_profiler(length):
    """Within 5%: it counts element-wise products and activations, too, which ours leave out.

    It sees torch.mm, matmul, linear and scaled_dot_product_attention by replacing them, so on a CPU, where each expert
    is one torch.mm, every product of ours; of attention as run, with the masked pairs in the blocks on the diagonal. On
    a GPU it does not see grouped_mm, and takes the whole square of attention: there it and this count part ways. The
    forward alone is compared, without gradients, because the loss makes its own in the same pass.
    """
    from deepspeed.profiling.flops_profiler import FlopsProfiler

    config = dataclasses.replace(load_model_config("tiny"), num_nextn_predict_layers=1)
    model = DeepseekForCausalLM(config)
    model.init_weights(0)
    ids = torch.randint(0, config.vocab_size, (2, length))
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    with torch.no_grad():
        model(ids, ids)
    counted = profiler.get_total_flops()
    profiler.end_profile()
    assert sum(flops_per_token(config, length).values()) * ids.numel() == pytest.approx(counted, rel=0.05)


def test_parts_by_hand():
    """V2-Lite at one token, where attention's products are its head dims alone."""
    parts = flops_per_token(load_model_config("v2_lite"), 1)
    assert parts["attention_scores"] == 27 * 2 * 16 * (192 + 128)
    assert parts["dense"] == 2 * 3 * 2048 * 10944
    assert parts["experts"] == 26 * 6 * 2 * 3 * 2048 * 1408
    assert parts["shared_experts"] == 26 * 2 * 2 * 3 * 2048 * 1408
    assert parts["router"] == 26 * 2 * 2048 * 64
    assert parts["head"] == 2 * 2048 * 102400
    assert parts["mtp"] == 0


def test_attention_scores_grow_with_the_sequence_and_nothing_else_does():
    config = load_model_config("v2")
    short, long = flops_per_token(config, 1023), flops_per_token(config, 4095)
    assert long.pop("attention_scores") == 4 * short.pop("attention_scores")
    assert long == short


def test_command_line(capsys):
    assert main(["v3", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["parameters"]["total"] == 671_026_404_352
    assert result["training_flops_per_token"] == 3 * sum(result["forward_flops_per_token"].values())
    assert main(["tiny", "--seq_length", "128"]) == 0
    assert "7,250,432" in capsys.readouterr().out
    assert main(["no-such-model"]) == 2
    assert "neither a preset" in capsys.readouterr().err
    assert main(["tiny", "--seq_length", "0"]) == 2


def test_run_as_a_module():
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "model.flops", "v2", "--json"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["parameters"]["active"] == 21_375_800_320
