"""Each kind of death on two hosts: nothing stays on either, and the cause is printed. `make rehearse` runs it."""

import os
import signal
import subprocess
import time

import psutil
import pytest
from launching import REPOSITORY, environment

pytestmark = pytest.mark.skipif("REHEARSE" not in os.environ, reason="takes minutes: `make rehearse` runs it")
RANK = "tests/faults/guarded_rank.py"
GONE_SECONDS = 30


def find(cluster, kind):
    """The one process on the hosts that is of a kind."""
    for pid in cluster.processes():
        process = psutil.Process(pid)
        words, name = process.cmdline(), process.name()
        if {
            "rank": RANK in words and "--local_rank=0" in words and process.environ().get("RANK") == "1",
            "launcher": "--node_rank=1" in words and name.startswith("python"),
            "runner": any(word.endswith("bin/deepspeed") for word in words[:2]),
            "pdsh": name.startswith("pdsh"),
        }[kind] and not name.startswith("guard"):
            return process
    raise AssertionError(f"no {kind} in\n{cluster.listing()}")


CASES = [  # what dies, by which signal, the runner's exit code (None: any but 0), the cause
    ("raises", None, None, "fault: rank 1 on node2: ValueError: the router met"),
    ("rank", signal.SIGKILL, None, "fault: rank 1 on node2: died without a word: SIGKILL"),
    ("launcher", signal.SIGKILL, None, "stopped: rank 1 on node2: its launcher is gone"),
    ("runner", signal.SIGTERM, 1, ""),  # it ends pdsh, by which a host's words would come
    ("runner", signal.SIGKILL, -9, "stopped: rank 0 on node1: its launcher is gone"),
    ("pdsh", signal.SIGKILL, 0, ""),
]


@pytest.mark.parametrize(("kind", "number", "code", "cause"), CASES)
def test_death(cluster, tmp_path, kind, number, code, cause):
    log = tmp_path / "log"
    how = "raises" if kind == "raises" else "runs"
    words = ["deepspeed", "--hostfile", str(cluster.hostfile), RANK, str(tmp_path), how]
    command, variables = cluster.on("node1", words), environment(**cluster.environment())
    with log.open("w") as file:
        job = subprocess.Popen(command, cwd=REPOSITORY, env=variables, stdout=file, stderr=file)
    deadline = time.monotonic() + 120
    while len(list(tmp_path.glob("rank_*"))) < 2:
        assert job.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    print(f"\n=== {kind} {number or ''}\n{cluster.listing()}")
    if number:
        find(cluster, kind).send_signal(number)
    begin = time.monotonic()
    while cluster.processes():
        job.poll()
        assert time.monotonic() - begin < GONE_SECONDS, f"still there:\n{cluster.listing()}\n{log.read_text()}"
        time.sleep(0.2)
    job.wait(10)
    ends = [line for line in log.read_text().splitlines() if line.strip()][-4:]
    print(f"--- {time.monotonic() - begin:.1f} s later: exit code {job.returncode}, processes: {cluster.listing()}")
    print("\n".join(ends))
    assert job.returncode == code if code is not None else job.returncode > 0
    assert cause in log.read_text()
