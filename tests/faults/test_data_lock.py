"""The lock of a preparation: one holder at a time, visible waiting, and no waiting for the dead."""

import json
import os
import threading
import time

import pytest

from recipes.data import lock
from recipes.data.lock import held_lock, owner_record, start_of, take_over


@pytest.fixture(autouse=True)
def hurried(monkeypatch):
    monkeypatch.setattr(lock, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(lock, "HEARTBEAT_SECONDS", 0.05)


def dead_process():
    """(pid, start) of a process that has ended; it is a zombie until it is waited for."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(reader, 1)
        os._exit(0)
    start = start_of(pid)
    os.write(writer, b"x")
    while start_of(pid) is not None:
        time.sleep(0.01)
    return pid, start


def write_lock(path, **change):
    path.write_text(json.dumps({**owner_record(), **change}))


def test_lock_is_there_while_held_and_gone_after(tmp_path):
    path = tmp_path / "x.lock"
    with held_lock(path, "test"):
        assert json.loads(path.read_text())["pid"] == os.getpid()
        before = path.stat().st_mtime_ns
        time.sleep(0.3)
        assert path.stat().st_mtime_ns > before, "the heartbeat"
    assert not list(tmp_path.iterdir())


def test_lock_is_released_on_an_error(tmp_path):
    with pytest.raises(RuntimeError), held_lock(tmp_path / "x.lock", "test"):
        raise RuntimeError
    assert not list(tmp_path.iterdir())


def test_waiting_says_for_whom_and_what(tmp_path):
    path = tmp_path / "x.lock"
    write_lock(path)  # of a living process: this one
    messages = []
    threading.Timer(0.3, path.unlink).start()
    started = time.monotonic()
    with held_lock(path, "prepare the data", messages.append):
        assert time.monotonic() - started >= 0.3
    (message,) = messages
    assert f"waiting for process {os.getpid()} on " in message
    assert message.endswith(f" to prepare the data (lock {path})")


def test_who_waits_for_work_that_is_done_does_not_take_the_lock(tmp_path):
    """Or thousands of ranks would pass it on one by one."""
    path, done, passed = tmp_path / "x.lock", threading.Event(), []
    write_lock(path)  # of a living process, to the end

    def wait():
        with held_lock(path, "test", lambda message: None, done.is_set):
            passed.append(path.read_text())

    waiters = [threading.Thread(target=wait, daemon=True) for _ in range(20)]
    for waiter in waiters:
        waiter.start()
    time.sleep(0.1)
    assert not passed
    done.set()
    for waiter in waiters:
        waiter.join(timeout=10)
    assert len(passed) == 20 and set(passed) == {path.read_text()}


@pytest.mark.parametrize("reaped", [True, False])
def test_a_dead_process_loses_the_lock(tmp_path, reaped):
    path = tmp_path / "x.lock"
    pid, start = dead_process()
    if reaped:
        os.waitpid(pid, 0)
    write_lock(path, pid=pid, started=start)
    messages = []
    with held_lock(path, "test", messages.append):
        assert json.loads(path.read_text())["pid"] == os.getpid()
    assert messages == [f"warning: {path}: its holder, process {pid}, is gone; taking the lock over"]
    if not reaped:
        os.waitpid(pid, 0)


def test_a_pid_that_was_given_again_is_another_process(tmp_path):
    write_lock(tmp_path / "x.lock", started=12345)  # our own pid, but a process that began long ago
    messages = []
    with held_lock(tmp_path / "x.lock", "test", messages.append):
        assert "is gone" in messages[0]


@pytest.mark.parametrize("content", [None, '{"host": 1'])
def test_silence_proves_death_elsewhere(tmp_path, monkeypatch, content):
    """On another host, or where the lock is unreadable, only a heartbeat that stands still does."""
    monkeypatch.setattr(lock, "DEAD_AFTER_SECONDS", 0.8)
    path = tmp_path / "x.lock"
    write_lock(path, host="elsewhere")
    if content is not None:
        path.write_text(content)
    stop = threading.Event()
    beating = threading.Thread(target=lock.beat, args=(path, stop))
    beating.start()
    threading.Timer(1.0, stop.set).start()
    messages = []
    started = time.monotonic()
    with held_lock(path, "test", messages.append):
        assert (
            time.monotonic() - started > 1.4
        )  # 1.0 s of heartbeats, then 0.8 s of silence, less a few beats and polls
    beating.join()
    assert "taking the lock over" in messages[-1]


def test_only_one_of_many_takes_over(tmp_path):
    path = tmp_path / "x.lock"
    path.write_text("dead")
    wins = []
    threads = [
        threading.Thread(target=lambda n=n: wins.append(take_over(path, "dead", f"waiter {n}"))) for n in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(wins) == 1 and path.read_text().startswith("waiter")


def test_a_guard_left_by_a_dead_waiter_is_removed(tmp_path):
    pid, start = dead_process()
    os.waitpid(pid, 0)
    write_lock(tmp_path / "x.lock", pid=pid, started=start)
    write_lock(tmp_path / "x.lock.takeover", pid=pid, started=start)
    with held_lock(tmp_path / "x.lock", "test", lambda message: None):
        pass
    assert not list(tmp_path.iterdir())
