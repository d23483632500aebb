"""A lock file that says who holds it, is kept alive by a heartbeat, and is taken over from the dead."""

import contextlib
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

HEARTBEAT_SECONDS = 5.0
# A holder on another host is dead when its heartbeat stood still this long by the waiter's own clock: clocks differ.
DEAD_AFTER_SECONDS = 120.0
POLL_SECONDS = 0.2  # between a waiter's first two looks; the later ones are further apart
LONGEST_POLL_SECONDS = 5.0
REMIND_SECONDS = 30.0


def print_to_stderr(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


@contextlib.contextmanager
def held_lock(
    path: Path,
    purpose: str,
    report: Callable[[str], None] = print_to_stderr,
    done: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
    """Hold the lock file `path`, waiting for whoever holds it.

    A holder whose process is gone from this host, or whose heartbeat stood still for DEAD_AFTER_SECONDS on another
    host, loses the lock with a warning. `purpose` completes the sentence "waiting for process P to ...".

    Args:
        done: whether the work that the lock guards is done, so that nobody needs it: then it is not taken. Thousands of
            waiting ranks would else pass it on one by one.
    """
    content = json.dumps(owner_record())
    path.parent.mkdir(parents=True, exist_ok=True)
    if not wait_for_lock(path, content, purpose, report, done):
        yield
        return
    stop = threading.Event()
    heartbeat = threading.Thread(target=beat, args=(path, stop), name="lock-heartbeat", daemon=True)
    heartbeat.start()
    try:
        yield
    finally:
        stop.set()
        heartbeat.join()
        if read_text(path) == content:
            path.unlink(missing_ok=True)


def wait_for_lock(
    path: Path, content: str, purpose: str, report: Callable[[str], None], done: Callable[[], bool]
) -> bool:
    """Return True once `path` holds `content`, or False once the lock is not needed any more."""
    last_beat, beat_seen_at, reminded_at = None, time.monotonic(), -REMIND_SECONDS
    pause = POLL_SECONDS
    while not done():
        if create_exclusively(path, content):
            return True
        holder_text = read_text(path)
        if holder_text is None:  # released between the two calls
            continue
        now = time.monotonic()
        if (beat_now := heartbeat_time(path)) != last_beat:
            last_beat, beat_seen_at = beat_now, now
        why_dead = death_of_holder(holder_text, silent_seconds=now - beat_seen_at)
        if why_dead is not None:
            if take_over(path, holder_text, content):
                report(f"warning: {path}: {why_dead}; taking the lock over")
                return True
        elif now - reminded_at >= REMIND_SECONDS:
            report(f"waiting for {describe_holder(holder_text)} to {purpose} (lock {path})")
            reminded_at = now
        time.sleep(pause)
        pause = min(1.5 * pause, LONGEST_POLL_SECONDS)
    return False


def owner_record() -> dict[str, object]:
    """Who holds a lock: the start time tells a living process from another that was given the same pid later."""
    pid = os.getpid()
    return {"host": host_identity(), "pid": pid, "started": start_of(pid), "token": uuid.uuid4().hex}


def host_identity() -> str:
    """The host and the pid namespace: two containers may share a host's name, but not its pids."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{socket.gethostname()} {namespace}".strip()


def death_of_holder(holder_text: str, silent_seconds: float) -> str | None:
    """Why the holder must be dead, or None while it may be alive."""
    try:
        holder = json.loads(holder_text)
        host, pid, started = holder["host"], int(holder["pid"]), int(holder["started"])
    except (ValueError, KeyError, TypeError):
        # Unreadable: its writer may be about to write, so only silence proves death.
        return "its content is unreadable" if silent_seconds > DEAD_AFTER_SECONDS else None
    if host == host_identity():
        return None if start_of(pid) == started else f"its holder, process {pid}, is gone"
    if silent_seconds > DEAD_AFTER_SECONDS:
        return f"its holder, process {pid} on {host}, gave no sign for {DEAD_AFTER_SECONDS:.0f} s"
    return None


def start_of(pid: int) -> int | None:
    """When a process began [clock ticks since the host's boot]; None where it is gone, or a zombie."""
    try:
        # proc(5): the fields after the command's closing bracket begin with the third, the state; the 22nd is starttime
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def describe_holder(holder_text: str) -> str:
    try:
        holder = json.loads(holder_text)
        return f"process {holder['pid']} on {holder['host'].split()[0]}"
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return "another process"


def create_exclusively(path: Path, content: str) -> bool:
    """Create `path` with its content; False where it exists. Network file systems keep that atomic too."""
    try:
        with open(path, "x") as file:
            file.write(content)
    except FileExistsError:
        return False
    return True


def take_over(path: Path, dead_content: str, content: str) -> bool:
    """Replace a dead holder's lock by ours; only one of several waiters succeeds, because a guard file lets one in."""
    guard = path.with_name(path.name + ".takeover")
    if not create_exclusively(guard, content):
        if (guard_content := read_text(guard)) is not None and death_of_holder(guard_content, 0.0) is not None:
            guard.unlink(missing_ok=True)
        return False
    try:
        if read_text(path) != dead_content:
            return False
        aside = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
        aside.write_text(content)
        os.replace(aside, path)
        return True
    finally:
        guard.unlink(missing_ok=True)


def beat(path: Path, stop: threading.Event) -> None:
    while not stop.wait(HEARTBEAT_SECONDS):
        with contextlib.suppress(OSError):
            os.utime(path)


def heartbeat_time(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def read_text(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
