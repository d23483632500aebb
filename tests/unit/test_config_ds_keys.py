"""The valid keys of a ds_config come from the installed DeepSpeed itself."""

import pytest
from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT_DEFAULT
from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS, DeepSpeedConfig
from deepspeed.runtime.precision_config import DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from recipes.config.ds_keys import known_keys, native_autos, optimizer_keys, unknown_key_faults

# What people write most, from DeepSpeed's own documentation; each must be known or every such file is refused.
DOCUMENTED = """train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps optimizer scheduler
communication_data_type prescale_gradients gradient_predivide_factor fp16 bf16 torch_autocast gradient_clipping
zero_optimization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer steps_per_print wall_clock_breakdown
dump_state aio flops_profiler activation_checkpointing data_types tensorboard wandb csv_monitor comms_logger
checkpoint tensor_parallel expert_parallel data_efficiency compile timers memory_breakdown pipeline
sequence_parallel_size""".split()


@pytest.mark.parametrize("key", DOCUMENTED)
def test_documented_keys_are_known(key):
    assert key in known_keys()


def test_nested_keys_are_those_of_deepspeeds_models():
    tree = known_keys()
    assert set(tree["fp16"]) == set(DeepSpeedFP16Config.model_fields)
    zero = DeepSpeedZeroConfig.model_fields
    assert set(tree["zero_optimization"]) == set(zero) | {f.alias for f in zero.values() if f.alias}
    assert set(tree["activation_checkpointing"]) == set(ACT_CHKPT_DEFAULT)
    assert "pin_memory" in tree["zero_optimization"]["offload_optimizer"]
    assert set(tree["timers"]["throughput"]) == {"enabled", "synchronized"}
    assert set(tree["tensorboard"]) == {"enabled", "output_path", "job_name"}
    assert "autoep_size" in tree["expert_parallel"]


def test_removed_sections_are_not_valid_keys():
    assert not set(_REMOVED_TOP_LEVEL_CONFIG_KEYS) & set(known_keys())


@pytest.mark.parametrize(
    "config, path, hint",
    [
        ({"zero_optimisation": {"stage": 2}}, "zero_optimisation", 'did you mean "zero_optimization"?'),
        ({"gradient_acumulation_steps": 4}, "gradient_acumulation_steps", '"gradient_accumulation_steps"?'),
        ({"fp16": {"enable": True}}, "fp16.enable", 'did you mean "enabled"?'),
        (
            {"zero_optimization": {"offload_optimizer": {"pin_memry": True}}},
            "zero_optimization.offload_optimizer.pin_memry",
            'did you mean "pin_memory"?',
        ),
        ({"checkpoint": {"load_univrsal": True}}, "checkpoint.load_univrsal", 'did you mean "load_universal"?'),
        (
            {"activation_checkpointing": {"partitioned_activations": 1}},
            "activation_checkpointing.partitioned_activations",
            'did you mean "partition_activations"?',
        ),
        ({"timers": {"throughput": {"x": 1}}}, "timers.throughput.x", "valid: enabled, synchronized"),
    ],
)
def test_a_misspelt_key_at_any_level_is_one_fault_with_the_nearest(config, path, hint):
    (fault,) = unknown_key_faults(config, "f.json")
    assert fault.startswith(f"f.json: {path}: unknown key") and fault.endswith(hint)


def test_deepspeed_itself_would_have_said_nothing():
    # the reason for all this: were it ever refused by DeepSpeed, these checks could go
    assert DeepSpeedConfig({"train_batch_size": 1, "zero_optimisation": {"stage": 2}}).zero_optimization_stage == 0


@pytest.mark.parametrize("key", [*_REMOVED_TOP_LEVEL_CONFIG_KEYS, "zero_optimization.mics_shard_size"])
def test_what_deepspeed_removed_is_named_as_removed(key):
    *parents, last = key.split(".")
    config = {parents[0]: {last: 1}} if parents else {last: {}}
    (fault,) = unknown_key_faults(config, "f.json")
    assert fault.startswith(f"f.json: {key}: DeepSpeed removed it")


def test_a_value_in_place_of_a_section():
    (fault,) = unknown_key_faults({"fp16": True}, "f.json")
    assert "fp16: True must be a section" in fault


def test_a_valid_file_has_no_fault():
    config = {
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 1, "prefetch_bucket_size": 1},
        "pipeline": {"stages": "auto"},
        "data_efficiency": {"data_sampling": {"curriculum_learning": {"metrics_of_mine": 1}}},
    }
    assert unknown_key_faults(config, "f.json") == []


def test_optimizer_params_come_from_the_optimizers_signature():
    def keys_of(name, torch_adam=False, offloaded=False):
        return optimizer_keys(name, torch_adam=torch_adam, offloaded=offloaded)[1]

    assert {"AdamW", "Muon", "Lion", "Lamb", "SGD"} <= set(optimizer_keys("Lion", torch_adam=False, offloaded=False)[0])
    assert {"lr", "betas", "eps", "weight_decay", "torch_adam"} <= keys_of("AdamW")
    assert "fused" in keys_of("AdamW", torch_adam=True)
    assert "fused" not in keys_of("AdamW")  # DeepSpeed's FusedAdam would raise a TypeError
    assert "adam_w_mode" not in keys_of("AdamW")  # AdamW ignores it
    assert "adam_w_mode" in keys_of("Adam")
    assert {"muon_lr", "adam_lr", "momentum"} <= keys_of("Muon")
    assert "momentum" in keys_of("SGD")
    assert keys_of("AdmaW") is None
    assert keys_of("MuAdam") is None


def test_where_deepspeed_itself_understands_auto():
    assert {"data_types.keep_in_fp32_modules", "expert_parallel.score_func", "pipeline.stages"} <= native_autos()
