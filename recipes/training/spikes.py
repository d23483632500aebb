"""Spikes of the loss: found against a running median, before the update that they would make."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from recipes.config.errors import TrainingFault
from recipes.config.run_config import RunConfig
from recipes.training.checkpoint import load_checkpoint
from recipes.training.checkpoint_files import TrainingState, list_checkpoints, read_state
from recipes.training.metrics import MetricsWriter
from recipes.training.resume import layout_changes

# The median absolute deviation of normally distributed values times this is their standard deviation.
NORMAL_DEVIATION = 1.4826
SMALLEST_DEVIATION = 1e-3  # of the median: among losses that hardly differ, their last digits are no spike
MOST_REWINDS = 3  # to one checkpoint; more would not come out elsewhere
_ANSWERS = {
    "warn": "it is trained on",
    "skip": "its update is left out",
    "rewind": "back to the checkpoint of step {}, and from there over this batch",
}


@dataclass(frozen=True)
class Spike:
    """A loss far above those before it, in nats per token."""

    loss: float
    median: float
    deviation: float  # standard deviation of the losses before, estimated from their median absolute deviation

    def __str__(self) -> str:
        times = (self.loss - self.median) / self.deviation
        return f"the loss {self.loss:.4f} is {times:.1f} deviations above the running median {self.median:.4f}"


def find_spike(loss: float, recent: Sequence[float], window: int, deviations: float) -> Spike | None:
    """Whether a loss lies more than so many deviations above the median of those before it.

    Args:
        recent: losses of the last steps, at most `window` of them; fewer than half as many tell nothing.
        window: 0 switches it off.
    """
    if not window or len(recent) < max(2, window / 2) or not math.isfinite(loss):
        return None
    median = statistics.median(recent)
    spread = statistics.median(abs(value - median) for value in recent)
    deviation = max(NORMAL_DEVIATION * spread, SMALLEST_DEVIATION * abs(median))
    return Spike(loss, median, deviation) if loss > median + deviations * deviation else None


def remember(recent: list[float], loss: float, window: int) -> None:
    """Add a loss to the last `window` ones, in place; one that is not finite is not remembered."""
    if math.isfinite(loss):
        recent.append(loss)
    del recent[: max(0, len(recent) - window)]


def next_sample(samples: int, global_batch_size: int, passed_over: Sequence[Sequence[int]]) -> int:
    """Where the next batch begins: at `samples`, or after the sequences to pass over that it would touch.

    Args:
        passed_over: (first sequence, sequences, step rewound to) of each batch that is not trained on again.
    """
    for first, count, _ in sorted(map(tuple, passed_over)):
        if first < samples + global_batch_size and samples < first + count:
            samples = first + count
    return samples


class SpikeWatch:
    """Looks for a spike before each update, and does with it what `--on_spike` says; every rank alike.

    Args:
        checkpoints: the run's folder of them, to go back to.
    """

    def __init__(self, engine: Any, config: RunConfig, checkpoints: Path) -> None:
        self._engine, self._config, self._checkpoints = engine, config, checkpoints
        self._spike: Spike | None = None  # of the step that is being taken

    def is_unwanted(self, recent: Sequence[float], loss: float) -> bool:
        """Compare a step's loss with those before it; whether its update is to be left out."""
        self._spike = find_spike(loss, recent, self._config.spike_window, self._config.spike_deviations)
        return self._spike is not None and self._config.on_spike != "warn"

    def remember(self, recent: list[float], loss: float) -> None:
        """Add the step's loss to those that the next are compared with, in place."""
        remember(recent, loss, self._config.spike_window)

    def answer(
        self,
        state: TrainingState,
        layout: dict[str, Any],
        global_batch_size: int,
        finish_save: Callable[[], None],
        metrics: MetricsWriter | None,
    ) -> TrainingState | None:
        """Say that the step's loss spiked, if it did, and go back if that was asked for.

        Args:
            state: after the step.
            layout: of this run; only a checkpoint of the same can be loaded on the way.
            global_batch_size: of the step [sequences].
            finish_save: completes a save that is under way.
            metrics: of rank 0.
        Returns:
            Where training goes on after a rewind; None without one.
        Raises:
            TrainingFault: the run has gone back to this checkpoint too often already.
        """
        spike, self._spike = self._spike, None
        if spike is None:
            return None
        answer, rewound = self._config.on_spike, None
        if answer == "rewind":
            finish_save()
            rewound = self._rewind(state, layout, global_batch_size)
            answer = "rewind" if rewound else "skip"  # nothing to go back to has been saved yet
        if metrics:
            to = rewound.step if rewound else state.step
            print(f"warning: step {state.step}: {spike}; {_ANSWERS[answer].format(to)}", flush=True)
            if rewound:
                metrics.rewind(rewound.step)
            metrics.write_event("spike", state.step, **asdict(spike), answer=answer)
        return rewound

    def _rewind(self, state: TrainingState, layout: dict[str, Any], global_batch_size: int) -> TrainingState | None:
        newest: list[Any] = [next(iter(list_checkpoints(self._checkpoints)), None)]
        torch.distributed.broadcast_object_list(newest, src=0)  # another host may see files late
        if newest[0] is None:
            return None
        saved = read_state(newest[0])
        if layout_changes(saved, layout):
            return None
        rewinds = sum(step == saved.step for *_, step in state.passed_over)
        if rewinds >= MOST_REWINDS:
            raise TrainingFault(
                f"step {state.step}: the loss spiked again after {rewinds} rewinds to {newest[0]}, each over another "
                "batch; look at the data there, lower the learning rate, or write --on_spike warn"
            )
        first = state.samples - global_batch_size
        passed_over = [*state.passed_over, [first, global_batch_size, saved.step]]
        return replace(load_checkpoint(self._engine, newest[0]), settings=state.settings, passed_over=passed_over)
