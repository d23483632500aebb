"""From a ds_configs JSON to what `deepspeed.initialize` takes: loading, overriding, checking, resolving, choosing."""

import copy
import difflib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.config import ModelConfig
from recipes.config.batch import ACCUMULATION, MICRO_BATCH, TRAIN_BATCH, Batch, BatchFault, resolve_batch
from recipes.config.batch_plan import BatchPlan, BatchRamp
from recipes.config.ds_auto import fill_in_autos, left_auto_faults, recipe_record, reopen
from recipes.config.ds_check import LEARNING_RATES, combination_faults, ranks_per_sequence, section
from recipes.config.ds_keys import RECIPE_KEY, quiet_deepspeed, unknown_key_faults
from recipes.config.errors import UserError
from recipes.config.parallel_check import parallel_faults
from recipes.config.scheduler_section import resolve_scheduler

DS_CONFIGS = Path(__file__).resolve().parents[2] / "ds_configs"


@dataclass(frozen=True)
class RunFacts:
    """What a ds_config is resolved against; nothing here is asked of a device.

    Args:
        world_size: ranks.
        device_type: "cpu" or "cuda".
        device_dtypes: what the device computes in, of "fp32", "bf16", "fp16".
        seq_length: tokens per sequence.
        global_batch_size: `--global_batch_size` [sequences]; None: the file's.
        max_steps, train_tokens: the length of the run; one of them.
        lr_scaling: "sqrt", "linear" or "none", of global_batch_size / reference_batch_size.
        compiler_available: a C++ compiler and ninja, which build the ops of DeepSpeed that offload needs.
        nvcc_available: CUDA's compiler, which DeepSpeed's own Adam on a GPU needs.
        async_io_available: libaio, which offload to NVMe needs.
        output_dir: the run's folder; TensorBoard's goes into it.
        batch_ramp: how the global batch grows to its full size; None: it does not.
    """

    world_size: int
    device_type: str
    device_dtypes: frozenset[str] | set[str]
    model: ModelConfig
    seq_length: int
    global_batch_size: int | None = None
    max_steps: int | None = None
    train_tokens: int | None = None
    lr_scaling: str = "sqrt"
    reference_batch_size: int = 256
    compiler_available: bool = True
    nvcc_available: bool = True
    async_io_available: bool = False
    output_dir: Path | None = None
    batch_ramp: BatchRamp | None = None


@dataclass(frozen=True)
class ResolvedDsConfig:
    """A ds_config without any "auto", and what the loop needs of it.

    Args:
        config: for `deepspeed.initialize`; as JSON in the run's folder it reproduces the run alone.
        global_batch_size, gradient_accumulation_steps: once a ramp is over; before it, see batch_plan.
        batch_plan: step -> global batch, samples and tokens.
        scheduler: for recipes.training.schedule.build_schedule.
        lr_line: how the peak learning rate came about, for the user.
        notes: what was filled in or mended, for the user.
    """

    config: dict[str, Any]
    global_batch_size: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    batch_plan: BatchPlan
    max_steps: int
    peak_learning_rate: float
    lr_line: str
    scheduler: dict[str, Any]
    notes: list[str]

    @property
    def gradient_checkpointing(self) -> str:
        """ "full" where the file has a section `activation_checkpointing`, else "none"; a flag overrides it."""
        return "full" if "activation_checkpointing" in self.config else "none"


def load_ds_config(path: str | Path) -> dict[str, Any]:
    """Read a ds_config.

    Raises:
        UserError: no such file, not JSON (with line and column), a key twice, not a mapping.
    """
    path = Path(path).expanduser()
    try:
        text = path.read_text()
    except OSError as error:
        shipped = sorted(str(p.relative_to(DS_CONFIGS.parent)) for p in DS_CONFIGS.glob("*.json"))
        close = difflib.get_close_matches(path.stem, [Path(p).stem for p in shipped], n=1)
        hint = f"did you mean ds_configs/{close[0]}.json?" if close else f"there are {', '.join(shipped)}"
        raise UserError(f"--deepspeed_config {path}: cannot be read ({error.strerror}); {hint}") from None

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        for key in {key for key in keys if keys.count(key) > 1}:
            raise UserError(f"{path}: {key}: stands there twice; the first would be lost")
        return dict(pairs)

    try:
        config = json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: line {error.lineno} column {error.colno}: not JSON: {error.msg}") from None
    if not isinstance(config, dict):
        raise UserError(f"{path}: must be a JSON object {{...}}, is a {type(config).__name__}")
    return config


