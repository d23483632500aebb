"""Reading pieces: each becomes texts, each with the file and line or row that it stood in."""

import csv
import functools
import json
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from recipes.config.errors import UserError
from recipes.data.sources import Piece, open_binary

ON_ERROR_CHOICES = ("stop", "replace", "skip")
BROKEN_FILE = (EOFError, OSError, zlib.error, csv.Error)  # what a truncated, damaged or unreadable file raises


@dataclass
class Documents:
    """What a piece held. `encoded` are the texts in UTF-8; `origins` name each text's file and line or row."""

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
            text = line.decode("utf-8").removeprefix("\ufeff")  # the mark that some editors begin a file with
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
        except BROKEN_FILE as error:
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
            column = column.cast(pa.large_binary())  # strings in a file are not checked to be UTF-8; add() checks them
        for text in column.to_pylist():
            yield text, f"{piece.path}: row {row_number}"
            row_number += 1
    except (OSError, ValueError, pa.ArrowException) as error:
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
