"""What a ds_config may not say: combinations that DeepSpeed ignores, gets wrong or rejects only after minutes.

Every check returns its faults, so that one report holds them all. Nothing here starts a process group or touches a
device: what the machine can do comes in as RunFacts.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from recipes.config.batch import ACCUMULATION, MICRO_BATCH, TRAIN_BATCH
from recipes.config.ds_keys import RECIPE_KEY, nearest, optimizer_keys, quiet_deepspeed, removed_keys

if TYPE_CHECKING:
    from recipes.config.ds_config import RunFacts

_READ_ELSEWHERE = (TRAIN_BATCH, MICRO_BATCH, ACCUMULATION, "optimizer", "scheduler", RECIPE_KEY)
LEARNING_RATES = ("lr", "muon_lr", "adam_lr")


def section(config: dict[str, Any], *path: str) -> dict[str, Any]:
    """A nested section; {} where it is absent or no section."""
    for key in path:
        value = config.get(key)
        config = value if isinstance(value, dict) else {}
    return config


def enabled(config: dict[str, Any], *path: str) -> bool:
    return section(config, *path).get("enabled") is True


def zero_stage(config: dict[str, Any]) -> int:
    stage = section(config, "zero_optimization").get("stage", 0)
    return stage if isinstance(stage, int) else 0


def offload_device(config: dict[str, Any], what: str) -> str:
    return section(config, "zero_optimization", what).get("device", "none")


def offloads_to_nvme(config: dict[str, Any]) -> bool:
    """Whether anything is offloaded to a disk, for which DeepSpeed needs libaio."""
    return "nvme" in (offload_device(config, "offload_optimizer"), offload_device(config, "offload_param"))


def precision(config: dict[str, Any]) -> str:
    """ "fp16", "bf16" or "fp32": what the weights are computed in."""
    return "fp16" if enabled(config, "fp16") else "bf16" if enabled(config, "bf16") else "fp32"


def autoep_size(config: dict[str, Any]) -> int:
    """Ranks that share one set of experts; 0 where AutoEP is off."""
    return int(section(config, "expert_parallel").get("autoep_size", 1)) if enabled(config, "expert_parallel") else 0


def autotp_size(config: dict[str, Any]) -> int:
    """Ranks that share every sharded matrix; 1 where AutoTP is off."""
    return _size(section(config, "tensor_parallel").get("autotp_size", 1))


def ranks_per_sequence(config: dict[str, Any]) -> int:
    """Ranks that work on the same sequences, together."""
    return autotp_size(config) * sequence_parallel_size(config)


def sequence_parallel_size(config: dict[str, Any]) -> int:
    """Ranks that share every sequence's tokens; 1 without sequence parallelism."""
    return _size(config.get("sequence_parallel_size"))