def apply_overrides(config: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """A copy of the ds_config with `key.path=value` set; a value is JSON, or else a string.

    Raises:
        UserError: no "=", an empty path, or a path through something that is no section.
    """
    changed = copy.deepcopy(config)
    faults = []
    for override in overrides:
        path, equals, text = override.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            faults.append(f"--set {override}: write KEY=VALUE, such as optimizer.params.lr=3e-4")
            continue
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            value = text
        target = changed
        for key in keys[:-1]:
            target = target.setdefault(key, {})
            if not isinstance(target, dict):
                faults.append(f"--set {override}: {key} is a value, not a section")
                break
        else:
            target[keys[-1]] = value
    if faults:
        raise UserError(*faults)
    return changed


def choose_ds_config(device_type: str, world_size: int, bf16: bool) -> Path:
    """The shipped ds_config that fits a machine, when the user names none.

    Args:
        bf16: the device computes bf16 faster than it would fp32 (CPU) or fp16 (GPU) at the same accuracy.
    """
    if device_type == "cpu":
        return DS_CONFIGS / ("cpu_bf16.json" if bf16 else "cpu.json")
    if world_size == 1:
        name = "1gpu_bf16" if bf16 else "1gpu_fp16"
    elif world_size <= 8:
        name = "8gpu_zero2_bf16" if bf16 else "8gpu_zero2_fp16"
    elif not bf16:
        name = "8gpu_zero3_fp16"
    else:
        name = "32gpu_zero2_bf16" if world_size <= 32 else "64gpu_zero3_bf16"
    return DS_CONFIGS / f"{name}.json"


def resolve_ds_config(config: dict[str, Any], *, source: str, facts: RunFacts) -> ResolvedDsConfig:
    """Check a ds_config and fill in every "auto".

    Args:
        config: from load_ds_config and apply_overrides; it is not changed. A run's own ds_config.json will do, too: it
            gives the same again, and on another world size its global batch and its learning rate stay.
        source: the file's name, for the faults.
    Raises:
        UserError: with all faults at once.
    """
    reopened, reference = reopen(config, facts.reference_batch_size)
    resolved = copy.deepcopy(reopened)
    faults = unknown_key_faults(resolved, source)
    batch = Batch(1, 1, 1)
    try:
        batch = resolve_batch(
            resolved,
            world_size=max(1, facts.world_size // ranks_per_sequence(resolved)),
            seq_length=facts.seq_length,
            flag=facts.global_batch_size,
            ramp=facts.batch_ramp,
        )
    except BatchFault as fault:
        faults.append(f"{source}: {fault}")
    ramp = facts.batch_ramp if facts.batch_ramp and not facts.batch_ramp.fault(batch.global_batch_size) else None
    plan = BatchPlan(batch.global_batch_size, facts.seq_length, ramp)
    max_steps = _max_steps(facts, plan)
    params = section(resolved, "optimizer", "params")
    scheduler, scheduler_faults = resolve_scheduler(
        resolved.get("scheduler"),
        source=source,
        max_steps=max_steps,
        total_tokens=facts.train_tokens or plan.tokens_before(max_steps),
        optimizer_lr=params.get("lr"),
    )
    if scheduler.peak_learning_rate and "optimizer" in resolved:
        params.setdefault("lr", scheduler.peak_learning_rate)
    resolved[TRAIN_BATCH] = batch.global_batch_size
    resolved[MICRO_BATCH] = batch.micro_batch_size
    resolved[ACCUMULATION] = batch.accumulation_steps
    resolved["scheduler"] = scheduler.section
    notes = [*batch.notes, *scheduler.notes, *fill_in_autos(resolved, facts)]
    faults += combination_faults(resolved, source, facts) + parallel_faults(resolved, source, facts)
    faults += scheduler_faults + left_auto_faults(resolved, source)
    if faults:
        raise UserError(*faults)
    base_lr = float(params["lr"])
    factor = scaling_factor(facts.lr_scaling, batch.global_batch_size, reference)
    params.update({key: float(params[key]) * factor for key in LEARNING_RATES if key in params})
    resolved[RECIPE_KEY] = recipe_record(config, reopened, resolved, source)
    _load_with_deepspeed(resolved, source)
    return ResolvedDsConfig(
        config=resolved,
        global_batch_size=batch.global_batch_size,
        micro_batch_size=batch.micro_batch_size,
        gradient_accumulation_steps=batch.accumulation_steps,
        batch_plan=plan,
        max_steps=max_steps,
        peak_learning_rate=params["lr"],
        lr_line=_lr_line(facts.lr_scaling, base_lr, params["lr"], batch.global_batch_size, reference),
        scheduler=scheduler.section,
        notes=notes,
    )


def scaling_factor(rule: str, global_batch_size: int, reference_batch_size: int) -> float:
    """What the file's learning rate is multiplied with; batch sizes in sequences.

    "sqrt" is this project's rule; DeepSeek states no change of the rate with the batch.
    """
    ratio = global_batch_size / reference_batch_size
    return {"sqrt": math.sqrt(ratio), "linear": ratio, "none": 1.0}[rule]


def _lr_line(rule: str, base: float, peak: float, global_batch_size: int, reference: int) -> str:
    if rule == "none":
        return f"peak lr {peak:.4g} = the file's, not scaled with the batch"
    ratio = f"{global_batch_size} / {reference}"
    worked = f"sqrt({ratio})" if rule == "sqrt" else f"({ratio})"
    return f"peak lr {peak:.4g} = {base:.4g} * {worked}, global over reference batch in sequences"


def _max_steps(facts: RunFacts, plan: BatchPlan) -> int:
    if facts.max_steps is None and facts.train_tokens is None:
        raise UserError("the run has no length: give --max_steps or --train_tokens")
    if facts.max_steps is not None and facts.train_tokens is not None:
        raise UserError("--max_steps and --train_tokens: both state the length of the run; give one")
    return facts.max_steps or plan.steps_for_tokens(facts.train_tokens or 0)


def _load_with_deepspeed(config: dict[str, Any], source: str) -> None:
    """Let DeepSpeed's own config class have the last word."""
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    # without the global batch: no process group tells the class yet how many ranks there are
    known = {key: value for key, value in config.items() if key not in (TRAIN_BATCH, RECIPE_KEY)}
    try:
        with quiet_deepspeed():
            DeepSpeedConfig(known)
    except (DeepSpeedConfigError, ValueError, AssertionError, TypeError) as error:
        raise UserError(f"{source}: DeepSpeed refuses it: {' '.join(str(error).split())}") from error
