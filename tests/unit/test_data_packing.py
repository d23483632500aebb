"""Packing: each token is predicted once, documents stay whole, and fill-in-the-middle only rearranges."""

from collections import Counter

import numpy as np
import pytest

from recipes.data.fim import BLOCK_DOCUMENTS, FimDocuments, PlainDocuments
from recipes.data.loader import TrainingData
from recipes.data.packing import BestFitPacking, ConcatenatedPacking, best_fit
from tests.data_corpora import EOS, FIM, FIRST_ID, PAD, flat, numbered_documents, open_corpus

LENGTHS = [3, 1, 12, 7, 5, 30, 2, 2, 9, 41, 1, 6]


def predicted(samples):
    """How often each (token, next token) is a prediction that counts."""
    pairs = Counter()
    for sample in samples:
        for token, label in zip(sample["input_ids"].tolist(), sample["labels"].tolist(), strict=True):
            if label != -100:
                pairs[token, label] += 1
    return pairs


@pytest.mark.parametrize("shard_tokens", [1, 20, 1 << 20])  # 1: every document in a shard of its own
@pytest.mark.parametrize("seq_length", [1, 4, 10, 200])
def test_concatenated_rows_are_windows(tmp_path, seq_length, shard_tokens):
    corpus = open_corpus(tmp_path / "c", LENGTHS, shard_tokens=shard_tokens)
    stream = flat(numbered_documents(LENGTHS))
    if seq_length >= len(stream):
        assert ConcatenatedPacking(PlainDocuments(corpus), seq_length).num_sequences == 0
        return
    packing = ConcatenatedPacking(PlainDocuments(corpus), seq_length)
    assert packing.num_sequences == (len(stream) - 1) // seq_length
    for index in range(packing.num_sequences):
        row = packing.row(index, False)
        assert row.tokens.tolist() == stream[index * seq_length : (index + 1) * seq_length + 1]
        assert row.document_ids is None and row.num_real == seq_length + 1


def test_each_token_is_predicted_once(tmp_path):
    corpus = open_corpus(tmp_path / "c", LENGTHS)
    data = TrainingData([(corpus, 1.0)], seq_length=4, seed=0)
    stream = flat(numbered_documents(LENGTHS))
    kept = data.num_sequences * 4 + 1
    got = predicted(data.sample(index) for index in range(data.num_sequences))
    assert got == Counter(zip(stream[: kept - 1], stream[1:kept], strict=True))


def test_document_mask_by_hand(tmp_path):
    """Documents 10 11 E | 12 E | 13 14 15 16 E in rows of 5: 10 11 E 12 E 13, then 13 14 15 16 E."""
    corpus = open_corpus(tmp_path / "c", [2, 1, 4])
    data = TrainingData([(corpus, 1.0)], seq_length=5, seed=0, document_mask=True)
    sample = data.sample(0)
    assert data.num_sequences == 1
    assert sample["input_ids"].tolist() == [10, 11, EOS, 12, EOS]
    assert sample["labels"].tolist() == [11, EOS, -100, EOS, -100]
    assert sample["position_ids"].tolist() == [0, 1, 2, 0, 1]
    assert sample["document_ids"].tolist() == [0, 0, 0, 1, 1]
    plain = TrainingData([(corpus, 1.0)], seq_length=5, seed=0).sample(0)
    assert plain["labels"].tolist() == [11, EOS, 12, EOS, 13]
    assert plain["position_ids"].tolist() == [0, 1, 2, 3, 4] and "document_ids" not in plain


def test_best_fit_by_hand(tmp_path):
    """Rows of 6 tokens; documents of 3, 8, 2, 4 tokens with EOS. The one of 8 gives one full row and a rest of 3."""
    corpus = open_corpus(tmp_path / "c", [2, 7, 1, 3])
    packing = BestFitPacking(PlainDocuments(corpus), 5, PAD)
    rows = [packing.row(index, True) for index in range(packing.num_sequences)]
    assert [row.tokens.tolist() for row in rows] == [
        [12, 13, 14, 15, 16, 17],
        [19, EOS, 20, 21, 22, EOS],  # the longest, and what fits beside it best; in the order of the corpus
        [10, 11, EOS, 17, 18, EOS],
    ]
    assert [row.document_ids.tolist() for row in rows] == [[0] * 6, [0] * 2 + [1] * 4, [0] * 3 + [1] * 3]
    assert packing.num_padding == 0


