"""Answer for a whole job: `python recipes/supervise.py deepspeed [--hostfile F] recipes/pretrain.py [flags]`."""

import sys
from pathlib import Path

if not __package__:  # run as a script: the repository's root, not recipes/, must be importable
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import contextlib
import os
import shutil
import signal
import subprocess
from types import FrameType

import psutil

from recipes.config.errors import EXIT_FAULT, EXIT_USER_ERROR, UserError, run_command
from recipes.config.run_config import parse_pretrain_config, run_folder

USAGE = """usage: python recipes/supervise.py LAUNCHER [its flags] recipes/pretrain.py [its flags]

Runs the command as it stands (deepspeed, torchrun, accelerate launch, ...), and besides
- exits 0 only if the run's folder then says that the run is finished, whatever the launcher's exit code says;
- on SIGTERM, SIGINT (Ctrl-C) or SIGHUP ends this job alone and waits for its end: DeepSpeed's runner would end every
  job that the same Python has started on the hosts."""
ENDING_SECONDS = 60


class Stopped(Exception):
    """A signal asks for the end of the job."""


def main(argv: list[str] | None = None) -> int:
    """Run the command; its exit code, 128 + a signal that ended it, or 1 where it only seems to have ended well."""
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if words else EXIT_USER_ERROR
    folder = _folder_of_run(words)
    beside = str(Path(sys.executable).parent)
    program = shutil.which(words[0], path=os.pathsep.join([beside, os.environ.get("PATH", "")]))
    if program is None:
        raise UserError(f"{words[0]}: no such command; give a launcher and what it runs")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _stop)
    job = subprocess.Popen([program, *words[1:]], start_new_session=True)  # a terminal's Ctrl-C comes here alone
    try:
        code = job.wait()
    except Stopped as stopped:
        return _end(job, int(str(stopped)))
    if code == 0 and folder and not (folder / "finished.json").exists():
        print(f"fault: {words[0]} ended with 0, but {folder} holds no finished.json: it was cut off", file=sys.stderr)
        return EXIT_FAULT
    return code if code >= 0 else 128 - code


def _stop(number: int, frame: FrameType | None) -> None:
    for again in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(again, signal.SIG_IGN)
    raise Stopped(number)


def _folder_of_run(words: list[str]) -> Path | None:
    """The folder of the run that the command is to finish; None where it is to finish none."""
    script = next((at for at, word in enumerate(words) if Path(word).name == "pretrain.py"), None)
    if script is None:
        return None
    config = parse_pretrain_config(words[script + 1 :])
    return None if config.dry_run else run_folder(config)


def _end(job: subprocess.Popen, number: int) -> int:
    """End what the launcher has started, not through it; ssh sessions take the other hosts along."""
    runner = psutil.Process(job.pid)
    members = runner.children(recursive=True)
    runner.kill()
    job.wait()
    # On this host the guardians notice the runner's end and tell the ranks once; on the others, the session's.
    for member in members:
        with contextlib.suppress(psutil.NoSuchProcess):
            if member.name().startswith(("pdsh", "ssh")):
                member.terminate()
    _, left = psutil.wait_procs(members, timeout=ENDING_SECONDS)
    for member in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    return 128 + number


if __name__ == "__main__":
    sys.exit(run_command(main))
