"""Checkpoints as transactions: written aside, listed with size and checksum, then renamed, then pointed to.

checkpoints/
    step_00000012/      DeepSpeed's own files, and beside them:
        state.json      step, position in the data, world size, ZeRO stage, dtype
        config.json     the model's configuration
        tokenizer/
        buffers.pt      the model's buffers (balancing biases), in their own dtype
        rng_00000.pt    random-number states of each rank
        manifest.json   size and SHA-256 of every other file; written last
    latest              name of the newest complete checkpoint
    best                name of the one with the lowest evaluation loss
"""

import contextlib
import hashlib
import io
import json
import os
import random
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from model.config import ModelConfig
from recipes.cluster.launch import quiet_deepspeed
from recipes.config.errors import TrainingFault, UserError

PARTIAL_SUFFIX = ".partial"
MANIFEST = "manifest.json"
STATE = "state.json"
LATEST = "latest"
BEST = "best"


@dataclass
class TrainingState:
    """Where a run stands; all that a resumed run needs beside DeepSpeed's files."""

    step: int = 0  # optimizer steps done, skipped ones included
    samples: int = 0  # sequences taken from the data order
    tokens: int = 0  # tokens with a loss
    skipped_steps: int = 0
    best_eval_loss: float | None = None
    world_size: int = 1
    zero_stage: int = 0
    dtype: str = "fp32"


class CheckpointError(TrainingFault):
    """A checkpoint is incomplete or altered; the message names the file."""


def checkpoint_name(step: int) -> str:
    """`step_00000012` for step 12."""
    return f"step_{step:08d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete-looking checkpoints (they have a manifest), newest first."""
    found = [path for path in folder.glob("step_*") if path.suffix != PARTIAL_SUFFIX and (path / MANIFEST).is_file()]
    return sorted(found, key=lambda path: path.name, reverse=True)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def _write_durably(path: Path, text: str) -> None:
    """Replace a small file so that after a crash it holds the old or the new text, never a part."""
    aside = path.with_name(path.name + PARTIAL_SUFFIX)
    with aside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make renames in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def verify_sizes(checkpoint: Path) -> None:
    """Check that every file of the manifest is there in full, without reading them.

    Raises:
        CheckpointError: naming the file.
    """
    for name, entry in _manifest(checkpoint).items():
        path = checkpoint / name
        if not path.is_file():
            raise CheckpointError(f"{path}: missing")
        if path.stat().st_size != entry["bytes"]:
            raise CheckpointError(f"{path}: {path.stat().st_size} bytes, the manifest says {entry['bytes']}")


def verify_checksums(checkpoint: Path, part: int = 0, parts: int = 1) -> None:
    """Read every `parts`-th file and compare its SHA-256, so that ranks share the work.

    Raises:
        CheckpointError: naming the file.
    """
    for name, entry in sorted(_manifest(checkpoint).items())[part::parts]:
        if _sha256(checkpoint / name) != entry["sha256"]:
            raise CheckpointError(f"{checkpoint / name}: its content is not what was saved (SHA-256 differs)")