@pytest.mark.parametrize("seq_length", [5, 16])
def test_best_fit_cuts_no_document_that_fits(tmp_path, seq_length):
    corpus = open_corpus(tmp_path / "c", LENGTHS)
    data = TrainingData([(corpus, 1.0)], seq_length, seed=0, document_mask=True, packing="best_fit")
    samples = [data.sample(index) for index in range(data.num_sequences)]
    within_documents = Counter()
    for document in numbered_documents(LENGTHS):
        within_documents.update(zip(document, [*document[1:], EOS], strict=True))
        if len(document) + 1 <= seq_length + 1:  # whole in one row: its inputs and its EOS stand side by side
            whole = [s for s in samples if set(document) <= set(s["input_ids"].tolist())]
            assert len(whole) == 1
    assert predicted(samples) == within_documents
    for sample in samples:
        real = sample["valid_tokens"]
        assert not np.any(np.diff(real.astype(int)) > 0), "padding only at the end"
        assert np.all(sample["input_ids"][~real] == PAD) and np.all(sample["labels"][~real] == -100)
    padding = data.packings[0].num_padding
    assert padding == sum(seq_length + 1 - data.packings[0].row(i, False).num_real for i in range(len(samples)))


def test_best_fit_decreasing_by_hand():
    bins, num_bins = best_fit(np.array([2, 7, 5, 3, 4, 1, 8]), 10)
    # 8 -> bin 0 (2 left), 7 -> 1 (3 left), 5 -> 2 (5 left), 4 -> 2 (1 left), 3 -> 1 (0 left), 2 -> 0 (0), 1 -> 2 (0)
    assert num_bins == 3 and bins.tolist() == [0, 1, 2, 1, 2, 2, 0]
    assert best_fit(np.array([8, 5, 2]), 10)[0].tolist() == [0, 1, 0], "the tightest room, not the widest"


def naive_fim(documents, chosen, cut, fim_tokens=FIM):
    """The same documents rearranged one by one, without any arithmetic on positions."""
    prefix_token, suffix_token, middle_token = fim_tokens
    stream = []
    for number, document in enumerate(documents):
        if chosen[number]:
            first, second = cut(number, len(document))
            document = [
                prefix_token,
                *document[:first],
                suffix_token,
                *document[second:],
                middle_token,
                *document[first:second],
            ]
        stream += [*document, EOS]
    return stream


@pytest.mark.parametrize("fim_rate", [0.4, 1.0])
def test_fim_only_rearranges(tmp_path, fim_rate):
    documents = numbered_documents(LENGTHS)
    fim = FimDocuments(open_corpus(tmp_path / "c", LENGTHS), fim_rate, 7, FIM)
    chosen = fim.chosen(0, len(documents))
    expected = naive_fim(documents, chosen, fim.cuts)
    assert 0 < chosen.sum() <= len(documents) and fim.num_tokens == len(expected)
    for start in range(len(expected)):
        for stop in {start, start + 1, *range(start, len(expected), 5), len(expected)}:
            assert fim.read(start, stop).tolist() == expected[start:stop]
    ends = [position + 1 for position, token in enumerate(expected) if token == EOS]
    assert fim.ends(0, len(documents)).tolist() == ends
    assert [fim.document_at(p) for p in range(len(expected))] == [
        sum(e <= p for e in ends) for p in range(len(expected))
    ]
    assert sorted(t for t in expected if t >= FIRST_ID) == sorted(t for d in documents for t in d), "nothing is lost"


def test_fim_rate_seed_and_blocks(tmp_path):
    num_documents = 3 * BLOCK_DOCUMENTS + 5
    corpus = open_corpus(tmp_path / "c", [2] * num_documents)
    fim, again, other = (FimDocuments(corpus, 0.1, seed, FIM) for seed in (1, 1, 2))
    chosen = fim.chosen(0, num_documents)
    # A binomial share: standard deviation sqrt(0.1 * 0.9 / 3077) = 0.0054; five of them
    assert abs(chosen.mean() - 0.1) < 5 * 0.0054
    assert np.array_equal(chosen, again.chosen(0, num_documents))
    assert not np.array_equal(chosen, other.chosen(0, num_documents))
    ends = np.cumsum(np.where(chosen, 6, 3))
    assert fim.num_tokens == ends[-1] and np.array_equal(fim.ends(1000, 2100), ends[1000:2100])
    for document in (0, 1, 1023, 1024, 2047, num_documents - 1):
        assert fim.document_at(int(ends[document]) - 1) == document
    middles = [fim.cuts(document, 1000) for document in range(400)]
    assert all(0 <= first <= second <= 1000 for first, second in middles)
    # Two sorted uniform draws have means of a third and two thirds; the deviation is 236 / sqrt(400) = 12; five of them
    assert np.mean(middles, axis=0) == pytest.approx([333, 667], abs=60)


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
def test_fim_sample_is_a_function_of_seed_and_index(tmp_path, packing):
    corpus = open_corpus(tmp_path / "c", LENGTHS)
    runs = [TrainingData([(corpus, 1.0)], 8, seed=5, packing=packing, fim_rate=0.5) for _ in range(2)]
    order = list(range(2 * runs[0].num_sequences))
    forwards = {index: runs[0].sample(index)["input_ids"].tolist() for index in order}
    backwards = {index: runs[1].sample(index)["input_ids"].tolist() for index in reversed(order)}
    assert forwards == backwards
    assert {token for row in forwards.values() for token in row} >= set(FIM)
