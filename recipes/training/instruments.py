"""What watches a run from the outside, step by step: ranks, memory, communication, and on request a profile."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.profiler import record_function

from recipes.config.instrument_flags import ProfileSteps
from recipes.data.loader import StepBatch
from recipes.training.communication_clock import CommunicationClock
from recipes.training.memory_watch import GrowthWatcher, MemoryReading
from recipes.training.plan_run import RunPlan
from recipes.training.profile_verdict import RANGE_PREFIX
from recipes.training.profiling import StepProfiler
from recipes.training.rank_metrics import gather_from_ranks, rank_metrics
from recipes.training.run_log import PRINTED, logger

SNAPSHOT_EVENTS = 200_000  # allocations and frees that a memory snapshot looks back at, about a hundred bytes each


@dataclass(frozen=True)
class MemoryGrowth:
    """Memory of one rank that grew at every look: a leak."""

    memory: str
    rank: int
    bytes_per_1000_steps: int


class Instruments:
    """Used as a context around the loop; `begin_step` and `end_step` around each step, on every rank."""

    def __init__(self, plan: RunPlan, engine: Any, done_steps: int) -> None:
        self._config, self._rank, self._folder = plan.config, plan.launch.rank, plan.folder
        self._device = engine.device
        self._clock = CommunicationClock(engine.device)
        self._data_wait_seconds = 0.0
        self._watchers: dict[str, GrowthWatcher] = {}
        self._profiler = None
        if plan.config.profile and plan.launch.is_main:
            steps = ProfileSteps.parse(plan.config.profile, done_steps, plan.resolved.max_steps)
            self._profiler = StepProfiler(steps, engine, self._clock, plan.folder, plan.launch.rank)

    def __enter__(self) -> "Instruments":
        self._clock.install()
        if self._config.memory_snapshot:
            torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_EVENTS)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._clock.remove()
        if self._profiler:
            self._profiler.stop()
        if self._config.memory_snapshot:  # also, and above all, when memory ran out
            path = self._folder / "memory_snapshot" / f"rank_{self._rank:05d}.pickle"
            write_memory_snapshot(path)
            logger.info("memory snapshot in %s; open it at pytorch.org/memory_viz", path)

    def begin_step(self, step: int) -> None:
        """Call before the step's batch is fetched."""
        every = self._config.empty_cache_steps
        if every and step > 1 and (step - 1) % every == 0:
            torch.cuda.empty_cache()  # on all ranks after the same step, or one waits for the others' allocations
        self._clock.take_seconds()  # what happened between the steps is not this step's
        if self._profiler:
            self._profiler.before_step(step)

    def fetch(self, batches: Iterator[StepBatch]) -> StepBatch:
        """Wait for the step's batch, and remember how long."""
        begin = time.perf_counter()
        with record_function(RANGE_PREFIX + "data wait"):
            batch = next(batches)
        self._data_wait_seconds = time.perf_counter() - begin
        return batch

    def end_step(self, step: int, seconds: float) -> tuple[dict[str, float], list[MemoryGrowth]]:
        """Call when the step is done.

        Args:
            seconds: this rank's whole step, from before `fetch`.
        Returns:
            The ranks' part of the metrics line, and what happened, both the same on every rank.
        """
        if self._profiler:
            lines = self._profiler.after_step(step, seconds, self._data_wait_seconds)
            if lines:
                print("\n".join(["", *lines]), flush=True)
        communication = self._clock.take_seconds()
        memory = MemoryReading(self._device)
        growing = {
            f"{name} growth": self._watchers.setdefault(name, GrowthWatcher()).add(value) or 0.0
            for name, value in memory.watched.items()
        }
        own = {
            "own_seconds": seconds - communication,
            "data_wait_seconds": self._data_wait_seconds,
            "communication_seconds": communication,
            **memory.metrics,
            **growing,
        }
        logger.debug(
            "step %d: %s", step, ", ".join(f"{name} {value:.6g}" for name, value in own.items()), extra=PRINTED
        )
        by_rank = gather_from_ranks(own, self._device)
        growths = [
            MemoryGrowth(name.removesuffix(" growth"), rank, round(slope))
            for name in growing
            for rank, slope in enumerate(by_rank[name])
            if slope
        ]
        for growth in growths:
            if self._rank in (0, growth.rank):
                logger.warning(
                    "step %d: the %s of rank %d grows steadily, by %.1f MiB per 1,000 steps: something keeps what it "
                    "should let go of",
                    step,
                    growth.memory,
                    growth.rank,
                    growth.bytes_per_1000_steps / 2**20,
                )
        return rank_metrics(by_rank), growths


def write_memory_snapshot(path: Path) -> None:
    """Write what torch's allocator on the GPU did, and stop recording it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)
