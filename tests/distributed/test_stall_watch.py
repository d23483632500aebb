"""--dist_timeout holds for every group that DeepSpeed makes, and the rank that stalls is named, with its stack."""

import os
import signal
import subprocess
import sys

import pytest
from launching import REPOSITORY, environment, free_port

SECONDS = 8  # enough for two ranks on loaded cores to stay together


def start(how):
    """Two ranks, started by hand, so that one can be watched while the other stands still."""
    job = {"WORLD_SIZE": "2", "LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        subprocess.Popen(
            [sys.executable, "tests/distributed/train_stalling.py", how, str(SECONDS)],
            cwd=REPOSITORY,
            env=environment(RANK=str(rank), LOCAL_RANK=str(rank), **job),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


@pytest.fixture(scope="module")
def ended():
    """{how: (code, stdout, stderr) of both ranks}; the two jobs run at once."""
    jobs = {how: start(how) for how in ("sleep", "stop")}
    found = {}
    for how, ranks in jobs.items():
        try:
            first = ranks[0].communicate(timeout=120)
            if how == "stop":  # it would stand still for ever
                os.kill(ranks[1].pid, signal.SIGKILL)
            second = ranks[1].communicate(timeout=60)
        finally:
            for rank in ranks:
                rank.kill()
        found[how] = [(rank.returncode, *texts) for rank, texts in zip(ranks, (first, second), strict=True)]
    return found


def test_every_group_of_deepspeed_has_the_timeout(ended):
    # the default group, and ZeRO's clone of it
    assert f"timeouts [{SECONDS}.0, {SECONDS}.0] and of ZeRO 0:00:0{SECONDS}" in ended["sleep"][0][1]


def test_a_rank_that_stalls_is_named_with_its_stack(ended):
    (waiting_code, _, _), (code, _, errors) = ended["sleep"]
    assert code == 1 and waiting_code not in (0, None)
    assert "in sleep_instead_of_training" in errors
    assert errors.splitlines()[-1].startswith("fault: rank 1 on ") and "stalls" in errors.splitlines()[-1]


def test_a_rank_that_is_stopped_is_named_by_one_that_waits(ended):
    code, _, errors = ended["stop"][0]
    assert code == 1
    last = errors.splitlines()[-1]
    assert last.startswith("fault: rank 0 on ") and "for rank 1, which gives no sign of life" in last


def test_long_work_of_all_ranks_is_no_stall(ended):
    assert all("nobody stalled" in output for _, output, _ in ended["sleep"]), ended["sleep"]
