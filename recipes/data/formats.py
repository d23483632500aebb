"""Reading: a source file is cut into pieces by one process, and each piece is turned into documents by another.

Cutting does no more than it must (it reads lines, or counts rows), so that one process keeps many tokenizing ones busy.
"""

import csv
import functools
import io
import json
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from recipes.config.errors import UserError
from recipes.data.sources import COMPRESSIONS, PIECE_BYTES, Piece, SourceFile, open_binary

ON_ERROR_CHOICES = ("stop", "replace", "skip")
LONG_TEXT_BYTES = 1 << 20  # a .txt file above this is a collection, not a document
LONG_TEXT_DOCUMENT_BYTES = 64 << 10
SEPARATORS = {".csv": ",", ".tsv": "\t"}
BROKEN_FILE = (EOFError, OSError, zlib.error, csv.Error)  # what a truncated or damaged file raises while it is read


def broken_file_errors() -> tuple[type[BaseException], ...]:
    import zstandard

    return (*BROKEN_FILE, zstandard.ZstdError)


# ---------------------------------------------------------------- cutting


def iter_pieces(files: list[SourceFile], text_key: str) -> Iterator[Piece]:
    """The pieces of all files, always the same ones in the same order.

    Raises:
        UserError: a file that cannot be read, with its line or row where one is known.
    """
    batch: list[str] = []
    batch_bytes = 0
    for file in files:
        if file.kind == "text" and not is_long_text(file):
            if batch and batch_bytes + file.num_bytes > PIECE_BYTES:
                yield Piece("text", batch[0], 1, batch, batch_bytes)
                batch, batch_bytes = [], 0
            batch.append(file.path)
            batch_bytes += file.num_bytes
            continue
        if batch:
            yield Piece("text", batch[0], 1, batch, batch_bytes)
            batch, batch_bytes = [], 0
        yield from CUTTERS[file.kind](file, text_key)
    if batch:
        yield Piece("text", batch[0], 1, batch, batch_bytes)


def is_long_text(file: SourceFile) -> bool:
    name = file.path
    for compression in COMPRESSIONS:
        name = name.removesuffix(compression)
    return name.endswith(".txt") and file.num_bytes > LONG_TEXT_BYTES


def cut_lines(file: SourceFile, text_key: str) -> Iterator[Piece]:
    line_number = 1
    try:
        with open_binary(file.path) as stream:
            while lines := stream.readlines(PIECE_BYTES):
                yield Piece("jsonl", file.path, line_number, lines, sum(map(len, lines)))
                line_number += len(lines)
    except broken_file_errors() as error:
        raise UserError(
            f"{file.path}:{line_number}: the file is damaged after this line: {first_line(error)}"
        ) from error


def cut_long_text(file: SourceFile, text_key: str) -> Iterator[Piece]:
    """Cut a long .txt at blank lines into documents of 64 KiB or a little more, or at any line end past twice that."""
    documents: list[bytes] = []
    lines: list[bytes] = []
    size, piece_size, line_number, first = 0, 0, 1, 1
    try:
        with open_binary(file.path) as stream:
            for line in stream:
                lines.append(line)
                size += len(line)
                line_number += 1
                if (size >= LONG_TEXT_DOCUMENT_BYTES and not line.strip()) or size >= 2 * LONG_TEXT_DOCUMENT_BYTES:
                    documents.append(b"".join(lines))
                    lines, piece_size, size = [], piece_size + size, 0
                if piece_size >= PIECE_BYTES:
                    yield Piece("blobs", file.path, first, documents, piece_size)
                    documents, piece_size, first = [], 0, line_number
    except broken_file_errors() as error:
        raise UserError(
            f"{file.path}:{line_number}: the file is damaged after this line: {first_line(error)}"
        ) from error
    if lines:
        documents.append(b"".join(lines))
    if documents:
        yield Piece("blobs", file.path, first, documents, piece_size + size)


def cut_table(file: SourceFile, text_key: str) -> Iterator[Piece]:
    """Rows of a .csv or .tsv. Bytes that are not UTF-8 pass as surrogates, which the reader of the piece finds."""
    csv.field_size_limit(1 << 31)
    suffix = next(s for s in SEPARATORS if s in file.path.rsplit("/", 1)[-1])
    rows: list[tuple[int, Any]] = []
    size, line_number = 0, 1
    try:
        with open_binary(file.path) as raw, io.TextIOWrapper(raw, "utf-8", "surrogateescape", newline="") as stream:
            reader = csv.DictReader(stream, delimiter=SEPARATORS[suffix], strict=True)
            if reader.fieldnames is None:
                return
            if text_key not in reader.fieldnames:
                raise UserError(missing_key(f"{file.path}:1", "column", text_key, list(reader.fieldnames)))
            for row in reader:
                line_number = reader.line_num
                rows.append((line_number, row[text_key]))
                size += len(row[text_key] or "")
                if size >= PIECE_BYTES:
                    yield Piece("rows", file.path, rows[0][0], rows, size)
                    rows, size = [], 0
    except broken_file_errors() as error:
        raise UserError(f"{file.path}:{line_number + 1}: the table is damaged: {first_line(error)}") from error
    if rows:
        yield Piece("rows", file.path, rows[0][0], rows, size)


