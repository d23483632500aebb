"""Processes seen from outside: whether one lives, how it ended, and those without which nobody would end a rank."""

import os
from pathlib import Path, PurePath

import psutil

from recipes.config.errors import TrainingFault

DEEPSPEED_LAUNCH = "deepspeed.launcher.launch"
# Words, by the end of their path, with which the other launchers that docs/launching.md describes are started.
OTHER_LAUNCHERS = {"torchrun", "torch.distributed.run", "run.py", "accelerate", "accelerate-launch"}
STARTER_WORDS = 4  # an interpreter, its flags and the program: where a launcher's own name stands in its command line


def find_launchers() -> list[psutil.Process]:
    """The launcher of this rank and what that launcher itself depends on; empty where a user started the rank.

    DeepSpeed's launcher stands under its runner on the same host, and under an ssh session on the others. The runner
    and pdsh themselves are found where they run on this host.

    Raises:
        TrainingFault: DeepSpeed's launcher was killed before its rank came this far.
    """
    parent = psutil.Process().parent()
    words = _words(parent)
    if parent is None or DEEPSPEED_LAUNCH not in words:
        if "CROSS_SIZE" in os.environ:  # DeepSpeed's launcher alone sets it
            raise TrainingFault("the launcher that started this rank is gone")
        return [parent] if parent is not None and _is_other_launcher(parent) else []
    found, above = [parent], parent.parent()
    while above and any(DEEPSPEED_LAUNCH in word for word in _words(above)):  # shells that carry its command line
        found.append(above)
        above = above.parent()
    if above is None or above.pid == 1 and not _is_runner(above):
        raise TrainingFault("what started this rank's launcher is gone")
    if above and (_is_runner(above) or _name(above).startswith("sshd")):
        found.append(above)
    return found + _pdsh_of(words)


def is_alive(process: psutil.Process) -> bool:
    """Whether it still runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ended_file(pid: int) -> list[int]:
    """A descriptor that becomes readable when a process ends, where the system has such."""
    try:
        return [os.pidfd_open(pid)]
    except (AttributeError, OSError):
        return []


def exit_status(pid: int) -> int | None:
    """How a process ended, as `waitpid` tells its parent; None once the parent has asked, or where it is hidden."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return int(fields[-1]) or None if fields[0] == "Z" else None


def describe(process: psutil.Process) -> str:
    """What a process is, for a message; also after its end."""
    return f"process {process.pid} ({_name(process) or 'ended'})"


def _pdsh_of(launch_words: list[str]) -> list[psutil.Process]:
    """pdsh and the runner above it, if they run on this host: the ssh sessions outlive them."""
    job = [word for word in launch_words if word.startswith(("--world_info=", "--master_port=", "--master_addr="))]
    for process in psutil.process_iter():
        if _name(process).startswith("pdsh") and set(job) <= set(_words(process)):
            runner = process.parent()
            return [process, runner] if runner and _is_runner(runner) else [process]
    return []


def _is_runner(process: psutil.Process) -> bool:
    return bool({"deepspeed", "ds", "deepspeed.launcher.runner"} & _starters(process))


def _is_other_launcher(process: psutil.Process) -> bool:
    return _name(process) == "slurmstepd" or bool(OTHER_LAUNCHERS & _starters(process))


def _starters(process: psutil.Process) -> set[str]:
    return {PurePath(word).name for word in _words(process)[:STARTER_WORDS]}


def _words(process: psutil.Process | None) -> list[str]:
    try:
        return process.cmdline() if process else []
    except psutil.Error:
        return []


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return ""
