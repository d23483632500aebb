"""Cutting source files into pieces: lines, rows or ranges, with no more work than that takes.

One process cuts, and so keeps many that read and tokenize busy.
"""

import csv
import io
from collections.abc import Iterator
from typing import Any

from recipes.config.errors import UserError
from recipes.data.reading import BROKEN_FILE, first_line, load_dataset_folder, missing_key
from recipes.data.sources import COMPRESSIONS, PIECE_BYTES, Piece, SourceFile, open_binary

LONG_TEXT_BYTES = 1 << 20  # a .txt file above this is a collection, not a document
LONG_TEXT_DOCUMENT_BYTES = 64 << 10
SEPARATORS = {".csv": ",", ".tsv": "\t"}


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
    except BROKEN_FILE as error:
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
    except BROKEN_FILE as error:
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
        with open_binary(file.path) as raw, io.TextIOWrapper(raw, "utf-8-sig", "surrogateescape", newline="") as stream:
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
    except BROKEN_FILE as error:
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