def cut_parquet(file: SourceFile, text_key: str) -> Iterator[Piece]:
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_metadata(file.path)
        names = pq.read_schema(file.path).names
    except Exception as error:  # pyarrow has an exception of its own for each layer
        raise UserError(f"{file.path}: not a readable parquet file: {first_line(error)}") from error
    if text_key not in names:
        raise UserError(missing_key(file.path, "column", text_key, names))
    first = 0
    for group in range(metadata.num_row_groups):
        share = file.num_bytes // metadata.num_row_groups
        yield Piece("parquet", file.path, first, group, share)
        first += metadata.row_group(group).num_rows


def cut_dataset(file: SourceFile, text_key: str) -> Iterator[Piece]:
    dataset = load_dataset_folder(file.path)
    if text_key not in dataset.column_names:
        raise UserError(missing_key(file.path, "column", text_key, dataset.column_names))
    num_rows = len(dataset)
    rows_per_piece = max(1, num_rows * PIECE_BYTES // max(file.num_bytes, 1))
    for first in range(0, num_rows, rows_per_piece):
        last = min(num_rows, first + rows_per_piece)
        yield Piece("dataset", file.path, first, last, file.num_bytes * (last - first) // num_rows)


def cut_hub(file: SourceFile, text_key: str) -> Iterator[Piece]:
    """Rows of a hub data set's `train` split, streamed: nothing but the prepared tokens is kept on disk."""
    from datasets import load_dataset

    name, _, configuration = file.path.partition(":")
    rows: list[tuple[int, Any]] = []
    size = 0
    try:
        dataset = load_dataset(name, configuration or None, split="train", streaming=True)
        for row_number, row in enumerate(dataset):
            if text_key not in row:
                raise UserError(missing_key(f"{file.path}: row {row_number}", "column", text_key, list(row)))
            rows.append((row_number, row[text_key]))
            size += len(row[text_key] or "")
            if size >= PIECE_BYTES:
                yield Piece("rows", file.path, rows[0][0], rows, size)
                rows, size = [], 0
    except (OSError, ValueError) as error:  # no network, no such repository, several configurations to choose from
        raise UserError(
            f"--input {file.path}: neither a file or folder here nor a data set that the hub gives: {first_line(error)}"
        ) from error
    if rows:
        yield Piece("rows", file.path, rows[0][0], rows, size)


def cut_megatron(file: SourceFile, text_key: str) -> Iterator[Piece]:
    from recipes.data.megatron import MegatronDocuments

    documents = MegatronDocuments(file.path)
    for first, last in documents.ranges(PIECE_BYTES):
        yield Piece("megatron", file.path, first, last, documents.size_of(first, last))


CUTTERS = {
    "jsonl": cut_lines,
    "text": cut_long_text,
    "table": cut_table,
    "parquet": cut_parquet,
    "dataset": cut_dataset,
    "hub": cut_hub,
    "megatron": cut_megatron,
}


# ---------------------------------------------------------------- reading


@dataclass
class Documents:
    """What a piece held. `encoded` are the texts in UTF-8; `origins` name each text's file and line or row, for messages."""

    texts: list[str] = field(default_factory=list)
    encoded: list[bytes] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, text: Any, origin: str, on_error: str) -> None:
        """Take one text, or note why not: `stop` makes a fault of a bad one, `skip` counts and drops it."""
        errors = "replace" if on_error == "replace" else "strict"
        try:
            if isinstance(text, bytes):
                encoded, text = text, text.decode("utf-8")
            elif isinstance(text, str):
                encoded = text.encode("utf-8")
            else:
                self.reject(f"{origin}: the text is {type(text).__name__}, not a string", on_error)
                return
        except UnicodeDecodeError as error:
            if errors == "strict":
                place = f"byte {error.start} (0x{error.object[error.start]:02x})"
                self.reject(f"{origin}: {place} is not UTF-8; --on_error replace or skip accepts the file", on_error)
                return
            text = text.decode("utf-8", errors)
            encoded = text.encode("utf-8")
            self.counts["replaced"] += 1
        except UnicodeEncodeError:  # JSON may escape half of a surrogate pair
            if errors == "strict":
                place = "half of a surrogate pair has no UTF-8"
                self.reject(f"{origin}: {place}; --on_error replace or skip accepts the file", on_error)
                return
            encoded = text.encode("utf-8", errors)
            text = encoded.decode("utf-8")
            self.counts["replaced"] += 1
        if not text:
            self.counts["empty"] += 1
            return
        self.texts.append(text)
        self.encoded.append(encoded)
        self.origins.append(origin)

    def reject(self, fault: str, on_error: str) -> None:
        if on_error == "skip":
            self.counts["skipped"] += 1
        else:
            self.faults.append(fault)


def read_piece(piece: Piece, text_key: str, on_error: str) -> Documents:
    """The documents of a piece (any kind but megatron, whose documents are tokens already)."""
    documents = Documents()
    for text, origin in READERS[piece.kind](piece, text_key, on_error, documents):
        documents.add(text, origin, on_error)
    return documents


Texts = Iterator[tuple[Any, str]]


def read_lines(piece: Piece, text_key: str, on_error: str, documents: Documents) -> Texts:
    for line_number, line in enumerate(piece.payload, piece.first):
        origin = f"{piece.path}:{line_number}"
        if not line.strip():
            continue
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError:
            if on_error != "replace":
                yield line, origin  # add() says which byte
                continue
            documents.counts["replaced"] += 1
            text = line.decode("utf-8", "replace")
        try:
            record = json.loads(text)
        except ValueError as error:
            documents.reject(f"{origin}: not JSON: {error}", on_error)
            continue
        if not isinstance(record, dict) or text_key not in record:
            keys = list(record) if isinstance(record, dict) else []
            documents.reject(missing_key(origin, "key", text_key, keys), on_error)
            continue
        yield record[text_key], origin


def read_texts(piece: Piece, text_key: str, on_error: str, documents: Documents) -> Texts:
    for path in piece.payload:
        try:
            with open_binary(path) as stream:
                content = stream.read()
        except broken_file_errors() as error:
            documents.reject(f"{path}: cannot be read: {first_line(error)}", on_error)
            continue
        yield content, path


def read_blobs(piece: Piece, text_key: str, on_error: str, documents: Documents) -> Texts:
    line_number = piece.first
    for blob in piece.payload:
        yield blob, f"{piece.path}:{line_number}"
        line_number += blob.count(b"\n")


def read_rows(piece: Piece, text_key: str, on_error: str, documents: Documents) -> Texts:
    for row_number, text in piece.payload:
        if isinstance(text, str):  # surrogates stand for bytes that were not UTF-8; as bytes again add() sees to them
            text = text.encode("utf-8", "surrogateescape")
        yield text, f"{piece.path}:{row_number}"


def read_parquet(piece: Piece, text_key: str, on_error: str, documents: Documents) -> Texts:
    import pyarrow as pa
    import pyarrow.parquet as pq

    row_number = piece.first
    try:
        column = pq.ParquetFile(piece.path).read_row_group(piece.payload, columns=[text_key]).column(0)
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            column = column.cast(pa.large_binary())  # strings in a file are not checked to be UTF-8; add() does
        for text in column.to_pylist():
            yield text, f"{piece.path}: row {row_number}"
            row_number += 1
    except (OSError, pa.ArrowException) as error:
        documents.reject(f"{piece.path}: row group {piece.payload}: {first_line(error)}", on_error)


def read_dataset(piece: Piece, text_key: str, on_error: str, documents: Documents) -> Texts:
    rows = load_dataset_folder(piece.path)[piece.first : piece.payload][text_key]
    for row_number, text in enumerate(rows, piece.first):
        yield text, f"{piece.path}: row {row_number}"


READERS = {
    "jsonl": read_lines,
    "text": read_texts,
    "blobs": read_blobs,
    "rows": read_rows,
    "parquet": read_parquet,
    "dataset": read_dataset,
}


@functools.lru_cache(maxsize=4)
def load_dataset_folder(path: str) -> Any:
    from datasets import load_from_disk

    try:
        return load_from_disk(path)
    except Exception as error:  # a damaged folder raises whatever its first missing part does
        raise UserError(f"--input {path}: not a readable folder of `datasets`: {first_line(error)}") from error


def missing_key(origin: str, noun: str, text_key: str, present: list[str]) -> str:
    has = ", ".join(map(str, present)) if present else "none"
    return f"{origin}: no {noun} {text_key!r} (it has: {has}); name the text's {noun} with --text_key"


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
