"""Batches: a function of the step alone, complete and disjoint over ranks and workers."""

import math
import pickle
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from recipes.config.batch_plan import BatchPlan, BatchRamp
from recipes.config.errors import UserError
from recipes.data.corpus import PreparedCorpus
from recipes.data.loader import TrainingData, default_num_workers, heldout_batches, step_batches
from recipes.training.loop import evaluate_heldout
from tests.data_corpora import EOS, PAD, flat, numbered_documents, open_corpus, write_corpus

LENGTHS = [5, 9, 3, 20, 1, 14, 7, 7, 2, 30]
SEQ = 4


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return TrainingData([(open_corpus(tmp_path_factory.mktemp("corpus") / "c", LENGTHS), 1.0)], SEQ, seed=3)


def rank_steps(data, first_step, num_steps, *, G=8, micro=2, world=1, **options):
    """For each rank its StepBatches."""
    return [
        list(
            step_batches(
                data,
                first_step=first_step,
                batch_plan=BatchPlan(G, SEQ),
                micro_batch_size=micro,
                rank=rank,
                world_size=world,
                num_steps=num_steps,
                **options,
            )
        )
        for rank in range(world)
    ]


def test_global_index_of_each_row(data):
    """Row b of micro-step m on rank r in step s is sequence s * G + (m * world + r) * micro + b."""
    G, micro, world = 12, 2, 3
    for rank, steps in enumerate(rank_steps(data, 5, 2, G=G, micro=micro, world=world)):
        assert [batch.step for batch in steps] == [5, 6]
        for batch in steps:
            assert batch.sample_ids.shape == (2, 2) and len(batch.micro_batches) == 2
            for m in range(2):
                for b in range(micro):
                    sample = data.sample(batch.step * G + (m * world + rank) * micro + b)
                    assert batch.sample_ids[m, b] == sample["sample_id"]
                    for key in ("input_ids", "labels", "position_ids"):
                        assert batch.micro_batches[m][key][b].tolist() == sample[key].tolist()
            assert set(batch.micro_batches[0]) == {"input_ids", "labels", "position_ids"}


def test_two_epochs_resumed_on_other_world_sizes(data):
    """A run that changes its world size twice, in the middle of an epoch, logs the sample ids of the unbroken one."""
    num_steps = 2 * data.num_sequences // 8
    whole = [set(batch.sample_ids.flatten().tolist()) for batch in rank_steps(data, 0, num_steps)[0]]
    broken = []
    for first, count, world, micro in ((0, 2, 1, 8), (2, 3, 4, 1), (5, num_steps - 5, 2, 2)):
        ranks = rank_steps(data, first, count, world=world, micro=micro)
        for step_of_ranks in zip(*ranks, strict=True):
            ids = [i for batch in step_of_ranks for i in batch.sample_ids.flatten().tolist()]
            assert len(ids) == 8
            broken.append(set(ids))
    assert broken == whole
    order = [data.sample(index)["sample_id"] for index in range(2 * data.num_sequences)]
    first, second = order[: data.num_sequences], order[data.num_sequences :]
    assert sorted(first) == sorted(second) == list(range(data.num_sequences)) and first != second


def test_workers_neither_repeat_nor_drop(tmp_path):
    """One shard, two ranks with two workers each: the case in which streams are often read twice."""
    corpus = open_corpus(tmp_path / "c", LENGTHS)
    assert len(corpus.manifest.splits["train"].shards) == 1
    data = TrainingData([(corpus, 1.0)], SEQ, seed=3, document_mask=True)
    data.sample(0)  # so that a shard is open when the workers start
    num_steps = data.num_sequences // 8
    random_state = torch.get_rng_state()
    with_workers = rank_steps(data, 0, num_steps, world=2, num_workers=2)
    assert torch.equal(random_state, torch.get_rng_state()), "the run's random numbers must not depend on workers"
    seen = []
    for ours, theirs in zip(with_workers, rank_steps(data, 0, num_steps, world=2), strict=True):
        for one, two in zip(ours, theirs, strict=True):
            assert torch.equal(one.sample_ids, two.sample_ids) and one.step == two.step
            for batch, other in zip(one.micro_batches, two.micro_batches, strict=True):
                assert batch.keys() == other.keys() and all(torch.equal(batch[key], other[key]) for key in batch)
            seen += one.sample_ids.flatten().tolist()
    assert len(seen) == len(set(seen)) == 8 * num_steps


def test_endless_stream_crosses_epochs(data):
    steps = step_batches(data, first_step=10**6, batch_plan=BatchPlan(8, SEQ), micro_batch_size=8, rank=0, world_size=1)
    batch = next(steps)
    assert batch.step == 10**6 and batch.epoch == 8 * 10**6 // data.num_sequences
    assert next(steps).step == 10**6 + 1


