"""Checkpoints on disk: their names, what they hold, whether they are whole, and which may be deleted.

checkpoints/
    step_00000012/      DeepSpeed's own files, and beside them:
        state.json      step, position in the data, layout, loss scaler, settings of the run
        config.json     the model's configuration
        tokenizer/
        buffers.pt      the model's buffers (balancing biases), in their own dtype
        rng_00000.pt    random-number states of each rank
        manifest.json   size and SHA-256 of every other file; written last
    step_00000012.universal/   converted for another world size or ZeRO stage, when one is resumed with
    latest              name of the newest complete checkpoint
    best                name of the one with the lowest evaluation loss; its state.json says which
"""

import json
import os
import shutil
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from recipes.config.durable_file import PARTIAL_SUFFIX, write_durably
from recipes.config.errors import TrainingFault
from recipes.data.corpus import hash_file

DELETED_SUFFIX = ".deleted" + PARTIAL_SUFFIX
UNIVERSAL_SUFFIX = ".universal"
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
    autoep_size: int = 0  # ranks that share one set of experts; 0: AutoEP is off
    autotp_size: int = 1  # ranks that share every sharded matrix
    grouping: int = 1  # recipes.training.optimizer.GROUPING; of checkpoints that do not say, two groups
    loss_scaler: dict[str, float] | None = None  # fp16's: scale and counters
    recent_losses: list[float] = field(default_factory=list)  # against which a spike is measured
    passed_over: list[list[int]] = field(default_factory=list)  # [first sequence, sequences, step rewound to] of spikes
    settings: dict[str, Any] = field(default_factory=dict)  # what the run was told, to show what a resume changes


class CheckpointError(TrainingFault):
    """A checkpoint is incomplete or altered; the message names the file."""


def checkpoints_folder(run: Path) -> Path:
    """Where a run keeps its checkpoints."""
    return run / "checkpoints"


def checkpoint_name(step: int) -> str:
    """`step_00000012` for step 12."""
    return f"step_{step:08d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete-looking checkpoints (they have a manifest), newest first."""
    found = [
        path
        for path in folder.glob("step_*")
        if path.suffix not in (PARTIAL_SUFFIX, UNIVERSAL_SUFFIX) and (path / MANIFEST).is_file()
    ]
    return sorted(found, key=lambda path: path.name, reverse=True)


def read_state(checkpoint: Path) -> TrainingState:
    """Read where the run stood.

    Raises:
        CheckpointError: the file cannot be read, or was written by something newer.
    """
    path = checkpoint / STATE
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    unknown = values.keys() - {f.name for f in fields(TrainingState)}
    if unknown:
        raise CheckpointError(f"{path}: holds {', '.join(sorted(unknown))}, which this version does not know")
    return TrainingState(**values)


def write_and_sync(path: Path, text: str) -> None:
    """Replace a small file, and make its new name durable."""
    write_durably(path, text)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """File name -> its `bytes` and `sha256`.

    Raises:
        CheckpointError: naming the manifest.
    """
    try:
        return json.loads((checkpoint / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{checkpoint / MANIFEST}: cannot be read ({error})") from error


def verify_sizes(checkpoint: Path) -> None:
    """Check that every file of the manifest is there in full, without reading them.

    Raises:
        CheckpointError: naming the file.
    """
    for name, entry in read_manifest(checkpoint).items():
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
    for name, entry in sorted(read_manifest(checkpoint).items())[part::parts]:
        if hash_file(checkpoint / name) != entry["sha256"]:
            raise CheckpointError(f"{checkpoint / name}: its content is not what was saved (SHA-256 differs)")


def commit(aside: Path, target: Path, known: dict[str, dict[str, Any]]) -> None:
    """Turn the complete folder into a checkpoint: manifest, fsync of everything, rename, pointer.

    Args:
        known: manifest entries of files that their writers have hashed and synced already.
    """
    files = dict(known)
    for folder, _, names in os.walk(aside):
        for path in (Path(folder, name) for name in names):
            name = path.relative_to(aside).as_posix()
            if name not in files:
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                files[name] = {"bytes": path.stat().st_size, "sha256": hash_file(path)}
    files = dict(sorted(files.items()))
    write_and_sync(aside / MANIFEST, json.dumps({"files": files}, indent=1))
    if target.exists():  # the same step, saved again after a resume from an older checkpoint
        delete_checkpoint(target)
    aside.rename(target)
    sync_folder(target.parent)
    write_and_sync(target.parent / LATEST, target.name)


def delete_checkpoint(checkpoint: Path) -> None:
    """Delete a checkpoint and what was converted from it, so that a kill on the way leaves none that looks whole."""
    aside = checkpoint.with_name(checkpoint.name + DELETED_SUFFIX)
    shutil.rmtree(aside, ignore_errors=True)
    checkpoint.rename(aside)  # what a kill leaves of it, the next start clears
    shutil.rmtree(aside)
    shutil.rmtree(checkpoint.with_name(checkpoint.name + UNIVERSAL_SUFFIX), ignore_errors=True)


def best_name(folder: Path) -> str | None:
    """The checkpoint that `best` points to; its state.json has the evaluation loss."""
    try:
        return (folder / BEST).read_text().strip()
    except OSError:
        return None


def prune(folder: Path, total_limit: int, dry_run: bool = False) -> list[Path]:
    """Delete the oldest checkpoints over the limit, never the best, and return them.

    Args:
        total_limit: checkpoints to keep besides the best; 0 keeps all.
        dry_run: delete nothing.
    """
    if not total_limit:
        return []
    best = best_name(folder)
    old = [path for path in list_checkpoints(folder) if path.name != best][total_limit:]
    for path in [] if dry_run else old:
        delete_checkpoint(path)
    return old


def clear_partial(folder: Path) -> None:
    """Remove what interrupted saves and conversions left, and conversions that the run is past."""
    for path in folder.glob(f"*{PARTIAL_SUFFIX}"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if list_checkpoints(folder):  # before its first one, a run may begin from the conversion of another run's
        for path in folder.glob(f"step_*{UNIVERSAL_SUFFIX}"):
            if not (path.with_suffix("") / MANIFEST).is_file():
                shutil.rmtree(path)
