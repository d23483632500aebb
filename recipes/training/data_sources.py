"""From `--data` to open corpora: prepared folders as they are, everything else prepared once and kept."""

import re
from pathlib import Path

from model.config import ModelConfig
from recipes.config.errors import UserError
from recipes.config.run_config import REPOSITORY, PretrainConfig
from recipes.data.corpus import PreparedCorpus, is_prepared
from recipes.data.mixture import parse_data_spec, resolve_weights
from recipes.data.prepare import PrepareSettings, fingerprint_of, prepare
from recipes.data.sources import expand_inputs
from recipes.data.tokenizer import load_tokenizer

PREPARED_FOLDER = REPOSITORY / "runs" / "data"


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
        (training corpus, its part of the tokens) for each source, and the held-out part of the first.
    Raises:
        UserError: a source is missing or damaged, or its token ids do not fit the model.
    """
    tokenizer = config.tokenizer
    specs = [parse_data_spec(spec) for spec in config.data]
    corpora = []
    for source, _ in specs:
        folder = Path(source) if is_prepared(source) else _prepare(source, tokenizer, model, config)
        corpus = PreparedCorpus.open(folder)
        corpus.check_vocab_size(model.vocab_size)
        tokenizer = tokenizer or str(corpus.tokenizer_folder)
        corpora.append(corpus)
    weights = resolve_weights(
        [corpus.num_tokens for corpus in corpora], [weight for _, weight in specs], config.mixture_temperature
    )
    return list(zip(corpora, weights, strict=True)), PreparedCorpus.open(corpora[0].folder, "heldout")


def _prepare(source: str, tokenizer: str | None, model: ModelConfig, config: PretrainConfig) -> Path:
    """Prepare one source into a folder named after it and after all that decides its content."""
    settings = PrepareSettings(tokenizer=tokenizer, vocab_size=model.vocab_size, fim=config.fim_rate > 0)
    given = load_tokenizer(tokenizer) if tokenizer else None
    fingerprint, _ = fingerprint_of(expand_inputs([source]).files, settings, given)
    name = f"{re.sub(r'[^A-Za-z0-9_.-]', '_', Path(source).stem)}-{fingerprint[:8]}"
    return prepare([source], PREPARED_FOLDER / name, tokenizer=tokenizer, vocab_size=model.vocab_size, fim=settings.fim)
