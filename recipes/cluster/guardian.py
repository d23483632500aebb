"""The guardian: a process beside each rank that outlives it.

A rank that was killed cannot say so, and one that waits in a collective cannot listen. Its guardian can: it knows at
once when the rank is gone, notices that a launcher or a host is, hears what ended the job elsewhere, ends its rank, and
says the first cause last. It is forked before the rank has threads, sockets or a device, and touches none of the
rank's.
"""

import contextlib
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

import psutil

from recipes.cluster.job_board import ENDED, Cause, JobBoard, serve
from recipes.cluster.launcher_processes import describe, ended_file, exit_status, is_alive
from recipes.config.errors import EXIT_USER_ERROR

POLL_SECONDS = 0.2
BEAT_SECONDS = 2.0
LOST_SECONDS = 25.0  # a host that gave no sign of life for so long is lost
JOIN_SECONDS = 300.0  # in which every rank must have begun, after rank 0 has, and
JOIN_SECONDS_A_RANK = 0.1  # for each: thousands that import from one shared folder take longer
POST_SECONDS = 4.0  # in which a cause is agreed upon, or this host's own view stands
GRACE_SECONDS = 5.0  # in which a rank that was told to end must have, before it is killed
STOP_SECONDS = 20.0  # the same, where it may save: DeepSpeed's launcher gives 30 s
LAUNCHER_SECONDS = 35.0  # in which a launcher ends after its rank; it prints until then
FAMILY_SECONDS = 5.0  # between two looks at what the rank has started


@dataclass(frozen=True)
class Watch:
    """What a guardian watches.

    Args:
        launchers: processes without which the rank must not go on.
        listening: at the master's port, where this guardian serves the job's store.
        alone: no other ranks, so no board.
        console: where the cause is printed.
    """

    rank: int
    local_rank: int
    world_size: int
    rank_pid: int
    launchers: list[psutil.Process]
    link: Connection
    listening: socket.socket | None
    alone: bool
    console: int


