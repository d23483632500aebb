"""Which files an input names, and how each is cut into pieces that one process reads and tokenizes at a time."""

import io
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from recipes.config.errors import UserError

STDLIB = "stdlib"
# Distributions ship the standard library's tests apart, so without them the corpus is the same everywhere.
STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
PIECE_BYTES = 1 << 20  # a fraction of a second's work: hides what a task costs, and still spreads evenly over cores
LINE_SUFFIXES = (".jsonl", ".ndjson", ".json")
TABLE_SUFFIXES = (".csv", ".tsv")
COMPRESSIONS = (".gz", ".zst")


@dataclass(frozen=True)
class SourceFile:
    """One file, or one data set, to read.

    kind: "jsonl", "text", "table" (csv, tsv), "parquet", "dataset" (a folder of `datasets`), "hub" or "megatron".
    """

    kind: str
    path: str
    num_bytes: int  # 0 where it is not known up front
    identity: tuple[Any, ...] = ()  # what changes when the content does: size and modification time, or a fingerprint


@dataclass(frozen=True)
class Piece:
    """A part of the input, small enough to hold; documents keep their order across pieces.

    first: the number of the first line (from 1) or row (from 0) in it.
    payload: by kind: the lines' bytes (jsonl), paths (text), rows as (row number, text) (table, hub), a range of row
        groups (parquet) or rows (dataset), a range of documents (megatron).
    """

    kind: str
    path: str
    first: int
    payload: Any
    num_bytes: int = 0


@dataclass
class Inputs:
    files: list[SourceFile]
    notes: list[str] = field(default_factory=list)


def expand_inputs(inputs: list[str]) -> Inputs:
    """Find every file that the inputs name, in the inputs' order and by name within a folder.

    An input is `stdlib` (the Python standard library's .py files on this machine, without site-packages and without its
    test folders), a file, a folder, a folder saved by `datasets`, Megatron's .bin/.idx pair, or a hub id (optionally
    `id:configuration`). A folder with .jsonl or .parquet files is a folder of data, of which these alone are read; one
    with only .csv and .tsv files likewise; any other is a folder of texts, each file one document.

    Raises:
        UserError: with one line for each input that names nothing.
    """
    found = Inputs(files=[])
    faults = []
    for name in inputs:
        try:
            files = expand_one(name, found.notes)
        except UserError as error:
            faults.extend(error.faults)
            continue
        except OSError as error:
            faults.append(f"--input {name}: cannot be read: {error}")
            continue
        if not files:
            faults.append(f"--input {name}: there is no file to read in it")
        found.files.extend(files)
    if not inputs:
        faults.append("--input: at least one file, folder or hub id is needed")
    if faults:
        raise UserError(*faults)
    return found


def expand_one(name: str, notes: list[str]) -> list[SourceFile]:
    path = Path(name)
    if name == STDLIB and not path.exists():
        return stdlib_files()
    if megatron_prefix(path) is not None:
        return [megatron_file(megatron_prefix(path) or path)]
    if path.is_file():
        kind = file_kind(path)
        if kind is None and is_binary(path):
            raise UserError(
                f"--input {name}: a binary file of no known format; jsonl, csv, tsv, txt (also .gz, .zst), parquet and "
                "Megatron's .bin/.idx are read"
            )
        return [source_file(path, kind or "text")]
    if path.is_dir():
        return folder_files(path, notes)
    if looks_like_hub_id(name):
        return [SourceFile("hub", name, 0, (name,))]
    raise UserError(f"--input {name}: no such file or folder")


def looks_like_hub_id(name: str) -> bool:
    repository = name.partition(":")[0]
    parts = repository.split("/")
    is_name = all(part and all(c.isalnum() or c in "._-" for c in part) for part in parts)
    return (
        len(parts) <= 2 and is_name and not name.startswith(".") and (len(parts) == 2 or file_kind(Path(name)) is None)
    )


def stdlib_files() -> list[SourceFile]:
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in walk(root, STDLIB_LEFT_OUT) if path.suffix == ".py"]
    return [source_file(path, "text") for path in paths]


