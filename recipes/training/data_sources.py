"""From `--data` to open corpora: prepared folders as they are, everything else prepared once and kept."""

from model.config import ModelConfig
from recipes.config.errors import UserError
from recipes.config.run_config import REPOSITORY, PretrainConfig
from recipes.data.corpus import PreparedCorpus, is_prepared
from recipes.data.mixture import parse_data_spec, resolve_weights
from recipes.data.prepare import prepare_all
from recipes.data.sources import expand_inputs

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
) -> tuple[list[tuple[PreparedCorpus, float]], list[PreparedCorpus]]:
    """Open every source, preparing what is not prepared yet.

    Returns:
        (training corpus, its part of the tokens) for each source, and the held-out part of each.
    Raises:
        UserError: a source is missing or damaged, or its token ids do not fit the model.
    """
    specs = [parse_data_spec(spec) for spec in config.data]
    folders = prepare_all(
        [source for source, _ in specs],
        PREPARED_FOLDER,
        tokenizer=config.tokenizer,
        vocab_size=model.vocab_size,
        holdout=config.holdout,
        text_key=config.text_key,
        on_error=config.on_error,
        fim=config.fim_rate > 0,
    )
    corpora = [PreparedCorpus.open(folder, verify=config.verify_data) for folder in folders]
    for corpus in corpora:
        corpus.check_vocab_size(model.vocab_size)
    weights = resolve_weights(
        [corpus.num_tokens for corpus in corpora], [weight for _, weight in specs], config.mixture_temperature
    )
    heldout = [PreparedCorpus.open(folder, "heldout", verify=config.verify_data) for folder in folders]
    return list(zip(corpora, weights, strict=True)), heldout
