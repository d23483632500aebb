"""A prepared corpus on disk: its manifest, and reading its tokens without loading them.

A prepared folder holds `manifest.json`, `tokenizer/`, and for each split (`train`, `heldout`) token shards
`SPLIT-00000.bin` (little-endian uint16 or uint32, documents one after the other, each ended by EOS) and `SPLIT.ends`
(int64, the position in the split's tokens after each document).
"""

import bisect
import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recipes.config.errors import UserError

MANIFEST_NAME = "manifest.json"
TOKENIZER_FOLDER = "tokenizer"
FORMAT_NAME = "deepseek-recipes-corpus"
FORMAT_VERSION = 1
SPLITS = ("train", "heldout")
HASH_BLOCK_BYTES = 1 << 20
MOST_OPEN_SHARDS = 256  # of a split in one process: trillions of tokens have more shards than a process may open files
QUICK_HASH_BYTES = 256 << 20  # a quick verification hashes splits up to this size, under a second's work
TOKEN_DTYPES: dict[str, np.dtype] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


@dataclass(frozen=True)
class DataFile:
    """A file of a split, as the manifest records it."""

    name: str
    num_bytes: int
    sha256: str
    max_token_id: int = -1  # of a shard's tokens


@dataclass(frozen=True)
class SplitManifest:
    num_tokens: int
    num_bytes: int  # UTF-8 bytes of the texts
    num_documents: int
    shards: tuple[DataFile, ...]
    document_ends: DataFile


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` says. fim_tokens: ids of (prefix, suffix, middle), or None where the tokenizer has none.

    kind: "text", or "conversations", whose tokens carry a bit of their own (see conversation_corpus).
    """

    inputs: list[str]  # as they were named
    fingerprint: str  # of what decided the content: inputs and settings
    settings: dict[str, Any]
    dtype: str
    vocab_size: int
    eos_token_id: int
    pad_token_id: int
    fim_tokens: tuple[int, int, int] | None
    tokenizer_file: DataFile
    counts: dict[str, int]
    splits: dict[str, SplitManifest]
    content_hash: str
    kind: str = "text"

    def write(self, folder: Path) -> None:
        document = {"format": FORMAT_NAME, "version": FORMAT_VERSION, **asdict(self)}
        path = folder / MANIFEST_NAME
        with open(path, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Raises UserError: the folder holds no manifest, or not one of this format."""
        path = folder / MANIFEST_NAME
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            if document.pop("format") != FORMAT_NAME or document.pop("version") != FORMAT_VERSION:
                raise ValueError("of another format or version")
            document["tokenizer_file"] = DataFile(**document["tokenizer_file"])
            document["splits"] = {name: split_from_dict(split) for name, split in document["splits"].items()}
            if document["fim_tokens"] is not None:
                document["fim_tokens"] = tuple(document["fim_tokens"])
            return cls(**document)
        except FileNotFoundError as error:
            raise UserError(
                f"{folder}: no prepared corpus ({MANIFEST_NAME} is missing); make one with prepare_data"
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: not a manifest of a prepared corpus ({error}); prepare the data again") from error


def split_from_dict(split: dict[str, Any]) -> SplitManifest:
    shards = tuple(DataFile(**shard) for shard in split.pop("shards"))
    return SplitManifest(shards=shards, document_ends=DataFile(**split.pop("document_ends")), **split)


def hash_file(path: Path) -> str:
    """SHA-256 of a file, the same as `sha256sum` prints."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(HASH_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def describe_file(folder: Path, name: str, max_token_id: int = -1) -> DataFile:
    path = folder / name
    return DataFile(name, path.stat().st_size, hash_file(path), max_token_id)


def is_prepared(folder: str | Path) -> bool:
    """True for a folder that prepare() finished."""
    return (Path(folder) / MANIFEST_NAME).is_file()


class ShardedTokens:
    """The tokens of a split as one read-only sequence over its shards: `len(tokens)`, `tokens[start:stop]`.

    Reads go through pread, not through a mapping: pages of a mapping count as this process's memory for as long as the
    kernel likes, and a shuffled epoch would touch them all.
    """

    def __init__(self, paths: list[Path], dtype: np.dtype) -> None:
        self.paths = paths
        self.dtype = dtype
        self.starts = [0]  # position of each shard's first token, and the end
        for path in paths:
            self.starts.append(self.starts[-1] + path.stat().st_size // dtype.itemsize)
        self.descriptors: dict[int, int] = {}  # of shards, the one used longest ago first

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, positions: slice) -> np.ndarray:
        start, stop, stride = positions.indices(len(self))
        if stride != 1:
            raise ValueError(f"tokens are read in ranges, not with a stride of {stride}")
        tokens = np.empty(max(0, stop - start), dtype=self.dtype)
        filled = 0
        while filled < len(tokens):
            shard = bisect.bisect_right(self.starts, start + filled) - 1
            count = min(len(tokens) - filled, self.starts[shard + 1] - start - filled)
            self.fill(tokens[filled : filled + count], shard, start + filled - self.starts[shard])
            filled += count
        return tokens

    def fill(self, target: np.ndarray, shard: int, offset: int) -> None:
        """Read tokens of one shard, from `offset` [tokens] on, into `target`."""
        descriptor = self.descriptors.pop(shard, None)
        if descriptor is None:
            if len(self.descriptors) == MOST_OPEN_SHARDS:
                os.close(self.descriptors.pop(next(iter(self.descriptors))))
            descriptor = os.open(self.paths[shard], os.O_RDONLY)
        self.descriptors[shard] = descriptor
        if os.preadv(descriptor, [target.view(np.uint8).data], offset * self.dtype.itemsize) != target.nbytes:
            raise OSError(f"{self.paths[shard]}: ended before position {offset + len(target)}: it changed while in use")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "descriptors": {}}  # a descriptor means nothing in another process

    def __del__(self) -> None:
        for descriptor in self.__dict__.get("descriptors", {}).values():
            os.close(descriptor)


class PreparedCorpus:
    """One split of a prepared folder.

    Attributes:
        num_tokens, num_bytes (UTF-8 bytes of the texts), num_documents: totals of the split.
        tokens: the split's tokens, read by slices.
        document_ends: (num_documents,) int64, the position after each document's EOS.
    """

    def __init__(self, folder: Path, split: str, manifest: Manifest) -> None:
        self.folder = folder
        self.split = split
        self.manifest = manifest
        part = manifest.splits[split]
        self.num_tokens, self.num_bytes, self.num_documents = part.num_tokens, part.num_bytes, part.num_documents
        self.tokens = ShardedTokens([folder / shard.name for shard in part.shards], TOKEN_DTYPES[manifest.dtype])
        ends_path = folder / part.document_ends.name
        self.document_ends: np.ndarray = (
            np.memmap(ends_path, dtype="<i8", mode="r") if part.num_documents else np.empty(0, dtype="<i8")
        )

    @classmethod
    def open(
        cls, folder: str | Path, split: str = "train", verify: str = "quick", kind: str = "text"
    ) -> "PreparedCorpus":
        """Open a split after verifying its files.

        Args:
            verify: "quick": each file's size, and its hash where the split has at most QUICK_HASH_BYTES; "full": size
                and hash of every file.
            kind: what it must hold, "text" or "conversations".
        Raises:
            UserError: no prepared folder, or a file that is missing or altered; all such files at once.
        """
        folder = Path(folder)
        manifest = Manifest.read(folder)
        if manifest.kind != kind:
            raise UserError(f"{folder}: holds prepared {manifest.kind}, where {kind} is needed")
        if faults := find_damage(folder, manifest, split, verify):
            raise UserError(*faults)
        return cls(folder, split, manifest)

    @property
    def tokenizer_folder(self) -> Path:
        return self.folder / TOKENIZER_FOLDER

    @property
    def content_hash(self) -> str:
        """A hash of the tokens and the tokenizer; equal corpora have equal ones wherever they lie."""
        return self.manifest.content_hash

    def check_vocab_size(self, vocab_size: int) -> None:
        """Raises UserError: the split holds an id that a model with `vocab_size` embeddings lacks; names the shard."""
        faults = [
            f"{self.folder / shard.name}: token id {shard.max_token_id} is not below the model's vocab_size "
            f"{vocab_size}; use a model with a vocab_size of at least {self.manifest.vocab_size}, or prepare "
            "with its own tokenizer"
            for shard in self.manifest.splits[self.split].shards
            if shard.max_token_id >= vocab_size
        ]
        if faults:
            raise UserError(*faults)


def find_damage(folder: Path, manifest: Manifest, split: str, verify: str) -> list[str]:
    """One line for each file that the split needs and that is missing, of another size, or of another content."""
    if verify not in ("quick", "full"):
        raise ValueError(f"verify is quick or full, not {verify!r}")
    part = manifest.splits[split]
    files = [manifest.tokenizer_file, *part.shards, part.document_ends]
    hashed = verify == "full" or sum(file.num_bytes for file in files) <= QUICK_HASH_BYTES
    again = "restore it, or prepare the data again"
    faults = []
    for file in files:
        path = folder / file.name
        if not path.is_file():
            faults.append(f"{path}: missing; {again}")
        elif (size := path.stat().st_size) != file.num_bytes:
            faults.append(f"{path}: {size} bytes, but the manifest says {file.num_bytes}; {again}")
        elif hashed and hash_file(path) != file.sha256:
            faults.append(f"{path}: altered: its SHA-256 is not the manifest's; {again}")
    return faults
