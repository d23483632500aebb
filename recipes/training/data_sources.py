"""From `--data` to open corpora: prepared folders as they are, everything else prepared once and kept."""

import re
from pathlib import Path

from model.config import ModelConfig
from recipes.config.errors import UserError
from recipes.config.run_config import REPOSITORY, PretrainConfig
from recipes.data.corpus import PreparedCorpus, is_prepared
from recipes.data.prepare import PrepareSettings, fingerprint_of, prepare
from recipes.data.sources import expand_inputs
from recipes.data.tokenizer import load_tokenizer

PREPARED_FOLDER = REPOSITORY / "runs" / "data"


def parse_data_spec(spec: str) -> tuple[str, float]:
    """Split `source=weight`; the weight is 1 where none is given.

    Raises:
        UserError: the weight is not a positive number.
    """
    source, equals, weight = spec.rpartition("=")
    if not equals or Path(spec).exists():
        return spec, 1.0
    try:
        value = float(weight)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise UserError(f"--data {spec}: the weight {weight!r} must be a positive number, as in {source}=0.7")
    return source, value


def check_data(config: PretrainConfig) -> None:
    """Find, without reading them, that all sources are there.

    Raises:
        UserError: for each one that is not.
    """
    faults: list[str] = []
    for spec in config.data:
        try:
            source, _ = parse_data_spec(spec)
            if not is_prepared(source):
                expand_inputs([source])
        except UserError as error:
            faults += [fault if fault.startswith("--data") else f"--data {spec}: {fault}" for fault in error.faults]
    if faults:
        raise UserError(*faults)


def open_sources(
    config: PretrainConfig, model: ModelConfig
) -> tuple[list[tuple[PreparedCorpus, float]], PreparedCorpus]:
    """Open every source, preparing what is not prepared yet.

    A tokenizer that is trained here is trained on the first source and used for all.

    Returns:
        (training corpus, weight) for each source, and the held-out part of the first.
    Raises:
        UserError: a source is missing or damaged, or its token ids do not fit the model.
    """
    tokenizer = config.tokenizer
    sources = []
    for spec in config.data:
        source, weight = parse_data_spec(spec)
        folder = Path(source) if is_prepared(source) else _prepare(source, tokenizer, model.vocab_size)
        corpus = PreparedCorpus.open(folder)
        corpus.check_vocab_size(model.vocab_size)
        tokenizer = tokenizer or str(corpus.tokenizer_folder)
        sources.append((corpus, weight))
    return sources, PreparedCorpus.open(sources[0][0].folder, "heldout")


def _prepare(source: str, tokenizer: str | None, vocab_size: int) -> Path:
    """Prepare one source into a folder named after it and after all that decides its content."""
    settings = PrepareSettings(tokenizer=tokenizer, vocab_size=vocab_size)
    given = load_tokenizer(tokenizer) if tokenizer else None
    fingerprint, _ = fingerprint_of(expand_inputs([source]).files, settings, given)
    name = f"{re.sub(r'[^A-Za-z0-9_.-]', '_', Path(source).stem)}-{fingerprint[:8]}"
    return prepare([source], PREPARED_FOLDER / name, tokenizer=tokenizer, vocab_size=vocab_size)
