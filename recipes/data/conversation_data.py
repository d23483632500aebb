"""Batches of conversations: packed whole, each attending to itself alone, with loss on the answers only."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor

from model.losses import IGNORE_INDEX
from recipes.config.errors import UserError
from recipes.data.conversation_corpus import KIND, LEARNED_BIT
from recipes.data.corpus import PreparedCorpus
from recipes.data.loader import TrainingData, heldout_batches, row_fields, stack
from recipes.data.packing import BestFitPacking, Packing, Row


class ConversationDocuments:
    """The conversations of a corpus as documents, each cut to the tokens that one row holds.

    Those in which nothing to learn is left before the cut are left out. num_cut, num_left_out: how many.
    """

    def __init__(self, corpus: PreparedCorpus, longest: int) -> None:
        self.corpus = corpus
        ends = np.asarray(corpus.document_ends)
        starts, lengths = np.concatenate([[0], ends[:-1]]) if len(ends) else ends, np.diff(ends, prepend=0)
        long = lengths > longest
        kept = np.ones(len(ends), dtype=bool)
        for index in np.flatnonzero(long):
            words = corpus.tokens[int(starts[index]) + 1 : int(starts[index]) + longest]
            kept[index] = bool((words & LEARNED_BIT).any())
        self.num_cut, self.num_left_out = int((long & kept).sum()), int((~kept).sum())
        self.starts = starts[kept]
        self.all_ends = np.cumsum(np.minimum(lengths[kept], longest))
        self.num_documents = len(self.all_ends)
        self.num_tokens = int(self.all_ends[-1]) if self.num_documents else 0

    def ends(self, first: int, last: int) -> np.ndarray:
        """(last - first,) the positions after each of the documents [first, last)."""
        return self.all_ends[first:last]

    def document_at(self, position: int) -> int:
        """The document that holds this position."""
        return int(np.searchsorted(self.all_ends, position, side="right"))

    def read(self, start: int, stop: int) -> np.ndarray:
        """(stop - start,) uint32 words with LEARNED_BIT, of one document."""
        document = self.document_at(start)
        offset = int(self.starts[document]) + start - (int(self.all_ends[document - 1]) if document else 0)
        return self.corpus.tokens[offset : offset + stop - start]


def pack_conversations(corpus: PreparedCorpus, seq_length: int) -> BestFitPacking:
    """Rows of whole conversations."""
    documents: Any = ConversationDocuments(corpus, seq_length + 1)
    return BestFitPacking(documents, seq_length, corpus.manifest.pad_token_id)


def conversation_fields(row: Row) -> dict[str, np.ndarray]:
    """What the model gets of one row: `row_fields` with the bit taken off the ids and out on the labels."""
    fields = row_fields(row, has_padding=True)
    labels = fields["labels"]
    learned = (labels != IGNORE_INDEX) & (labels & LEARNED_BIT != 0)
    fields["labels"] = np.where(learned, labels & (LEARNED_BIT - 1), IGNORE_INDEX)
    fields["input_ids"] = fields["input_ids"] & (LEARNED_BIT - 1)
    return fields


class ConversationData(TrainingData):
    """The training sequences of one or several corpora of conversations; as TrainingData, always masked by document.

    Args:
        sources: (corpus, weight) each. seq_length: S. seed: decides the order.
    Raises:
        UserError: a source without a single sequence.
    Source: DeepSeek-V3 (arXiv 2412.19437), section 5.1: samples are packed, and kept invisible to each other.
    """

    def __init__(self, sources: list[tuple[PreparedCorpus, float]], seq_length: int, seed: int) -> None:
        super().__init__(sources, seq_length, seed, document_mask=True, packing="best_fit")

    def pack(self, corpus: PreparedCorpus, packing: str, fim_rate: float, seed: int) -> Packing:
        """Conversations are neither rearranged nor cut in two."""
        return pack_conversations(corpus, self.seq_length)

    def sample(self, global_index: int) -> dict[str, Any]:
        """As TrainingData.sample; labels are -100 but where the assistant speaks."""
        source, sequence, epoch = self.locate(global_index)
        fields = conversation_fields(self.packings[source].row(sequence, with_document_ids=True))
        return {**fields, "sample_id": self.first_ids[source] + sequence, "source_id": source, "epoch": epoch}

    def notes(self) -> list[str]:
        """What did not fit, a line for each source that has any, and how full the rows are."""
        return [
            note
            for corpus, packing in zip(self.corpora, self.packings, strict=True)
            for note in _notes(corpus, packing)
        ]


def _notes(corpus: PreparedCorpus, packing: Packing) -> list[str]:
    assert isinstance(packing, BestFitPacking) and isinstance(packing.documents, ConversationDocuments)
    documents, seq_length = packing.documents, packing.seq_length
    full = 1 - packing.num_padding / max(1, packing.num_sequences * (seq_length + 1))
    lines = [
        f"{corpus.folder.name}: {documents.num_documents} conversations in {packing.num_sequences} sequences of "
        f"{seq_length} tokens, {full:.0%} full"
    ]
    if documents.num_cut or documents.num_left_out:
        lines.append(
            f"{corpus.folder.name}: {documents.num_cut} conversations are longer than a sequence and are cut, "
            f"{documents.num_left_out} whose answers begin after that are left out; raise --seq_length for them"
        )
    return lines


def heldout_conversation_batches(
    corpus: PreparedCorpus, *, seq_length: int, micro_batch_size: int, rank: int, world_size: int
) -> Iterator[dict[str, Tensor]]:
    """This rank's share of a held-out split, each answer's token predicted once; equally many batches on every rank.

    Raises:
        UserError: every conversation is too long.
    """
    packing = pack_conversations(corpus, seq_length)
    if not packing.num_sequences:
        raise UserError(f"{corpus.folder}: no held-out answer begins within --seq_length {seq_length}; raise it")
    padding = np.full(seq_length + 1, corpus.manifest.pad_token_id, dtype=np.uint32)
    filler = Row(padding, np.zeros(seq_length + 1, dtype=np.int32), 0)
    for batch_index in range(-(-packing.num_sequences // (micro_batch_size * world_size))):
        first = (batch_index * world_size + rank) * micro_batch_size
        rows = [
            packing.row(index, with_document_ids=True) if index < packing.num_sequences else filler
            for index in range(first, first + micro_batch_size)
        ]
        yield stack([conversation_fields(row) for row in rows])


def evaluation_batches(
    corpus: PreparedCorpus,
    *,
    seq_length: int,
    micro_batch_size: int,
    rank: int,
    world_size: int,
    document_mask: bool,
    most_rows: int | None = None,
) -> Iterator[dict[str, Tensor]]:
    """This rank's share of a split of either kind: `heldout_batches`, or those of conversations, always all of them."""
    if corpus.manifest.kind == KIND:
        return heldout_conversation_batches(
            corpus, seq_length=seq_length, micro_batch_size=micro_batch_size, rank=rank, world_size=world_size
        )
    return heldout_batches(
        corpus,
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        rank=rank,
        world_size=world_size,
        document_mask=document_mask,
        most_rows=most_rows,
    )
