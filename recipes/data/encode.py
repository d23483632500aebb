"""Tokenizing pieces in several processes. No import of transformers or torch here, so that a process starts at once."""

import hashlib
import multiprocessing
import os
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from recipes.data.reading import Documents, read_piece
from recipes.data.sources import Piece

HASH_BYTES = 16
# One call of the tokenizer gets at most this much of a text: its memory is tens of times the text's.
LONGEST_ENCODED_TEXT = 1 << 18


@dataclass(frozen=True)
class EncoderSettings:
    """All that a tokenizing process needs. vocab_size: ids at or above it are a fault."""

    tokenizer_json: str
    eos_token_id: int
    vocab_size: int
    text_key: str
    on_error: str

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)


@dataclass
class EncodedPiece:
    """Documents as token ids, each ended by EOS.

    tokens: all documents one after the other; lengths: tokens of each; num_bytes: UTF-8 bytes of each text;
    hashes: 16 bytes of each text's hash.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    num_bytes: np.ndarray
    hashes: list[bytes]
    faults: list[str]
    counts: Counter[str]


class Encoder:
    """Turns pieces into token ids."""

    def __init__(self, settings: EncoderSettings) -> None:
        self.settings = settings
        self.tokenizer = Tokenizer.from_str(settings.tokenizer_json)
        # A document that spells out "<|endoftext|>" must not end the document.
        self.tokenizer.encode_special_tokens = True

    def encode(self, piece: Piece) -> EncodedPiece:
        if piece.kind == "megatron":
            return self.take_megatron(piece)
        documents = read_piece(piece, self.settings.text_key, self.settings.on_error)
        ids = self.encode_texts(documents.texts)
        self.check_ids(ids, documents)
        return self.pack(ids, documents)

    def encode_texts(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text, EOS included."""
        parts = [part for text in texts for part in split_long_text(text)]
        encodings = iter(self.tokenizer.encode_batch_fast(parts, add_special_tokens=False))
        ids = []
        for text in texts:
            document: list[int] = []
            for _ in split_long_text(text):
                document.extend(next(encodings).ids)
            document.append(self.settings.eos_token_id)
            ids.append(document)
        return ids

    def take_megatron(self, piece: Piece) -> EncodedPiece:
        """Token ids as they stand; the bytes are those of their decoded text."""
        from recipes.data.megatron import MegatronDocuments

        eos = self.settings.eos_token_id
        stored = MegatronDocuments(piece.path)
        documents = Documents()
        ids = []
        for index in range(piece.first, piece.payload):
            document = stored.read(index).tolist()
            if not document or document == [eos]:
                documents.counts["empty"] += 1
                continue
            ids.append(document if document[-1] == eos else [*document, eos])
            documents.origins.append(f"{piece.path}.bin: document {index}")
        self.check_ids(ids, documents)
        if not documents.faults:  # an id outside the vocabulary has no text
            texts = self.tokenizer.decode_batch([document[:-1] for document in ids], skip_special_tokens=False)
            documents.encoded = [text.encode("utf-8") for text in texts]
        return self.pack(ids, documents)

    def pack(self, ids: list[list[int]], documents: Documents) -> EncodedPiece:
        if documents.faults:  # nothing of the piece is used
            ids, documents.encoded = [], []
        lengths = np.array([len(document) for document in ids], dtype=np.int64)
        tokens = np.empty(int(lengths.sum()), dtype=self.settings.dtype)
        start = 0
        for document in ids:
            tokens[start : start + len(document)] = document
            start += len(document)
        documents.counts["documents"] += len(ids)
        return EncodedPiece(
            tokens=tokens,
            lengths=lengths,
            num_bytes=np.array([len(text) for text in documents.encoded], dtype=np.int64),
            hashes=[hash_text(text) for text in documents.encoded],
            faults=documents.faults,
            counts=documents.counts,
        )

    def check_ids(self, ids: list[list[int]], documents: Documents) -> None:
        for document, origin in zip(ids, documents.origins, strict=True):
            largest, smallest = max(document), min(document)
            if largest >= self.settings.vocab_size or smallest < 0:
                wrong = largest if largest >= self.settings.vocab_size else smallest
                documents.faults.append(
                    f"{origin}: token id {wrong} is outside the vocabulary of {self.settings.vocab_size} ids"
                )


def hash_text(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=HASH_BYTES).digest()


def split_long_text(text: str) -> Iterator[str]:
    """Cut a text for the tokenizer, after line ends where there are any; joined, the parts are the text."""
    start = 0
    while len(text) - start > LONGEST_ENCODED_TEXT:
        cut = text.rfind("\n", start, start + LONGEST_ENCODED_TEXT) + 1
        if cut <= start:
            cut = start + LONGEST_ENCODED_TEXT
        yield text[start:cut]
        start = cut
    yield text[start:]


WORKER: list[Encoder] = []  # the one encoder of a tokenizing process


def start_worker(settings: EncoderSettings) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    WORKER.append(Encoder(settings))


def encode_in_worker(piece: Piece) -> EncodedPiece:
    return WORKER[0].encode(piece)


def encode_pieces(
    pieces: Iterable[Piece], settings: EncoderSettings, num_proc: int
) -> Generator[EncodedPiece, None, None]:
    """Tokenize pieces in `num_proc` processes; results come in the pieces' order, a few pieces ahead at most.

    Raises:
        BrokenProcessPool: one of the processes was killed, as happens when memory runs out.
    """
    if num_proc == 1:
        encoder = Encoder(settings)
        yield from map(encoder.encode, pieces)
        return
    # fork: the parent may be a training script, whose imports a spawned process would repeat
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(num_proc, mp_context=context, initializer=start_worker, initargs=(settings,))
    pending: deque[Future[EncodedPiece]] = deque()
    try:
        for piece in pieces:
            pending.append(pool.submit(encode_in_worker, piece))
            if len(pending) > 2 * num_proc:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
