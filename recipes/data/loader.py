"""From packed sequences to the micro-batches of each optimizer step.

Nothing here has a state: the batch of a step is a function of the step, so a run resumes anywhere, on any number of
ranks.
"""

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from model.losses import IGNORE_INDEX
from recipes.config.batch_plan import BatchPlan
from recipes.config.errors import UserError
from recipes.data.corpus import PreparedCorpus
from recipes.data.fim import Documents, FimDocuments, PlainDocuments
from recipes.data.mixture import Mixture
from recipes.data.order import permute
from recipes.data.packing import PACKINGS, BestFitPacking, ConcatenatedPacking, Packing, Row, document_ids_between

MOST_WORKERS = 4  # one keeps up with a GPU here; more only help on slow disks
PREFETCH_FACTOR = 4


class TrainingData:
    """The training sequences of one corpus or a mixture, in an order that depends on (seed, epoch, index) alone.

    Args:
        sources: (corpus, weight) each; a weight is the source's part of the tokens, on any scale. With one source it
            does not matter.
        seq_length: S, the tokens that the model reads of each sequence.
        seed: decides the order, and what fim_rate changes.
        document_mask: batches carry document_ids, positions restart at documents, and no label crosses into the next.
        packing: "concatenate" or "best_fit".
        fim_rate: part of the documents rearranged for fill-in-the-middle.
    Raises:
        UserError: a source without a single sequence, or without tokens for fill-in-the-middle where they are needed.
    """

    def __init__(
        self,
        sources: Sequence[tuple[PreparedCorpus, float]],
        seq_length: int,
        seed: int,
        document_mask: bool = False,
        packing: str = "concatenate",
        fim_rate: float = 0.0,
    ) -> None:
        if packing not in PACKINGS:
            raise UserError(f"--packing {packing}: must be one of {', '.join(PACKINGS)}")
        if seq_length < 1:
            raise UserError(f"--seq_length {seq_length}: must be at least 1")
        if not 0.0 <= fim_rate <= 1.0:
            raise UserError(f"--fim_rate {fim_rate}: must be from 0 to 1")
        self.corpora = [corpus for corpus, _ in sources]
        check_same_tokenizer(self.corpora)
        self.seq_length = seq_length
        self.seed = seed
        self.document_mask = document_mask
        self.packings = [
            self.pack(corpus, packing, fim_rate, seed + number) for number, corpus in enumerate(self.corpora)
        ]
        self.sizes = [part.num_sequences for part in self.packings]
        faults = [
            f"{corpus.folder}: its {corpus.num_tokens} {corpus.split} tokens make no sequence of {seq_length}; "
            "lower --seq_length or give more data"
            for corpus, size in zip(self.corpora, self.sizes, strict=True)
            if size == 0
        ]
        if faults:
            raise UserError(*faults)
        self.num_sequences = sum(self.sizes)
        self.first_ids = [0, *itertools.accumulate(self.sizes)]
        self.mixture = Mixture([weight for _, weight in sources])

    def pack(self, corpus: PreparedCorpus, packing: str, fim_rate: float, seed: int) -> Packing:
        """The packing of one source."""
        return make_packing(corpus, self.seq_length, packing, fim_rate, seed)

    def locate(self, global_index: int) -> tuple[int, int, int]:
        """(source, sequence within the source, epoch of the source) of the run's sequence `global_index`."""
        source, turn = self.mixture.locate(global_index) if len(self.sizes) > 1 else (0, global_index)
        epoch, index = divmod(turn, self.sizes[source])
        return source, permute(index, self.sizes[source], self.seed + source, epoch), epoch

    def sample(self, global_index: int) -> dict[str, Any]:
        """One sequence of the run.

        Returns:
            input_ids, labels, position_ids: (S,) int64; labels are the next tokens, or -100.
            document_ids (S,) int32 with document_mask; valid_tokens (S,) bool where the packing pads.
            sample_id: one number for each sequence of all sources; source_id; epoch: of its source, from 0.
        """
        source, sequence, epoch = self.locate(global_index)
        packing = self.packings[source]
        fields = row_fields(packing.row(sequence, self.document_mask), packing.has_padding)
        return {**fields, "sample_id": self.first_ids[source] + sequence, "source_id": source, "epoch": epoch}

    def repeats(self, num_samples: int) -> list[float]:
        """How often each source was gone through in the run's first `num_samples` sequences."""
        counts = self.mixture.count(num_samples) if len(self.sizes) > 1 else [num_samples]
        return [count / size for count, size in zip(counts, self.sizes, strict=True)]

    def check_global_batch_size(self, global_batch_size: int) -> None:
        """Raises UserError: all sources together have fewer sequences than one global batch."""
        if self.num_sequences < global_batch_size:
            folders = ", ".join(str(corpus.folder) for corpus in self.corpora)
            raise UserError(
                f"{folders}: {self.num_sequences} sequences of {self.seq_length} tokens are fewer than one global "
                f"batch of {global_batch_size}; lower --global_batch_size or --seq_length, or give more data"
            )


