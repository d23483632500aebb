"""The work of preparing one corpus, in a folder of its own until it is whole."""

import contextlib
import hashlib
import itertools
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from recipes.config.errors import UserError
from recipes.data.corpus import SPLITS, TOKENIZER_FOLDER, Manifest, SplitManifest, describe_file
from recipes.data.cutting import iter_pieces
from recipes.data.encode import EncoderSettings, encode_pieces, hash_text
from recipes.data.reading import ON_ERROR_CHOICES, read_piece
from recipes.data.sources import Inputs, Piece, SourceFile
from recipes.data.tokenizer import (
    add_fim_tokens,
    encoder_json,
    find_fim_tokens,
    load_tokenizer,
    save_tokenizer,
    train_tokenizer,
    vocabulary_size,
)
from recipes.data.writer import JOURNAL_NAME, CorpusWriter, holdout_rule

DEFAULT_VOCAB_SIZE = 4096
TOKENIZER_TRAINING_BYTES = 256 << 20  # more text hardly moves the merges and only takes longer
JOURNAL_SECONDS = 10.0
SHOWN_FAULTS = 10


@dataclass(frozen=True)
class PrepareSettings:
    """What decides the content of a prepared corpus besides its inputs.

    tokenizer: a name or folder, or None to train a byte-level BPE of vocab_size ids on the training documents.
    vocab_size: of the tokenizer to train (None: 4,096); with a tokenizer given, the model's, which no id may reach
        (None: no check).
    holdout: the part of documents held out, by the hash of their text.
    text_key: the key or column of the text in jsonl, csv, parquet and data sets.
    on_error: for a bad record: "stop" with its file and line; "replace" bytes that are not UTF-8; "skip" it.
    fim: give the tokenizer tokens for fill-in-the-middle if it has none.
    """

    tokenizer: str | None = None
    vocab_size: int | None = None
    holdout: float = 0.1
    text_key: str = "text"
    on_error: str = "stop"
    fim: bool = False

    def check(self) -> None:
        faults = []
        if not 0.0 <= self.holdout < 1.0:
            faults.append(f"--holdout {self.holdout}: must be at least 0 and below 1")
        if not self.text_key:
            faults.append("--text_key '': must name the key of the text")
        if self.on_error not in ON_ERROR_CHOICES:
            faults.append(f"--on_error {self.on_error}: must be one of {', '.join(ON_ERROR_CHOICES)}")
        if self.vocab_size is not None and self.vocab_size < 1:
            faults.append(f"--vocab_size {self.vocab_size}: must be at least 1")
        if faults:
            raise UserError(*faults)


