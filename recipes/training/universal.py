"""Checkpoints in DeepSpeed's universal form: one file a parameter, so that any world size and ZeRO stage can load them.

DeepSpeed's converter and its loaders are used. Around them: ZeRO stage 0 is converted and loaded (they cannot), and
one small file that both loaders expect is written the same for every stage, which lets stage 3 and stages 1 and 2 read
each other's, and keeps this run's own clipping, parameter groups and loss scaler from being overwritten.
"""

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import psutil
import torch
from deepspeed.utils import logger
from torch import Tensor
from tqdm import tqdm

from model.config import ModelConfig
from model.transformer import DeepseekForCausalLM
from recipes.config.errors import TrainingFault
from recipes.data.corpus import hash_file
from recipes.data.lock import DEAD_AFTER_SECONDS, held_lock
from recipes.training.checkpoint import load_buffers, load_random_state, own_settings, restore_settings
from recipes.training.checkpoint_files import (
    MANIFEST,
    PARTIAL_SUFFIX,
    UNIVERSAL_SUFFIX,
    TrainingState,
    read_state,
    write_and_sync,
)
from recipes.training.expert_parallel_universal import translate_universal

FINISHED = "universal.json"
SMALL_BYTES = 64 << 20
VALUES = ("fp32", "exp_avg", "exp_avg_sq")
MOMENTS = VALUES[1:]
# The loaders walk this run's parameter groups beside the saved ones; empty entries leave a group as it is.
UNCHANGED_GROUPS: list[dict[str, Any]] = [{} for _ in range(1024)]


def universal_folder(checkpoint: Path, checkpoints: Path) -> Path:
    """Where a checkpoint's converted form belongs: with this run's checkpoints, also if it came from another run."""
    return checkpoints / (checkpoint.name + UNIVERSAL_SUFFIX)


def _identity(checkpoint: Path) -> str:
    return hash_file(checkpoint / MANIFEST)


def is_converted(target: Path, checkpoint: Path, autoep: bool | None = None) -> bool:
    """Whether `target` is the finished conversion of this very checkpoint, for blocks of that kind (None: its own)."""
    try:
        finished = json.loads((target / FINISHED).read_text())
        sizes = {name: (target / name).stat().st_size for name in finished["files"]}
    except (OSError, ValueError, KeyError):
        return False
    kind = read_state(checkpoint).autoep_size > 0 if autoep is None else autoep
    return (finished["source"], finished.get("autoep"), finished["files"]) == (_identity(checkpoint), kind, sizes)


def convert(checkpoint: Path, target: Path, autoep: bool | None = None, *, workers: int | None = None) -> None:
    """Convert a verified checkpoint, unless it has been; an unfinished conversion is begun anew.

    Args:
        autoep: whether AutoEP's blocks will load it; None: as when it was saved.
        workers: processes that take the ranks' files apart and put parameters together; default: one a core, as far as
            their memory goes.
    Raises:
        TrainingFault: DeepSpeed's converter failed, or cannot convert such a checkpoint.
    """
    if is_converted(target, checkpoint, autoep):
        return
    aside = target.with_name(target.name + PARTIAL_SUFFIX)
    with held_lock(target.with_name(target.name + ".lock"), f"convert {checkpoint.name}"):
        if is_converted(target, checkpoint, autoep):
            return
        for old in (aside, target):
            shutil.rmtree(old, ignore_errors=True)
        aside.mkdir(parents=True)
        state = read_state(checkpoint)
        if state.zero_stage == 0:
            _convert_unpartitioned(checkpoint, aside)
        else:
            _run_converter(checkpoint, aside, workers)
            if state.zero_stage == 3:
                _wrap_values(aside / "zero")
        kind = state.autoep_size > 0 if autoep is None else autoep
        translate_universal(aside / "zero", autoep=kind)
        _write_common_state(aside / "zero", _optimizer_step(aside / "zero"))
        files = {
            path.relative_to(aside).as_posix(): path.stat().st_size
            for path in sorted(aside.rglob("*.pt"))
            if path.is_file()
        }
        write_and_sync(
            aside / FINISHED, json.dumps({"source": _identity(checkpoint), "autoep": kind, "files": files}, indent=1)
        )
        aside.rename(target)


