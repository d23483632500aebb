"""Commands on the hosts of a hostfile, by the same `ssh HOST` that DeepSpeed and pdsh use."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from recipes.config.run_config import REPOSITORY

T = TypeVar("T")
# DeepSpeed's own check asks for no password; nor can a command that runs on all hosts at once
_SSH = ("ssh", "-o", "PasswordAuthentication=no", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
_TIMED_OUT = 124
AT_ONCE = 64  # each is a process here, with two pipes

# what ssh or the host's shell says -> what to do
_CAUSES = (
    (r"Could not resolve hostname|Name or service not known", "the name is unknown here; correct the hostfile, or DNS"),
    (r"Host key verification failed", "the host's key is not known; log in once by hand: ssh {host}"),
    (r"Permission denied|Too many authentication failures", "no key is accepted; run ssh-copy-id {host}"),
    (r"Connection refused", "no sshd listens there; start it, or set its Port in ~/.ssh/config"),
    (
        r"timed out|No route to host|Network is unreachable",
        "it cannot be reached; see to its network, firewall or power",
    ),
    (r"No such file or directory|not found", "the repository and its Python must lie at the same path on every host"),
    (r"No module named", "install requirements.txt into the same virtual environment on every host"),
)


@dataclass(frozen=True)
class Ended:
    """How a command on a host ended. host: None for this one. begin, end: by this host's clock [s]."""

    host: str | None
    code: int
    stdout: str
    stderr: str
    begin: float
    end: float

    def cause(self) -> tuple[str, str]:
        """What went wrong, and what to do."""
        lines = [line for line in self.stderr.splitlines() if line.strip()]
        said = lines[-1].strip() if lines else f"exit code {self.code} without a word"
        if self.code == _TIMED_OUT:
            return f"no answer after {self.end - self.begin:.0f} s", "see to its load and its file systems"
        for pattern, remedy in _CAUSES:
            if re.search(pattern, self.stderr):
                return said, remedy.format(host=self.host)
        return said, f"try it by hand: ssh {self.host} hostname" if self.host else "see the message"


def run_on(host: str | None, command: str, timeout: float) -> Ended:
    """Run a shell command on a host (None: on this one, without ssh); at the time limit it is ended."""
    words = ["sh", "-c", command] if host is None else [*_SSH, host, command]
    begin = time.time()
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return Ended(host, 127, "", f"{words[0]}: {error.strerror}; install openssh-client", begin, time.time())
    try:
        stdout, stderr = process.communicate(timeout=timeout)
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        code = _TIMED_OUT
    return Ended(host, code, stdout, stderr, begin, time.time())


def module_command(module: str, arguments: Sequence[str], **variables: str) -> str:
    """The shell command that runs a module of this repository with this Python, as DeepSpeed's launcher does."""
    words = ["env", *(f"{name}={value}" for name, value in variables.items())] if variables else []
    words += [sys.executable, "-m", module, *arguments]
    return f"cd {shlex.quote(str(REPOSITORY))} && exec {shlex.join(words)}"


def on_all(work: Sequence[Callable[[], T]], at_once: int = AT_ONCE) -> list[T]:
    """Run all, so many at once; results in order."""
    with ThreadPoolExecutor(max_workers=max(1, at_once)) as pool:
        return [one.result() for one in [pool.submit(each) for each in work]]
