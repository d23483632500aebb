"""Preparing a corpus: text of any kind becomes token ids on disk, once, however many processes ask for it."""

import errno
import hashlib
import itertools
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from recipes.config.errors import UserError
from recipes.data.corpus import (
    FORMAT_VERSION,
    SPLITS,
    TOKENIZER_FOLDER,
    Manifest,
    PreparedCorpus,
    SplitManifest,
    is_prepared,
)
from recipes.data.encode import EncoderSettings, encode_pieces, hash_text
from recipes.data.formats import ON_ERROR_CHOICES, iter_pieces, read_piece
from recipes.data.lock import held_lock, print_to_stderr
from recipes.data.sources import Inputs, SourceFile, expand_inputs
from recipes.data.tokenizer import (
    add_fim_tokens,
    encoder_json,
    find_fim_tokens,
    load_tokenizer,
    save_tokenizer,
    train_tokenizer,
    vocabulary_size,
)
from recipes.data.writer import CorpusWriter

DEFAULT_VOCAB_SIZE = 4096
TOKENIZER_TRAINING_BYTES = 256 << 20  # more text hardly moves the merges and only takes longer
JOURNAL_SECONDS = 10.0
SHOWN_FAULTS = 10
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class PrepareSettings:
    """What decides the content of a prepared corpus besides its inputs.

    tokenizer: a name or folder, or None to train a byte-level BPE of vocab_size ids on the training documents.
    vocab_size: of the tokenizer to train; with a tokenizer given, the model's, which no id may reach (None: no check).
    holdout: the part of documents held out, by the hash of their text.
    text_key: the key or column of the text in jsonl, csv, parquet and data sets.
    on_error: what to do with a bad record: "stop" with its file and line; "replace" bytes that are not UTF-8; "skip" it.
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


def prepare(
    inputs: list[str],
    output: str | Path,
    *,
    tokenizer: str | None = None,
    vocab_size: int | None = None,
    holdout: float = 0.1,
    text_key: str = "text",
    on_error: str = "stop",
    fim: bool = False,
    num_proc: int | None = None,
    overwrite: bool = False,
    show_progress: bool = True,
    report: Callable[[str], None] = print_to_stderr,
) -> Path:
    """Tokenize `inputs` into a prepared folder, or verify the one that is there and keep it.

    Several processes may call this at once: one prepares, the others wait for it and say so. The work is done in
    `output`.partial, which takes the name `output` when it is whole; after an interruption the next call goes on there.

    Args:
        inputs: see `expand_inputs`.
        output: the folder to make.
        tokenizer, vocab_size, holdout, text_key, on_error, fim: see `PrepareSettings`.
        num_proc: tokenizing processes; None: one for each core at hand.
        overwrite: replace a folder that was prepared otherwise.
    Returns:
        output.
    Raises:
        UserError: bad input (with its file and line), a folder that was prepared otherwise, a damaged one, a full disk.
    """
    settings = PrepareSettings(tokenizer, vocab_size, holdout, text_key, on_error, fim)
    settings.check()
    found = expand_inputs(inputs)
    given = load_tokenizer(tokenizer) if tokenizer is not None else None
    fingerprint, fingerprinted = fingerprint_of(found.files, settings, given)
    output = Path(output)
    if reusable(output, fingerprint, fingerprinted, overwrite):
        return output
    try:
        with held_lock(output.with_name(output.name + ".lock"), f"prepare {output}", report):
            if not reusable(output, fingerprint, fingerprinted, overwrite):
                for note in found.notes:
                    report(f"note: {note}")
                work = Preparation(found, output, settings, given, fingerprint, fingerprinted, show_progress, report)
                work.run(num_proc or len(os.sched_getaffinity(0)))
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        raise UserError(
            f"{output}: cannot be written: {error.strerror}; free space and run again, what was done is kept"
        ) from error
    return output


def fingerprint_of(
    files: list[SourceFile], settings: PrepareSettings, given: PreTrainedTokenizerFast | None
) -> tuple[str, dict[str, Any]]:
    """A hash of all that decides the content, and the parts of it that are shown when two differ."""
    shown = {key: value for key, value in asdict(settings).items() if key != "tokenizer"}
    shown["tokenizer"] = "trained here" if given is None else hash_tokenizer(given)
    stamps = [(file.kind, file.path, file.identity) for file in files]
    shown["inputs"] = hashlib.sha256(json.dumps(stamps).encode()).hexdigest()
    shown["version"] = FORMAT_VERSION
    return hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest(), shown


def hash_tokenizer(tokenizer: PreTrainedTokenizerFast) -> str:
    return hashlib.sha256(f"{encoder_json(tokenizer)} {tokenizer.eos_token_id}".encode()).hexdigest()


def reusable(output: Path, fingerprint: str, shown: dict[str, Any], overwrite: bool) -> bool:
    """True when `output` is whole and made from the same inputs and settings."""
    if not is_prepared(output):
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise UserError(f"--output {output}: exists and is not a prepared corpus; name another folder")
        return False
    manifest = Manifest.read(output)
    if manifest.fingerprint != fingerprint:
        if overwrite:
            return False
        differing = [key for key in shown if manifest.settings.get(key) != shown[key]]
        raise UserError(
            f"--output {output}: was prepared with other {', '.join(differing)}; name another folder, or replace it with "
            "--overwrite"
        )
    for split in SPLITS:
        PreparedCorpus.open(output, split)
    return True


@dataclass
class Preparation:
    """One run of preparing, under the lock."""

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
        tokenizer = self.find_tokenizer(folder)
        size = vocabulary_size(tokenizer)
        limit = size if self.settings.vocab_size is None else min(size, self.settings.vocab_size)
        encoder = EncoderSettings(
            tokenizer_json=encoder_json(tokenizer),
            eos_token_id=int(tokenizer.eos_token_id),
            vocab_size=limit,
            text_key=self.settings.text_key,
            on_error=self.settings.on_error,
        )
        writer = CorpusWriter(folder, encoder.dtype.name, self.settings.holdout)
        self.write_documents(writer, encoder, num_proc)
        splits = writer.finish()
        self.check_not_empty(splits, writer.counts)
        manifest = self.make_manifest(tokenizer, encoder, splits, dict(writer.counts))
        manifest.write(folder)
        self.publish(folder)
        seconds = time.monotonic() - started
        self.report(describe(self.output, manifest, len(self.found.files), seconds))

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
            if any(file.kind == "megatron" for file in self.found.files):
                raise UserError("--tokenizer: Megatron's .bin/.idx holds token ids; name the tokenizer that made them")
            tokenizer = train_tokenizer(self.training_texts(), self.settings.vocab_size or DEFAULT_VOCAB_SIZE)
        if self.settings.fim:
            add_fim_tokens(tokenizer)
        aside = folder / (TOKENIZER_FOLDER + ".new")
        save_tokenizer(tokenizer, aside)
        aside.rename(saved)
        return tokenizer

    def training_texts(self) -> Iterator[str]:
        """The texts that a tokenizer is trained on: the first TOKENIZER_TRAINING_BYTES that are not held out."""
        is_held_out = CorpusWriter.holdout_rule(self.settings.holdout)
        left = TOKENIZER_TRAINING_BYTES
        for piece in iter_pieces(self.found.files, self.settings.text_key):
            documents = read_piece(piece, self.settings.text_key, self.settings.on_error)
            raise_faults(documents.faults)
            for text, encoded in zip(documents.texts, documents.encoded, strict=True):
                if not is_held_out(hash_text(encoded)):
                    left -= len(encoded)
                    yield text
            if left <= 0:
                return

    def write_documents(self, writer: CorpusWriter, encoder: EncoderSettings, num_proc: int) -> None:
        """Tokenize and write all pieces that the writer has not done yet."""
        pieces = iter_pieces(self.found.files, self.settings.text_key)
        sizes: list[int] = []  # of the pieces that were handed out, in their order

        def handed_out() -> Iterator[Any]:
            for piece in pieces:
                sizes.append(piece.num_bytes)
                yield piece

        skipped = list(itertools.islice((piece.num_bytes for piece in pieces), writer.pieces_done))
        if skipped:
            self.report(f"{self.output}: going on after {writer.num_documents} documents that are done")
        known = all(file.num_bytes and not file.path.endswith((".gz", ".zst")) for file in self.found.files)
        total = sum(file.num_bytes for file in self.found.files) if known else None
        journaled = time.monotonic()
        try:
            with tqdm(
                desc="tokenizing",
                total=total,
                initial=sum(skipped),
                unit="B",
                unit_scale=True,
                disable=not self.show_progress,
            ) as bar:
                for index, encoded in enumerate(encode_pieces(handed_out(), encoder, num_proc)):
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
        names = ", ".join(dict.fromkeys(file.path for file in self.found.files[:3]))
        raise UserError(f"{names}: the corpus is empty: no document is left to train on ({what or 'nothing was read'})")

    def make_manifest(
        self,
        tokenizer: PreTrainedTokenizerFast,
        encoder: EncoderSettings,
        splits: dict[str, SplitManifest],
        counts: dict[str, int],
    ) -> Manifest:
        tokenizer_hash = hash_tokenizer(tokenizer)
        hashes = [file.sha256 for split in SPLITS for file in (*splits[split].shards, splits[split].document_ends)]
        pad = tokenizer.pad_token_id
        return Manifest(
            fingerprint=self.fingerprint,
            settings=self.fingerprinted,
            dtype=encoder.dtype.name,
            vocab_size=vocabulary_size(tokenizer),
            eos_token_id=encoder.eos_token_id,
            pad_token_id=int(tokenizer.eos_token_id if pad is None else pad),
            fim_tokens=find_fim_tokens(tokenizer),
            tokenizer_sha256=tokenizer_hash,
            counts=counts,
            splits=splits,
            content_hash=hashlib.sha256(" ".join([tokenizer_hash, *hashes]).encode()).hexdigest(),
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


def raise_faults(faults: list[str]) -> None:
    if len(faults) > SHOWN_FAULTS:
        faults = [*faults[:SHOWN_FAULTS], f"and {len(faults) - SHOWN_FAULTS} more in the same part of the input"]
    if faults:
        raise UserError(*faults)


def describe(output: Path, manifest: Manifest, num_files: int, seconds: float) -> str:
    """The line that a preparation ends with."""
    train, heldout = manifest.splits["train"], manifest.splits["heldout"]
    num_bytes = train.num_bytes + heldout.num_bytes
    parts = [
        f"prepared {output}: {num_files} inputs, {train.num_documents + heldout.num_documents} documents",
        f"{num_bytes / 1e6:.1f} MB, {train.num_tokens} tokens to train on, {heldout.num_tokens} held out",
        f"{seconds:.1f} s, {num_files / seconds:.0f} files/s, {num_bytes / 1e6 / seconds:.1f} MB/s",
    ]
    dropped = {name: number for name, number in manifest.counts.items() if name != "documents" and number}
    if dropped:
        parts.append(", ".join(f"{number} {name}" for name, number in sorted(dropped.items())))
    return "; ".join(parts)