class Guardian:
    """One rank's."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.host = socket.gethostname()
        self.cause: Cause | None = None  # the job's first one, once known
        self.words: Cause | None = None  # the rank's own last ones
        self.done = False  # the rank has ended well, or is about to
        self.rank = psutil.Process(watch.rank_pid)
        self.status: int | None = None  # how the rank ended, as waitpid says
        self.ended = ended_file(watch.rank_pid)
        self.family: list[psutil.Process] = []
        self.contact = 0.0  # when the board answered last; 0 before it first did
        self.over = False
        self._outgoing: Cause | None = None
        self._answered, self._wake = threading.Event(), threading.Event()
        self._store = serve(watch.listening) if watch.listening else None
        self._monitor = Monitor(watch.world_size) if watch.rank == 0 else None

    def run(self) -> None:
        """Watch until the rank is gone, then say why."""
        if not self.watch.alone:
            threading.Thread(target=self._keep_contact, daemon=True).start()
        deadline, looked = 0.0, 0.0
        while self._rank_lives():
            self._listen()
            now = time.monotonic()
            if now - looked > FAMILY_SECONDS:
                self.family, looked = self._look_at_family(), now
            if deadline:
                if now > deadline:
                    self._send(self.rank.kill)
            elif self._must_end():
                deadline = self._end_rank()
        self._conclude()

    def _rank_lives(self) -> bool:
        alive = is_alive(self.rank)
        if not alive and self.status is None:  # now or never: its parent is about to collect it
            self.status = exit_status(self.watch.rank_pid)
        return alive

    def _send(self, end: Callable[[], None]) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            end()

    def _look_at_family(self) -> list[psutil.Process]:
        try:
            return self.rank.children(recursive=True)
        except psutil.Error:
            return self.family

    def _listen(self) -> None:
        """Take what the rank says within POLL_SECONDS: a Cause, or that it ends well. Its end cuts the wait short."""
        try:
            if self.watch.link in wait([self.watch.link, *self.ended], POLL_SECONDS):
                message = self.watch.link.recv()
                self.done, self.words = message is None, message
        except (EOFError, OSError):  # the rank's end of the link is closed: it is going
            if self._rank_lives():
                time.sleep(POLL_SECONDS)

    def _must_end(self) -> bool:
        """Whether the job ends: sets `cause`."""
        # A user's mistake is found by every rank, and the host's first one prints it: the others' words can wait.
        if self.words and not self.words.said and self.words.code != EXIT_USER_ERROR and not self.cause:
            self.cause = self._agree(self.words)
        gone = next((process for process in self.watch.launchers if not is_alive(process)), None)
        if gone and not self.cause and not self.done:
            self.cause = self._agree(self._own(f"its launcher is gone: {describe(gone)}", graceful=True))
        if self._contact_is_lost() and not self.cause and not self.done:
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            text = f"the master at {where} (rank 0's host) has not answered {self.host} for {LOST_SECONDS:.0f} s"
            self.cause = self._own(f"{text}: the host, the link or its ranks are gone")
        return self.cause is not None

    def _contact_is_lost(self) -> bool:
        return 0 < self.contact < time.monotonic() - LOST_SECONDS and not self.over

    def _own(self, text: str, graceful: bool = False) -> Cause:
        return Cause(self.watch.rank, self.host, text, graceful=graceful)

    def _end_rank(self) -> float:
        """Tell the rank to end; returns when it must be gone."""
        assert self.cause
        if self.cause.graceful:
            self._send(self.rank.terminate)
            return time.monotonic() + STOP_SECONDS
        if self.words is None:  # else it is on its way out, and may still be printing why
            with contextlib.suppress(OSError):
                self.watch.link.send(self.cause.code)
        return time.monotonic() + GRACE_SECONDS

    def _agree(self, cause: Cause) -> Cause:
        """Post a cause: the job's first one, or this one where the board does not answer in time."""
        if not self.watch.alone:
            self._outgoing = cause
            self._wake.set()
            self._answered.wait(POST_SECONDS)
        return self.cause or cause

    def _keep_contact(self) -> None:
        """In a thread of its own, as a cut link lets a request hang."""
        board, beat = None, 0
        while not self.over:
            # A board that cannot be reached shows in `contact`, which then stands still.
            with contextlib.suppress(OSError, RuntimeError):
                if board is None:
                    board = self._join()
                self._exchange(board, beat)
                self.contact, beat = time.monotonic(), beat + 1
            self._wake.wait(BEAT_SECONDS)
            self._wake.clear()

    def _join(self) -> JobBoard:
        board = JobBoard()
        if self._monitor:
            board.expect(self.watch.world_size)
        return board

    def _exchange(self, board: JobBoard, beat: int) -> None:
        gone = not self._rank_lives()
        if self._outgoing:
            self.cause = board.post(self._outgoing)
            self._outgoing = None
            self._answered.set()
        self.cause = self.cause or board.cause()
        board.beat(self.watch.rank, ENDED if gone else f"{self.host} {beat}")
        if not self._monitor:
            self.over = board.is_over() or gone and self.done
            return
        beats = board.beats(self.watch.world_size)
        lost = self._monitor.lost(beats)
        if lost and not self.cause:
            self.cause = board.post(lost)
        if gone and all(sign == ENDED for sign in beats):
            board.close()
            self.over = True

    def _conclude(self) -> None:
        """The rank is gone: find the cause, clear up after the rank, speak, and stay until the others have heard."""
        self._listen()  # what it said last
        if not self.done and not self.cause:
            self.cause = self._agree(self.words or self._last_cause())
        self._clear_family()
        if self.cause and self._is_speaker(self.cause):
            self._wait(lambda: not any(map(is_alive, self.watch.launchers[:1])), LAUNCHER_SECONDS)
            with contextlib.suppress(OSError):
                os.write(self.watch.console, f"\n{self.cause.line}\n".encode())
        self._wake.set()
        if not self.watch.alone:
            # Rank 0's guardian serves the board, and others may not have heard.
            self._wait(lambda: self.over, 3 * BEAT_SECONDS if self._monitor else 1.0)

    def _last_cause(self) -> Cause:
        """Of a rank that died without a word."""
        status = self.status
        number = None if status is None else status & 0x7F  # the signal, of waitpid's word
        # SIGTERM is how launchers clear up after another rank's end, which is then the cause; and they collect at once
        # those that they end so, so that their status cannot be read any more.
        if number is None:
            self._wait(lambda: self.cause is not None, 2 * BEAT_SECONDS)  # the board is read every BEAT_SECONDS
            return self.cause or self._own("died without a word")
        if number == signal.SIGTERM or status == (128 + signal.SIGTERM) << 8:
            self._wait(lambda: self.cause is not None, 2 * BEAT_SECONDS)
            return self.cause or self._own("was ended by SIGTERM", graceful=True)
        how = signal.Signals(number).name if number else f"exit code {(status or 0) >> 8}"
        hint = " (the kernel's, out of memory, or somebody's)" if number == signal.SIGKILL else ""
        return self._own(f"died without a word: {how}{hint}")

    def _clear_family(self) -> None:
        """End what the rank has started and left behind: loading workers end by themselves, others would not."""
        _, left = psutil.wait_procs(self.family, timeout=GRACE_SECONDS)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()

    def _is_speaker(self, cause: Cause) -> bool:
        """One guardian speaks for all, rank 0's; and on its own host one that saw the cause, or sees no other host."""
        if cause.said:
            return False
        beside = self.watch.local_rank == 0 and (cause.host == self.host or self._contact_is_lost())
        # The rank failed before rank 0 served a board, so nobody else can know; of a user's mistake rank 0 speaks.
        alone_knows = (
            not self.watch.alone and not self.contact and cause == self.words and cause.code != EXIT_USER_ERROR
        )
        return self.watch.rank == 0 or beside or alone_knows

    def _wait(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS / 4)