def walk(root: Path, left_out: set[str] | frozenset[str] = frozenset()) -> Iterator[Path]:
    """Files under `root` in the order of their names, without hidden ones and without the folders left out."""
    for folder, folder_names, file_names in os.walk(root):
        folder_names[:] = sorted(n for n in folder_names if n not in left_out and not n.startswith("."))
        for file_name in sorted(file_names):
            if not file_name.startswith("."):
                yield Path(folder, file_name)


def file_kind(path: Path) -> str | None:
    """The kind of a data file by its suffix, which may be followed by .gz or .zst; None for anything else."""
    suffixes = path.suffixes[-2:]
    suffix = suffixes[0] if len(suffixes) == 2 and suffixes[1] in COMPRESSIONS else path.suffix
    if suffix in LINE_SUFFIXES:
        return "jsonl"
    if suffix in TABLE_SUFFIXES:
        return "table"
    return "parquet" if suffix == ".parquet" else None


def source_file(path: Path, kind: str) -> SourceFile:
    status = path.stat()
    return SourceFile(kind, str(path.resolve()), status.st_size, (status.st_size, status.st_mtime_ns))


def folder_files(folder: Path, notes: list[str]) -> list[SourceFile]:
    if (folder / "state.json").exists() or (folder / "dataset_dict.json").exists():
        return [dataset_folder(folder)]
    paths = list(walk(folder, {"__pycache__"}))
    kinds = {path: file_kind(path) for path in paths}
    data = [p for p in paths if kinds[p] == "parquet" or (kinds[p] == "jsonl" and ".json" not in p.suffixes)]
    if not data and paths and all(kind == "table" for kind in kinds.values()):
        data = paths
    pairs = [prefix for path in paths if path.suffix == ".idx" and (prefix := megatron_prefix(path)) is not None]
    if pairs and not data:
        return [megatron_file(prefix) for prefix in pairs]
    if data:
        if len(data) < len(paths):
            notes.append(f"{folder}: {len(paths) - len(data)} files beside its data files are not read")
        return [source_file(path, kinds[path] or "text") for path in data]
    texts = [path for path in paths if not is_binary(path)]
    if len(texts) < len(paths):
        notes.append(f"{folder}: {len(paths) - len(texts)} binary files are not read")
    return [source_file(path, "text") for path in texts]


def is_binary(path: Path) -> bool:
    """A file with a NUL in its first 8 KiB is no text (git's rule), unless it is a text that was compressed."""
    if path.suffix in COMPRESSIONS:
        return ".txt" not in path.suffixes
    with open(path, "rb") as file:
        return b"\0" in file.read(8192)


def dataset_folder(folder: Path) -> SourceFile:
    """A folder that `datasets` saved; of a dictionary of splits, `train` is read."""
    if (folder / "dataset_dict.json").exists():
        if not (folder / "train").is_dir():
            raise UserError(f"--input {folder}: this data set has no split named train; name one split's folder")
        folder = folder / "train"
    files = [file for file in folder.rglob("*") if file.is_file()]
    stamps = sorted((str(file.relative_to(folder)), file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    return SourceFile("dataset", str(folder.resolve()), sum(stamp[1] for stamp in stamps), tuple(stamps))


def megatron_prefix(path: Path) -> Path | None:
    """The common name of Megatron's .bin/.idx pair, given either file or the name itself; None if there is no pair."""
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    bin_file, index_file = prefix.with_name(prefix.name + ".bin"), prefix.with_name(prefix.name + ".idx")
    return prefix if bin_file.is_file() and index_file.is_file() else None


def megatron_file(prefix: Path) -> SourceFile:
    stats = [prefix.with_name(prefix.name + suffix).stat() for suffix in (".bin", ".idx")]
    stamps = tuple((status.st_size, status.st_mtime_ns) for status in stats)
    return SourceFile("megatron", str(prefix.resolve()), stats[0].st_size, stamps)


def open_binary(path: str) -> IO[bytes]:
    """Open a file for reading bytes, decompressed where its name ends in .gz or .zst."""
    if path.endswith(".gz"):
        import gzip

        return gzip.open(path, "rb")  # type: ignore[return-value]
    if path.endswith(".zst"):
        import pyarrow as pa

        # Arrow's reader takes several frames one after the other, as parallel compressors write them, and says when the
        # last one is cut; the zstandard package does neither.
        return io.BufferedReader(pa.input_stream(path, compression="zstd"), PIECE_BYTES)
    return open(path, "rb")
