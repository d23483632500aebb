"""The mark of a run that came to its end: `finished.json` in its folder.

An exit code is the launcher's, and DeepSpeed's runner says 0 where its launcher was killed. The mark is the run's own.
"""

import json
from pathlib import Path

FINISHED = "finished.json"


def clear_finished(run: Path) -> None:
    """Take the mark away, because the run begins or goes on."""
    (run / FINISHED).unlink(missing_ok=True)


def write_finished(run: Path, steps: int) -> None:
    """Set the mark: this many steps are trained, saved and reported."""
    aside = run / f"{FINISHED}.partial"
    aside.write_text(json.dumps({"steps": steps}) + "\n")
    aside.replace(run / FINISHED)