def check_same_tokenizer(corpora: Sequence[PreparedCorpus]) -> None:
    """Raises UserError: two sources of one mixture were prepared with different tokenizers."""
    first = corpora[0]
    faults = [
        f"{corpus.folder}: prepared with another tokenizer than {first.folder}; prepare it again with --tokenizer "
        f"{first.tokenizer_folder}"
        for corpus in corpora[1:]
        if corpus.manifest.tokenizer_file.sha256 != first.manifest.tokenizer_file.sha256
    ]
    if faults:
        raise UserError(*faults)


def make_packing(corpus: PreparedCorpus, seq_length: int, packing: str, fim_rate: float, seed: int) -> Packing:
    documents: Documents = PlainDocuments(corpus)
    if fim_rate > 0.0:
        if corpus.manifest.fim_tokens is None:
            raise UserError(
                f"--fim_rate {fim_rate}: the tokenizer of {corpus.folder} has no tokens for fill-in-the-middle; "
                "prepare the data again with --fim"
            )
        documents = FimDocuments(corpus, fim_rate, seed, corpus.manifest.fim_tokens)
    if packing == "best_fit":
        return BestFitPacking(documents, seq_length, corpus.manifest.pad_token_id)
    return ConcatenatedPacking(documents, seq_length)


def row_fields(row: Row, has_padding: bool) -> dict[str, np.ndarray]:
    """What the model gets of one row: see `TrainingData.sample`."""
    seq_length = len(row.tokens) - 1
    tokens = row.tokens.astype(np.int64)
    labels = tokens[1:].copy()
    labels[max(0, row.num_real - 1) :] = IGNORE_INDEX
    positions = np.arange(seq_length, dtype=np.int64)
    fields = {"input_ids": tokens[:-1], "labels": labels, "position_ids": positions}
    if row.document_ids is not None:
        document_ids = row.document_ids[:-1]
        labels[row.document_ids[1:] != document_ids] = IGNORE_INDEX
        # the position of each document's first token in the row, repeated over the document
        starts = np.flatnonzero(np.diff(document_ids, prepend=-1))
        lengths = np.diff(starts, append=seq_length)
        fields["position_ids"] = positions - np.repeat(starts, lengths)
        fields["document_ids"] = document_ids
    if has_padding:
        fields["valid_tokens"] = np.arange(seq_length) < row.num_real
    return fields


@dataclass(frozen=True)
class StepBatch:
    """What one rank works on in one optimizer step.

    epoch: passes over all sequences that were finished before the step.
    micro_batches: one dict of (micro_batch_size, S) tensors for each micro-step, as the model's forward takes them.
    sample_ids, source_ids: (micro-steps, micro_batch_size) int64.
    """

    step: int
    epoch: int
    micro_batches: list[dict[str, Tensor]]
    sample_ids: Tensor
    source_ids: Tensor


class MicroBatches(Dataset[dict[str, Tensor]]):
    """The micro-batches of one rank over the whole run, by (step, micro-step)."""

    def __init__(
        self,
        data: TrainingData,
        batch_plan: BatchPlan,
        micro_batch_size: int,
        rank: int,
        world_size: int,
        sample_offset: int,
    ) -> None:
        self.data = data
        self.batch_plan = batch_plan
        self.micro_batch_size = micro_batch_size
        self.rank = rank
        self.world_size = world_size
        self.sample_offset = sample_offset

    def accumulation(self, step: int) -> int:
        """Micro-steps of a step."""
        return self.batch_plan.batch_at(step) // (self.micro_batch_size * self.world_size)

    def first_sample(self, step: int) -> int:
        """The run's sequence that a step begins with."""
        return self.sample_offset + self.batch_plan.samples_before(step)

    def __getitem__(self, index: tuple[int, int]) -> dict[str, Tensor]:
        step, micro = index
        first = self.first_sample(step) + (micro * self.world_size + self.rank) * self.micro_batch_size
        return stack([self.data.sample(first + row) for row in range(self.micro_batch_size)])


