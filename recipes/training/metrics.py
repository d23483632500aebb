"""What a run writes down: metrics.jsonl, and DeepSpeed's monitors (TensorBoard, W&B, CSV) as the ds_config asks."""

import contextlib
import json
import math
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from recipes.training.expert_metrics import expert_metrics
from recipes.training.step import StepResult


def step_metrics(
    result: StepResult,
    engine: Any,
    *,
    step: int,
    tokens: int,
    skipped_steps: int,
    epoch: int,
    seconds: float,
    batch_tokens: int,
    flops_per_token: float,
    peak_flops: float,
) -> dict[str, Any]:
    """One line of metrics.jsonl, but for what the ranks measure each on their own.

    Args:
        batch_tokens: of the global batch, padding and everything else that has no loss included.
        flops_per_token: forward and backward of one token [FLOP].
        peak_flops: of one device [FLOP/s].
    """
    tokens_per_second = result.label_tokens / seconds
    return {
        "step": step,
        "tokens": tokens,
        "loss": result.loss,
        "mtp_loss": result.mtp_loss,
        "balance_loss": result.balance_loss,
        "learning_rate": result.learning_rate,
        "grad_norm": result.grad_norm,
        "loss_scale": float(getattr(engine.optimizer, "cur_scale", 1.0)),
        "skipped_steps": skipped_steps,
        "step_seconds": seconds,
        "tokens_per_second": tokens_per_second,
        "tokens_per_second_with_padding": batch_tokens / seconds,
        "mfu": tokens_per_second * flops_per_token / (peak_flops * torch.distributed.get_world_size()),
        **expert_metrics(result.expert_load, result.router_entropy),
        "epoch": epoch,
        **({"grad_norms": result.grad_norms} if result.grad_norms else {}),
    }


class MetricsWriter:
    """Appends lines to metrics.jsonl and events to the engine's monitor; rank 0 only."""

    def __init__(self, folder: Path, monitor: Any, resumed_step: int) -> None:
        self._path = folder / "metrics.jsonl"
        self._monitor = monitor
        if self._path.exists():
            self._drop_after(resumed_step)
        self._file = self._path.open("a")
        if resumed_step:
            self.write_event("resume", resumed_step)

    def _drop_after(self, step: int) -> None:
        """Forget steps that will be taken again, and a last line that a crash cut short."""
        os.truncate(self._path, _bytes_to_step(self._path, step))

    def rewind(self, step: int) -> None:
        """Forget the steps after `step`: training goes on from there."""
        self._file.close()
        self._drop_after(step)
        self._file = self._path.open("a")
        self.write_event("resume", step)

    def write_event(self, event: str, step: int, **details: Any) -> None:
        """Write a line that is no measurement: a resume, a spike."""
        self._file.write(json.dumps({"event": event, "step": step, **details}) + "\n")
        self._file.flush()

    def write(self, line: dict[str, Any]) -> None:
        """Write one line; values that are not finite become null, as JSON has no NaN."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
        self._file.write(json.dumps(finite) + "\n")
        self._file.flush()
        if self._monitor is not None and self._monitor.enabled:
            self._monitor.write_events([(f"train/{name}", value, line["step"]) for name, value in _numbers(finite)])

    def close(self) -> None:
        """Flush to disk."""
        self._file.close()


def _bytes_to_step(path: Path, step: int) -> int:
    """How much of a metrics.jsonl belongs to steps up to `step`. Read from its end: a long run's has gigabytes, and its
    lines stand in the order in which things happened."""
    if not path.stat().st_size:
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        end = len(content)
        while end:
            begin = content.rfind(b"\n", 0, end - 1) + 1
            line = content[begin:end]
            with contextlib.suppress(ValueError):
                if line.endswith(b"\n") and json.loads(line).get("step", 0) <= step:
                    break
            end = begin
        return end


def _numbers(line: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """A line's numbers; one for each layer or source in a dictionary of them, as `name/layer`."""
    for name, value in line.items():
        if isinstance(value, int | float):
            yield name, value
        elif isinstance(value, dict):
            yield from ((f"{name}/{key}", inner) for key, inner in value.items() if isinstance(inner, int | float))