def wait_until_converted(checkpoint: Path, target: Path, autoep: bool | None = None) -> None:
    """Wait for the rank that converts, outside any collective, so that no timeout of the process group runs.

    Raises:
        TrainingFault: the converting rank gave no sign for long.
    """
    lock = target.with_name(target.name + ".lock")
    last_beat, seen_at = 0.0, time.monotonic()
    while not is_converted(target, checkpoint, autoep):
        try:
            beat = lock.stat().st_mtime
        except OSError:
            beat = last_beat
        if beat != last_beat:
            last_beat, seen_at = beat, time.monotonic()
        if time.monotonic() - seen_at > DEAD_AFTER_SECONDS:
            raise TrainingFault(f"{target}: rank 0 converts no more (no sign for {DEAD_AFTER_SECONDS:.0f} s)")
        time.sleep(0.5)


def converter_workers(checkpoint: Path, available: int, cores: int) -> tuple[int, int]:
    """(Processes that take the ranks' files apart, processes that put parameters together), one at least.

    The former hold one rank's file, the latter one parameter in float32 in parts and as a whole.

    Args:
        available: main memory [bytes].
    """
    file = max(path.stat().st_size for path in checkpoint.glob("*.pt"))
    with torch.device("meta"):
        model = DeepseekForCausalLM(ModelConfig.from_file(checkpoint / "config.json"))
    parameter = 4 * max(parameter.numel() for parameter in model.parameters())
    extract, merge = (min(cores, available // (2 * size)) for size in (file, parameter))
    return max(1, extract), max(1, merge)


def _run_converter(checkpoint: Path, output: Path, workers: int | None) -> None:
    """DeepSpeed's ds_to_universal, with its progress bars on the console.

    In a process of its own, because its workers are forked, which a process with communication threads must not be;
    a small checkpoint needs no workers, and takes less time than a new process.
    """
    if sum(path.stat().st_size for path in checkpoint.glob("*.pt")) < SMALL_BYTES:
        from deepspeed.checkpoint import ds_to_universal

        arguments = Namespace(
            input_folder=str(checkpoint), output_folder=str(output), num_extract_workers=1, num_merge_workers=1,
            keep_temp_folder=False, strict=True, inject_missing_state=False,
        )  # fmt: skip
        with contextlib.redirect_stdout(io.StringIO()):
            ds_to_universal.main(arguments)
    else:
        available, cores = psutil.virtual_memory().available, len(os.sched_getaffinity(0))
        extract, merge = (workers, workers) if workers else converter_workers(checkpoint, available, cores)
        size = sum(path.stat().st_size for path in checkpoint.glob("*.pt"))
        print(
            f"converting {checkpoint}: {size / 1e9:,.1f} GB, by {extract} processes and then {merge}; of a large "
            "checkpoint this may be done ahead of the resume: python recipes/checkpoint.py convert",
            file=sys.stderr,
            flush=True,
        )
        # its package imports the module that -m then runs, which Python warns of
        words = [sys.executable, "-W", "ignore::RuntimeWarning", "-m", "deepspeed.checkpoint.ds_to_universal"]
        words += ["--input_folder", str(checkpoint), "--output_folder", str(output)]
        words += ["--num_extract_workers", str(extract), "--num_merge_workers", str(merge)]
        # It works with tensors in host memory alone, and is no rank of this job.
        job = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        environment = {name: value for name, value in os.environ.items() if name not in job}
        result = subprocess.run(words, env=environment | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True)
        if result.returncode:
            raise TrainingFault(
                f"{checkpoint}: DeepSpeed's converter failed with exit code {result.returncode}; its last words: "
                + " ".join(result.stdout.splitlines()[-1:])
            )
    for path in output.glob("*model_states.pt"):
        path.unlink()  # copies of files that the checkpoint itself holds
    (output.parent / "latest_universal").unlink(missing_ok=True)


def _convert_unpartitioned(checkpoint: Path, output: Path) -> None:
    """ZeRO stage 0: rank 0 saved whole parameters and the optimizer's own state dict."""
    saved = torch.load(checkpoint / "mp_rank_00_model_states.pt", map_location="cpu", mmap=True, weights_only=False)
    optimizer = saved["optimizer"]
    indices = {
        name: index
        for group in optimizer["param_groups"]
        for name, index in zip(group["names"], group["params"], strict=True)
    }
    for name, index in tqdm(indices.items(), desc="converting", unit="parameter"):
        values = {"fp32": saved["module"][name].float(), **{key: optimizer["state"][index][key] for key in MOMENTS}}
        for key, value in values.items():
            _save(output / "zero" / name / f"{key}.pt", {"param": value})
        _save(output / "zero" / name / "step.pt", optimizer["state"][index]["step"])


def _wrap_values(zero: Path) -> None:
    """ZeRO stage 3's files hold bare tensors, where the loader of stages 1 and 2 expects a dictionary."""
    for folder in [path for path in tqdm(sorted(zero.iterdir()), desc="finishing") if path.is_dir()]:
        for path in folder.glob("*.pt"):
            value = torch.load(path, map_location="cpu", weights_only=False)
            if isinstance(value, Tensor) and path.stem in VALUES:
                _save(path, {"param": value})


def _optimizer_step(zero: Path) -> float:
    """The updates that Adam counted, for its bias correction."""
    for path in zero.glob("*/step.pt"):
        return float(torch.load(path, weights_only=False))
    common = torch.load(zero / "optimizer_state.pt", map_location="cpu", mmap=True, weights_only=False)  # stage 3
    return float(common["optimizer_state_dict"]["state"][0]["step"])


def _write_common_state(zero: Path, step: float) -> None:
    from deepspeed.git_version_info import version

    for folder in zero.iterdir():
        if (folder / "exp_avg.pt").is_file():
            _save(folder / "step.pt", torch.tensor(step))
    _save(
        zero / "optimizer_state.pt",
        {
            "ds_version": version,
            "param_groups": UNCHANGED_GROUPS,
            "optimizer_state_dict": {"state": {0: {"step": torch.tensor(step)}}, "param_groups": UNCHANGED_GROUPS},
        },
    )


def _save(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)


def load_universal(engine: Any, checkpoint: Path, universal: Path, dtype: str) -> TrainingState:
    """Restore engine, buffers and RNG from a converted checkpoint; this run's settings stay.

    Args:
        checkpoint: what was converted.
        universal: its converted form.
        dtype: this run's, "fp16", "bf16" or "fp32".
    """
    state = read_state(checkpoint)
    settings = own_settings(engine)
    optimizer = engine.optimizer
    stage = engine.zero_optimization_stage()
    if stage == 0:
        _load_unpartitioned(engine, universal / "zero")
    elif stage == 3:
        optimizer.checkpoint_event_prologue()  # parts again what stage 3 keeps whole between steps ...
        optimizer.load_hp_checkpoint_state_from_checkpoint_dir_stage3(str(universal))
        optimizer.checkpoint_event_epilogue()  # ... and gathers it with the values just loaded
    else:
        level = logger.level
        logger.setLevel("ERROR")  # it warns that there is no tensor parallelism, which nobody asked for
        optimizer.load_hp_checkpoint_state_from_checkpoint_dir("bit16_groups", str(universal))
        logger.setLevel(level)
        optimizer.update_lp_params()
    place_step_counters(getattr(optimizer, "optimizer", optimizer))
    engine.global_steps, engine.global_samples = state.step, state.samples
    engine.skipped_steps = state.skipped_steps
    engine.micro_steps = state.step * engine.gradient_accumulation_steps()
    engine.lr_scheduler.last_epoch = state.step - state.skipped_steps
    engine.lr_scheduler._step_count = engine.lr_scheduler.last_epoch + 1
    restore_settings(engine, settings)
    if dtype == "fp16" and state.loss_scaler and state.dtype == "fp16":
        for name, value in state.loss_scaler.items():
            setattr(optimizer.loss_scaler, name, value)
    load_buffers(engine, checkpoint)
    load_random_state(checkpoint, torch.distributed.get_rank())
    return state


def place_step_counters(optimizer: Any) -> None:
    """Give each parameter of torch's optimizer a counter of its own, where the optimizer wants it.

    Stage 3's loader gives one to all sub-groups, each of which would then count every update. torch's fused Adam takes
    counters that lie beside the weights alone, every other optimizer those on the host.
    """
    fused = any(group.get("fused") for group in optimizer.param_groups)
    for parameter, entry in optimizer.state.items():
        entry["step"] = entry["step"].to(parameter.device if fused else "cpu", copy=True)


@torch.no_grad()
def _load_unpartitioned(engine: Any, zero: Path) -> None:
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        values = {
            key: torch.load(zero / name / f"{key}.pt", map_location="cpu", mmap=True)["param"].view(parameter.shape)
            for key in VALUES
        }
        parameter.copy_(values["fp32"])
        engine.optimizer.state[parameter] = {
            "step": torch.load(zero / name / "step.pt"),
            **{key: values[key].to(parameter.device, torch.float32, copy=True) for key in MOMENTS},
        }