class Monitor:
    """Rank 0's view of all signs of life: which rank gave none for LOST_SECONDS."""

    def __init__(self, world_size: int) -> None:
        now = time.monotonic()
        self._seen: list[tuple[str, float]] = [("", now)] * world_size
        self._last_look = now
        self._join_seconds = JOIN_SECONDS + JOIN_SECONDS_A_RANK * world_size

    def lost(self, beats: list[str]) -> Cause | None:
        """The cause that ends the job, where ranks are lost."""
        now = time.monotonic()
        pause, self._last_look = now - self._last_look, now
        for rank, (sign, since) in enumerate(self._seen):
            if beats[rank] != sign:
                self._seen[rank] = (beats[rank], now)
            elif pause > LOST_SECONDS / 2:  # it was this process that stood still
                self._seen[rank] = (sign, since + pause)
        limit = self._join_seconds
        missing = [rank for rank, (sign, since) in enumerate(self._seen) if not sign and now - since > limit]
        if missing:
            text = f"has not begun {limit:.0f} s after rank 0: see its host's own output{_others(missing)}"
            return Cause(missing[0], "a host that is not known", text)
        silent = [
            rank
            for rank, (sign, since) in enumerate(self._seen)
            if sign not in ("", ENDED) and now - since > LOST_SECONDS
        ]
        if not silent:
            return None
        host = self._seen[silent[0]][0].split()[0]
        text = f"no sign of life for {LOST_SECONDS:.0f} s: {host} or the link to it is down{_others(silent)}"
        return Cause(silent[0], host, text)


def _others(ranks: list[int]) -> str:
    return f" (the same of {len(ranks) - 1} more ranks, up to rank {ranks[-1]})" if len(ranks) > 1 else ""


def run_guardian(watch: Watch) -> None:
    """The life of the forked process: never returns."""
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)  # sent to the whole group, and the rank's to follow
        listening = [watch.listening.fileno()] if watch.listening else []
        _close_others({0, 1, 2, watch.console, watch.link.fileno(), *listening})
        with open(os.devnull, "w") as nowhere:  # torch's C++ warns at length of connections that broke, as they do here
            os.dup2(nowhere.fileno(), 2)
        with contextlib.suppress(OSError):  # a name of its own in ps and top
            Path("/proc/self/comm").write_text(f"guard rank {watch.rank}")
        Guardian(watch).run()
    except BaseException:
        os.write(watch.console, traceback.format_exc().encode())  # nobody is above to print it
    finally:
        os._exit(0)


def _close_others(kept: set[int]) -> None:
    """Close what the rank had open: a lock, or a connection whose end others wait for, would outlive it here."""
    numbers = [int(name) for name in os.listdir("/proc/self/fd")] if Path("/proc/self/fd").is_dir() else range(3, 4096)
    for number in numbers:
        if number not in kept:
            with contextlib.suppress(OSError):
                os.close(number)
