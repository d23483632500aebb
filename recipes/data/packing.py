"""Packing: which tokens make up sequence i.

A sequence of length S is a row of S + 1 tokens: the model reads the first S and predicts the last S. Both packings cut
rows with one token in common, so that each token is predicted exactly once in an epoch.
"""

from dataclasses import dataclass

import numpy as np

from recipes.data.fim import Documents

PACKINGS = ("concatenate", "best_fit")


@dataclass(frozen=True)
class Row:
    """One packed row.

    tokens: (S + 1,) ids. num_real: how many of them are text; the rest, at the end, is padding.
    document_ids: (S + 1,) int32, 0, 1, ... within the row, padding a document of its own; None where not asked for.
    """

    tokens: np.ndarray
    document_ids: np.ndarray | None
    num_real: int


class ConcatenatedPacking:
    """All documents laid one after the other and cut every S tokens, as V3 does (arXiv 2412.19437, section 4.1).

    The rest that fills no row, less than S tokens, is left out.
    """

    has_padding = False

    def __init__(self, documents: Documents, seq_length: int) -> None:
        self.documents = documents
        self.seq_length = seq_length
        self.num_sequences = max(0, (documents.num_tokens - 1) // seq_length)

    def row(self, index: int, with_document_ids: bool) -> Row:
        start = index * self.seq_length
        stop = start + self.seq_length + 1
        tokens = self.documents.read(start, stop)
        document_ids = document_ids_between(self.documents, start, stop) if with_document_ids else None
        return Row(tokens, document_ids, self.seq_length + 1)


def document_ids_between(documents: Documents, start: int, stop: int) -> np.ndarray:
    """(stop - start,) int32: which document each position is in, counted from 0 at `start`."""
    ids = np.zeros(stop - start, dtype=np.int32)
    document = documents.document_at(start)
    # A row of n tokens touches at most n + 1 documents: each has at least its EOS.
    ends = documents.ends(document, min(document + stop - start + 1, documents.num_documents))
    boundaries = ends[ends < stop] - start
    np.add.at(ids, boundaries, 1)
    return np.cumsum(ids, dtype=np.int32)


class BestFitPacking:
    """Documents packed so that none is cut that fits in a row.

    A document longer than a row is first cut into full rows; its rest, and every shorter document, longest first, goes
    into the row with the least room that still holds it; within a row they keep the corpus's order. The rows are
    planned once, which keeps about 30 bytes of memory for each document.

    Source: Ding et al., "Fewer Truncations Improve Language Modeling" (arXiv 2404.10830), section 3.
    """

    has_padding = True

    def __init__(self, documents: Documents, seq_length: int, pad_token_id: int) -> None:
        self.documents = documents
        self.seq_length = seq_length
        self.pad_token_id = pad_token_id
        ends = documents.ends(0, documents.num_documents)
        lengths = np.diff(ends, prepend=0)
        row_tokens = seq_length + 1
        # A long document gives rows [k S, k S + S + 1) while more than one row's worth is left.
        self.full_rows = np.maximum(0, -(-(lengths - row_tokens) // seq_length))
        self.full_row_ends = np.cumsum(self.full_rows)
        rest = lengths - self.full_rows * seq_length
        bins, num_bins = best_fit(rest, row_tokens)
        order = np.argsort(bins, kind="stable")
        self.members = order.astype(np.int32 if len(order) < 1 << 31 else np.int64)  # documents, bin by bin
        self.bin_starts = np.searchsorted(bins[order], np.arange(num_bins + 1))
        self.num_full_rows = int(self.full_row_ends[-1]) if len(lengths) else 0
        self.num_sequences = self.num_full_rows + num_bins
        self.num_padding = int(num_bins * row_tokens - rest.sum())  # tokens, of num_sequences * (S + 1)

    def row(self, index: int, with_document_ids: bool) -> Row:
        if index < self.num_full_rows:
            document = int(np.searchsorted(self.full_row_ends, index, side="right"))
            part = index - int(self.full_row_ends[document] - self.full_rows[document])
            start, _ = self.bounds(document)
            start += part * self.seq_length
            tokens = self.documents.read(start, start + self.seq_length + 1)
            document_ids = np.zeros(self.seq_length + 1, dtype=np.int32) if with_document_ids else None
            return Row(tokens, document_ids, self.seq_length + 1)
        chosen = index - self.num_full_rows
        members = self.members[self.bin_starts[chosen] : self.bin_starts[chosen + 1]]
        parts = []
        for document in members.tolist():
            start, end = self.bounds(document)
            parts.append(self.documents.read(start + int(self.full_rows[document]) * self.seq_length, end))
        num_real = sum(map(len, parts))
        padding = np.full(self.seq_length + 1 - num_real, self.pad_token_id, dtype=parts[0].dtype)
        lengths = [*map(len, parts), len(padding)]
        document_ids = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths) if with_document_ids else None
        return Row(np.concatenate([*parts, padding]), document_ids, num_real)

    def bounds(self, document: int) -> tuple[int, int]:
        """Positions of a document's first token and after its last."""
        first = max(0, document - 1)
        ends = self.documents.ends(first, document + 1)
        return (int(ends[0]), int(ends[1])) if document else (0, int(ends[0]))


def best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """Best-fit decreasing: the bin of each item, and the number of bins.

    The bins with r tokens of room left are a stack for each r; a Python integer has bit r set where that stack is not
    empty, so the tightest bin that holds an item is found by one shift and one lowest set bit.

    Args:
        lengths: (n,) items, each from 1 to capacity.
        capacity: of each bin.
    """
    bins = np.zeros(len(lengths), dtype=np.int64)
    stacks: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0
    num_bins = 0
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            chosen = stacks[room].pop()
            if not stacks[room]:
                rooms ^= 1 << room
        else:
            room, chosen = capacity, num_bins
            num_bins += 1
        bins[item] = chosen
        if left := room - length:
            stacks[left].append(chosen)
            rooms |= 1 << left
    return bins, num_bins


Packing = ConcatenatedPacking | BestFitPacking