@dataclass
class Preparation:
    """One run of preparing, by the one process that holds the lock.

    given: the tokenizer that settings.tokenizer names. fingerprint, fingerprinted: see `fingerprint_of`.
    """

    inputs: list[str]
    found: Inputs
    output: Path
    settings: PrepareSettings
    given: PreTrainedTokenizerFast | None
    fingerprint: str
    fingerprinted: dict[str, Any]
    show_progress: bool
    report: Callable[[str], None]

    def run(self, num_proc: int) -> None:
        started = time.monotonic()
        folder = self.open_partial_folder()
        try:
            tokenizer = self.find_tokenizer(folder)
            encoder = self.encoder_settings(tokenizer)
            writer = CorpusWriter(folder, encoder.dtype.name, self.settings.holdout)
            self.write_documents(writer, encoder, num_proc)
            splits = writer.finish()
            self.check_not_empty(splits, writer.counts)
        except UserError:
            # Mended files are other inputs: what was made of these cannot serve. A hub that failed may answer again.
            streamed = any(file.kind == "hub" for file in self.found.files)
            if not (streamed and (folder / JOURNAL_NAME).exists()):
                shutil.rmtree(folder)
            raise
        manifest = self.make_manifest(folder, tokenizer, encoder, splits, dict(writer.counts))
        manifest.write(folder)
        self.publish(folder)
        self.report(describe(self.output, manifest, len(self.found.files), time.monotonic() - started))
        if self.settings.holdout > 0 and not splits["heldout"].num_documents:
            number = splits["train"].num_documents
            self.report(f"warning: {self.output}: none of its {number} documents fell into the part to hold out")

    def open_partial_folder(self) -> Path:
        """The folder to work in; what an interrupted run with the same inputs and settings left there is kept."""
        folder = self.output.with_name(self.output.name + ".partial")
        stamp = folder / "fingerprint"
        if folder.exists() and not (stamp.is_file() and stamp.read_text() == self.fingerprint):
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        stamp.write_text(self.fingerprint)
        return folder

    def find_tokenizer(self, folder: Path) -> PreTrainedTokenizerFast:
        """The tokenizer, saved in `folder`: the one given, the one that an interrupted run trained, or a new one."""
        saved = folder / TOKENIZER_FOLDER
        if saved.is_dir():
            return load_tokenizer(saved)
        tokenizer = self.given
        if tokenizer is None:
            texts = training_texts(self.found.files, self.settings, TOKENIZER_TRAINING_BYTES)
            tokenizer = train_tokenizer(texts, self.settings.vocab_size or DEFAULT_VOCAB_SIZE)
        if self.settings.fim:
            add_fim_tokens(tokenizer)
        aside = folder / (TOKENIZER_FOLDER + ".new")
        save_tokenizer(tokenizer, aside)
        aside.rename(saved)
        return tokenizer

    def encoder_settings(self, tokenizer: PreTrainedTokenizerFast) -> EncoderSettings:
        size = vocabulary_size(tokenizer)
        return EncoderSettings(
            tokenizer_json=encoder_json(tokenizer),
            eos_token_id=int(tokenizer.eos_token_id),
            vocab_size=size if self.settings.vocab_size is None else min(size, self.settings.vocab_size),
            text_key=self.settings.text_key,
            on_error=self.settings.on_error,
        )

    def write_documents(self, writer: CorpusWriter, encoder: EncoderSettings, num_proc: int) -> None:
        """Tokenize and write all pieces that the writer has not done yet."""
        pieces = iter_pieces(self.found.files, self.settings.text_key)
        if writer.pieces_done:
            self.report(f"{self.output}: going on after {writer.num_documents} documents that an earlier run did")
        done_bytes = sum(piece.num_bytes for piece in itertools.islice(pieces, writer.pieces_done))
        sizes: list[int] = []  # of the pieces that were handed out, in their order
        known = all(file.num_bytes and not file.path.endswith((".gz", ".zst")) for file in self.found.files)
        bar = tqdm(
            desc="tokenizing",
            total=sum(file.num_bytes for file in self.found.files) if known else None,
            initial=done_bytes,
            unit="B",
            unit_scale=True,
            disable=not self.show_progress,
        )
        journaled = time.monotonic()
        # closing: an error here must also end the tokenizing processes here, not when the generator is collected
        with bar, contextlib.closing(encode_pieces(noting_sizes(pieces, sizes), encoder, num_proc)) as results:
            try:
                for index, encoded in enumerate(results):
                    raise_faults(encoded.faults)
                    writer.append(encoded)
                    bar.update(sizes[index])
                    if time.monotonic() - journaled > JOURNAL_SECONDS:
                        writer.save_journal()
                        journaled = time.monotonic()
            except BaseException:
                writer.save_after_interruption()
                raise

    def check_not_empty(self, splits: dict[str, SplitManifest], counts: dict[str, int]) -> None:
        if splits["train"].num_documents:
            return
        what = ", ".join(f"{number} {name}" for name, number in sorted(counts.items()) if number)
        raise UserError(
            f"--input {' '.join(self.inputs)}: the corpus is empty: no document is left to train on "
            f"({what or 'nothing was read'})"
        )

    def make_manifest(
        self,
        folder: Path,
        tokenizer: PreTrainedTokenizerFast,
        encoder: EncoderSettings,
        splits: dict[str, SplitManifest],
        counts: dict[str, int],
    ) -> Manifest:
        return make_manifest(
            folder,
            tokenizer,
            splits,
            inputs=self.inputs,
            fingerprint=self.fingerprint,
            settings=self.fingerprinted,
            dtype=encoder.dtype.name,
            fim_tokens=find_fim_tokens(tokenizer),
            counts=counts,
        )

    def publish(self, folder: Path) -> None:
        """Give the finished folder its name, in one step."""
        (folder / "fingerprint").unlink()
        if self.output.exists():  # an empty folder, or one to overwrite
            old = self.output.with_name(self.output.name + ".old")
            shutil.rmtree(old, ignore_errors=True)
            self.output.rename(old)
            folder.rename(self.output)
            shutil.rmtree(old)
        else:
            folder.rename(self.output)