def test_mixture_counts_and_source_ids(tmp_path):
    small = open_corpus(tmp_path / "a", [7, 7, 6], tokenizer="{}")  # 22 tokens: 5 sequences
    large = open_corpus(tmp_path / "b", [40, 62])  # 104 tokens: 25 sequences
    data = TrainingData([(small, 0.7), (large, 0.3)], SEQ, seed=0)
    assert data.sizes == [5, 25]
    samples = [data.sample(index) for index in range(100)]
    for prefix in range(1, 101):
        count = sum(sample["source_id"] == 0 for sample in samples[:prefix])
        assert abs(count - 0.7 * prefix) < 1
    assert data.repeats(100) == [70 / 5, 30 / 25]
    assert Counter(s["sample_id"] for s in samples if s["source_id"] == 0) == {i: 14 for i in range(5)}
    assert {s["sample_id"] for s in samples if s["source_id"] == 1} == set(range(5, 30))
    assert [s["epoch"] for s in samples if s["source_id"] == 1] == [0] * 25 + [1] * 5
    batch = rank_steps(data, 0, 1)[0][0]
    assert batch.source_ids.flatten().tolist() == [sample["source_id"] for sample in samples[:8]]


def test_pad_equal_to_eos_keeps_the_loss_of_eos(tmp_path):
    folder = write_corpus(tmp_path / "c", numbered_documents([2, 3]), pad_token_id=EOS)
    data = TrainingData([(PreparedCorpus.open(folder), 1.0)], 9, seed=0, packing="best_fit")
    sample = data.sample(0)
    assert data.num_sequences == 1
    assert sample["input_ids"].tolist() == [10, 11, EOS, 12, 13, 14, EOS, EOS, EOS]
    assert sample["labels"].tolist() == [11, EOS, 12, 13, 14, EOS, -100, -100, -100]
    assert sample["valid_tokens"].tolist() == [True] * 7 + [False] * 2


@pytest.mark.parametrize("world, micro", [(1, 1), (1, 3), (2, 2), (3, 1), (4, 4)])
@pytest.mark.parametrize("lengths", [LENGTHS, [7], [8], [9], [1]])
def test_heldout_predicts_each_token_once_on_any_world_size(tmp_path, world, micro, lengths):
    corpus = open_corpus(tmp_path / "c", lengths)
    batches = [
        list(heldout_batches(corpus, seq_length=SEQ, micro_batch_size=micro, rank=rank, world_size=world))
        for rank in range(world)
    ]
    assert len({len(of_rank) for of_rank in batches}) == 1
    stream = flat(numbered_documents(lengths))
    pairs = []
    for batch in (batch for of_rank in batches for batch in of_rank):
        assert batch["input_ids"].shape == (micro, SEQ)
        counted = batch["labels"] != -100
        pairs += zip(batch["input_ids"][counted].tolist(), batch["labels"][counted].tolist(), strict=True)
        if "valid_tokens" in batch:
            assert not torch.any(counted & ~batch["valid_tokens"]) and not batch["valid_tokens"].all()
    assert sorted(pairs) == sorted(zip(stream[:-1], stream[1:], strict=True))


@pytest.mark.parametrize("world, micro", [(1, 1), (1, 3), (2, 2), (4, 4)])
def test_a_part_of_heldout_is_spread_evenly_and_the_same_on_any_world_size(tmp_path, world, micro):
    corpus = open_corpus(tmp_path / "c", [10 * SEQ])  # and EOS: 10 rows, each full
    options = {"seq_length": SEQ, "micro_batch_size": micro, "world_size": world, "most_rows": 4}
    batches = [list(heldout_batches(corpus, rank=rank, **options)) for rank in range(world)]
    assert len({len(of_rank) for of_rank in batches}) == 1
    rows = [
        row.tolist()
        for of_rank in batches
        for batch in of_rank
        for row, labels in zip(batch["input_ids"], batch["labels"], strict=True)
        if (labels != -100).any()
    ]
    stream = flat(numbered_documents([10 * SEQ]))
    assert sorted(rows) == [stream[row * SEQ : (row + 1) * SEQ] for row in (0, 2, 5, 7)]


class Model:
    """Stands for an engine: each token's loss is its own id."""

    device = "cpu"

    def eval(self):
        return self

    train = eval

    def __call__(self, input_ids, labels, **_):
        counted = labels != -100
        return {"cross_entropy_sum": input_ids[counted].sum(), "label_count": counted.sum()}


@pytest.mark.parametrize(
    ("eval_tokens", "rows"),
    [(0, [range(6), range(3)]), (9 * SEQ, [range(6), range(3)]), (3 * SEQ - 1, [(0, 3), (0,)])],
)
def test_an_evaluation_takes_its_part_of_each_source(tmp_path, monkeypatch, eval_tokens, rows):
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: None)
    corpora = [open_corpus(tmp_path / "a", [6 * SEQ]), open_corpus(tmp_path / "b", [3 * SEQ])]
    plan = SimpleNamespace(
        config=SimpleNamespace(eval_tokens=eval_tokens, document_mask=False),
        resolved=SimpleNamespace(config={}, micro_batch_size=2),
        launch=SimpleNamespace(rank=0, world_size=1),
        seq_length=SEQ,
    )
    found = evaluate_heldout(Model(), plan, corpora)
    streams = [flat(numbered_documents([size * SEQ])) for size in (6, 3)]
    read = [stream[row * SEQ : (row + 1) * SEQ] for stream, of in zip(streams, rows, strict=True) for row in of]
    nats, tokens = sum(map(sum, read)), sum(map(len, read))
    parts = [len(of) / size for of, size in zip(rows, (6, 3), strict=True)]
    text_bytes = sum(corpus.num_bytes * part for corpus, part in zip(corpora, parts, strict=True))
    assert (found.tokens, found.loss) == (tokens, pytest.approx(nats / tokens))
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) / text_bytes)


