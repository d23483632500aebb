"""Fill-in-the-middle on documents of token ids, before packing.

A chosen document becomes PREFIX_TOKEN prefix SUFFIX_TOKEN suffix MIDDLE_TOKEN middle EOS, where prefix + middle +
suffix is the document (V3, arXiv 2412.19437, section 4.1: prefix-suffix-middle, on documents, before packing).
Which documents are chosen and where they are cut are functions of (seed, document index): the same in every epoch, so
that an epoch has the same sequences, and on any rank. V3 does not say where it cuts; here it is between two tokens, so
that the lengths are known without tokenizing again.
"""

import numpy as np

from recipes.data.corpus import PreparedCorpus
from recipes.data.order import MASK64, mix64

ADDED_TOKENS = 3
# Positions are found by a binary search over every BLOCK-th document and then within one block, so that the memory is a
# thousandth of the corpus's document table.
BLOCK_DOCUMENTS = 1024


def mix64_array(values: np.ndarray) -> np.ndarray:
    """`mix64` for an array of uint64."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class PlainDocuments:
    """The documents of a corpus, laid one after the other, as they are.

    num_tokens: of all documents. Documents are counted from 0; positions are in tokens.
    """

    def __init__(self, corpus: PreparedCorpus) -> None:
        self.corpus = corpus
        self.num_documents = corpus.num_documents
        self.num_tokens = corpus.num_tokens

    def ends(self, first: int, last: int) -> np.ndarray:
        """(last - first,) the positions after each of the documents [first, last)."""
        return np.asarray(self.corpus.document_ends[first:last])

    def document_at(self, position: int) -> int:
        """The document that holds this position."""
        return int(np.searchsorted(self.corpus.document_ends, position, side="right"))

    def read(self, start: int, stop: int) -> np.ndarray:
        """(stop - start,) the ids at positions [start, stop)."""
        return self.corpus.tokens[start:stop]


class FimDocuments:
    """The documents of a corpus, of which a part is rearranged for fill-in-the-middle.

    Args:
        fim_rate: the part of the documents that is rearranged, 0 to 1.
        seed: decides which, and where they are cut.
        fim_tokens: ids of (prefix, suffix, middle).
    """

    def __init__(self, corpus: PreparedCorpus, fim_rate: float, seed: int, fim_tokens: tuple[int, int, int]) -> None:
        self.corpus = corpus
        self.fim_tokens = fim_tokens
        self.threshold = int(fim_rate * 2.0**53)
        self.key = mix64(seed & MASK64) ^ 0x46494D  # apart from the key of the epochs' order
        self.num_documents = corpus.num_documents
        starts = range(0, self.num_documents, BLOCK_DOCUMENTS)
        chosen = [int(self.chosen(start, min(start + BLOCK_DOCUMENTS, self.num_documents)).sum()) for start in starts]
        # chosen_before[b]: how many documents before block b are chosen; block_ends[b]: position after block b
        self.chosen_before = np.concatenate([[0], np.cumsum(chosen, dtype=np.int64)])
        last = np.minimum(np.arange(1, len(chosen) + 1) * BLOCK_DOCUMENTS, self.num_documents) - 1
        self.block_ends = np.asarray(corpus.document_ends[last]) + ADDED_TOKENS * self.chosen_before[1:]
        self.num_tokens = int(self.block_ends[-1]) if len(chosen) else 0

    def chosen(self, first: int, last: int) -> np.ndarray:
        """(last - first,) bool: whether each of the documents [first, last) is rearranged."""
        documents = np.arange(first, last, dtype=np.uint64)
        return (mix64_array(documents ^ np.uint64(self.key)) >> np.uint64(11)).astype(np.int64) < self.threshold

    def ends(self, first: int, last: int) -> np.ndarray:
        if first >= last:
            return np.empty(0, dtype=np.int64)
        block = first // BLOCK_DOCUMENTS
        chosen = np.cumsum(self.chosen(block * BLOCK_DOCUMENTS, last))[first - block * BLOCK_DOCUMENTS :]
        return np.asarray(self.corpus.document_ends[first:last]) + ADDED_TOKENS * (self.chosen_before[block] + chosen)

    def document_at(self, position: int) -> int:
        block = int(np.searchsorted(self.block_ends, position, side="right"))
        first = block * BLOCK_DOCUMENTS
        ends = self.ends(first, min(first + BLOCK_DOCUMENTS, self.num_documents))
        return first + int(np.searchsorted(ends, position, side="right"))

    def cuts(self, document: int, body: int) -> tuple[int, int]:
        """Where the middle of a document of `body` tokens (without EOS) begins and ends: two sorted uniform draws."""
        draws = (mix64(mix64(document ^ self.key) + number) % (body + 1) for number in (1, 2))
        first, second = sorted(draws)
        return first, second

    def read(self, start: int, stop: int) -> np.ndarray:
        tokens = np.empty(max(0, stop - start), dtype=self.corpus.tokens.dtype)
        position = start
        document = self.document_at(start) if stop > start else 0
        while position < stop:
            end = int(self.ends(document, document + 1)[0])
            read_to = min(stop, end)
            self.fill(tokens[position - start : read_to - start], document, end, position)
            position, document = read_to, document + 1
        return tokens

    def fill(self, target: np.ndarray, document: int, end: int, position: int) -> None:
        """Write the ids of one document, from `position` on, into `target`; `end` is its end's position."""
        raw_end = int(self.corpus.document_ends[document])
        raw_start = int(self.corpus.document_ends[document - 1]) if document else 0
        if not self.chosen(document, document + 1)[0]:
            offset = raw_end - (end - position)
            target[:] = self.corpus.tokens[offset : offset + len(target)]
            return
        first, second = self.cuts(document, raw_end - 1 - raw_start)
        prefix, suffix, middle = self.fim_tokens
        middle_start, middle_end = raw_start + first, raw_start + second
        parts: list[tuple[int, int] | int] = [
            prefix,
            (raw_start, middle_start),
            suffix,
            (middle_end, raw_end - 1),
            middle,
            (middle_start, middle_end),
            (raw_end - 1, raw_end),  # EOS
        ]
        at = end - (raw_end - raw_start + ADDED_TOKENS) - position  # of the next part, relative to `target`
        for part in parts:
            length = 1 if isinstance(part, int) else part[1] - part[0]
            begin, finish = max(at, 0), min(at + length, len(target))
            if begin < finish:
                if isinstance(part, int):
                    target[begin] = part
                else:
                    target[begin:finish] = self.corpus.tokens[part[0] + begin - at : part[0] + finish - at]
            at += length


Documents = PlainDocuments | FimDocuments