def noting_sizes(pieces: Iterable[Piece], sizes: list[int]) -> Iterator[Piece]:
    for piece in pieces:
        sizes.append(piece.num_bytes)
        yield piece


def training_texts(files: list[SourceFile], settings: PrepareSettings, num_bytes: int) -> Iterator[str]:
    """The first `num_bytes` of text that is not held out, for training a tokenizer.

    Raises:
        UserError: bad records, or Megatron's token ids, which have no text without their tokenizer.
    """
    if any(file.kind == "megatron" for file in files):
        raise UserError("--tokenizer: Megatron's .bin/.idx holds token ids; name the tokenizer that made them")
    is_held_out = holdout_rule(settings.holdout)
    for piece in iter_pieces(files, settings.text_key):
        documents = read_piece(piece, settings.text_key, settings.on_error)
        raise_faults(documents.faults)
        for text, encoded in zip(documents.texts, documents.encoded, strict=True):
            if not is_held_out(hash_text(encoded)):
                num_bytes -= len(encoded)
                yield text
        if num_bytes <= 0:
            return


def raise_faults(faults: list[str]) -> None:
    if len(faults) > SHOWN_FAULTS:
        faults = [*faults[:SHOWN_FAULTS], f"and {len(faults) - SHOWN_FAULTS} more in the same part of the input"]
    if faults:
        raise UserError(*faults)


def describe(output: Path, manifest: Manifest, num_files: int, seconds: float) -> str:
    """The line that a preparation ends with."""
    train, heldout = manifest.splits["train"], manifest.splits["heldout"]
    num_documents = train.num_documents + heldout.num_documents
    num_bytes = train.num_bytes + heldout.num_bytes
    parts = [
        f"prepared {output}: {num_files} inputs, {num_documents} documents",
        f"{num_bytes / 1e6:.1f} MB, {train.num_tokens} tokens to train on, {heldout.num_tokens} held out",
        f"{seconds:.1f} s, {num_documents / seconds:.0f} documents/s, {num_bytes / 1e6 / seconds:.1f} MB/s",
    ]
    dropped = {name: number for name, number in manifest.counts.items() if name != "documents" and number}
    if dropped:
        parts.append(", ".join(f"{number} {name}" for name, number in sorted(dropped.items())))
    return "; ".join(parts)


def make_manifest(
    folder: Path, tokenizer: PreTrainedTokenizerFast, splits: dict[str, SplitManifest], **known: Any
) -> Manifest:
    """The manifest of a folder whose files are all written, with their hashes.

    Args:
        known: the fields of Manifest that the files and the tokenizer do not give.
    """
    tokenizer_file = describe_file(folder, f"{TOKENIZER_FOLDER}/tokenizer.json")
    files = [tokenizer_file]
    for split in SPLITS:
        files.extend([*splits[split].shards, splits[split].document_ends])
    pad = tokenizer.pad_token_id
    return Manifest(
        vocab_size=vocabulary_size(tokenizer),
        eos_token_id=int(tokenizer.eos_token_id),
        pad_token_id=int(tokenizer.eos_token_id if pad is None else pad),
        tokenizer_file=tokenizer_file,
        splits=splits,
        content_hash=hashlib.sha256(" ".join(file.sha256 for file in files).encode()).hexdigest(),
        **known,
    )