def test_heldout_with_document_mask(tmp_path):
    corpus = open_corpus(tmp_path / "c", [2, 3])
    options = {"seq_length": SEQ, "micro_batch_size": 3, "rank": 0, "world_size": 1, "document_mask": True}
    (batch,) = heldout_batches(corpus, **options)
    assert batch["input_ids"].tolist() == [[10, 11, EOS, 12], [13, 14, EOS, PAD], [PAD] * 4]
    assert batch["labels"].tolist() == [[11, EOS, -100, 13], [14, EOS, -100, -100], [-100] * 4]
    assert batch["document_ids"].tolist() == [[0, 0, 0, 1], [0, 0, 0, 1], [0] * 4]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0], [0, 1, 2, 0], [0, 1, 2, 3]]


def test_heldout_of_an_empty_split(tmp_path):
    corpus = open_corpus(tmp_path / "c", LENGTHS, split="heldout")
    assert corpus.num_tokens == 0
    assert list(heldout_batches(corpus, seq_length=4, micro_batch_size=2, rank=0, world_size=1)) == []


def test_growing_batch_and_an_offset_lose_and_repeat_no_sequence(data):
    """A ramp from 4 to 8, then the same run resumed at step 3 with batches of 6: the sequences go on without a gap."""
    ramped = BatchPlan(8, SEQ, BatchRamp(4, tokens=8 * SEQ))
    steps = list(
        step_batches(data, batch_plan=ramped, first_step=0, micro_batch_size=2, rank=0, world_size=1, num_steps=3)
    )
    assert [batch.sample_ids.numel() for batch in steps] == [4, 4, 8]  # by hand: 4 until 8 * SEQ tokens are consumed
    fixed = BatchPlan(6, SEQ)
    offset = 16 - fixed.samples_before(3)
    resumed = step_batches(
        data,
        batch_plan=fixed,
        first_step=3,
        micro_batch_size=2,
        rank=0,
        world_size=1,
        num_steps=2,
        sample_offset=offset,
    )
    seen = [int(i) for batch in [*steps, *resumed] for i in batch.sample_ids.flatten()]
    assert seen == [data.sample(index)["sample_id"] for index in range(16 + 12)]


def test_data_survives_pickling(data):
    data.sample(5)
    assert data.corpora[0].tokens.descriptors
    copy = pickle.loads(pickle.dumps(data))
    assert not copy.corpora[0].tokens.descriptors, "open files belong to one process"
    assert copy.sample(5)["input_ids"].tolist() == data.sample(5)["input_ids"].tolist()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"batch_plan": BatchPlan(10**6, SEQ)}, r"fewer than one global batch of 1000000; lower --global_batch_size"),
        ({"batch_plan": BatchPlan(9, SEQ), "micro_batch_size": 2}, r"--global_batch_size 9: must be a multiple of 2"),
    ],
)
def test_batches_that_cannot_be_made(data, change, message):
    options = {
        "first_step": 0,
        "batch_plan": BatchPlan(8, SEQ),
        "micro_batch_size": 2,
        "rank": 0,
        "world_size": 1,
        **change,
    }
    with pytest.raises(UserError, match=message):
        step_batches(data, **options)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"seq_length": 1000}, "tokens make no sequence of 1000; lower --seq_length"),
        ({"seq_length": 0}, "--seq_length 0"),
        ({"packing": "first_fit"}, "--packing first_fit: must be one of concatenate, best_fit"),
        ({"fim_rate": 1.5}, "--fim_rate 1.5: must be from 0 to 1"),
        ({"fim_rate": 0.5}, "no tokens for fill-in-the-middle; prepare the data again with --fim"),
    ],
)
def test_settings_that_cannot_be_met(tmp_path, options, message):
    corpus = open_corpus(tmp_path / "c", LENGTHS, fim_tokens=None)
    with pytest.raises(UserError, match=message):
        TrainingData([(corpus, 1.0)], **{"seq_length": 4, "seed": 0, **options})


def test_sources_with_different_tokenizers_are_refused(tmp_path):
    one, two = (open_corpus(tmp_path / name, LENGTHS, tokenizer=f'"{name}"') for name in "ab")
    with pytest.raises(
        UserError, match=r"b: prepared with another tokenizer than .*a; prepare it again with --tokenizer"
    ):
        TrainingData([(one, 1.0), (two, 1.0)], 4, seed=0)


def test_number_of_workers(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(32)))
    assert default_num_workers("cpu", 1) == 0
    assert [default_num_workers("cuda", ranks) for ranks in (1, 8, 16, 32)] == [4, 3, 1, 1]
