"""Signals that ask a run to stop: the first one is answered with a checkpoint, the second at once."""

import os
import signal
import time
from types import FrameType

PASSED_ON_SECONDS = 1.0  # in which the launcher and the guardian may pass the same request on, each for itself
EXIT_STOPPED = 75  # sysexits.h's EX_TEMPFAIL: saved and stopped on request; the same command goes on from here


class StopSignals:
    """Notes SIGTERM and SIGUSR1, which Slurm and spot instances send before they take the machine.

    A second one (another signal, or the same one later), or SIGINT at any time, ends the process at once with the
    shell's code for it (128 + signal).
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._since = 0.0

    def install(self) -> None:
        """Take the signals over; call it in the main thread."""
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._note)
        signal.signal(signal.SIGINT, self._end)

    def ignore(self) -> None:
        """The run is saved and about to end with EXIT_STOPPED: a launcher that ends the later ranks once the first is
        gone must not turn their code into a signal's."""
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)

    def _note(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.received == name and time.monotonic() - self._since < PASSED_ON_SECONDS:
            return
        if self.received:
            self._end(number, frame)
        self.received, self._since = name, time.monotonic()

    def _end(self, number: int, frame: FrameType | None) -> None:
        os._exit(128 + number)  # a Python exit would wait for collectives that never end
