"""Ranks that share a model: what is refused, and that the table of what goes together is what the tests train."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_config_ds_check import GOOD, faults_of, resolve

from model.config import load_model_config
from recipes.config.ds_config import DS_CONFIGS, RunFacts, apply_overrides, load_ds_config, resolve_ds_config
from recipes.config.parallel_check import flag_faults

sys.path.append(str(Path(__file__).resolve().parents[1] / "distributed"))
import test_expert_parallel  # noqa: E402
import test_shared_sequences  # noqa: E402

NOT_IN_THE_TABLE = {test_shared_sequences.CLIP, test_shared_sequences.MICRO, "save"}


def table():
    """(ranks, settings and words, result) of each row of the README's table."""
    rows = re.findall(r"^\| (\d+) \| (.*) \| (.*) \|$", (DS_CONFIGS / "README.md").read_text(), re.MULTILINE)
    return [(int(ranks), " ".join(re.findall("`(.*?)`", cell)).split(), result) for ranks, cell, result in rows]


def test_every_row_that_is_called_equal_is_trained():
    rows = [(ranks, set(words)) for ranks, words, result in table() if result == "equal"]
    trained = [
        (ranks, set(module.CASES[ranks][name]) - NOT_IN_THE_TABLE)
        for module, cases in (
            (test_expert_parallel, test_expert_parallel.EXACT),
            (test_shared_sequences, test_shared_sequences.SHARED),
        )
        for ranks, name in cases
    ]
    assert len(rows) == 15
    for row in rows:
        assert row in trained
    for case in trained:
        assert case in rows


REFUSED = [(ranks, words) for ranks, words, result in table() if result != "equal"]


@pytest.mark.parametrize("ranks, words", REFUSED)
def test_every_row_that_is_called_refused_is(ranks, words):
    key = words[0].partition("=")[0].replace("expert_parallel.enabled", "expert_parallel.autoep_size")
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


TENSOR, SEQUENCE = "tensor_parallel.autotp_size=2", "sequence_parallel_size=2"
SEQUENCE_3 = [SEQUENCE, "zero_optimization.stage=3"]
BF16 = ["bf16.enabled=true", "data_types.grad_accum_dtype=fp32"]


@pytest.mark.parametrize(
    "overrides, facts, fault, way_out",
    [
        ([TENSOR], {"world_size": 3}, "tensor_parallel.autotp_size: 2 does not divide the 3 ranks", "write 1 or 3"),
        (
            ["tensor_parallel.autotp_size=8"],
            {"world_size": 8},
            "tensor_parallel.autotp_size: 8 does not",
            "write 2 or 4",
        ),
        (["tensor_parallel.autotp_size=-2"], {}, "tensor_parallel.autotp_size: -2 must be", "1 for none"),
        (['tensor_parallel.autotp_size="2"'], {}, "tensor_parallel.autotp_size: '2' must be", "1 for none"),
        ([TENSOR, "tensor_parallel.preset_model=deepseek_v2"], {}, "tensor_parallel.preset_model: ", "delete"),
        ([TENSOR, "tensor_parallel.tp.tp_size=4"], {}, "tensor_parallel.tp: ", "delete"),
        (["tensor_parallel.tp.tp_size=2"], {}, "tensor_parallel.tp: ", "delete"),
        (
            [TENSOR, "tensor_parallel.partition_config.use_default_specs=true"],
            {},
            "tensor_parallel.partition_config: ",
            "delete",
        ),
        ([TENSOR, *BF16], {}, "tensor_parallel.autotp_size: 2 in bf16", "write stage 2"),
        ([SEQUENCE, *BF16], {}, "sequence_parallel_size: 2 in bf16", "write stage 2"),
        ([SEQUENCE], {"seq_length": 127}, "sequence_parallel_size: 2 does not divide the 127 tokens", "write 1"),
        (
            ["sequence_parallel_size=8"],
            {"world_size": 8},
            "sequence_parallel_size: 8 does not divide the 4 att",
            "2 or 4",
        ),
        (["sequence_parallel_size=0"], {}, "sequence_parallel_size: 0 must", "1 for none"),
        (
            [*SEQUENCE_3, "zero_optimization.reduce_scatter=false"],
            {},
            "zero_optimization.reduce_scatter: False with",
            "write true",
        ),
        (
            [*SEQUENCE_3, "zero_optimization.zero_hpz_partition_size=2"],
            {},
            "zero_optimization.zero_hpz_partition_size: ",
            "write 1",
        ),
        (
            [*SEQUENCE_3, "zero_optimization.zero_quantized_gradients=true"],
            {},
            "zero_optimization.zero_quantized_gradients: ",
            "false",
        ),
        ([SEQUENCE, "data_parallel_size=1"], {}, "data_parallel_size: ", "delete it"),
        ([SEQUENCE, "optimizer.type=SGD", 'optimizer.params={"lr": 1e-3}'], {}, "sequence_parallel_size: 2", "AdamW"),
    ],
)
def test_what_shared_sequences_do_not_go_with(overrides, facts, fault, way_out):
    found = faults_of(overrides, **facts)
    assert len(found) == 1 and found[0].startswith(f"f.json: {fault}") and way_out in found[0], found


def test_ranks_that_share_sequences_count_once_in_the_batch():
    for setting in (TENSOR, SEQUENCE):
        resolved = resolve(apply_overrides(GOOD, [setting]), world_size=8)
        assert resolved.micro_batch_size * resolved.gradient_accumulation_steps == 2  # 8 sequences over 4 groups
        again = resolve(resolved.config, world_size=8)
        assert again.config == resolved.config


@pytest.mark.parametrize("flag", ["torch_compile", "log_group_norms", "ema_decay", "lora_rank"])
@pytest.mark.parametrize("setting", [TENSOR, SEQUENCE])
def test_flags_that_shared_sequences_do_not_go_with(flag, setting):
    config = apply_overrides(GOOD, [setting])
    [fault] = flag_faults(config, SimpleNamespace(**{flag: 1}))
    assert fault.startswith(f"--{flag}: with {setting.partition('=')[0]} 2")
    assert flag_faults(GOOD, SimpleNamespace(**{flag: 1})) == []


def test_flags_that_shared_experts_do_not_go_with():
    config = apply_overrides(GOOD, ["expert_parallel.enabled=true", "expert_parallel.autoep_size=2"])
    faults = flag_faults(config, SimpleNamespace(log_group_norms=True, ema_decay=0.9))
    assert [fault.split()[0] for fault in faults] == ["--log_group_norms", "--ema_decay"]
    assert flag_faults(config, SimpleNamespace(log_group_norms=False, ema_decay=None)) == []


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
