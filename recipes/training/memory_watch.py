"""What memory a rank uses, and whether it grows: a leak is found long before it ends the run."""

import resource
from collections import deque
from pathlib import Path

import numpy as np
import torch

WARMUP_STEPS = 50  # caches, the optimizer's state and the allocators' arenas come with the first steps
BLOCK_STEPS = 5  # readings whose median is one point: a single peak is no growth
LEAST_BLOCKS, MOST_BLOCKS = 12, 40  # points that a verdict needs, and looks back at
LEAST_STEADINESS = 0.8  # of later points above earlier ones (Kendall's tau); a jump in mid-window reaches 0.53
LEAST_GROWTH_BYTES, LEAST_GROWTH_SHARE = 4 << 20, 0.005  # over the window; less is the allocators' own noise


class GrowthWatcher:
    """Tells steady growth from noise and from jumps, in readings taken once a step at the same point of the step."""

    def __init__(self) -> None:
        self._readings = 0
        self._block: list[float] = []
        self._points: deque[float] = deque(maxlen=MOST_BLOCKS)

    def add(self, value: float) -> float | None:
        """Take the next step's reading.

        Args:
            value: [bytes].
        Returns:
            The slope [bytes per 1,000 steps] when the window that this reading ends grows steadily, and a new window
            begins; else None.
        """
        self._readings += 1
        if self._readings <= WARMUP_STEPS:
            return None
        self._block.append(value)
        if len(self._block) < BLOCK_STEPS:
            return None
        self._points.append(float(np.median(self._block)))
        self._block.clear()
        if len(self._points) < LEAST_BLOCKS:
            return None
        slope, steadiness = theil_sen(np.array(self._points))
        growth = slope * (len(self._points) - 1)
        if steadiness < LEAST_STEADINESS:
            return None
        if growth < max(LEAST_GROWTH_BYTES, LEAST_GROWTH_SHARE * self._points[0]):
            return None
        self._points.clear()
        return slope / BLOCK_STEPS * 1000


def theil_sen(values: np.ndarray) -> tuple[float, float]:
    """The median slope over all pairs of points [per point], unbent by outliers, and Kendall's tau against time.

    Args:
        values: (N,), evenly spaced.
    Source: Sen, Estimates of the regression coefficient based on Kendall's tau (JASA 63, 1968).
    """
    earlier, later = np.triu_indices(len(values), k=1)
    rises = values[later] - values[earlier]
    return float(np.median(rises / (later - earlier))), float(np.sign(rises).mean())


def host_memory() -> tuple[int, int]:
    """This process's resident memory, and the part of it that is its own and no file's [bytes].

    A memory-mapped corpus grows the first as it is read, and costs nothing: only the second can leak.
    """
    status = Path("/proc/self/status").read_text()
    kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in status.splitlines() if line.endswith(" kB")}
    resident = kilobytes["VmRSS"]
    own = kilobytes.get("RssAnon", resident)  # some sandboxes' kernels do not tell it apart
    return resident * 1024, (own + kilobytes.get("RssShmem", 0)) * 1024


def peak_host_memory() -> int:
    """The most that this process ever had resident [bytes]."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux reports KiB


class MemoryReading:
    """This rank's memory now: `metrics` by their names in metrics.jsonl, and `watched`, which must not grow [bytes]."""

    def __init__(self, device: torch.device) -> None:
        resident, own = host_memory()
        self.metrics = {"host_rss_bytes": resident}
        self.watched = {"host memory": own}
        if device.type == "cuda":
            allocated = torch.cuda.memory_allocated(device)
            self.metrics |= {
                "memory_bytes": torch.cuda.max_memory_allocated(device),
                "memory_allocated_bytes": allocated,
                "memory_reserved_bytes": torch.cuda.memory_reserved(device),
            }
            self.watched["GPU memory"] = allocated
        else:
            self.metrics["memory_bytes"] = max(peak_host_memory(), resident)  # the kernel adds up both late
