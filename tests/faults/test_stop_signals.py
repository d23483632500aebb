"""Signals: the first saves within the step and exits with 75, on every rank; the second, and SIGINT, end at once."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from launching import PRETRAIN, REPOSITORY, environment, free_port, metrics, run_python

from recipes.training.pretraining import carry_out
from recipes.training.stop_signals import StopSignals

EXIT_STOPPED = 75


def words(model, corpus, folder, *more):
    return [
        PRETRAIN,
        *f"--model {model} --data {corpus} --max_steps 100000 --seq_length 16 --global_batch_size 4".split(),
        *f"--deepspeed_config ds_configs/cpu.json --save_steps 1000000 --output_dir {folder}".split(),
        *more,
    ]


class Started:
    """A command in a session of its own, watched through its metrics."""

    def __init__(self, command, folder):
        self.folder = folder
        self.process = subprocess.Popen(
            command, cwd=REPOSITORY, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip

    def wait_for_steps(self, count):
        log, deadline = self.folder / "metrics.jsonl", time.monotonic() + 120
        before = log.read_text().count('"loss"') if log.exists() else 0
        while not (log.exists() and log.read_text().count('"loss"') >= before + count):
            assert self.process.poll() is None, self.process.stdout.read()
            assert time.monotonic() < deadline, "the run never came to the step"
            time.sleep(0.05)

    def ranks(self, guardians=False):
        """Process ids of this session's ranks, and of the guardian beside each if asked for."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                command = (entry / "cmdline").read_text().split("\0")
                if os.getsid(int(entry.name)) == self.process.pid and any(word.endswith(PRETRAIN) for word in command):
                    if "deepspeed.launcher.launch" not in command and "bin/deepspeed" not in " ".join(command):
                        if guardians or not (entry / "comm").read_text().startswith("guard"):
                            found.append(int(entry.name))
            except (OSError, ProcessLookupError):
                continue
        return found

    def end(self, timeout):
        output, _ = self.process.communicate(timeout=timeout)
        return self.process.returncode, output

    def kill(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture
def start():
    started = []

    def begin(command, folder):
        started.append(Started(command, folder))
        return started[-1]

    yield begin
    for one in started:
        one.kill()


def newest_step(folder):
    return max(int(path.name[5:]) for path in (folder / "checkpoints").glob("step_*"))


def test_sigusr1_saves_and_the_same_command_goes_on(tmp_path, small_corpus, small_model, start):
    run = start([sys.executable, *words(small_model, small_corpus, tmp_path / "run", "--async_save")], tmp_path / "run")
    run.wait_for_steps(3)
    os.kill(run.process.pid, signal.SIGUSR1)
    code, output = run.end(timeout=60)
    assert code == EXIT_STOPPED, output
    step = metrics(tmp_path / "run")[-1]["step"]
    assert newest_step(tmp_path / "run") == step  # of the step in which it came, and complete though in the background
    assert f"SIGUSR1: saved at step {step}" in output
    more = words(small_model, small_corpus, tmp_path / "run", "--max_steps", str(step + 2))
    again = run_python(more)
    assert again.code == 0 and f"resumed at step {step} of {step + 2}" in again.stdout, again.output
    assert "changed, this run's takes effect: steps of the run: 100000 -> " in again.stdout
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, step + 3))


def test_sigterm_to_one_rank_stops_all_and_sigint_leaves_none(tmp_path, small_corpus, small_model, start):
    launcher = [str(Path(sys.executable).parent / "deepspeed"), "--master_port", str(free_port()), "--num_gpus", "2"]
    command = [*launcher, *words(small_model, small_corpus, tmp_path / "run")]
    run = start(command, tmp_path / "run")
    run.wait_for_steps(3)
    os.kill(max(run.ranks()), signal.SIGTERM)
    code, output = run.end(timeout=60)
    assert code == EXIT_STOPPED, output
    step = metrics(tmp_path / "run")[-1]["step"]
    assert newest_step(tmp_path / "run") == step
    state = json.loads((tmp_path / "run" / "checkpoints" / f"step_{step:08d}" / "state.json").read_text())
    assert state["step"] == step and state["world_size"] == 2

    again = start(command, tmp_path / "run")
    again.wait_for_steps(2)
    assert len(again.ranks()) == 2
    os.killpg(again.process.pid, signal.SIGINT)  # as Ctrl-C does
    deadline = time.monotonic() + 10
    while left := again.ranks(guardians=True):
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.1)
    assert again.process.wait(timeout=30) != 0
    assert newest_step(tmp_path / "run") == step  # nothing was saved, and nothing lost


def test_a_second_signal_ends_at_once(tmp_path, small_corpus, small_model, start):
    """The step is held up (stopped) when both come, as a step of minutes on a large model would be."""
    run = start([sys.executable, *words(small_model, small_corpus, tmp_path / "run")], tmp_path / "run")
    run.wait_for_steps(2)
    for number in (signal.SIGSTOP, signal.SIGUSR1, signal.SIGTERM, signal.SIGCONT):
        os.kill(run.process.pid, number)
    code, _ = run.end(timeout=30)
    assert code in (128 + signal.SIGTERM, 128 + signal.SIGUSR1)
    assert not list((tmp_path / "run" / "checkpoints").glob("step_*"))


def test_without_the_flag_the_signal_has_its_usual_effect(tmp_path, small_corpus, small_model, start):
    command = [sys.executable, *words(small_model, small_corpus, tmp_path / "run", "--save_on_exit_signal", "False")]
    run = start(command, tmp_path / "run")
    run.wait_for_steps(1)
    os.kill(run.process.pid, signal.SIGTERM)
    code, _ = run.end(timeout=30)
    assert code == -signal.SIGTERM
    assert not list((tmp_path / "run" / "checkpoints").glob("step_*"))


def test_once_saved_no_signal_changes_the_exit_code(monkeypatch):
    """srun and other launchers end the later ranks as soon as the first has ended."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    signals = StopSignals()
    plan = SimpleNamespace(launch=SimpleNamespace(is_main=False))
    state = SimpleNamespace(step=3)

    def train():
        signals.install()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signals.received == "SIGUSR1"

    try:
        run = SimpleNamespace(plan=plan, train=train, signals=signals, stopped_by="SIGUSR1", state=state)
        assert carry_out(run, None, 0.0) == EXIT_STOPPED
        for number in (signal.SIGTERM, signal.SIGUSR1):
            os.kill(os.getpid(), number)
        assert ended == []
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
