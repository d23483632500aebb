"""Which checkpoint a run goes on from, decided before anything is started or written."""

import shutil
from pathlib import Path
from typing import Any

from model.config import ModelConfig
from recipes.config.ds_check import offload_device
from recipes.config.errors import UserError
from recipes.training.checkpoint_files import (
    PARTIAL_SUFFIX,
    CheckpointError,
    TrainingState,
    checkpoints_folder,
    clear_partial,
    list_checkpoints,
    verify_checksums,
    verify_sizes,
)


def find_candidates(run: Path, resume: str) -> list[Path]:
    """Checkpoints to go on from, best first; empty means a fresh start.

    Args:
        run: the run's folder.
        resume: `auto`, `never`, or a checkpoint's (or run's) folder.
    Raises:
        UserError: `never` over a run that is there, or a path that holds no complete checkpoint.
    """
    if resume == "auto":
        candidates = [path for path in list_checkpoints(checkpoints_folder(run)) if _complete(path)]
        # a kill during the first save leaves a partial folder, and nothing to lose
        left = [path for path in checkpoints_folder(run).glob("step_*") if path.suffix != PARTIAL_SUFFIX]
        if left and not candidates:
            raise UserError(
                f"--resume auto: {checkpoints_folder(run)} holds checkpoints, none of them complete; "
                "move the folder away, or start over with --resume never --overwrite"
            )
        return candidates
    if resume == "never":
        return []
    path = Path(resume).expanduser().resolve()
    if not path.is_dir():
        raise UserError(f"--resume {resume}: no such folder; give a checkpoint's or a run's folder, auto or never")
    candidates = list_checkpoints(checkpoints_folder(path)) if checkpoints_folder(path).is_dir() else [path]
    if not candidates:
        raise UserError(f"--resume {resume}: holds no complete checkpoint")
    try:
        verify_sizes(candidates[0])
    except CheckpointError as error:
        raise UserError(f"--resume {resume}: does not verify: {error}") from None
    return candidates[:1]


def _complete(checkpoint: Path) -> bool:
    try:
        verify_sizes(checkpoint)
    except CheckpointError as error:
        print(f"warning: {error}; this checkpoint is passed over", flush=True)
        return False
    return True


# What a run may change without becoming another model.
NOT_ARCHITECTURE = {
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "initializer_range",
    "bias_update_speed",
    "balance_loss_alpha",
    "mtp_loss_weight",
}


def architecture_differences(saved: ModelConfig, here: ModelConfig) -> list[str]:
    """The fields of the architecture that differ, in words."""
    there, ours = saved.to_dict(), here.to_dict()
    keys = [key for key in ours if key not in NOT_ARCHITECTURE and there.get(key) != ours[key]]
    return [f"{key} {there.get(key)} there, {ours[key]} here" for key in keys]


def check_same_run(run: Path, checkpoint: Path | None, model: ModelConfig) -> None:
    """Refuse a folder, or a checkpoint, of another model.

    Raises:
        UserError: naming the first fields that differ.
    """
    for path in (run / "model_config.json", checkpoint / "config.json" if checkpoint else None):
        if path is None or not path.is_file():
            continue
        different = architecture_differences(ModelConfig.from_file(path), model)
        if different:
            raise UserError(
                f"{path}: belongs to another model ({', '.join(different[:3])}); give this run another --output_dir"
            )


def layout_changes(state: TrainingState, here: dict[str, Any]) -> list[str]:
    """What ties a native DeepSpeed checkpoint to its run and differs here, in words; empty: it loads as it is."""
    return [f"{key} {getattr(state, key)} -> {value}" for key, value in here.items() if getattr(state, key) != value]


def check_convertible(checkpoint: Path, state: TrainingState, here: dict[str, Any], ds_config: dict[str, Any]) -> None:
    """Refuse a change of layout that DeepSpeed's universal form cannot carry.

    Raises:
        UserError: saying what stands in the way.
    """
    changes = layout_changes(state, here)
    if not changes:
        return
    optimizer = ds_config["optimizer"]["type"]
    if "adam" not in optimizer.lower():
        raise UserError(
            f"{checkpoint}: {', '.join(changes)}, but DeepSpeed converts Adam's state alone and the optimizer is "
            f"{optimizer}; resume with the layout that it was saved with"
        )
    if offload_device(ds_config, "offload_optimizer") == "nvme":
        raise UserError(
            f"{checkpoint}: {', '.join(changes)}, but DeepSpeed does not load a converted checkpoint into an optimizer "
            "on NVMe; resume once with offload_optimizer.device cpu, save, and go on with nvme"
        )


def check_fresh_folder(run: Path, resume: str, overwrite: bool) -> None:
    """Refuse a fresh start over a run that is there.

    Raises:
        UserError: `--resume never` over a run, without `--overwrite` or where the folder is no run's.
    """
    if resume != "never" or not run.exists() or not any(run.iterdir()):
        return
    if not overwrite:
        raise UserError(f"--resume never: {run} holds a run; give another --output_dir, or --overwrite to delete it")
    if not (run / "run.json").exists():
        raise UserError(f"--overwrite: {run} has no run.json, so it is not a run's folder; nothing was deleted")


def prepare_run_folder(run: Path, resume: str) -> None:
    """Clear what a fresh start or a resume must not find; one process calls it, before the run writes."""
    if resume == "never" and run.exists():  # checked before: it is a run, and the user wants it gone
        shutil.rmtree(run)
    if checkpoints_folder(run).is_dir():
        clear_partial(checkpoints_folder(run))


def newest_verified(candidates: list[Path], asked_for: bool, rank: int, world_size: int, agree: Any) -> Path | None:
    """The first candidate whose checksums hold on all ranks.

    Args:
        asked_for: the user named this checkpoint: no other one will do.
        agree: collects a string from every rank into a list.
    Raises:
        UserError: the checkpoint asked for is altered, or none of several is whole.
    """
    for candidate in candidates:
        fault = ""
        try:
            verify_checksums(candidate, rank, world_size)
        except (CheckpointError, OSError) as error:
            fault = str(error)
        faults = [text for text in agree(fault) if text]
        if not faults:
            return candidate
        if asked_for:
            raise UserError(f"--resume: does not verify: {faults[0]}")
        if rank == 0:
            print(f"warning: {faults[0]}; this checkpoint is passed over", flush=True)
    if candidates:
        raise UserError(f"--resume auto: none of {len(candidates)} checkpoints beside {candidates[0]} verifies")
    return None
