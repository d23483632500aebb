"""A rank's side of its guardian: start it, tell it how the rank ends, end when it says so."""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import torch

from recipes.cluster.guardian import LOST_SECONDS, Watch, run_guardian
from recipes.cluster.job_board import Cause, has_agent_store, master_socket
from recipes.cluster.launch import Launch
from recipes.cluster.launcher_processes import find_launchers
from recipes.config.errors import EXIT_USER_ERROR, TrainingFault, UserError


@contextlib.contextmanager
def guarded(launch: Launch) -> Iterator[None]:
    """Run a rank's work under a guardian, so that the job ends as a whole, and with its first cause.

    Enter it before the rank has threads or a process group. A process that no launcher started and that has no other
    ranks runs without one.

    Raises:
        UserError: the master's port is taken.
        TrainingFault: the launcher is gone.
    """
    launchers = find_launchers()
    alone = launch.world_size == 1
    nowhere_to_meet = not alone and "MASTER_PORT" not in os.environ  # torch says so when it starts the process group
    if alone and not launchers or nowhere_to_meet or not hasattr(os, "fork"):
        yield
        return
    link, theirs = multiprocessing.Pipe()
    listening = master_socket() if launch.rank == 0 and not alone and not has_agent_store() else None
    rank_pid = os.getpid()
    console = os.dup(2)
    watch = Watch(
        launch.rank, launch.local_rank, launch.world_size, rank_pid, launchers, theirs, listening, alone, console
    )
    child = os.fork()
    if child == 0:
        if os.fork() == 0:
            run_guardian(watch)
        # so that the guardian is nobody's child: launchers end a rank's children with it, and wait for them
        os._exit(0)
    os.waitpid(child, 0)
    theirs.close()
    os.close(console)
    if not alone:
        # torch's rendezvous then joins the guardian's store, which outlives rank 0, and starts none of its own
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(True)
    if listening:
        listening.close()
    threading.Thread(target=_obey, args=(link,), daemon=True).start()
    try:
        yield
    except BaseException as error:
        _report(link, launch, error)
        raise
    _send(link, None)


def _obey(link: Connection) -> None:
    """End this process as soon as its guardian says so, whatever the main thread waits for."""
    with contextlib.suppress(EOFError, OSError):
        os._exit(link.recv())


def _send(link: Connection, cause: Cause | None) -> None:
    with contextlib.suppress(OSError):  # no guardian, nothing to tell
        link.send(cause)


def _report(link: Connection, launch: Launch, error: BaseException) -> None:
    """Tell the guardian how this rank ends."""
    where = launch.rank, os.uname().nodename
    first_line = (str(error).splitlines() or [""])[0]
    if isinstance(error, SystemExit):
        _send(link, None)
    elif isinstance(error, UserError):
        # the host's first rank prints it (run_command); another one's counts only if that one does not find it
        said = launch.local_rank == 0
        _send(link, Cause(*where, first_line, code=EXIT_USER_ERROR, said=said))
    elif isinstance(error, KeyboardInterrupt):
        _send(link, Cause(*where, "interrupted (SIGINT)", code=128 + signal.SIGINT, graceful=True))
    else:
        if is_communication_error(error):
            # Some other rank's end shows here first as a broken connection: its guardian knows better, and ends us.
            time.sleep(LOST_SECONDS + 5)
        name = "" if isinstance(error, TrainingFault) else type(error).__name__
        text = ": ".join(part for part in (name, first_line) if part)
        _send(link, Cause(*where, text, said=launch.world_size == 1))


def is_communication_error(error: BaseException) -> bool:
    """Whether an exception only says that another rank could not be reached."""
    return isinstance(error, torch.distributed.DistError) or isinstance(error, RuntimeError) and "gloo" in str(error)
