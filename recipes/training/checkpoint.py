"""Saving and loading a run: every rank writes its part aside, then one rename makes the whole a checkpoint."""

import copy
import json
import random
import shutil
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
from torch import Tensor

from recipes.config.errors import TrainingFault
from recipes.training.checkpoint_files import (
    BEST,
    PARTIAL_SUFFIX,
    STATE,
    CheckpointError,
    TrainingState,
    checkpoint_name,
    commit,
    prune,
    read_state,
    write_and_sync,
)
from recipes.training.expert_parallel_weights import own_name
from recipes.training.hashed_file import write_hashed


class _Collector(CheckpointEngine):
    """DeepSpeed hands its files over here instead of writing them; nothing in it can fail on one rank alone."""

    def __init__(self, loader: CheckpointEngine, copies: bool) -> None:
        super().__init__()
        self.files: list[tuple[Path, Any]] = []
        self._loader = loader
        self._copies = copies

    def create(self, info: CheckpointCommitInfo) -> None:
        pass

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        pass

    def save(self, state_dict: Any, path: str) -> None:
        self.files.append((Path(path), _host_copy(state_dict) if self._copies else state_dict))

    def load(self, path: str, map_location: Any = None) -> Any:
        return self._loader.load(path, map_location)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        return True


def _host_copy(value: Any) -> Any:
    """A copy in host memory that training does not change."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _host_copy(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_host_copy(entry) for entry in value)
    return copy.deepcopy(value)


@dataclass
class _Save:
    """A checkpoint that is being written."""

    aside: Path
    target: Path
    best: bool
    files: list[tuple[Path, Any]]  # this rank's
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    error: str = ""
    thread: threading.Thread | None = None

    def write(self) -> None:
        """Write this rank's files; a failure is kept for all ranks to hear of."""
        try:
            for path, content in self.files:
                self.entries[path.relative_to(self.aside).as_posix()] = write_hashed(path, content)
        except (OSError, RuntimeError) as error:
            self.error = str(error)
        self.files = []  # the host copies


class CheckpointWriter:
    """Saves a run's checkpoints, each as one transaction over all ranks.

    A save in the background copies everything to host memory first, so that training goes on while a thread writes;
    there is one such copy at a time.

    Args:
        folder: the run's checkpoints/ folder.
        model_config: as config.json.
        total_limit: checkpoints to keep besides the best; 0 keeps all. Old ones go only after a new one is complete.
        background: write behind training's back.
    """

    def __init__(
        self,
        engine: Any,
        folder: Path,
        model_config: dict[str, Any],
        tokenizer_folder: Path,
        *,
        total_limit: int,
        background: bool,
    ) -> None:
        self._engine = engine
        self._folder = folder
        self._model_config = model_config
        self._tokenizer_folder = tokenizer_folder
        self._total_limit = total_limit
        self._background = background
        self._rank = torch.distributed.get_rank()
        self._pending: _Save | None = None
        self._pruning: threading.Thread | None = None  # rank 0's

    @property
    def is_written(self) -> bool:
        """Whether this rank's part of a background save is on disk (or failed) and waits for the others'."""
        return self._pending is not None and self._pending.thread is not None and not self._pending.thread.is_alive()

    def save(self, state: TrainingState, best: bool = False) -> float:
        """Save; all ranks call it. In the background mode the checkpoint is complete only after `finish`.

        Args:
            best: also point `best` to it.
        Returns:
            How long training stood still [s].
        Raises:
            CheckpointError: a rank could not write; earlier checkpoints are untouched.
        """
        begin = time.perf_counter()
        self.close()  # there is room for one checkpoint more than are kept, not for two
        target = self._folder / checkpoint_name(state.step)
        aside = target.with_name(target.name + PARTIAL_SUFFIX)
        if self._rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
        torch.distributed.barrier()
        save = _Save(aside, target, best, self._collect(aside))
        self._pending = save
        if self._rank == 0:
            try:
                self._write_small_files(aside, state)
            except OSError as error:
                save.error = str(error)
        if self._background:
            save.thread = threading.Thread(target=save.write, name="checkpoint-writer", daemon=True)
            save.thread.start()
        else:
            save.write()
            self.finish()
        return time.perf_counter() - begin

    def finish(self) -> None:
        """Complete the save that is under way, if any; all ranks call it.

        Raises:
            CheckpointError: a rank could not write its part.
        """
        save, self._pending = self._pending, None
        if save is None:
            return
        if save.thread:
            save.thread.join()
        self._wait_for_pruning()
        parts: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(parts, (save.entries, save.error))
        for rank, (_, error) in enumerate(parts):
            if error:
                raise CheckpointError(f"{save.target}: rank {rank} could not write it: {error}")
        failure = [""]
        if self._rank == 0:
            try:
                commit(save.aside, save.target, {name: entry for part, _ in parts for name, entry in part.items()})
                if save.best:
                    write_and_sync(self._folder / BEST, save.target.name)
            except OSError as error:
                failure = [str(error)]
        torch.distributed.broadcast_object_list(failure)  # also keeps every rank here until the rename is done
        if failure[0]:
            raise CheckpointError(f"{save.target}: could not be completed: {failure[0]}")
        if self._rank == 0:
            self._pruning = threading.Thread(target=self._prune, name="checkpoint-pruner", daemon=True)
            self._pruning.start()

    def close(self) -> None:
        """`finish`, and wait until old checkpoints are deleted; all ranks call it."""
        self.finish()
        self._wait_for_pruning()

    def _prune(self) -> None:
        """Behind training's back: a checkpoint of thousands of ranks has tens of thousands of files."""
        try:
            prune(self._folder, self._total_limit)
        except OSError as error:
            print(f"warning: {self._folder}: an old checkpoint could not be deleted: {error}", flush=True)

    def _wait_for_pruning(self) -> None:
        if self._pruning:
            self._pruning.join()
            self._pruning = None

    def _collect(self, aside: Path) -> list[tuple[Path, Any]]:
        """This rank's files and their contents; copies if they are written later."""
        engine, collector = self._engine, _Collector(self._engine.checkpoint_engine, self._background)
        engine.checkpoint_engine, usual = collector, engine.checkpoint_engine
        try:
            engine.save_checkpoint(str(aside.parent), tag=aside.name, save_latest=False)
        finally:
            engine.checkpoint_engine = usual
        rng = {
            "python": random.getstate(),
            "numpy": numpy.random.get_state(),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        }
        collector.save(rng, str(aside / f"rng_{self._rank:05d}.pt"))
        if self._rank == 0:
            collector.save(dict(engine.module.named_buffers()), str(aside / "buffers.pt"))
        return collector.files

    def _write_small_files(self, aside: Path, state: TrainingState) -> None:
        state.loss_scaler = loss_scaler_state(self._engine)
        (aside / STATE).write_text(json.dumps(asdict(state), indent=2))
        (aside / "config.json").write_text(json.dumps(self._model_config, indent=2))
        shutil.copytree(self._tokenizer_folder, aside / "tokenizer")


