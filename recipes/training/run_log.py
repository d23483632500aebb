"""Python logging of a run: every rank into a file of its own, rank 0 on the console, one line an event."""

import contextlib
import logging
import socket
import sys
from collections.abc import Iterator
from logging.handlers import RotatingFileHandler
from pathlib import Path

from tqdm import tqdm

logger = logging.getLogger("recipes")

PRINTED = {
    "printed": True
}  # logger.info(..., extra=PRINTED): the user reads it elsewhere, so it goes to the files only
MAX_LOG_BYTES, KEPT_LOGS = 5 << 20, 3  # a rank's file is cut at the first, and this many older ones stay


class _OneLine(logging.Formatter):
    """A traceback or a message of several lines stays one line, so that lines can be counted, sorted and searched."""

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).replace("\n", " | ")


class _AboveTheBar(logging.StreamHandler):
    """Writes to stderr above the progress bar instead of into it."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)


def start_run_log(folder: Path, rank: int, level: str) -> None:
    """Log to `folder`/logs/rank_00000.log and, on rank 0, to the console; what an earlier run opened is closed.

    DeepSpeed's own warnings go into the file, too; on the console it writes them itself.

    Args:
        level: the least that is logged, a name of logging's; `debug` adds this rank's own numbers of each step.
    """
    stop_run_log()
    path = folder / "logs" / f"rank_{rank:05d}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    file = RotatingFileHandler(path, maxBytes=MAX_LOG_BYTES, backupCount=KEPT_LOGS, encoding="utf-8")
    file.setFormatter(_OneLine(f"%(asctime)s rank {rank} %(levelname)s %(message)s"))
    logger.setLevel(level.upper())
    logger.propagate = False
    logger.addHandler(file)
    deepspeed_logger().addHandler(file)
    if rank == 0:
        console = _AboveTheBar()
        console.addFilter(lambda record: not getattr(record, "printed", False))
        console.setFormatter(_OneLine("%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S"))
        logger.addHandler(console)
    logger.info("rank %d of this run begins on %s", rank, socket.gethostname(), extra=PRINTED)


@contextlib.contextmanager
def faults_logged() -> Iterator[None]:
    """Write what ends the run early into this rank's file, with its traceback in the same line."""
    try:
        yield
    except BaseException as fault:
        logger.error("the run ends: %s", fault, exc_info=True, extra=PRINTED)
        raise


def stop_run_log() -> None:
    """Close what `start_run_log` opened."""
    for handler in list(logger.handlers):
        for owner in (logger, deepspeed_logger()):
            owner.removeHandler(handler)
        handler.close()


def deepspeed_logger() -> logging.Logger:
    """DeepSpeed's logger, under its own name."""
    return logging.getLogger("DeepSpeed")
