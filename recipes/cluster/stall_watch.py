"""One timeout for every process group, and a watch that names the rank for which all others wait.

torch counts a group's collectives. When a rank has begun none for almost the whole timeout it tells the others how far
it is, through a connection of its own to the job's store. A rank that sees others further on is the one that stalls: it
prints its main thread's stack and ends, and the launcher ends the rest. A rank that cannot speak any more (stopped, or
stuck outside Python) is named by the first of those that wait for it.
"""

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d

from recipes.config.errors import EXIT_FAULT

_PREFIX = "stall_watch"
_UNKNOWN = -1  # what a rank says that moves on
_WAITING_IN = ("torch/distributed/", "deepspeed/comm/")
_LONGEST_HEAD_START_SECONDS = 30.0
# Each tells whether this rank's GPU is inside a collective. NCCL's calls return at once: the host waits later, at
# whatever first asks for a result, which is no frame of a collective.
device_waits: list[Callable[[], bool]] = []


def set_default_timeout(timeout: timedelta) -> None:
    """Give every group made from now on this timeout; call before the process group starts.

    DeepSpeed passes its timeout to the default group alone. Its other groups, ZeRO's clone of the world among them,
    are made by torch.distributed.new_group without one, which then takes these two module variables.
    """
    distributed_c10d.default_pg_timeout = timeout
    distributed_c10d.default_pg_nccl_timeout = timeout


def world_collectives() -> int:
    """Collectives that this rank has begun on the groups of all ranks: comparable between ranks, unlike subgroups'."""
    world = torch.distributed.get_world_size()
    groups: list[Any] = list(distributed_c10d._world.pg_map)  # torch's stubs leave the groups' method out
    return sum(group._get_sequence_number_for_group() for group in groups if group.size() == world)


class StallWatch:
    """A thread of each rank that watches over its main thread.

    Args:
        timeout: of the process groups [s]. The watch is a little ahead of them, for they would end the ranks that
            wait, not the one that stalls.
    """

    def __init__(self, timeout: float) -> None:
        head_start = min(timeout / 5, _LONGEST_HEAD_START_SECONDS)
        self._limit = timeout - head_start
        self._interval = head_start / 6
        self._rank = torch.distributed.get_rank()
        self._ranks = torch.distributed.get_world_size()
        # torch's client serves one caller at a time, and the main thread may wait in it
        store: Any = distributed_c10d._get_default_store()
        self._store = torch.distributed.PrefixStore(_PREFIX, store.clone())
        self._stop = threading.Event()
        self._main_thread = threading.main_thread().ident or 0
        self._thread = threading.Thread(target=self._watch, name="stall-watch", daemon=True)

    def start(self) -> None:
        """Begin to watch; all ranks must have joined the default group."""
        self._say(_UNKNOWN)
        self._thread.start()

    def stop(self) -> None:
        """End the watch, before the process group is left."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        count, since, told = -1, time.monotonic(), False
        while not self._stop.wait(self._interval):
            try:
                if (now := world_collectives()) != count:
                    if told:  # what the others may still read is true no more
                        self._say(_UNKNOWN)
                    count, since, told = now, time.monotonic(), False
                    continue
                idle = time.monotonic() - since
                if idle > self._limit / 2 and not told:
                    self._say(count)
                    told = True
                if idle > self._limit:
                    self._judge(count, idle)
            except (RuntimeError, ValueError):  # a group is just being made or left, or the store's host has ended
                continue

    def _judge(self, count: int, idle: float) -> None:
        """End the job if this rank is the one that stalls, or the first that waits for one that cannot speak."""
        counts = self._counts() | {self._rank: count}
        known = {rank: theirs for rank, theirs in counts.items() if theirs != _UNKNOWN}
        furthest = max(known.values())
        if count < furthest:
            # ranks that wait in a smaller group are behind, too; the one to blame waits for nobody
            if count == min(known.values()) and not self._is_waiting():
                self._end(f"stalls: it took part in no collective for {idle:.0f} s, and others wait for it", stack=True)
            return
        speaks = self._rank == min(rank for rank, theirs in known.items() if theirs == furthest)
        late = [str(rank) for rank in counts if known.get(rank, -1) < furthest]
        if late and speaks and self._is_waiting() and idle > self._limit + 2 * self._interval:
            self._end(f"has waited {idle:.0f} s for rank {', '.join(late)}, which gives no sign of life", stack=False)

    def _say(self, count: int) -> None:
        self._store.set(str(self._rank), str(count))

    def _counts(self) -> dict[int, int]:
        """What every rank has said, in one request: with one a rank, thousands of ranks would each ask thousands."""
        keys = [str(rank) for rank in range(self._ranks)]
        if self._store.check(keys):
            said = self._store.multi_get(keys)
        else:  # some rank has not come so far as to speak; to ask for its word would be to wait for it
            said = [self._store.get(key) if self._store.check([key]) else str(_UNKNOWN).encode() for key in keys]
        return {rank: int(count) for rank, count in enumerate(said)}

    def _is_waiting(self) -> bool:
        """Whether the main thread is inside a collective, or its device."""
        if any(waits() for waits in device_waits):
            return True
        frames = traceback.extract_stack(sys._current_frames()[self._main_thread])
        return any(part in frame.filename for frame in frames for part in _WAITING_IN)

    def _end(self, what: str, *, stack: bool) -> None:
        lines = traceback.format_stack(sys._current_frames()[self._main_thread]) if stack else []
        fault = f"fault: rank {self._rank} on {socket.gethostname()} {what} (--dist_timeout)"
        print("".join(lines) + fault, file=sys.stderr, flush=True)
        os._exit(EXIT_FAULT)
