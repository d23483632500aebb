"""Reading Megatron's indexed data sets (.bin with token ids, .idx with where each sequence and document lies)."""

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from recipes.config.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
# The codes of the .idx header (Megatron-LM, megatron/core/datasets/indexed_dataset.py, DType)
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32, 8: np.uint16}
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document boundaries


class MegatronDocuments:
    """The documents of a .bin/.idx pair.

    Args:
        prefix: the pair's path without its suffix.
    Raises:
        UserError: either file is not what the other or the format says.
    """

    def __init__(self, prefix: str) -> None:
        self.bin_path, self.index_path = Path(prefix + ".bin"), Path(prefix + ".idx")
        size = self.index_path.stat().st_size
        with open(self.index_path, "rb") as file:
            header = file.read(HEADER.size)
        if len(header) < HEADER.size or not header.startswith(MAGIC):
            raise UserError(f"{self.index_path}: not an index of Megatron's (its first bytes are not {MAGIC[:7]!r})")
        _, version, code, num_sequences, num_boundaries = HEADER.unpack(header)
        if version != 1 or code not in DTYPES or np.dtype(DTYPES[code]).kind == "f":
            raise UserError(
                f"{self.index_path}: version {version}, dtype code {code}: only version 1 with integer ids is read"
            )
        if size < HEADER.size + num_sequences * 12 + num_boundaries * 8 or num_boundaries < 1:
            raise UserError(
                f"{self.index_path}: {size} bytes are too few for {num_sequences} sequences: the file is cut"
            )
        self.dtype = np.dtype(DTYPES[code])
        mapped = np.memmap(self.index_path, mode="r", dtype=np.uint8)
        lengths_end = HEADER.size + 4 * num_sequences
        pointers_end = lengths_end + 8 * num_sequences
        self.lengths = mapped[HEADER.size : lengths_end].view(np.int32)  # (sequences,) tokens
        self.pointers = mapped[lengths_end:pointers_end].view(np.int64)  # (sequences,) byte offsets
        # (documents + 1,) the first sequence of each document, and the number of sequences
        self.boundaries = mapped[pointers_end : pointers_end + 8 * num_boundaries].view(np.int64)
        if num_sequences:
            needed = int(self.pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize
            if self.bin_path.stat().st_size < needed:
                raise UserError(f"{self.bin_path}: shorter than its index says ({needed} bytes): the file is cut")

    def __len__(self) -> int:
        return len(self.boundaries) - 1

    def size_of(self, first: int, last: int) -> int:
        """Bytes of the documents [first, last)."""
        tokens = self.lengths[self.boundaries[first] : self.boundaries[last]].sum(dtype=np.int64)
        return int(tokens) * self.dtype.itemsize

    def ranges(self, target_bytes: int) -> Iterator[tuple[int, int]]:
        """Ranges of documents of about `target_bytes` each."""
        first, size = 0, 0
        for index in range(len(self)):
            size += self.size_of(index, index + 1)
            if size >= target_bytes:
                yield first, index + 1
                first, size = index + 1, 0
        if first < len(self):
            yield first, len(self)

    def read(self, index: int) -> np.ndarray:
        """The ids of one document: its sequences one after the other."""
        sequences = range(int(self.boundaries[index]), int(self.boundaries[index + 1]))
        with open(self.bin_path, "rb") as file:
            parts = []
            for sequence in sequences:
                file.seek(int(self.pointers[sequence]))
                length = int(self.lengths[sequence])
                parts.append(np.frombuffer(file.read(length * self.dtype.itemsize), dtype=self.dtype))
        return np.concatenate(parts) if parts else np.empty(0, dtype=self.dtype)
