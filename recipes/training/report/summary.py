"""The numbers at the top of the report."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from recipes.training.report.number_text import byte_size, duration, short_number, whole_number
from recipes.training.report.run_folder import RunRecord


@dataclass(frozen=True)
class RunSummary:
    """One run in a few numbers; None where metrics.jsonl does not tell."""

    name: str
    folder: str
    steps: int
    max_steps: int | None
    tokens: int | None
    loss: float | None  # last finite training loss [nats per token]
    eval_loss: float | None  # last evaluation [nats per token]
    eval_bits_per_byte: float | None
    best_eval_loss: float | None
    best_step: int | None
    training_seconds: float | None  # sum of the steps' times, without evaluation and checkpoints
    tokens_per_second: float | None  # median
    mfu: float | None  # median, share of the device's peak
    peak_memory_bytes: int | None
    skipped_steps: int
    spikes: int
    resumes: int
    non_finite_losses: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarise(record: RunRecord) -> RunSummary:
    """Work out a run's summary from its columns."""
    eval_steps, eval_losses = _finite(*record.series("eval_loss"))
    best = int(np.argmin(eval_losses)) if len(eval_losses) else None
    peak = [_reduce(record, key, np.max) for key in record.columns if _is_device_memory(key)]
    return RunSummary(
        name=record.name,
        folder=str(record.folder),
        steps=last_step(record),
        max_steps=_find_integer(record.run, "max_steps"),
        tokens=_as_int(_last(record, "tokens")),
        loss=_last(record, "loss"),
        eval_loss=_last(record, "eval_loss"),
        eval_bits_per_byte=_last(record, "eval_bits_per_byte"),
        best_eval_loss=None if best is None else float(eval_losses[best]),
        best_step=None if best is None else int(eval_steps[best]),
        training_seconds=_training_seconds(record),
        tokens_per_second=_reduce(record, "tokens_per_second", np.median),
        mfu=_reduce(record, "mfu", np.median),
        peak_memory_bytes=_as_int(max((value for value in peak if value is not None), default=None)),
        skipped_steps=sum(count for _, count in skipped_at(record)),
        spikes=len(record.events_of("spike")),
        resumes=len(record.events_of("resume")),
        non_finite_losses=int(np.count_nonzero(~np.isfinite(record.series("loss")[1]))),
    )


@dataclass(frozen=True)
class SummaryRow:
    """A row of the summary: what it is called, its text for a run, and which end of the scale is better, if any."""

    label: str
    text: Callable[[RunSummary], str | None]
    value: Callable[[RunSummary], float | None] | None = None
    better: Callable[[list[float]], float] = min


SUMMARY_ROWS = (
    SummaryRow("Steps", lambda s: whole_number(s.steps) + (f" of {whole_number(s.max_steps)}" if s.max_steps else "")),
    SummaryRow("Tokens", lambda s: None if s.tokens is None else short_number(s.tokens)),
    SummaryRow("Training loss, last", lambda s: _loss(s.loss), lambda s: s.loss),
    SummaryRow("Evaluation loss, last", lambda s: _loss(s.eval_loss), lambda s: s.eval_loss),
    SummaryRow("Bits per byte, last", lambda s: _loss(s.eval_bits_per_byte), lambda s: s.eval_bits_per_byte),
    SummaryRow(
        "Best evaluation loss",
        lambda s: None if s.best_step is None else f"{_loss(s.best_eval_loss)}, step {whole_number(s.best_step)}",
        lambda s: s.best_eval_loss,
    ),
    SummaryRow("Training time", lambda s: None if s.training_seconds is None else duration(s.training_seconds)),
    SummaryRow(
        "Tokens per second, median",
        lambda s: None if s.tokens_per_second is None else short_number(s.tokens_per_second),
        lambda s: s.tokens_per_second,
        max,
    ),
    SummaryRow("MFU, median", lambda s: None if s.mfu is None else f"{100 * s.mfu:.3g}%", lambda s: s.mfu, max),
    SummaryRow(
        "Memory, peak",
        lambda s: None if s.peak_memory_bytes is None else byte_size(s.peak_memory_bytes),
        lambda s: s.peak_memory_bytes,
    ),
    SummaryRow("Steps skipped", lambda s: whole_number(s.skipped_steps)),
    SummaryRow("Spikes", lambda s: whole_number(s.spikes)),
    SummaryRow("Resumes", lambda s: whole_number(s.resumes)),
    SummaryRow("Losses not finite", lambda s: whole_number(s.non_finite_losses) if s.non_finite_losses else None),
)


def last_step(record: RunRecord) -> int:
    """The newest step of any number of the run."""
    return max(column.steps[-1] for column in record.columns.values() if column.steps)


def skipped_at(record: RunRecord) -> list[tuple[int, int]]:
    """(step of the line, steps skipped since the line before) wherever the run's counter rose.

    A counter that falls has started again, so that what it shows is new.
    """
    steps, counts = _finite(*record.series("skipped_steps"))
    previous = np.concatenate([np.zeros(1), counts[:-1]])
    risen = np.where(counts >= previous, counts - previous, counts) if len(counts) else counts
    return [(int(step), int(count)) for step, count in zip(steps, risen, strict=True) if count > 0]


def _training_seconds(record: RunRecord) -> float | None:
    """Each line's step time, times the steps since the line before it."""
    steps, seconds = record.series("step_seconds")
    if not len(steps):
        return None
    gaps = np.diff(steps)
    first = min(int(steps[0]), int(np.median(gaps))) if len(gaps) else 1
    return float(np.nansum(np.where(np.isfinite(seconds), seconds, 0.0) * np.concatenate([[max(first, 1)], gaps])))


def _is_device_memory(key: str) -> bool:
    return key.endswith("_bytes") and "memory" in key and not any(word in key for word in ("host", "rss", "total"))


def _finite(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    keep = np.isfinite(values)
    return steps[keep], values[keep]


def _last(record: RunRecord, key: str) -> float | None:
    values = _finite(*record.series(key))[1]
    return float(values[-1]) if len(values) else None


def _reduce(record: RunRecord, key: str, function: Callable[[np.ndarray], Any]) -> float | None:
    values = _finite(*record.series(key))[1]
    return float(function(values)) if len(values) else None


def _as_int(value: float | None) -> int | None:
    return None if value is None else int(value)


def _loss(value: float | None) -> str | None:
    return None if value is None else f"{value:.4f}"


def _find_integer(tree: Any, key: str) -> int | None:
    """The first positive integer under this key, at any depth: run.json keeps its arguments in groups."""
    if not isinstance(tree, dict):
        return None
    value = tree.get(key)
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    return next((found for branch in tree.values() if (found := _find_integer(branch, key)) is not None), None)
