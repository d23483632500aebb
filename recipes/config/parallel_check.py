"""What a ds_config may say about ranks that share a model: expert, tensor, sequence and pipeline parallelism.

A rank here trains on sequences of its own, whole, through the whole model; experts alone may lie on other ranks. The
table in ds_configs/README.md says what goes together; tests/unit/test_config_parallel_check.py walks it.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from recipes.config.batch import divisors
from recipes.config.ds_check import enabled, is_muon, offload_device, section, zero_stage
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


def parallel_faults(config: dict[str, Any], source: str, facts: "RunFacts") -> list[str]:
    """Everything that is wrong with the parallelism that a ds_config asks for."""
    checks = (_model_parallel, _expert_parallel)
    return [f"{source}: {fault}" for check in checks for fault in check(config, facts)]


def _model_parallel(config: dict[str, Any], facts: "RunFacts") -> Iterator[str]:
    size = section(config, "tensor_parallel").get("autotp_size", 0)
    if size not in (0, 1):
        yield (
            f"tensor_parallel.autotp_size: {size}, but every rank here is given sequences of its own, and ranks that "
            "share matrices need the same ones; write 1, and zero_optimization.stage 3 if the weights do not fit"
        )
    size = config.get("sequence_parallel_size", 1)
    if size != 1:
        yield (
            f"sequence_parallel_size: {size}, but every rank here is given whole sequences; delete it, and for long "
            "ones write a micro-batch of 1 with --gradient_checkpointing full"
        )
    stages = section(config, "pipeline").get("stages", "auto")
    if stages not in ("auto", 1):
        yield (
            f"pipeline.stages: {stages}, but DeepSpeed cuts only a PipelineModule into stages, a plain list of layers, "
            "and this model's head, multi-token prediction and balance loss join layers; delete it"
        )


def _expert_parallel(config: dict[str, Any], facts: "RunFacts") -> Iterator[str]:
    if not enabled(config, "expert_parallel"):
        return
    size = section(config, "expert_parallel").get("autoep_size", 1)
    experts = facts.model.n_routed_experts
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        yield f"expert_parallel.autoep_size: {size!r} must be a whole number of at least 1"
        return
    if not experts:
        yield "expert_parallel.enabled: true, but the model has no routed experts; write false"
        return
    fitting = [d for d in divisors(experts) if facts.world_size % d == 0]
    near = sorted(sorted(fitting, key=lambda d: abs(d - size))[:2])
    hint = f"write {' or '.join(map(str, near))}"
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
    if zero.get("zero_hpz_partition_size", 1) > 1:
        yield "zero_optimization.zero_hpz_partition_size: not with expert_parallel at stage 3; write 1"
    if zero.get("zero_quantized_gradients"):
        yield "zero_optimization.zero_quantized_gradients: not with expert_parallel at stage 3; write false"
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