def loss_scaler_state(engine: Any) -> dict[str, float] | None:
    """The dynamic loss scale and its counters; None where the run has none."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if scaler is None or not engine.fp16_enabled():
        return None
    return {name: value for name, value in vars(scaler).items() if isinstance(value, int | float)}


class _MappedReader(CheckpointEngine):
    """Maps the files that hold the model's weights instead of reading them.

    At ZeRO 1 and 2 every rank copies all weights out of rank 0's one file: the ranks of a host then share its pages,
    where each would else hold the whole in memory of its own.
    """

    def __init__(self, usual: CheckpointEngine) -> None:
        super().__init__()
        self._usual = usual

    def create(self, info: CheckpointCommitInfo) -> None:
        pass

    def save(self, state_dict: Any, path: str) -> None:
        self._usual.save(state_dict, path)

    def load(self, path: str, map_location: Any = None) -> Any:
        if not path.endswith("model_states.pt"):  # the optimizer keeps what it is given
            return self._usual.load(path, map_location)
        return torch.load(path, map_location=map_location, mmap=True, weights_only=False)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        return True


def load_checkpoint(engine: Any, checkpoint: Path) -> TrainingState:
    """Restore engine, buffers and RNG from a verified checkpoint of the same world size and ZeRO stage.

    This run's learning rate, betas and weight decay stay; DeepSpeed would put the checkpoint's in their place.

    Raises:
        TrainingFault: DeepSpeed found nothing to load.
    """
    ours, clip = own_settings(engine), getattr(engine.optimizer, "clip_grad", None)
    usual = engine.checkpoint_engine
    if engine.zero_optimization_stage() in (1, 2):  # at stage 0 the optimizer's state is in the same file
        engine.checkpoint_engine = _MappedReader(usual)
    try:
        path, _ = engine.load_checkpoint(str(checkpoint.parent), tag=checkpoint.name)
    finally:
        engine.checkpoint_engine = usual
    if path is None:
        raise TrainingFault(f"{checkpoint}: DeepSpeed found nothing to load in it")
    restore_settings(engine, ours)
    if clip is not None:
        engine.optimizer.clip_grad = clip
    load_buffers(engine, checkpoint)
    load_random_state(checkpoint, torch.distributed.get_rank())
    return read_state(checkpoint)


def own_settings(engine: Any) -> tuple[list[dict[str, Any]], list[float]]:
    """What this run's ds_config gave each parameter group, before a load overwrites it; and the base rates."""
    groups = [
        {k: v for k, v in group.items() if k not in ("params", "step")} for group in engine.optimizer.param_groups
    ]
    return groups, list(engine.lr_scheduler.base_lrs)


def restore_settings(engine: Any, settings: tuple[list[dict[str, Any]], list[float]]) -> None:
    """Put this run's settings back, with the learning rate that its schedule has where the scheduler stands."""
    groups, base_lrs = settings
    scheduler = engine.lr_scheduler
    scheduler.base_lrs = base_lrs
    rates = [
        base * multiplier(scheduler.last_epoch) for base, multiplier in zip(base_lrs, scheduler.lr_lambdas, strict=True)
    ]
    scheduler._last_lr = rates  # LambdaLR recomputes it only at its next step
    for group, mine, rate in zip(engine.optimizer.param_groups, groups, rates, strict=True):
        group.update(mine)
        group["lr"] = rate


def load_buffers(engine: Any, checkpoint: Path) -> None:
    """Restore the model's buffers; DeepSpeed's conversion loses them."""
    buffers: dict[str, Tensor] = torch.load(checkpoint / "buffers.pt", map_location=engine.device, weights_only=True)
    saved = {own_name(name): buffer for name, buffer in buffers.items()}  # AutoEP's blocks call some otherwise
    for name, buffer in engine.module.named_buffers():
        if own_name(name) in saved:
            buffer.copy_(saved[own_name(name)])


def load_random_state(checkpoint: Path, rank: int) -> None:
    """Restore this rank's random-number states; a rank that the saved run did not have keeps its seed's."""
    path = checkpoint / f"rng_{rank:05d}.pt"
    if not path.is_file():
        return
    rng = torch.load(path, weights_only=False)
    random.setstate(rng["python"])
    numpy.random.set_state(rng["numpy"])
    torch.set_rng_state(rng["torch"])
    if rng["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(rng["cuda"])
