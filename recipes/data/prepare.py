"""Preparing corpora: text of any kind becomes token ids on disk, once, however many processes ask for it."""

import errno
import hashlib
import json
import os
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from recipes.config.errors import UserError
from recipes.data.corpus import FORMAT_VERSION, SPLITS, Manifest, PreparedCorpus, is_prepared
from recipes.data.lock import held_lock, print_to_stderr
from recipes.data.preparation import (
    DEFAULT_VOCAB_SIZE,
    TOKENIZER_TRAINING_BYTES,
    Preparation,
    PrepareSettings,
    training_texts,
)
from recipes.data.sources import SourceFile, expand_inputs
from recipes.data.tokenizer import encoder_json, load_tokenizer, save_tokenizer, train_tokenizer

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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
    lock = output.with_name(output.name + ".lock")
    try:
        with held_lock(lock, f"prepare {output}", report, done=lambda: made_from(output, fingerprint)):
            if not reusable(output, fingerprint, fingerprinted, overwrite):
                for note in found.notes:
                    report(f"note: {note}")
                parts = (inputs, found, output, settings, given, fingerprint, fingerprinted, show_progress, report)
                Preparation(*parts).run(num_proc or len(os.sched_getaffinity(0)))
    except BrokenProcessPool as error:
        raise UserError(
            f"{output}: a tokenizing process was killed, most likely for lack of memory; lower --num_proc and run "
            "again, what was done is kept"
        ) from error
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        raise UserError(
            f"{output}: cannot be written: {error.strerror}; free space and run again, what was done is kept"
        ) from error
    return output


def prepare_all(
    specs: list[str],
    cache: Path,
    *,
    tokenizer: str | None = None,
    vocab_size: int | None = None,
    holdout: float = 0.1,
    text_key: str = "text",
    on_error: str = "stop",
    fim: bool = False,
    num_proc: int | None = None,
    show_progress: bool = True,
    report: Callable[[str], None] = print_to_stderr,
) -> list[Path]:
    """The prepared folder of each source that a run names; those that are not prepared yet are, under `cache`.

    All get the same tokenizer: the one given, else that of the first source which is prepared already, else one trained
    on all of them. A folder's name under `cache` holds its fingerprint, so that other settings make another folder.

    Args:
        specs: each a prepared folder, or what `expand_inputs` takes.
        cache: where to keep what is prepared here.
        The rest: see `PrepareSettings`.
    Raises:
        UserError: see `prepare`.
    """
    settings = PrepareSettings(tokenizer, vocab_size, holdout, text_key, on_error, fim)
    settings.check()
    raw = [spec for spec in specs if not is_prepared(spec)]
    prepared = [spec for spec in specs if is_prepared(spec)]
    if raw and settings.tokenizer is None:
        if prepared:
            settings = replace(settings, tokenizer=str(PreparedCorpus.open(prepared[0]).tokenizer_folder))
        elif len(raw) > 1:
            folder = shared_tokenizer(raw, cache, settings, report)
            settings = replace(settings, tokenizer=str(folder))
    folders = []
    for spec in specs:
        if is_prepared(spec):
            folders.append(Path(spec))
            continue
        output = cache / cache_name(spec, settings)
        arguments: dict[str, Any] = asdict(settings)
        folders.append(
            prepare([spec], output, num_proc=num_proc, show_progress=show_progress, report=report, **arguments)
        )
    return folders


def cache_name(spec: str, settings: PrepareSettings) -> str:
    given = load_tokenizer(settings.tokenizer) if settings.tokenizer is not None else None
    fingerprint, _ = fingerprint_of(expand_inputs([spec]).files, settings, given)
    return folder_name(spec, fingerprint)


def folder_name(spec: str, fingerprint: str) -> str:
    """What a prepared source is called in a cache: readable, and different for another content."""
    stem = "".join(character if character.isalnum() else "-" for character in Path(spec).name)
    return f"{stem}-{fingerprint[:8]}"


def shared_tokenizer(specs: list[str], cache: Path, settings: PrepareSettings, report: Callable[[str], None]) -> Path:
    """A tokenizer trained on several sources, an equal amount of text from each at most; kept under `cache`."""
    files = [expand_inputs([spec]).files for spec in specs]
    fingerprint, _ = fingerprint_of([file for source in files for file in source], settings, None)
    folder = cache / f"tokenizer-{fingerprint[:8]}"
    with held_lock(folder.with_name(folder.name + ".lock"), "train a tokenizer on all sources", report, folder.is_dir):
        if not folder.is_dir():
            share = TOKENIZER_TRAINING_BYTES // len(files)
            texts = (text for source in files for text in training_texts(source, settings, share))
            aside = folder.with_name(folder.name + ".partial")
            save_tokenizer(train_tokenizer(texts, settings.vocab_size or DEFAULT_VOCAB_SIZE), aside)
            aside.rename(folder)
    return folder


def fingerprint_of(
    files: list[SourceFile], settings: PrepareSettings, given: PreTrainedTokenizerFast | None
) -> tuple[str, dict[str, Any]]:
    """A hash of all that decides the content, and the parts of it that are shown when two differ."""
    shown = {key: value for key, value in asdict(settings).items() if key != "tokenizer"}
    shown["tokenizer"] = "trained here" if given is None else hash_tokenizer(given)
    shown["inputs"] = hash_inputs(files)
    shown["version"] = FORMAT_VERSION
    return hash_settings(shown), shown


def hash_inputs(files: list[SourceFile]) -> str:
    stamps = [(file.kind, file.path, file.identity) for file in files]
    return hashlib.sha256(json.dumps(stamps).encode()).hexdigest()


def hash_settings(shown: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()


def hash_tokenizer(tokenizer: PreTrainedTokenizerFast) -> str:
    return hashlib.sha256(f"{encoder_json(tokenizer)} {tokenizer.eos_token_id}".encode()).hexdigest()


def made_from(output: Path, fingerprint: str) -> bool:
    """Whether a folder is prepared from just these inputs and settings; may be asked while another process writes."""
    try:
        return is_prepared(output) and Manifest.read(output).fingerprint == fingerprint
    except (UserError, OSError):
        return False


def reusable(output: Path, fingerprint: str, shown: dict[str, Any], overwrite: bool) -> bool:
    """True when `output` is whole and made from the same inputs and settings.

    Raises:
        UserError: it is something else, was made otherwise and is not to be overwritten, or is damaged.
    """
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
            f"--output {output}: was prepared with other {', '.join(differing)}; name another folder, or "
            "replace it with --overwrite"
        )
    for split in SPLITS:
        PreparedCorpus.open(output, split)
    return True
