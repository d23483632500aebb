"""How long a rank is in collectives, measured around each one, at a cost that every step can bear.

DeepSpeed's comms logger would stop the GPU after every collective, time asynchronous ones only until they are issued,
and keep every latency for ever.
"""

import functools
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import deepspeed.comm.comm
import torch

from recipes.cluster.stall_watch import device_waits

COLLECTIVES = (
    "all_reduce",
    "all_reduce_coalesced",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_coalesced",
    "all_gather_object",
    "all_to_all",
    "all_to_all_single",
    "barrier",
)


class _TimedHandle:
    """Stands for the handle of an asynchronous collective, to time the waiting for it."""

    def __init__(self, handle: Any, clock: "CommunicationClock") -> None:
        self._handle, self._clock = handle, clock

    def wait(self, *args: Any, **keywords: Any) -> Any:
        with self._clock:
            return self._handle.wait(*args, **keywords)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


class CommunicationClock:
    """Adds up the time of every collective of DeepSpeed's and of ours, waiting for other ranks included.

    On a CPU that is the host's time in the call, or in the wait for an asynchronous one. On a GPU it is the time that
    the calling stream stood in it, by CUDA events; what DeepSpeed overlaps with the backward pass, on a stream of its
    own, is counted, too. Collectives that torch.compile traced or DTensor makes are not seen.
    """

    def __init__(self, device: torch.device) -> None:
        self.ranges = False  # whether each collective is a range in the profiler's trace
        self._on_gpu = device.type == "cuda"
        self._depth = 0  # DeepSpeed's functions call torch's: only the outermost counts
        self._seconds = 0.0
        self._begin: Any = None
        self._events: list[tuple[Any, Any]] = []
        self._range: Any = None
        self._last_end: Any = None
        self._replaced: list[tuple[Any, str, Any]] = []

    def install(self) -> None:
        """Put the clock around the collectives of torch.distributed and of DeepSpeed's backend."""
        for owner in (torch.distributed, deepspeed.comm.comm.cdb):
            for name in COLLECTIVES:
                function = getattr(owner, name, None)
                if function is not None:
                    self._replaced.append((owner, name, vars(owner).get(name)))
                    setattr(owner, name, self._timed(function))
        device_waits.append(self.device_waits)

    def remove(self) -> None:
        """Give both their own functions back."""
        if self.device_waits in device_waits:
            device_waits.remove(self.device_waits)
        while self._replaced:
            owner, name, original = self._replaced.pop()
            if original is None:  # a method of its class
                delattr(owner, name)
            else:
                setattr(owner, name, original)

    def device_waits(self) -> bool:
        """Whether the GPU has not come to the end of the newest collective; may be asked by another thread."""
        return self._last_end is not None and not self._last_end.query()

    def take_seconds(self) -> float:
        """What has added up since the last call [s]."""
        for begin, end in self._events:
            end.synchronize()
            self._seconds += begin.elapsed_time(end) / 1000
        self._events.clear()
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        if self.ranges:
            self._range = torch.profiler.record_function("communication")
            self._range.__enter__()
        self._begin = self._now()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._depth -= 1
        if self._depth:
            return
        if self._on_gpu:
            self._last_end = self._now()
            self._events.append((self._begin, self._last_end))
        else:
            self._seconds += self._now() - self._begin
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **keywords: Any) -> Any:
            with self:
                result = function(*args, **keywords)
            return _TimedHandle(result, self) if hasattr(result, "wait") and self._depth == 0 else result

        return timed
