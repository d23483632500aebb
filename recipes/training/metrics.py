"""What a run writes down: metrics.jsonl, and DeepSpeed's monitors (TensorBoard, W&B, CSV) as the ds_config asks."""

import functools
import json
import math
import resource
import time
from pathlib import Path
from typing import Any

import torch

from recipes.training.step import StepResult, expert_load_violation

# Dense tensor-core peaks without sparsity [FLOP/s in bf16 or fp16], from NVIDIA's data sheets of each product.
GPU_PEAK_FLOPS = {
    "V100": 125e12,
    "A100": 312e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
}


@functools.cache
def device_peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Peak of one device [FLOP/s]: a known GPU's data sheet in half precision, else a measured matrix product."""
    if device.type == "cuda" and dtype != torch.float32:
        name = torch.cuda.get_device_name(device)
        for product, peak in GPU_PEAK_FLOPS.items():
            if product in name:
                return peak
    return measured_matmul_flops(device, dtype)


def measured_matmul_flops(device: torch.device, dtype: torch.dtype, size: int = 2048, repeats: int = 4) -> float:
    """Best rate of a size-cubed matrix product [FLOP/s]."""
    generator = torch.Generator(device).manual_seed(0)  # the run's own random state stays as it is
    a = torch.randn(size, size, device=device, generator=generator).to(dtype)
    best = math.inf
    for _ in range(repeats):
        begin = time.perf_counter()
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best


def memory_bytes(device: torch.device) -> int:
    """Peak memory of this rank: allocated on the GPU, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux reports KiB


def step_metrics(
    result: StepResult,
    engine: Any,
    *,
    step: int,
    tokens: int,
    skipped_steps: int,
    epoch: int,
    seconds: float,
    data_wait_seconds: float,
    flops_per_token: float,
    peak_flops: float,
) -> dict[str, Any]:
    """One line of metrics.jsonl.

    Args:
        data_wait_seconds: of `seconds`, what this rank waited for its batch.
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
        "data_wait_seconds": data_wait_seconds,
        "tokens_per_second": tokens_per_second,
        "mfu": tokens_per_second * flops_per_token / (peak_flops * engine.dp_world_size),
        "memory_bytes": memory_bytes(engine.device),
        "expert_load_violation": expert_load_violation(result.expert_load),
        "expert_load": {layer: [round(share, 5) for share in shares] for layer, shares in result.expert_load.items()},
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
        kept = []
        for line in self._path.read_text().splitlines():
            try:
                if json.loads(line).get("step", 0) <= step:
                    kept.append(line + "\n")
            except ValueError:
                continue
        aside = self._path.with_suffix(".jsonl.partial")
        aside.write_text("".join(kept))
        aside.replace(self._path)

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
            self._monitor.write_events(
                [(f"train/{k}", v, line["step"]) for k, v in finite.items() if isinstance(v, int | float)]
            )

    def close(self) -> None:
        """Flush to disk."""
        self._file.close()
