"""Large files written past the page cache, and hashed on the way."""

import errno
import fcntl
import hashlib
import io
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils.serialization import config as serialization_config

BLOCK_BYTES = 16 << 20
_SECTOR = mmap.PAGESIZE  # what addresses, offsets and sizes of a direct write are multiples of, on any disk


class HashedFile(io.RawIOBase):
    """A new file, which takes no more than `write`; `finish` makes it durable and returns its entry of the manifest.

    Two threads hash a block and write it while the caller fills the other one; neither holds Python's lock meanwhile.
    Blocks go to the disk directly (O_DIRECT) where the file system can: a copy of each page in the system's cache
    costs a core as much time as the disk takes, in the background it is training's time, and it drives out of the cache
    what is read again, the data.

    Raises:
        OSError: from any method, where the disk refuses a block.
    """

    def __init__(self, path: Path) -> None:
        self.bytes = 0
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._set_direct(True)
        self._digest = hashlib.sha256()
        self._helpers = ThreadPoolExecutor(2, "checkpoint-disk")
        mapped = [mmap.mmap(-1, BLOCK_BYTES) for _ in range(2)]  # each begins with a page
        self._blocks = [numpy.frombuffer(memory, numpy.uint8) for memory in mapped]
        self._filled = 0  # bytes of the first block
        self._pending: list[Future[None]] = []  # what is done to the second one

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        """Take all of it; the buffer is the caller's again once this returns."""
        new = numpy.frombuffer(content, numpy.uint8)
        taken = 0
        while taken < len(new):
            piece = new[taken : taken + BLOCK_BYTES - self._filled]
            self._blocks[0][self._filled : self._filled + len(piece)] = piece
            self._filled += len(piece)
            taken += len(piece)
            if self._filled == BLOCK_BYTES:
                self._hand_over()
        self.bytes += taken
        return taken

    def finish(self) -> dict[str, Any]:
        """Write the rest, have everything on the disk, and return the file's size and SHA-256."""
        self._hand_over()
        self._wait()
        os.ftruncate(self._file, self.bytes)
        os.fsync(self._file)
        return {"bytes": self.bytes, "sha256": self._digest.hexdigest()}

    def close(self) -> None:
        if not self.closed:
            self._helpers.shutdown()
            os.close(self._file)
        super().close()

    def _hand_over(self) -> None:
        """Have the filled block hashed and written once the one before is."""
        self._wait()
        block, size = self._blocks[0], self._filled
        padded = -(-size // _SECTOR) * _SECTOR  # only the last block has what `finish` cuts off again
        self._pending = [
            self._helpers.submit(self._digest.update, block[:size].data),
            self._helpers.submit(self._write_block, block[:padded].data),
        ]
        self._blocks.reverse()
        self._filled = 0

    def _wait(self) -> None:
        for future in self._pending:
            future.result()

    def _write_block(self, block: memoryview) -> None:
        while block:  # less than it is given may be taken
            try:
                block = block[os.write(self._file, block) :]
            except OSError as error:
                # A file system that lets a file be opened so but not written, or the rest of a block it took a part of.
                if error.errno != errno.EINVAL or not self._set_direct(False):
                    raise

    def _set_direct(self, direct: bool) -> bool:
        """Whether that changed the file's flag; it does not where the file system knows no direct writes."""
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        wanted = flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT
        try:
            fcntl.fcntl(self._file, fcntl.F_SETFL, wanted)
        except OSError:
            return False
        return wanted != flags


def write_hashed(path: Path, content: Any) -> dict[str, Any]:
    """Save one object durably, as torch.save does, and return its entry of the manifest."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The manifest's checksums take the place of the archive's own, which cost a third of the time.
    without_crc = serialization_config.patch("save.compute_crc32", False)  # type: ignore[attr-defined]
    with HashedFile(path) as file, without_crc:
        try:
            torch.save(content, file)  # type: ignore[arg-type]  # it wants no more of a file than write()
        except RuntimeError:
            file.finish()  # raises what the disk said, if that is behind it: torch then failed anew to end its archive
            raise
        return file.finish()
