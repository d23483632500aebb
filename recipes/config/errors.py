"""The errors that a command reports to its user, and the exit codes that go with them."""

import os
import sys
import time
import traceback
from collections.abc import Callable

EXIT_SUCCESS = 0
EXIT_FAULT = 1
EXIT_USER_ERROR = 2
SILENT_RANK_SECONDS = 20


class UserError(Exception):
    """A mistake of the user's, found before anything was started or written.

    Args:
        faults: one line each: the file, the key or flag, the value, the rule, and what to write instead.
    """

    def __init__(self, *faults: str) -> None:
        super().__init__("\n".join(faults))
        self.faults = list(faults)


class TrainingFault(RuntimeError):
    """Training cannot go on, for a reason that is known; the message names it, and no good checkpoint was touched."""


def run_command(main: Callable[[], int]) -> int:
    """Run a command's main function and return its exit code.

    A UserError becomes one line per fault and exit code 2, a TrainingFault one line and exit code 1, both without a
    traceback. Any other exception's traceback is printed here, so that a command can then leave at once: the
    interpreter's own end would wait for the other ranks.
    """
    try:
        return main()
    except UserError as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            # Every rank finds the same mistake, and the launcher ends them all once one is gone: let the host's first
            # rank speak.
            time.sleep(SILENT_RANK_SECONDS)
            return EXIT_USER_ERROR
        for fault in error.faults:
            print(f"error: {fault}", file=sys.stderr, flush=True)
        return EXIT_USER_ERROR
    except TrainingFault as fault:
        print(f"fault: rank {os.environ.get('RANK', '0')}: {fault}", file=sys.stderr, flush=True)
        return EXIT_FAULT
    except Exception:
        traceback.print_exc()
        return EXIT_FAULT


def run_rank(main: Callable[[], int]) -> None:
    """Run a command whose process is one rank of a job, and end the process with its exit code.

    A rank that cannot go on is gone at once; the interpreter's own end would wait for the other ranks.
    """
    code = run_command(main)
    sys.stdout.flush()
    if code:
        os._exit(code)
