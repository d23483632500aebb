"""Conversations prepared once: token ids on disk, each with a bit that says whether it is to be learned.

The folder is a prepared corpus (see `corpus`) of kind "conversations": a document is one conversation, and a token a
uint32 whose top bit says that its prediction has loss, the rest being its id. A split's num_bytes counts the answers.
"""

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from recipes.config.errors import UserError
from recipes.data.chat_template import ChatEncoder, set_chat_template
from recipes.data.conversations import BadRecord, iter_records, messages_of
from recipes.data.corpus import FORMAT_VERSION, TOKENIZER_FOLDER, PreparedCorpus, SplitManifest, is_prepared
from recipes.data.encode import EncodedPiece, hash_text
from recipes.data.lock import held_lock, print_to_stderr
from recipes.data.preparation import make_manifest, raise_faults
from recipes.data.prepare import folder_name, hash_inputs, hash_settings, hash_tokenizer
from recipes.data.sources import SourceFile, expand_inputs
from recipes.data.tokenizer import load_tokenizer, save_tokenizer
from recipes.data.writer import CorpusWriter

KIND = "conversations"
LEARNED_BIT = 1 << 31
PIECE_RECORDS = 512


@dataclass(frozen=True)
class ConversationSettings:
    """What decides the content of a prepared folder besides its files.

    tokenizer: a folder or hub id. chat_template: a Jinja file, or None for the tokenizer's own or the default.
    holdout: the part of the conversations held out, by the hash of their messages. on_error: "stop" or "skip".
    """

    tokenizer: str
    chat_template: str | None = None
    holdout: float = 0.1
    on_error: str = "stop"


def prepare_conversations(
    spec: str,
    cache: Path,
    settings: ConversationSettings,
    *,
    show_progress: bool = True,
    report: Callable[[str], None] = print_to_stderr,
) -> Path:
    """The prepared folder of one source: itself if it is one, else made under `cache`, once, whoever asks.

    Args:
        spec: a prepared folder, or a file, folder or hub id of conversations.
    Raises:
        UserError: bad records with their file and line, a file that cannot be read, no conversation at all.
    """
    if is_prepared(spec):
        return Path(spec)
    files = expand_inputs([spec]).files
    tokenizer = load_tokenizer(settings.tokenizer)
    template = set_chat_template(tokenizer, settings.chat_template)
    shown = fingerprinted(files, settings, tokenizer)
    fingerprint = hash_settings(shown)
    output = cache / f"chat-{folder_name(spec, fingerprint)}"
    lock = output.with_name(output.name + ".lock")
    with held_lock(lock, f"prepare {output}", report, done=lambda: is_prepared(output)):
        if not is_prepared(output):
            aside = output.with_name(output.name + ".partial")
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            save_tokenizer(tokenizer, aside / TOKENIZER_FOLDER)
            writer = CorpusWriter(aside, "uint32", settings.holdout)
            try:
                largest = _write(writer, files, ChatEncoder(tokenizer), settings.on_error, show_progress)
                splits = {name: _with_largest(split, largest) for name, split in writer.finish().items()}
                if not any(split.num_documents for split in splits.values()):
                    raise UserError(f"--data {spec}: holds no conversation ({_counted(writer.counts) or 'no record'})")
            except UserError:
                shutil.rmtree(aside)
                raise
            make_manifest(
                aside,
                tokenizer,
                splits,
                inputs=[spec],
                fingerprint=fingerprint,
                settings=shown,
                dtype="uint32",
                fim_tokens=None,
                counts=dict(writer.counts),
                kind=KIND,
            ).write(aside)
            shutil.rmtree(output, ignore_errors=True)
            aside.rename(output)
            report(f"prepared {output}: {_counted(writer.counts)}; chat template: {template}")
    return output


def fingerprinted(
    files: list[SourceFile], settings: ConversationSettings, tokenizer: PreTrainedTokenizerFast
) -> dict[str, Any]:
    """All that decides the content."""
    return {
        "kind": KIND,
        "version": FORMAT_VERSION,
        "inputs": hash_inputs(files),
        "tokenizer": hash_tokenizer(tokenizer),
        "chat_template": hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest(),
        "holdout": settings.holdout,
        "on_error": settings.on_error,
    }


def _write(
    writer: CorpusWriter, files: list[SourceFile], encoder: ChatEncoder, on_error: str, show_progress: bool
) -> int:
    """Write every conversation; returns the largest token id."""
    largest = -1
    with tqdm(desc="tokenizing", unit=" conversations", disable=not show_progress) as bar:
        for piece in encode_records(iter_records(files), encoder, on_error):
            raise_faults(piece.faults)
            if len(piece.tokens):
                largest = max(largest, int((piece.tokens & (LEARNED_BIT - 1)).max()))
            writer.append(piece)
            bar.update(len(piece.lengths))
    return largest


def encode_records(records: Iterator[tuple[Any, str]], encoder: ChatEncoder, on_error: str) -> Iterator[EncodedPiece]:
    """Pieces of conversations as tokens with LEARNED_BIT; a bad record is a fault of its piece, or counted."""
    exhausted = False
    while not exhausted:
        tokens, lengths, answer_bytes, hashes = [], [], [], []
        faults: list[str] = []
        counts: Counter[str] = Counter()
        exhausted = True
        for record, origin in records:
            try:
                if isinstance(record, BadRecord):
                    raise record
                messages = messages_of(record)
                encoded = encoder.encode(messages)
            except BadRecord as error:
                if on_error == "skip":
                    counts["skipped"] += 1
                else:
                    faults.append(f"{origin}: {error}; mend it, or leave such records out by --on_error skip")
            else:
                ids = np.array(encoded.token_ids, dtype=np.uint32)
                tokens.append(ids | np.where(encoded.learned, np.uint32(LEARNED_BIT), np.uint32(0)))
                lengths.append(len(ids))
                answer_bytes.append(encoded.answer_bytes)
                hashes.append(hash_text(json.dumps(messages).encode()))
                counts["conversations"] += 1
            if len(lengths) + len(faults) == PIECE_RECORDS:
                exhausted = False
                break
        yield EncodedPiece(
            tokens=np.concatenate(tokens) if tokens else np.empty(0, dtype=np.uint32),
            lengths=np.array(lengths, dtype=np.int64),
            num_bytes=np.array(answer_bytes, dtype=np.int64),
            hashes=hashes,
            faults=faults,
            counts=counts,
        )


def _with_largest(split: SplitManifest, largest: int) -> SplitManifest:
    """Without the bit: the shards' largest ids are for comparison with a model's vocabulary."""
    return replace(split, shards=tuple(replace(shard, max_token_id=largest) for shard in split.shards))


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(counts.items()) if number)


def open_conversations(folder: Path, split: str, verify: str = "quick") -> PreparedCorpus:
    """One split of a folder that prepare_conversations made."""
    return PreparedCorpus.open(folder, split, verify, kind=KIND)
