"""One trial of a search: a real, short training run in processes of its own, watched through its metrics.jsonl."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.cluster.launch import gpu_names
from recipes.config.run_config import REPOSITORY

POLL_SECONDS = 0.5
STOP_SECONDS = 20.0  # between asking a run to stop and ending it
SMOOTHED_STEPS = 10  # a step's loss alone says little


class TrialFailed(RuntimeError):
    """The run ended without a result; the message is its own last word."""


@dataclass(frozen=True)
class TrialResult:
    """loss: of the last evaluation, or else of the last steps. pruned: it was stopped on the way."""

    loss: float
    steps: int
    pruned: bool


def run_trial(
    words: list[str],
    folder: Path,
    *,
    ranks: int = 1,
    devices: list[int] | None = None,
    keep_going: Callable[[int, float], bool] = lambda step, loss: True,
) -> TrialResult:
    """Pre-train with these flags under the deepspeed launcher. Any search may call it: it knows none.

    Args:
        words: flags of pretrain.py, without --output_dir.
        folder: the run's; what an earlier try left in it is deleted.
        devices: the GPUs to use, as torch counts them; None: the launcher's choice.
        keep_going: (step, loss) -> False to stop the run; the loss is that of the newest evaluation, or without one
            the mean of the last steps.
    Raises:
        TrialFailed: the run ended with an error, with the reason.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder / "run", ignore_errors=True)
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--master_port", str(_free_port())]
    where = ["--include", f"localhost:{','.join(gpu_names(devices))}"] if devices else ["--num_gpus", str(ranks)]
    script = str(REPOSITORY / "recipes" / "pretrain.py")
    fresh = ["--output_dir", str(folder / "run"), "--resume", "never"]
    metrics = folder / "run" / "metrics.jsonl"
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(
            [*launcher, *where, script, *words, *fresh],
            cwd=REPOSITORY,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            pruned = _watch(process, metrics, keep_going)
        finally:
            _stop(process)
    if process.returncode and not pruned:
        raise TrialFailed(_reason(folder / "log.txt", process.returncode))
    step, loss = _progress(_read(metrics))
    if loss is None:
        raise TrialFailed(f"no step was taken; see {folder / 'log.txt'}")
    return TrialResult(loss, step, pruned)


def _watch(process: subprocess.Popen, metrics: Path, keep_going: Callable[[int, float], bool]) -> bool:
    """Wait for the end; True where keep_going stopped it first."""
    seen = 0
    while process.poll() is None:
        time.sleep(POLL_SECONDS)
        step, loss = _progress(_read(metrics))
        if loss is not None and step > seen:
            seen = step
            if not keep_going(step, loss):
                return True
    return False


def _stop(process: subprocess.Popen) -> None:
    """End the run's whole process group: the launcher alone would leave its ranks behind."""
    for sign, patience in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, STOP_SECONDS)):
        if process.poll() is not None:
            return
        os.killpg(process.pid, sign)
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue


def _read(metrics: Path) -> list[dict[str, Any]]:
    """The whole lines so far."""
    if not metrics.is_file():
        return []
    text = metrics.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _progress(lines: list[dict[str, Any]]) -> tuple[int, float | None]:
    """(newest step, the loss to go by)."""
    evaluations = [line["eval_loss"] for line in lines if "eval_loss" in line]
    losses = [line["loss"] for line in lines if "loss" in line][-SMOOTHED_STEPS:]
    step = max((line["step"] for line in lines if "step" in line), default=0)
    if evaluations:
        return step, float(evaluations[-1])
    return step, sum(losses) / len(losses) if losses else None


def _reason(log: Path, code: int) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    named = [line for line in lines if line.startswith(("error: ", "fault: "))]
    return named[0] if named else f"exit code {code}: {lines[-1] if lines else 'no output'}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
