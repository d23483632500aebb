"""Small files that must survive a crash whole."""

import os
from pathlib import Path

PARTIAL_SUFFIX = ".partial"


def write_durably(path: Path, text: str) -> None:
    """Replace a file by a new one that is on disk before it takes the name: after a crash it holds the old or the new
    text, never a part.
    """
    aside = path.with_name(path.name + PARTIAL_SUFFIX)
    with aside.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
