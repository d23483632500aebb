"""What "auto" means in a ds_config, and the record that lets a resolved one be resolved again.

DeepSpeed resolves no "auto": in some sections it silently becomes the default. All of them are therefore filled in
here, and one that nobody fills in is a fault.
"""

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from recipes.config.batch import TRAIN_BATCH
from recipes.config.ds_check import LEARNING_RATES, autotp_size, enabled, offload_device, precision, section, zero_stage
from recipes.config.ds_keys import RECIPE_KEY, native_autos

if TYPE_CHECKING:
    from recipes.config.ds_config import RunFacts

# Which matrices AutoTP shares out: by heads in attention, by columns and then rows in dense layers and shared experts.
# MLA's compressed parts (q_a, kv_a), norms, routers, routed experts, embedding and head stay whole on every rank.
TENSOR_PARTITION = {
    "use_default_specs": False,
    "layer_specs": [
        {
            "patterns": [
                r".*\.self_attn\.(q|k|v|q_b|kv_b)_proj\.weight$",
                r".*\.mlp\.(shared_experts\.)?(gate|up)_proj\.weight$",
            ],
            "partition_type": "column",
        },
        {
            "patterns": [
                r".*\.self_attn\.o_proj\.weight$",
                r".*\.mlp\.(shared_experts\.)?down_proj\.weight$",
            ],
            "partition_type": "row",
        },
    ],
}

# What a resolved file keeps although it was filled in: the run's identity, which no other machine may change.
_IDENTITY = {TRAIN_BATCH, *(f"optimizer.params.{key}" for key in LEARNING_RATES)}


def fill_in_autos(config: dict[str, Any], facts: "RunFacts") -> list[str]:
    """Fill in, in place, what depends on the model and the machine; the batch and the scheduler are not among it.

    Returns:
        Notes for the user.
    """
    notes = []
    params = section(config, "optimizer", "params")
    if params.get("torch_adam") == "auto":
        use_torch = params["torch_adam"] = takes_torch_adam(config)
        if use_torch:
            params.setdefault("fused", True)
        notes.append(f"optimizer.params.torch_adam: {str(use_torch).lower()}, offload {'off' if use_torch else 'on'}")
    # Its timer would wait for the whole GPU twice in each micro-batch; the loop has a clock of its own.
    timers = config.setdefault("timers", {})
    if isinstance(timers, dict) and isinstance(throughput := timers.setdefault("throughput", {}), dict):
        throughput.setdefault("enabled", False)  # what is no section is left for the checks to name
    zero = section(config, "zero_optimization")
    hidden = facts.model.hidden_size
    # The sizes that transformers' Trainer gives these keys: about one weight matrix in flight, and norms and biases
    # kept whole on every rank because gathering them costs more latency than they cost memory.
    for key, value in (
        ("reduce_bucket_size", hidden * hidden),
        ("stage3_prefetch_bucket_size", int(0.9 * hidden * hidden)),
        ("stage3_param_persistence_threshold", 10 * hidden),
    ):
        if zero.get(key) == "auto":
            zero[key] = value
            notes.append(f"zero_optimization.{key}: {value}, from hidden_size {hidden}")
    if zero.get("contiguous_gradients") == "auto":
        # One block for all gradients spares a GPU's allocator gaps. On a CPU it is a copy, taken when most is in use.
        needed = facts.device_type != "cpu" or zero_stage(config) != 1 or enabled(config, "expert_parallel")
        zero["contiguous_gradients"] = needed
        notes.append(f"zero_optimization.contiguous_gradients: {str(needed).lower()} on {facts.device_type}")
    if enabled(config, "expert_parallel"):
        # The model's modules are laid out as this preset expects whatever its routing; others would match as well.
        config["expert_parallel"].setdefault("preset_model", "deepseek_v3")
        if precision(config) == "fp32":
            # DeepSpeed's Triton kernels, which it takes before capability 9.0, multiply float32 in TF32's 10 bits.
            config["expert_parallel"].setdefault("disable_triton_grouped_mm", True)
    if autotp_size(config) > 1 and not section(config, "tensor_parallel").get("partition_config"):
        config["tensor_parallel"]["partition_config"] = copy.deepcopy(TENSOR_PARTITION)
    for monitor in ("tensorboard", "csv_monitor"):
        values = section(config, monitor)
        if values.get("output_path") == "auto" and facts.output_dir is not None:
            values["output_path"] = str(facts.output_dir)
            if values.get("job_name") == "auto":
                values["job_name"] = monitor
    return notes


def takes_torch_adam(config: dict[str, Any]) -> bool:
    """What `torch_adam` "auto" becomes: torch's fused Adam is there, DeepSpeed's own is compiled by each host at first
    use, on a GPU with nvcc; but only DeepSpeed has one for what is offloaded."""
    return offload_device(config, "offload_optimizer") == "none"


def left_auto_faults(config: dict[str, Any], source: str) -> list[str]:
    """One fault for each "auto" that neither this project nor DeepSpeed fills in."""
    native = native_autos()
    return [
        f'{source}: {path}: "auto" is filled in by nobody; write a value'
        for path, value in _leaves(config)
        if value == "auto" and path not in native
    ]


def recipe_record(
    given: dict[str, Any], reopened: dict[str, Any], resolved: dict[str, Any], source: str
) -> dict[str, Any]:
    """What a resolved file says about its own making, under a key that DeepSpeed ignores.

    Args:
        given: the ds_config as it was handed in, perhaps with such a record.
        reopened: the same before anything was filled in.
        resolved: the same after.
    """
    before, after = dict(_leaves(reopened)), dict(_leaves(resolved))
    filled = {
        path: {"before": before.get(path), "after": value}
        for path, value in after.items()
        if before.get(path) != value and path not in _IDENTITY
    }
    return {
        "source": section(given, RECIPE_KEY).get("source", source),
        "learning_rate_holds_at_batch": resolved[TRAIN_BATCH],
        "filled_in": filled,
    }


def reopen(config: dict[str, Any], reference_batch_size: int) -> tuple[dict[str, Any], int]:
    """A resolved ds_config with its "auto"s back, and the batch [sequences] at which its learning rate holds.

    What the user has changed since it was resolved stays as changed. A config that was never resolved comes back as
    it is, with the reference batch size given.
    """
    opened = copy.deepcopy(config)
    record = opened.pop(RECIPE_KEY, None)
    if not isinstance(record, dict):
        return opened, reference_batch_size
    now = dict(_leaves(opened))
    for path, change in record.get("filled_in", {}).items():
        if path not in now or now[path] != change["after"]:
            continue
        *parents, key = path.split(".")
        parent = section(opened, *parents)
        if change["before"] is None:
            parent.pop(key, None)
        else:
            parent[key] = change["before"]
    return opened, record.get("learning_rate_holds_at_batch", reference_batch_size)


def _leaves(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Key path and value of everything that is no section; the scheduler counts as one value."""
    for key, value in config.items():
        path = f"{prefix}{key}"
        if path == RECIPE_KEY:
            continue
        if isinstance(value, dict) and path != "scheduler":
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value
