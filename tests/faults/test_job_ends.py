"""However a job ends, no process of it stays, its exit code says so, and the first cause is the last thing printed."""

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from launching import REPOSITORY, environment, free_port, run_python

from recipes.training.finished import write_finished

RANK = "tests/faults/guarded_rank.py"
HOST = socket.gethostname()
GONE_SECONDS = 30


@dataclass
class Job:
    """A job whose processes can be found by its session and by its folder in their command lines."""

    process: subprocess.Popen
    log: Path
    folder: Path

    def members(self, word: str = "") -> list[psutil.Process]:
        """Its living processes whose command line holds a word."""
        found = []
        for process in psutil.process_iter():
            try:
                words = " ".join(process.cmdline())
                # torchrun's ranks and a supervised launcher have sessions of their own
                inside = os.getsid(process.pid) == self.process.pid or str(self.folder) in words
                if inside and word in words and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (ProcessLookupError, psutil.Error):
                continue
        return found

    def rank(self, number: int) -> psutil.Process:
        """A rank's own process, not its guardian."""
        one_of = [process for process in self.members(RANK) if process.environ().get("RANK") == str(number)]
        return next(process for process in one_of if not process.name().startswith("guard"))

    def wait_until_it_works(self) -> None:
        deadline = time.monotonic() + 120
        while len(list(self.folder.glob("rank_*"))) < 2:
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.05)

    def wait_until_gone(self) -> float:
        """Seconds until its last process has ended; fails with the list of those that stay."""
        begin = time.monotonic()
        while left := self.members():
            assert time.monotonic() - begin < GONE_SECONDS, f"still there: {left}\n{self.output}"
            self.process.poll()
            time.sleep(0.1)
        self.process.wait(10)
        return time.monotonic() - begin

    @property
    def output(self) -> str:
        return self.log.read_text()

    @property
    def last_line(self) -> str:
        return self.output.strip().splitlines()[-1]


@pytest.fixture
def start(tmp_path):
    """Start a job of two ranks that ends as is said; whatever is left of it goes with the test."""
    jobs = []

    def start_job(how, launcher="deepspeed"):
        folder = tmp_path / str(len(jobs))
        folder.mkdir()
        words = {
            "deepspeed": ["deepspeed", "--num_gpus", "2", "--master_port", str(free_port())],
            "torchrun": ["torchrun", "--nproc_per_node", "2", "--master_port", str(free_port())],
        }
        words["supervise"] = ["python", "recipes/supervise.py", *words["deepspeed"]]
        words = words[launcher]
        log = folder / "log"
        with log.open("w") as file:
            process = subprocess.Popen(
                [str(Path(sys.executable).parent / words[0]), *words[1:], RANK, str(folder), how],
                cwd=REPOSITORY, env=environment(), stdout=file, stderr=file, start_new_session=True,
            )  # fmt: skip
        jobs.append(Job(process, log, folder))
        return jobs[-1]

    yield start_job
    for job in jobs:
        for process in job.members():
            process.kill()
        job.process.wait()


@pytest.mark.parametrize(
    ("how", "code", "cause"),
    [
        ("memory", 1, f"fault: rank 1 on {HOST}: MemoryError"),
        ("mistake", 2, f"fault: rank 1 on {HOST}: --data: the file of rank 1 is not there"),
        ("before", 1, f"fault: rank 1 on {HOST}: ValueError: the router met"),
    ],
)
def test_a_rank_that_fails(start, how, code, cause):
    job = start(how)
    job.process.wait(120)
    job.wait_until_gone()
    assert job.process.returncode == code, job.output
    assert job.last_line == cause, job.output
    if how == "memory":
        assert job.output.count("Traceback") == 1, "another rank's traceback hides the cause"


def test_a_rank_that_is_killed(start):
    job = start("runs")
    job.wait_until_it_works()
    job.rank(1).kill()
    job.wait_until_gone()
    assert job.process.returncode not in (0, None)
    assert job.last_line.startswith(f"fault: rank 1 on {HOST}: died without a word"), job.output


@pytest.mark.parametrize(
    ("launcher", "word", "other"),
    [("deepspeed", "deepspeed.launcher.launch", "deepspeed"), ("torchrun", "torchrun", "supervise")],
)
def test_a_launcher_that_is_killed(start, launcher, word, other):
    """Another job of the same interpreter goes on; then its first process alone is told to end, as schedulers do."""
    bystander, job = start("runs", other), start("runs", launcher)
    bystander.wait_until_it_works()
    job.wait_until_it_works()
    job.members(word)[0].kill()
    job.wait_until_gone()
    assert job.last_line.startswith("stopped: rank ") and "its launcher is gone" in job.last_line, job.output
    assert bystander.process.poll() is None and bystander.rank(0).is_running() and bystander.rank(1).is_running()
    bystander.process.send_signal(signal.SIGTERM)
    bystander.wait_until_gone()
    assert bystander.process.returncode == {"deepspeed": -signal.SIGTERM, "supervise": 128 + signal.SIGTERM}[other]
    assert bystander.last_line.startswith("stopped: rank "), bystander.output


def test_supervise_believes_the_mark_alone(tmp_path):
    """A launcher that says 0 without a finished run: here `true` stands for a runner whose launcher was killed."""
    words = ["recipes/supervise.py", "true", "recipes/pretrain.py", "--output_dir", str(tmp_path)]
    cut_off = run_python(words)
    assert cut_off.code == 1 and "no finished.json" in cut_off.stderr, cut_off.output
    write_finished(tmp_path, 5)
    assert run_python(words).code == 0
    assert run_python([*words, "--max_step", "4"]).code == 2, "a mistake is found before the launcher starts"
