"""A corpus of gigabytes is read without loading it."""

import os

import numpy as np
import psutil
import pytest

from recipes.data import corpus
from recipes.data.corpus import (
    SPLITS,
    DataFile,
    Manifest,
    PreparedCorpus,
    ShardedTokens,
    SplitManifest,
    describe_file,
)
from recipes.data.loader import TrainingData

SHARD_TOKENS, NUM_SHARDS, DOCUMENT_TOKENS = 1 << 29, 4, 1000  # four shards of 1 GiB


@pytest.fixture(scope="module")
def four_gigabytes(tmp_path_factory):
    """A prepared folder of 4 GiB of zeros, as sparse files that take no room on disk."""
    folder = tmp_path_factory.mktemp("large")
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text("{}")
    shards = []
    for number in range(NUM_SHARDS):
        path = folder / f"train-{number:05d}.bin"
        path.touch()
        os.truncate(path, 2 * SHARD_TOKENS)
        shards.append(DataFile(path.name, 2 * SHARD_TOKENS, "not hashed: too large for the quick verification"))
    num_tokens = NUM_SHARDS * SHARD_TOKENS
    ends = np.arange(DOCUMENT_TOKENS, num_tokens + 1, DOCUMENT_TOKENS, dtype="<i8")
    ends[-1] = num_tokens
    ends.tofile(folder / "train.ends")
    (folder / "heldout.ends").touch()
    train = SplitManifest(num_tokens, 1, len(ends), tuple(shards), describe_file(folder, "train.ends"))
    heldout = SplitManifest(0, 0, 0, (), describe_file(folder, "heldout.ends"))
    Manifest(
        inputs=[],
        fingerprint="",
        settings={},
        dtype="uint16",
        vocab_size=10,
        eos_token_id=1,
        pad_token_id=2,
        fim_tokens=None,
        tokenizer_file=describe_file(folder, "tokenizer/tokenizer.json"),
        counts={},
        splits=dict(zip(SPLITS, (train, heldout), strict=True)),
        content_hash="",
    ).write(folder)
    return folder


@pytest.mark.parametrize("document_mask", [False, True])
def test_memory_does_not_grow_with_the_corpus(four_gigabytes, document_mask):
    process = psutil.Process()
    before = process.memory_info().rss
    data = TrainingData([(PreparedCorpus.open(four_gigabytes), 1.0)], 2048, seed=0, document_mask=document_mask)
    assert data.num_sequences == (NUM_SHARDS * SHARD_TOKENS - 1) // 2048
    shards = set()
    for index in range(12_000):  # through a mapping, these would leave 12,000 x 64 KiB = 790 MB of pages
        source, sequence, _ = data.locate(index)
        shards.add(sequence * 2048 // SHARD_TOKENS)
        data.sample(index)
    assert shards == {0, 1, 2, 3}
    assert process.memory_info().rss - before < 200e6


def test_a_reader_of_many_shards_keeps_few_of_them_open(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "MOST_OPEN_SHARDS", 3)
    paths = [tmp_path / f"{number}.bin" for number in range(8)]
    for number, path in enumerate(paths):
        np.full(4, number, dtype="<u2").tofile(path)
    tokens = ShardedTokens(paths, np.dtype("<u2"))
    before = psutil.Process().num_fds()
    for _ in range(2):
        assert tokens[0 : len(tokens)].tolist() == [number for number in range(8) for _ in range(4)]
    assert psutil.Process().num_fds() == before + 3 and list(tokens.descriptors) == [5, 6, 7]
