"""Writing a corpus so that an interruption loses seconds of work and never leaves a half for a whole."""

import contextlib
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np

from recipes.config.durable_file import write_durably
from recipes.data.corpus import SPLITS, TOKEN_DTYPES, DataFile, SplitManifest, describe_file
from recipes.data.encode import HASH_BYTES, EncodedPiece

JOURNAL_NAME = "journal.json"
DOCUMENTS_NAME = "documents.bin"
SHARD_TOKENS = 1 << 29  # 1 GiB of 16-bit ids: few files, each cheap to copy or to verify
DOCUMENT_RECORD = np.dtype([("hash", f"V{HASH_BYTES}"), ("tokens", "<i8"), ("bytes", "<i8"), ("split", "u1")])

EMPTY_JOURNAL: dict[str, Any] = {"pieces": 0, "documents": 0, "counts": {}, "shard_sizes": {}}


class CorpusWriter:
    """Appends documents to the shards of both splits, without those seen before.

    A document's hash alone decides its split, so the same documents are held out whatever the order of the files. Every
    file only grows; the journal says how far each was whole when it was last written, and a new writer on the same
    folder cuts them back to that point and goes on. Memory: about 100 bytes for each document, to know duplicates.

    Args:
        folder: where to write; may hold what an interrupted writer left.
        dtype: "uint16" or "uint32".
        holdout: the part of documents to hold out, 0 to below 1.
    """

    def __init__(self, folder: Path, dtype: str, holdout: float, shard_tokens: int = SHARD_TOKENS) -> None:
        self.folder = folder
        self.dtype = TOKEN_DTYPES[dtype]
        self.is_held_out = holdout_rule(holdout)
        self.shard_tokens = shard_tokens
        self.pieces_done, self.num_documents = 0, 0
        self.counts: Counter[str] = Counter()
        self.shard_sizes: dict[str, list[int]] = {}  # by split, tokens of each shard
        self.seen: set[bytes] = set()
        self.files: dict[str, IO[bytes]] = {}
        self.restore()

    def restore(self) -> None:
        """Go back to the journal's state, or to nothing where there is none or a file is shorter than it says."""
        path = self.folder / JOURNAL_NAME
        journal: dict[str, Any] = json.loads(path.read_text()) if path.exists() else EMPTY_JOURNAL
        kept = self.journaled_bytes(journal)
        if any(not path.exists() or path.stat().st_size < size for path, size in kept.items()):
            journal, kept = EMPTY_JOURNAL, {}
        self.pieces_done, self.num_documents = journal["pieces"], journal["documents"]
        self.counts = Counter(journal["counts"])
        self.shard_sizes = {split: list(journal["shard_sizes"].get(split, [])) for split in SPLITS}
        for path in self.folder.glob("*.bin"):
            if path in kept:
                os.truncate(path, kept[path])
            else:
                path.unlink()
        if self.num_documents:
            self.seen = {bytes(value) for value in self.read_documents()["hash"]}

    def journaled_bytes(self, journal: dict[str, Any]) -> dict[Path, int]:
        """How long each file was when the journal was written."""
        sizes = journal["shard_sizes"].items()
        kept = {self.shard_path(s, i): n * self.dtype.itemsize for s, shards in sizes for i, n in enumerate(shards)}
        if journal["documents"]:
            kept[self.folder / DOCUMENTS_NAME] = journal["documents"] * DOCUMENT_RECORD.itemsize
        return kept

    def shard_path(self, split: str, index: int) -> Path:
        return self.folder / f"{split}-{index:05d}.bin"

    def read_documents(self) -> np.ndarray:
        return np.fromfile(self.folder / DOCUMENTS_NAME, dtype=DOCUMENT_RECORD)

    def append(self, piece: EncodedPiece) -> None:
        """Write the piece's documents; those whose text was seen before are counted and dropped."""
        split = np.full(len(piece.lengths), len(SPLITS), dtype=np.uint8)  # len(SPLITS) marks a duplicate
        for index, text_hash in enumerate(piece.hashes):
            if text_hash not in self.seen:
                self.seen.add(text_hash)
                split[index] = int(self.is_held_out(text_hash))
        fresh = split < len(SPLITS)
        records = np.empty(int(fresh.sum()), dtype=DOCUMENT_RECORD)
        records["hash"] = np.frombuffer(b"".join(piece.hashes), dtype=f"V{HASH_BYTES}")[fresh]
        records["tokens"], records["bytes"], records["split"] = (
            piece.lengths[fresh],
            piece.num_bytes[fresh],
            split[fresh],
        )
        self.write(self.folder / DOCUMENTS_NAME, records)
        token_split = np.repeat(split, piece.lengths)
        for split_index, split_name in enumerate(SPLITS):
            tokens = piece.tokens[token_split == split_index]
            if len(tokens):
                self.append_tokens(split_name, tokens.astype(self.dtype, copy=False))
        self.num_documents += len(records)
        self.counts.update(piece.counts)
        self.counts["duplicates"] += len(split) - len(records)
        self.pieces_done += 1

    def append_tokens(self, split: str, tokens: np.ndarray) -> None:
        sizes = self.shard_sizes[split]
        if not sizes or sizes[-1] >= self.shard_tokens:
            sizes.append(0)
        self.write(self.shard_path(split, len(sizes) - 1), tokens)
        sizes[-1] += len(tokens)

    def write(self, path: Path, values: np.ndarray) -> None:
        if path.name not in self.files:
            self.files[path.name] = open(path, "ab")
        self.files[path.name].write(values.tobytes())

    def save_journal(self) -> None:
        """Make everything so far survive: first the data, then the journal that vouches for it."""
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())
        journal = {
            "pieces": self.pieces_done,
            "documents": self.num_documents,
            "counts": self.counts,
            "shard_sizes": self.shard_sizes,
        }
        write_durably(self.folder / JOURNAL_NAME, json.dumps(journal))

    def save_after_interruption(self) -> None:
        """Keep what was done if the disk still takes it; if not, the last journal stands."""
        if self.pieces_done:
            with contextlib.suppress(OSError):
                self.save_journal()
        self.close()

    def close(self) -> None:
        for file in self.files.values():
            with contextlib.suppress(OSError):  # closing flushes; what a full disk refused is not in the journal
                file.close()
        self.files.clear()

    def finish(self) -> dict[str, SplitManifest]:
        """Write each split's document ends, hash all, and drop what only an interrupted run needs."""
        self.save_journal()
        self.close()
        documents = self.read_documents() if self.num_documents else np.empty(0, dtype=DOCUMENT_RECORD)
        splits = {}
        for split_index, split in enumerate(SPLITS):
            chosen = documents[documents["split"] == split_index]
            ends_path = self.folder / f"{split}.ends"
            with open(ends_path, "wb") as file:
                file.write(np.cumsum(chosen["tokens"], dtype="<i8").tobytes())
                file.flush()
                os.fsync(file.fileno())
            splits[split] = SplitManifest(
                num_tokens=int(chosen["tokens"].sum()),
                num_bytes=int(chosen["bytes"].sum()),
                num_documents=len(chosen),
                shards=tuple(self.describe_shard(split, index) for index in range(len(self.shard_sizes[split]))),
                document_ends=describe_file(self.folder, ends_path.name),
            )
        (self.folder / DOCUMENTS_NAME).unlink(missing_ok=True)
        (self.folder / JOURNAL_NAME).unlink()
        return splits

    def describe_shard(self, split: str, index: int) -> DataFile:
        path = self.shard_path(split, index)
        largest = -1
        with open(path, "rb") as file:
            while block := file.read(64 << 20):
                largest = max(largest, int(np.frombuffer(block, dtype=self.dtype).max()))
        return describe_file(self.folder, path.name, largest)


def holdout_rule(holdout: float) -> Callable[[bytes], bool]:
    """Tells from a document's hash whether it is held out."""
    limit = int(holdout * 2.0**64)
    return lambda text_hash: int.from_bytes(text_hash[:8], "little") < limit
