"""What a ds_config may say about ranks that share a model: expert, tensor, sequence and pipeline parallelism.

Consecutive ranks may share a model's experts, its matrices or every sequence, one of the three, but not stages. The
table in ds_configs/README.md says what goes together; tests/unit/test_config_parallel_check.py walks it.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from recipes.config.batch import divisors
from recipes.config.ds_auto import TENSOR_PARTITION
from recipes.config.ds_check import (
    autotp_size,
    enabled,
    is_muon,
    offload_device,
    section,
    sequence_parallel_size,
    zero_stage,
)
from recipes.config.ds_keys import quiet_deepspeed

if TYPE_CHECKING:
    from recipes.config.ds_config import RunFacts

# The model's configuration and its own router decide these; in the section they would change nothing, or the model.
_DECIDED_BY_THE_MODEL = (
    "top_k",
    "score_func",
    "score_apply",
    "route_norm",
    "route_scale",
    "routed_scaling_factor",
    "num_expert_groups",
    "num_limited_groups",
    "expert_activation",
)

# Stages of ZeRO at which each was tried with DeepSpeed 0.19.8, and what came of it.
_TENSOR_WRONG_STAGES = {
    0: "the gradient's norm is that of each rank's own matrices",
    3: "the output of a matrix that AutoTP has cut becomes NaN in the first forward pass",
}
_SEQUENCE_WRONG_STAGES = {0: "DeepSpeed clips gradients by groups of model-parallel ranks, which Ulysses does not have"}


def parallel_faults(config: dict[str, Any], source: str, facts: "RunFacts") -> list[str]:
    """Everything that is wrong with the parallelism that a ds_config asks for."""
    checks = (_pipeline, _tensor_parallel, _sequence_parallel, _expert_parallel)
    return [f"{source}: {fault}" for check in checks for fault in check(config, facts)]


def flag_faults(config: dict[str, Any], flags: Any) -> list[str]:
    """What a run's flags ask for that the ds_config's parallelism does not go with.

    Args:
        config: a resolved ds_config. flags: a PretrainConfig or FinetuneConfig.
    """
    sizes = {
        "tensor_parallel.autotp_size": autotp_size(config),
        "sequence_parallel_size": sequence_parallel_size(config),
    }
    faults = [
        f"--{name}: with {key} {size} in the ds_config, which it was not shown to work with; leave one of them out"
        for key, size in sizes.items()
        for name in ("torch_compile", "log_group_norms", "ema_decay", "lora_rank")
        if size > 1 and getattr(flags, name, None)
    ]
    if enabled(config, "expert_parallel") and flags.log_group_norms:
        faults.append(
            "--log_group_norms with expert_parallel in the ds_config: a rank would count its own experts alone; "
            "leave the flag out"
        )
    if enabled(config, "expert_parallel") and flags.ema_decay:
        faults.append(
            "--ema_decay with expert_parallel in the ds_config: each parameter is averaged by one rank, which has its "
            "own experts alone; leave the flag out, or average checkpoints later (recipes/checkpoint.py average)"
        )
    return faults


def _pipeline(config: dict[str, Any], facts: "RunFacts") -> Iterator[str]:
    stages = section(config, "pipeline").get("stages", "auto")
    if stages not in ("auto", 1):
        yield (
            f"pipeline.stages: {stages}, but DeepSpeed cuts only a PipelineModule into stages: a list of layers, each "
            "taking what the one before gives, while here the balance losses, and the embeddings for multi-token "
            "prediction, go past the layers between; delete it"
        )


def _tensor_parallel(config: dict[str, Any], facts: "RunFacts") -> Iterator[str]:
    key, tensor_parallel = "tensor_parallel.autotp_size", section(config, "tensor_parallel")
    for other in sorted(tensor_parallel.keys() - {"autotp_size", "partition_config"}):
        yield f"tensor_parallel.{other}: autotp_size alone is taken, the rest follows from the model; delete it"
    size = tensor_parallel.get("autotp_size", 0)
    if type(size) is not int or size < 0:
        yield f"{key}: {size!r} must be a whole number, 1 for none"
        return
    if size in (0, 1):
        return
    yield from _undivided(key, size, facts.world_size, f"the {facts.world_size} ranks")
    for field, width in _shared_widths(facts.model).items():
        yield from _undivided(key, size, width, f"the model's {field} {width}")
    if enabled(config, "expert_parallel"):
        yield (
            f"{key}: {size} with expert_parallel, under which AutoTP finds no shared experts and AutoEP cuts the "
            "tokens over the same ranks; write 1, or expert_parallel.enabled false"
        )
    yield from _not_shown(config, f"{key}: {size}", _TENSOR_WRONG_STAGES)
    if tensor_parallel.get("partition_config") != TENSOR_PARTITION:
        yield "tensor_parallel.partition_config: the model's own modules decide it; delete it"


def _sequence_parallel(config: dict[str, Any], facts: "RunFacts") -> Iterator[str]:
    key, size = "sequence_parallel_size", config.get("sequence_parallel_size", 1)
    if type(size) is not int or size < 1:
        yield f"{key}: {size!r} must be a whole number, 1 for none"
        return
    if "data_parallel_size" in config:
        yield "data_parallel_size: the ranks and sequence_parallel_size decide it; delete it"
    if size == 1:
        return
    for what, number in (
        ("ranks", facts.world_size),
        ("attention heads", facts.model.num_attention_heads),
        ("tokens of a sequence (--seq_length)", facts.seq_length),
    ):
        yield from _undivided(key, size, number, f"the {number} {what}")
    if autotp_size(config) > 1:
        yield f"{key}: {size} with tensor_parallel.autotp_size; DeepSpeed has no common groups; write 1 in one of them"
    if enabled(config, "expert_parallel"):
        yield (
            f"{key}: {size} with expert_parallel, whose groups AutoEP lays out without regard to the sequence's; "
            "write 1, or expert_parallel.enabled false"
        )
    yield from _not_shown(config, f"{key}: {size}", _SEQUENCE_WRONG_STAGES)
    if zero_stage(config) == 3:
        zero = section(config, "zero_optimization")
        if zero.get("reduce_scatter", True) is not True:
            yield (
                f"zero_optimization.reduce_scatter: {zero['reduce_scatter']!r} with {key} {size} at stage 3, where "
                "DeepSpeed then averages large and small gradients over different numbers of ranks; write true"
            )
        yield from _other_partitions(zero, f"{key} {size}")


def _not_shown(config: dict[str, Any], what: str, wrong_stages: dict[int, str]) -> Iterator[str]:
    """What tensor or sequence parallelism trains wrongly with, or was not tried with.

    Args:
        wrong_stages: stages of ZeRO that it does not go with, and why.
    """
    stage = zero_stage(config)
    if why := wrong_stages.get(stage):
        fitting = " or ".join(str(other) for other in (1, 2, 3) if other not in wrong_stages)
        yield f"{what} at zero_optimization.stage {stage}, where {why}; write stage {fitting}"
    wide = section(config, "data_types").get("grad_accum_dtype") == "fp32"
    if stage == 1 and enabled(config, "bf16") and wide:
        yield (
            f"{what} in bf16 with data_types.grad_accum_dtype fp32 at zero_optimization.stage 1, for which DeepSpeed "
            "has an optimizer of its own, not shown to train alike; write stage 2"
        )
    if section(config, "optimizer").get("type") not in ("AdamW", "Adam"):
        yield f"{what} with an optimizer that was not shown to train alike; write optimizer.type AdamW"
    for device in ("offload_optimizer", "offload_param"):
        if offload_device(config, device) != "none":
            yield f"{what} with zero_optimization.{device}, which was not shown to train alike; write device none"


def _other_partitions(zero: dict[str, Any], what: str) -> Iterator[str]:
    """Ways of ZeRO++ to share weights and gradients out otherwise, which nothing here was shown to train alike with."""
    if zero.get("zero_hpz_partition_size", 1) > 1:
        yield f"zero_optimization.zero_hpz_partition_size: not with {what} at stage 3; write 1"
    if zero.get("zero_quantized_gradients"):
        yield f"zero_optimization.zero_quantized_gradients: not with {what} at stage 3; write false"


def _shared_widths(model: Any) -> dict[str, int]:
    """What AutoTP cuts, by the field that says how wide it is."""
    shared = (model.moe_intermediate_size or 0) * model.n_shared_experts if model.n_routed_experts else 0
    has_dense = model.first_k_dense_replace or not model.n_routed_experts
    widths = {
        "num_attention_heads": model.num_attention_heads,
        "intermediate_size": model.intermediate_size if has_dense else 0,
        "moe_intermediate_size * n_shared_experts": shared,
    }
    return {field: width for field, width in widths.items() if width}


def _undivided(key: str, size: int, number: int, what: str) -> Iterator[str]:
    if number % size:
        yield f"{key}: {size} does not divide {what}; {_nearest(divisors(number), size)}"


def _nearest(fitting: list[int], wanted: int) -> str:
    """What to write instead: the two of the sizes that fit which are nearest to the one that was wanted."""
    near = sorted(sorted(fitting, key=lambda size: abs(size - wanted))[:2])
    return f"write {' or '.join(map(str, near))}"


def _expert_parallel(config: dict[str, Any], facts: "RunFacts") -> Iterator[str]:
    if not enabled(config, "expert_parallel"):
        return
    size = section(config, "expert_parallel").get("autoep_size", 1)
    experts = facts.model.n_routed_experts
    if type(size) is not int or size < 1:
        yield f"expert_parallel.autoep_size: {size!r} must be a whole number of at least 1"
        return
    if not experts:
        yield "expert_parallel.enabled: true, but the model has no routed experts; write false"
        return
    hint = _nearest([d for d in divisors(experts) if facts.world_size % d == 0], size)
    if experts % size:
        yield f"expert_parallel.autoep_size: {size} does not divide the model's {experts} routed experts; {hint}"
    if facts.world_size % size:
        yield f"expert_parallel.autoep_size: {size} does not divide the {facts.world_size} ranks; {hint}"
    elif fault := _autoep_fault(config, facts):
        yield f"expert_parallel: {fault}"
    for key in _DECIDED_BY_THE_MODEL:
        if section(config, "expert_parallel").get(key, "auto") not in ("auto", None):
            yield f"expert_parallel.{key}: the model's configuration decides it; delete it"
    yield from _beside_expert_parallel(config, size)


def _beside_expert_parallel(config: dict[str, Any], size: int) -> Iterator[str]:
    """What the rest of the file says that AutoEP does not go with."""
    stage, zero = zero_stage(config), section(config, "zero_optimization")
    if stage == 0 and size > 1:
        yield (
            f"expert_parallel.autoep_size: {size} at zero_optimization.stage 0, where DeepSpeed measures and clips the "
            "gradient on each rank with that rank's experts alone, so that the ranks drift apart; write stage 1"
        )
    for key in ("contiguous_gradients", "reduce_scatter"):
        if stage in (1, 2) and zero.get(key, True) is not True:
            yield f"zero_optimization.{key}: {zero[key]!r}, but DeepSpeed shares out experts only with true; write true"
    yield from _other_partitions(zero, "expert_parallel")
    if stage == 3 and offload_device(config, "offload_optimizer") == "nvme":
        yield (
            'zero_optimization.offload_optimizer.device: "nvme" with expert_parallel at stage 3, which DeepSpeed '
            'cannot save; write "cpu"'
        )
    if is_muon(config):
        yield "optimizer.type: Muon, which was not shown to train alike with expert_parallel; write AdamW"
    if config.get("use_data_before_expert_parallelism"):
        yield "use_data_before_expert_parallelism: true, but a checkpoint's experts are looked for rank by rank; delete"


def _autoep_fault(config: dict[str, Any], facts: "RunFacts") -> str | None:
    """What AutoEP itself says; it can be asked before there are ranks."""
    from deepspeed.module_inject.auto_ep_config import parse_autoep_config, validate_autoep_config

    try:
        with quiet_deepspeed():
            validate_autoep_config(
                parse_autoep_config(section(config, "expert_parallel")),
                facts.world_size,
                pp_size=1,
                tp_size=1,
                sp_size=1,
                zero_stage=zero_stage(config),
                zero_offload_optimizer=offload_device(config, "offload_optimizer") != "none",
                zero_offload_param=offload_device(config, "offload_param") != "none",
            )
    except (ValueError, TypeError) as error:
        return " ".join(str(error).split())
    return None
