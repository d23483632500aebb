"""Run the repository's commands as a user does, in processes of their own, bounded in time."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PRETRAIN = "recipes/pretrain.py"


@dataclass(frozen=True)
class Finished:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def free_port() -> int:
    """A port for a master that starts later: below those that the kernel gives to connections in the meantime."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def environment(**extra: str) -> dict[str, str]:
    """This process's environment without a surrounding launch, and with the venv's commands on PATH."""
    launch = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
    clean = {name: value for name, value in os.environ.items() if name not in launch}
    clean["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), clean.get("PATH", "")])
    # Tiny shapes gain nothing from threads, and several ranks share the cores.
    return {"OMP_NUM_THREADS": "1"} | clean | extra


def run(words: list[str], *, timeout: float = 300, cwd: Path = REPOSITORY, **extra: str) -> Finished:
    """Run a command in a session of its own; at the time limit its whole process group is killed."""
    process = subprocess.Popen(
        words,
        cwd=cwd,
        env=environment(**extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        raise AssertionError(f"{words} ran longer than {timeout} s:\n{stdout[-3000:]}\n{stderr[-3000:]}") from None
    return Finished(process.returncode, stdout, stderr)


def run_python(words: list[str], **keywords) -> Finished:
    """`python WORDS` with this interpreter."""
    return run([sys.executable, *words], **keywords)


def run_deepspeed(words: list[str], *, ranks: int | None = None, **keywords) -> Finished:
    """`deepspeed [--num_gpus RANKS] WORDS`, on a free port."""
    launcher = [str(Path(sys.executable).parent / "deepspeed"), "--master_port", str(free_port())]
    return run([*launcher, *(["--num_gpus", str(ranks)] if ranks else []), *words], **keywords)


def metrics(run_folder: Path, *, evaluation: bool = False) -> list[dict]:
    """The lines of a run's metrics.jsonl: training steps, or evaluations."""
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if ("eval_loss" if evaluation else "learning_rate") in line]


def repeatable(lines: list[dict]) -> list[dict]:
    """Metrics without what differs from run to run by nature: times, rates and memory."""
    measured = ("_seconds", "_bytes", "tokens_per_second", "tokens_per_second_with_padding", "mfu")
    return [
        {k: v for k, v in line.items() if not k.endswith(measured) and not k.startswith("slowest_rank")}
        for line in lines
    ]


def run_ranks(words: list[str], *, ranks: int, **keywords) -> list[Finished]:
    """The same Python command on every rank of one host, without a launcher; all must succeed."""
    job = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    with ThreadPoolExecutor(ranks) as pool:
        pending = [
            pool.submit(run_python, words, RANK=str(rank), LOCAL_RANK=str(rank), **job, **keywords)
            for rank in range(ranks)
        ]
        finished = [one.result() for one in pending]
    for rank, one in enumerate(finished):
        assert one.code == 0, f"rank {rank} ended with {one.code}:\n{one.output[-4000:]}"
    return finished
