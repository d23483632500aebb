"""The mark of a run that came to its end: `finished.json` in its folder.

An exit code is the launcher's, and DeepSpeed's runner says 0 where its launcher was killed. The mark is the run's own.
"""

import json
from pathlib import Path

from recipes.config.durable_file import write_durably

FINISHED = "finished.json"


class RunIsFinished(Exception):
    """The checkpoint to go on from is the run's last already.

    Args:
        step: its step.
    """

    def __init__(self, step: int) -> None:
        super().__init__(f"the run is finished at step {step}")
        self.step = step


def clear_finished(run: Path) -> None:
    """Take the mark away, because the run begins or goes on."""
    (run / FINISHED).unlink(missing_ok=True)


def write_finished(run: Path, steps: int) -> None:
    """Set the mark: this many steps are trained, saved and reported."""
    write_durably(run / FINISHED, json.dumps({"steps": steps}) + "\n")
