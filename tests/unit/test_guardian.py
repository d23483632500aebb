"""The parts of the guardian that need no job: signs of life, the board, what is seen of other processes."""

import multiprocessing
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
from launching import free_port

from recipes.cluster import guardian
from recipes.cluster.guard import is_communication_error
from recipes.cluster.guardian import JOIN_SECONDS, LOST_SECONDS, Monitor
from recipes.cluster.job_board import ENDED, Cause, JobBoard, master_socket, serve
from recipes.cluster.launcher_processes import ended_file, exit_status, find_launchers, is_alive
from recipes.config.errors import EXIT_USER_ERROR, TrainingFault, UserError


class Clock:
    """Stands for `time` in the guardian's module."""

    now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def monitor(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(guardian, "time", clock)
    return Monitor(3), clock


def after(monitor, clock, seconds, beats):
    """What the monitor says once the beats have stood for so long; it looks every two seconds, as in a job."""
    for _ in range(round(seconds / 2)):
        clock.now += 2
        cause = monitor.lost([f"{beat} {clock.now}" if beat.startswith("beats") else beat for beat in beats])
        if cause:
            return cause
    return None


def test_a_rank_that_falls_silent_is_named_with_its_host(monitor):
    assert after(*monitor, 1000, ["beats", "beats", "beats"]) is None
    assert after(*monitor, LOST_SECONDS - 3, ["beats", "beats", "node2 7"]) is None
    cause = after(*monitor, 6, ["beats", "beats", "node2 7"])
    assert (cause.rank, cause.host) == (2, "node2") and "node2 or the link to it" in cause.text


def test_a_rank_that_has_ended_may_be_silent(monitor):
    assert after(*monitor, 2, ["beats", "beats", "node2 7"]) is None
    assert after(*monitor, 1000, ["beats", "beats", ENDED]) is None


@pytest.mark.parametrize(
    ("last_words", "spoken"),
    [
        (Cause(1, "node1", "ValueError: the router met"), "\nfault: rank 1 on node1: ValueError: the router met\n"),
        (Cause(1, "node1", "--data: not there", code=EXIT_USER_ERROR), ""),  # rank 0 finds the same, and prints it
        (None, ""),  # ended with the others, by the launcher
    ],
)
def test_a_rank_that_fails_before_rank_0_has_begun_speaks_for_itself(monkeypatch, tmp_path, last_words, spoken):
    """Seen where rank 0 imported slowly: the launcher ended it before it had a guardian, and nobody named the cause."""
    monkeypatch.setattr(guardian, "POST_SECONDS", 0.5)
    monkeypatch.setattr(guardian, "BEAT_SECONDS", 0.1)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))  # nobody listens there
    rank = subprocess.Popen(["sleep", "60"])
    rank_link, link = multiprocessing.Pipe()
    with (tmp_path / "console").open("w") as console:
        watch = guardian.Watch(1, 1, 2, rank.pid, [], link, None, False, console.fileno())
        one = guardian.Guardian(watch)
        if last_words:
            rank_link.send(last_words)
        rank.terminate()
        rank.wait()
        one.run()
        one.over = True  # ends its thread
    assert (tmp_path / "console").read_text() == spoken


def test_a_rank_that_never_begins(monitor):
    assert after(*monitor, JOIN_SECONDS - 3, ["beats", "", ""]) is None
    cause = after(*monitor, 6, ["beats", "", ""])
    assert cause.rank == 1 and "has not begun" in cause.text and "up to rank 2" in cause.text


def test_thousands_of_ranks_may_take_longer_to_begin(monitor):
    _, clock = monitor
    large = Monitor(2000), clock
    assert after(*large, JOIN_SECONDS + 190, ["beats", *[""] * 1999]) is None
    assert "has not begun 500 s after rank 0" in after(*large, 20, ["beats", *[""] * 1999]).text


def test_a_machine_that_stood_still_accuses_nobody(monitor):
    watching, clock = monitor
    assert after(watching, clock, 10, ["node1 1", "beats", "beats"]) is None
    clock.now += 1000  # stopped by Ctrl-Z, or a laptop's lid
    assert watching.lost(["node1 1", "node1 1", "node2 1"]) is None
    assert after(watching, clock, 10, ["beats", "beats", "beats"]) is None


def test_the_first_cause_stays(monkeypatch):
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    store = serve(master_socket())
    with pytest.raises(UserError, match=f"port {port} of the master .*--master_port"):
        master_socket()
    one, other = JobBoard(), JobBoard()
    one.expect(2)
    assert one.beats(2) == ["", ""] and other.cause() is None and not other.is_over()
    first, second = Cause(1, "node2", "died"), Cause(0, "node1", "connection lost")
    assert other.post(first) == first
    assert one.post(second) == first and one.cause() == first
    other.beat(1, "node2 5")
    assert one.beats(2) == ["", "node2 5"]
    one.close()
    assert other.is_over()
    del store


@pytest.mark.parametrize(("end", "status"), [("os._exit(3)", 3 << 8), ("os.kill(os.getpid(), 9)", signal.SIGKILL)])
def test_how_a_process_ended(end, status):
    child = subprocess.Popen([sys.executable, "-c", f"import os, time; time.sleep(0.3); {end}"])
    seen, ended = psutil.Process(child.pid), ended_file(child.pid)
    assert is_alive(seen) and exit_status(child.pid) is None
    if ended:
        guardian.wait(ended, 10)
    deadline = time.monotonic() + 10
    while is_alive(seen) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert exit_status(child.pid) == status
    child.wait()
    assert exit_status(child.pid) is None and not is_alive(seen)


def test_who_has_started_this_process(monkeypatch):
    monkeypatch.delenv("CROSS_SIZE", raising=False)
    assert find_launchers() == []
    monkeypatch.setenv("CROSS_SIZE", "1")  # DeepSpeed's launcher was here
    with pytest.raises(TrainingFault, match="launcher that started this rank is gone"):
        find_launchers()


def test_a_broken_connection_is_nobodys_own_fault():
    gloo = RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:3021")
    assert is_communication_error(gloo)
    assert not is_communication_error(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_communication_error(MemoryError())