def _size(value: Any) -> int:
    """A parallel size as the file has it; 1 for what is none, which has its own fault."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 1 else 1


def is_muon(config: dict[str, Any]) -> bool:
    return str(section(config, "optimizer").get("type", "")).lower() == "muon"


def combination_faults(config: dict[str, Any], source: str, facts: "RunFacts") -> list[str]:
    """Everything that is wrong with a ds_config apart from its keys, its batch and its schedule."""
    checks = (_precision, _clipping, _optimizer, _offload, _section_values, _unused)
    return [f"{source}: {fault}" for check in checks for fault in check(config, facts)]


def _precision(config: dict[str, Any], facts: "RunFacts") -> Iterator[str]:
    both = enabled(config, "fp16") and enabled(config, "bf16")
    stage = zero_stage(config)
    if both:
        yield 'fp16.enabled: true, and bf16.enabled too; a run has one of them, write "enabled": false in the other'
    if enabled(config, "fp16") and stage == 0:
        yield (
            "fp16.enabled: true at zero_optimization.stage 0, where DeepSpeed divides gradients by a loss scale that "
            "it never multiplied in; write stage 1"
        )
    if enabled(config, "bf16") and stage == 0:
        yield (
            "bf16.enabled: true at zero_optimization.stage 0, where DeepSpeed begins with one step of the optimizer on "
            "no gradient; write stage 1"
        )
    if section(config, "bf16").get("check_grad_overflow") is False:
        yield "bf16.check_grad_overflow: false lets NaN gradients into the weights; write true, or delete it"
    for key in () if both else ("fp16", "bf16"):
        if enabled(config, key) and key not in facts.device_dtypes:
            have = ", ".join(sorted(facts.device_dtypes))
            yield f"{key}.enabled: true, but the {facts.device_type} device computes only in {have}; write false"
    if "bfloat16" in config:
        yield 'bfloat16: the old name, under which other settings miss it; write "bf16"'
    autocast = section(config, "torch_autocast")
    if enabled(config, "torch_autocast"):
        clipping = config.get("gradient_clipping")
        half = str(autocast.get("dtype", "")).split(".")[-1] in ("float16", "fp16", "half")
        if half and stage >= 1 and clipping != 0:
            yield (
                f'torch_autocast.dtype: "{autocast["dtype"]}" at stage {stage} with gradient_clipping {clipping}: the '
                'clip comes before the unscaling; write "bfloat16", or gradient_clipping 0.0'
            )
        if enabled(config, "fp16") or enabled(config, "bf16"):
            yield "torch_autocast.enabled: true together with fp16 or bf16; a run has one of them"


def _clipping(config: dict[str, Any], facts: "RunFacts") -> Iterator[str]:
    clipping = config.get("gradient_clipping")
    if clipping is None:
        yield (
            "gradient_clipping: missing, and DeepSpeed would then clip at 1.0 without a word; "
            "write 1.0 (as DeepSeek does), or 0.0 for none"
        )
    elif not _is_number(clipping) or clipping < 0:
        yield f"gradient_clipping: {clipping!r} must be a number of at least 0; 0.0 switches it off"
    elif is_muon(config) and clipping > 0 and zero_stage(config) >= 1:
        yield (
            f"gradient_clipping: {clipping} with Muon: at stage {zero_stage(config)} DeepSpeed clips the "
            "orthogonalised update, which then barely trains; write 0.0"
        )
    if not is_muon(config):
        return
    if zero_stage(config) == 3 and section(config, "zero_optimization").get("reduce_scatter", True):
        yield "zero_optimization.reduce_scatter: Muon at stage 3 needs whole gradients; write false"
    wide = section(config, "data_types").get("grad_accum_dtype") == "fp32"
    if zero_stage(config) == 1 and enabled(config, "bf16") and wide and facts.model.n_routed_experts:
        yield (
            "zero_optimization.stage: Muon in bf16 with fp32 gradients takes no fused experts at stage 1; write stage 2"
        )


def _optimizer(config: dict[str, Any], facts: "RunFacts") -> Iterator[str]:
    optimizer = section(config, "optimizer")
    name = optimizer.get("type")
    if not isinstance(name, str):
        yield 'optimizer.type: missing; write "AdamW"'
        return
    offloaded = offload_device(config, "offload_optimizer") != "none"
    torch_adam = section(config, "optimizer", "params").get("torch_adam") is True
    types, keys = optimizer_keys(name, torch_adam=torch_adam, offloaded=offloaded)
    if keys is None:
        yield f'optimizer.type: "{name}" is no optimizer of DeepSpeed or torch.optim{nearest(name, types)}'
        return
    adam = name.lower() in ("adam", "adamw")
    if adam and not torch_adam and not offloaded and facts.device_type == "cuda" and not facts.nvcc_available:
        yield (
            "optimizer.params.torch_adam: without it DeepSpeed compiles the op fused_adam, and there is no nvcc; "
            'write true or "auto", or install the CUDA toolkit'
        )
    params = section(config, "optimizer", "params")
    for key in params:
        if key == "max_grad_norm":
            yield 'optimizer.params.max_grad_norm: DeepSpeed refuses it here; write the top-level "gradient_clipping"'
        elif key not in keys:
            yield f"optimizer.params.{key}: {name} has no such param{nearest(key, keys)}"
    for key in LEARNING_RATES:
        if key in params and (not _is_number(params[key]) or params[key] <= 0):
            yield f"optimizer.params.{key}: {params[key]!r} must be a number above 0"
    if "lr" not in params:
        yield "optimizer.params.lr: missing, and every optimizer has a default of its own; write the peak learning rate"
    betas = params.get("betas")
    if betas is not None and not (
        isinstance(betas, list) and len(betas) == 2 and all(_is_number(b) and 0 <= b < 1 for b in betas)
    ):
        yield f"optimizer.params.betas: {betas!r} must be two numbers of at least 0 and below 1, such as [0.9, 0.95]"
    decay = params.get("weight_decay")
    if decay is not None and (not _is_number(decay) or decay < 0):
        yield f"optimizer.params.weight_decay: {decay!r} must be a number of at least 0"


def _offload(config: dict[str, Any], facts: "RunFacts") -> Iterator[str]:
    stage = zero_stage(config)
    optimizer, param = offload_device(config, "offload_optimizer"), offload_device(config, "offload_param")
    if optimizer != "none":
        if stage == 0:
            yield "zero_optimization.offload_optimizer: does nothing at stage 0; write stage 1, 2 or 3"
        if not facts.compiler_available:
            yield (
                f'zero_optimization.offload_optimizer.device: "{optimizer}" needs the op cpu_adam, and there is no '
                'C++ compiler or ninja to build it; install them, or write "none"'
            )
    if optimizer == "nvme" and stage in (1, 2):
        yield (
            f'zero_optimization.offload_optimizer.device: "nvme" at stage {stage}, where DeepSpeed keeps the optimizer '
            'in the host\'s memory without a word; write stage 3, or "cpu"'
        )
    if param != "none" and stage != 3:
        yield f"zero_optimization.offload_param: is for stage 3 only, and the stage is {stage}; delete it"
    for key, device in (("offload_optimizer", optimizer), ("offload_param", param)):
        if device == "nvme":
            if not section(config, "zero_optimization", key).get("nvme_path"):
                yield f'zero_optimization.{key}.nvme_path: missing; write a folder on the NVMe device, or device "cpu"'
            if not facts.async_io_available:
                yield (
                    f'zero_optimization.{key}.device: "nvme" needs the op async_io, and its library libaio is not '
                    'installed; install libaio-dev, or write "cpu"'
                )
            if facts.device_type == "cuda" and not facts.nvcc_available:
                yield (
                    f'zero_optimization.{key}.device: "nvme" needs the op async_io, which DeepSpeed links with CUDA, '
                    'and there is no nvcc; install the CUDA toolkit, or write "cpu"'
                )


def _section_values(config: dict[str, Any], facts: "RunFacts") -> Iterator[str]:
    """Values that DeepSpeed's own models refuse, section by section, so that one does not hide the next."""
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
    from pydantic import ValidationError

    alone = {MICRO_BATCH: 1, "zero_optimization": {"stage": min(zero_stage(config), 3)}}  # some ask for the stage
    with quiet_deepspeed():
        for key, value in config.items():
            if key in _READ_ELSEWHERE or (key == "expert_parallel" and enabled(config, key)):
                continue
            try:
                DeepSpeedConfig(alone | {key: value})
            except ValidationError as error:
                for item in error.errors():
                    location = [str(part) for part in item["loc"]]
                    path = location if location[:1] == [key] else [key, *location]
                    if item["type"] != "extra_forbidden":  # unknown keys have their own report
                        yield f"{'.'.join(path)}: {item['input']!r}: {item['msg']}"
            except (DeepSpeedConfigError, AssertionError, TypeError, ValueError, AttributeError) as error:
                if key not in removed_keys():
                    yield f"{key}: {' '.join(str(error).split())}"


def _unused(config: dict[str, Any], facts: "RunFacts") -> Iterator[str]:
    """What DeepSpeed knows but these recipes never reach."""
    if enabled(config, "data_efficiency"):
        yield "data_efficiency.enabled: true, but batches come from these recipes' own loader; write false"
    if config.get("dataloader_drop_last"):
        yield "dataloader_drop_last: true, but batches come from these recipes' own loader; delete it"
    for key in ("partition_activations", "contiguous_memory_optimization", "cpu_checkpointing", "profile"):
        if section(config, "activation_checkpointing").get(key):
            yield f"activation_checkpointing.{key}: activations are recomputed whole, by torch; write false"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