def stack(samples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Rows of fields -> fields of rows, (rows, S) or (rows,)."""
    return {key: torch.from_numpy(np.stack([sample[key] for sample in samples])) for key in samples[0]}


def step_batches(
    data: TrainingData,
    *,
    batch_plan: BatchPlan,
    first_step: int,
    micro_batch_size: int,
    rank: int,
    world_size: int,
    num_workers: int = 0,
    pin_memory: bool = False,
    num_steps: int | None = None,
    sample_offset: int = 0,
) -> Iterator[StepBatch]:
    """This rank's batches from `first_step` on, for `num_steps` steps or for ever.

    Row b of micro-step m on rank r in step s is the run's sequence
    sample_offset + batch_plan.samples_before(s) + (m * world_size + r) * micro_batch_size + b.
    The stream does not end with an epoch, so worker processes live as long as the run.

    Args:
        batch_plan: the global batch of each step.
        num_workers: loading processes; 0 loads in this one.
        pin_memory: put the tensors where a GPU copies them from without waiting.
        sample_offset: by which a run that was resumed with another batch is ahead of (or behind) its plan [sequences].
    Raises:
        UserError: a global batch is not a multiple of micro_batch_size * world_size, or the data holds fewer sequences.
    """
    for batch in batch_plan.batches:
        if batch % (micro_batch_size * world_size):
            raise UserError(
                f"--global_batch_size {batch}: must be a multiple of "
                f"{micro_batch_size} (micro batch) x {world_size} (ranks)"
            )
    data.check_global_batch_size(batch_plan.global_batch_size)
    micro_batches = MicroBatches(data, batch_plan, micro_batch_size, rank, world_size, sample_offset)
    steps: Iterable[int] = (
        itertools.count(first_step) if num_steps is None else range(first_step, first_step + num_steps)
    )
    indices = ((step, micro) for step in steps for micro in range(micro_batches.accumulation(step)))
    return group_steps(load(micro_batches, indices, num_workers, pin_memory), first_step, micro_batches)


def load(
    micro_batches: MicroBatches, indices: Iterable[tuple[int, int]], num_workers: int, pin_memory: bool
) -> Iterator[dict[str, Tensor]]:
    if num_workers == 0:
        for index in indices:
            batch = micro_batches[index]
            yield {key: value.pin_memory() for key, value in batch.items()} if pin_memory else batch
        return
    yield from DataLoader(
        micro_batches,
        batch_size=None,  # an item is a whole micro-batch
        sampler=indices,
        num_workers=num_workers,
        pin_memory=pin_memory,
        prefetch_factor=PREFETCH_FACTOR,
        generator=torch.Generator(),  # of its own: the run's random state must not depend on the number of workers
    )


def group_steps(
    stream: Iterator[dict[str, Tensor]], first_step: int, micro_batches: MicroBatches
) -> Iterator[StepBatch]:
    for step in itertools.count(first_step):
        group = list(itertools.islice(stream, micro_batches.accumulation(step)))
        if not group:
            return
        sample_ids, source_ids = (
            torch.stack([batch.pop(key) for batch in group]) for key in ("sample_id", "source_id")
        )
        for batch in group:
            del batch["epoch"]
        epoch = micro_batches.first_sample(step) // micro_batches.data.num_sequences
        yield StepBatch(step, epoch, group, sample_ids, source_ids)


def default_num_workers(device_type: str, ranks_on_host: int) -> int:
    """Loading processes for each rank: none on CPU, whose cores train; with GPUs up to MOST_WORKERS, as cores allow."""
    if device_type == "cpu":
        return 0
    cores_per_rank = len(os.sched_getaffinity(0)) // ranks_on_host
    return max(1, min(MOST_WORKERS, cores_per_rank - 1))


def heldout_batches(
    corpus: PreparedCorpus,
    *,
    seq_length: int,
    micro_batch_size: int,
    rank: int,
    world_size: int,
    document_mask: bool = False,
    most_rows: int | None = None,
) -> Iterator[dict[str, Tensor]]:
    """This rank's share of a held-out split: each token but the first, which follows nothing, is predicted once.

    All ranks get the same number of batches; rows that only fill up have no label that counts. A batch has
    `valid_tokens` where it holds padding.

    Args:
        most_rows: take no more than so many of the rows of `seq_length`, at even distances over the split.
    """
    documents = PlainDocuments(corpus)
    num_rows = heldout_rows(corpus, seq_length)
    taken = num_rows if most_rows is None else min(num_rows, most_rows)
    num_batches = -(-taken // (micro_batch_size * world_size))
    for batch_index in range(num_batches):
        first = (batch_index * world_size + rank) * micro_batch_size
        rows = [
            heldout_row(documents, index * num_rows // taken, seq_length, document_mask)  # behind the last one: padding
            for index in range(first, first + micro_batch_size)
        ]
        has_padding = any(row.num_real < seq_length for row in rows)
        yield stack([row_fields(row, has_padding) for row in rows])


def heldout_rows(corpus: PreparedCorpus, seq_length: int) -> int:
    """How many rows of `seq_length` predicted tokens a held-out split makes, the last one not always full."""
    return -(-max(0, corpus.num_tokens - 1) // seq_length)


def heldout_row(documents: PlainDocuments, index: int, seq_length: int, document_mask: bool) -> Row:
    """Row `index` of the concatenated documents; past the end it is padded, beyond it nothing but padding."""
    start = index * seq_length
    stop = min(start + seq_length + 1, documents.num_tokens)
    num_real = max(0, stop - start)
    tokens = np.full(seq_length + 1, documents.corpus.manifest.pad_token_id, dtype=documents.corpus.tokens.dtype)
    if num_real:
        tokens[:num_real] = documents.read(start, stop)
    document_ids = None
    if document_mask:
        document_ids = np.zeros(seq_length + 1, dtype=np.int32)
        if num_real:
            document_ids[:num_real] = document_ids_between(documents, start, stop)
            document_ids[num_real:] = document_ids[num_real - 1] + 1
    return Row(tokens, document_ids, num_real)
