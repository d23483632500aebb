"""Prepared corpora with token ids chosen by the test, and the naive readings that the tests compare with."""

import hashlib
from collections import Counter
from pathlib import Path

import numpy as np

from recipes.data.corpus import SPLITS, Manifest, PreparedCorpus, describe_file
from recipes.data.encode import EncodedPiece
from recipes.data.writer import CorpusWriter

EOS, PAD, FIM = 1, 2, (3, 4, 5)
FIRST_ID = 10  # of the ids that stand for text


def write_corpus(
    folder: Path,
    documents: list[list[int]],
    *,
    holdout: float = 0.0,
    pad_token_id: int = PAD,
    fim_tokens: tuple[int, int, int] | None = FIM,
    dtype: str = "uint16",
    shard_tokens: int = 1 << 20,
    tokenizer: str = "{}",
) -> Path:
    """A prepared folder that holds `documents` (lists of ids, without EOS) one after the other."""
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "tokenizer" / "tokenizer.json").write_text(tokenizer)
    writer = CorpusWriter(folder, dtype, holdout, shard_tokens)
    for number, document in enumerate(documents):  # one piece each, so that shards may roll over anywhere
        tokens = np.array([*document, EOS], dtype=dtype)
        text_hash = hashlib.blake2b(f"{number}".encode(), digest_size=16).digest()
        lengths = np.array([len(tokens)])
        writer.append(EncodedPiece(tokens, lengths, lengths * 3, [text_hash], [], Counter(documents=1)))
    splits = writer.finish()
    tokenizer_file = describe_file(folder, "tokenizer/tokenizer.json")
    hashes = [file.sha256 for split in SPLITS for file in splits[split].shards]
    Manifest(
        inputs=["test"],
        fingerprint="test",
        settings={},
        dtype=dtype,
        vocab_size=1000,
        eos_token_id=EOS,
        pad_token_id=pad_token_id,
        fim_tokens=fim_tokens,
        tokenizer_file=tokenizer_file,
        counts={},
        splits=splits,
        content_hash=" ".join(hashes),
    ).write(folder)
    return folder


def numbered_documents(lengths: list[int]) -> list[list[int]]:
    """Documents of the given lengths whose ids count up through all of them, so that every token is told apart."""
    ids = iter(range(FIRST_ID, FIRST_ID + sum(lengths)))
    return [[next(ids) for _ in range(length)] for length in lengths]


def open_corpus(folder: Path, lengths: list[int], split: str = "train", **options: object) -> PreparedCorpus:
    return PreparedCorpus.open(write_corpus(folder, numbered_documents(lengths), **options), split)  # type: ignore[arg-type]


def flat(documents: list[list[int]]) -> list[int]:
    """All documents one after the other, each with its EOS."""
    return [token for document in documents for token in [*document, EOS]]