def _manifest(checkpoint: Path) -> dict[str, Any]:
    try:
        return json.loads((checkpoint / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{checkpoint / MANIFEST}: cannot be read ({error})") from error


def read_state(checkpoint: Path) -> TrainingState:
    """Read where the run stood."""
    return TrainingState(**json.loads((checkpoint / STATE).read_text()))


def save_checkpoint(
    engine: Any,
    folder: Path,
    state: TrainingState,
    model_config: dict[str, Any],
    tokenizer_folder: Path,
    *,
    best: bool = False,
    total_limit: int = 0,
) -> Path:
    """Save engine, state, buffers and RNG as one transaction; all ranks call it.

    Args:
        folder: the run's checkpoints/ folder.
        best: also point `best` to it.
        total_limit: checkpoints to keep besides the best; 0 keeps all. Old ones go only after this one is complete.
    Raises:
        CheckpointError: a rank could not write; earlier checkpoints are untouched.
    """
    rank = torch.distributed.get_rank()
    target = folder / checkpoint_name(state.step)
    aside = target.with_name(target.name + PARTIAL_SUFFIX)
    if rank == 0:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    torch.distributed.barrier()
    _together(lambda: _write_parts(engine, aside, state, model_config, tokenizer_folder, rank), target)
    if rank == 0:
        _commit(aside, target)
        if best:
            _write_durably(folder / BEST, target.name)
        _prune(folder, total_limit)
    torch.distributed.barrier()
    return target


def _together(action: Any, target: Path) -> None:
    """Run an action on every rank; if it fails on any, all raise, so that none waits for ever."""
    failure = ""
    try:
        action()
    except (OSError, RuntimeError) as error:
        failure = str(error)
    failures: list[str] = [""] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(failures, failure)
    for rank, text in enumerate(failures):
        if text:
            raise CheckpointError(f"{target}: rank {rank} could not write it: {text}")


def _write_parts(
    engine: Any, aside: Path, state: TrainingState, model_config: dict[str, Any], tokenizer_folder: Path, rank: int
) -> None:
    engine.save_checkpoint(str(aside.parent), tag=aside.name, save_latest=False)
    rng: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }
    torch.save(rng, aside / f"rng_{rank:05d}.pt")
    if rank == 0:
        torch.save(dict(engine.module.named_buffers()), aside / "buffers.pt")
        (aside / STATE).write_text(json.dumps(asdict(state), indent=2))
        (aside / "config.json").write_text(json.dumps(model_config, indent=2))
        shutil.copytree(tokenizer_folder, aside / "tokenizer")


def _commit(aside: Path, target: Path) -> None:
    """Turn the complete folder into a checkpoint: manifest, fsync of everything, rename, pointer."""
    files = {}
    for path in _files(aside):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        files[path.relative_to(aside).as_posix()] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    _write_durably(aside / MANIFEST, json.dumps({"files": files}, indent=1))
    if target.exists():  # the same step, saved again after a resume from an older checkpoint
        shutil.rmtree(target)
    aside.rename(target)
    _sync_folder(target.parent)
    _write_durably(target.parent / LATEST, target.name)


def _prune(folder: Path, total_limit: int) -> None:
    """Delete the oldest checkpoints over the limit, never the best."""
    best = (folder / BEST).read_text().strip() if (folder / BEST).exists() else ""
    if total_limit:
        for old in [path for path in list_checkpoints(folder) if path.name != best][total_limit:]:
            (old / MANIFEST).unlink()  # first: without it a half-deleted folder is no checkpoint
            shutil.rmtree(old)


def clear_partial(folder: Path) -> None:
    """Remove what interrupted saves left."""
    for path in folder.glob(f"*{PARTIAL_SUFFIX}"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def load_checkpoint(engine: Any, checkpoint: Path) -> TrainingState:
    """Restore engine, buffers and RNG from a verified checkpoint of the same world size and ZeRO stage.

    This run's learning rate, betas and weight decay stay; DeepSpeed would put the checkpoint's in their place.
    """
    ours = [{k: v for k, v in group.items() if k not in ("params", "step")} for group in engine.optimizer.param_groups]
    base_lrs = list(engine.lr_scheduler.base_lrs)
    path, _ = engine.load_checkpoint(str(checkpoint.parent), tag=checkpoint.name)
    if path is None:
        raise CheckpointError(f"{checkpoint}: DeepSpeed found nothing to load in it")
    engine.lr_scheduler.base_lrs = base_lrs
    rates = [
        base * multiplier(engine.lr_scheduler.last_epoch)
        for base, multiplier in zip(base_lrs, engine.lr_scheduler.lr_lambdas, strict=True)
    ]
    engine.lr_scheduler._last_lr = rates  # LambdaLR recomputes it only at its next step
    for group, mine, rate in zip(engine.optimizer.param_groups, ours, rates, strict=True):
        group.update(mine)
        group["lr"] = rate

    buffers: dict[str, Tensor] = torch.load(checkpoint / "buffers.pt", map_location=engine.device, weights_only=True)
    for name, buffer in engine.module.named_buffers():
        if name in buffers:
            buffer.copy_(buffers[name])
    rng_file = checkpoint / f"rng_{torch.distributed.get_rank():05d}.pt"
    rng = torch.load(rng_file, weights_only=False)
    random.setstate(rng["python"])
    numpy.random.set_state(rng["numpy"])
    torch.set_rng_state(rng["torch"])
    if rng["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(rng["cuda"])
    return read_state(checkpoint)


class WholeTensors(Mapping[str, Tensor]):
    """A checkpoint's tensors, each put together from the ranks' parts when it is asked for."""

    def __init__(self, parts: dict[str, Any]) -> None:
        self._parts = parts

    def __getitem__(self, name: str) -> Tensor:
        return self._parts[name].contiguous()

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def load_model_state(path: Path) -> tuple[ModelConfig, WholeTensors, Path]:
    """The weights of a checkpoint in float32, from any ZeRO stage and world size, read when they are used.

    Args:
        path: a run's folder (its newest complete checkpoint) or a checkpoint's folder.
    Returns:
        The model's configuration; name -> parameter or buffer; the tokenizer's folder.
    Raises:
        UserError: there is no complete checkpoint.
    """
    checkpoint = path
    if not (path / MANIFEST).is_file():
        found = list_checkpoints(path / "checkpoints")
        if not found:
            raise UserError(f"{path}: holds no complete checkpoint; give a run's or a checkpoint's folder")
        checkpoint = found[0]
    try:
        verify_sizes(checkpoint)
    except CheckpointError as error:
        raise UserError(str(error)) from None
    quiet_deepspeed()
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    if read_state(checkpoint).zero_stage == 0:
        saved = torch.load(checkpoint / "mp_rank_00_model_states.pt", map_location="cpu", mmap=True, weights_only=False)
        state = dict(saved["module"])
    else:
        silence = io.StringIO()  # DeepSpeed prints its own progress, which is no part of a command's result
        with contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
            state = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint.parent), checkpoint.name, lazy_mode=True)
    state |= torch.load(checkpoint / "buffers.pt", map_location="cpu", weights_only=True)
    return ModelConfig.from_file(checkpoint / "config.json"), WholeTensors(state), checkpoint / "tokenizer"
