"""A trained model from wherever its weights lie: a run's folder, one checkpoint, or a Hugging Face folder."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from model.config import ConfigError, ModelConfig
from model.hf_layout import FilePart, file_parts
from model.hf_weights import INDEX, SINGLE, WeightsError, parts_of_folder, parts_of_state
from model.moe import iter_routers
from model.transformer import DeepseekForCausalLM
from recipes.config.errors import UserError
from recipes.training.checkpoint_weights import load_model_state
from recipes.training.grouped_products import choose_grouped_products
from recipes.training.merged_adapters import MergedTensors, has_adapters, with_frozen, without_adapters


@dataclass(frozen=True)
class TrainedWeights:
    """Weights that have not been read yet.

    Args:
        config: of the model that was trained.
        source: (config) -> (part) -> its tensor, for that architecture or the same one without MTP layers.
        tokenizer_folder: that belongs to the model, or None where a folder came without one.
    """

    config: ModelConfig
    source: Callable[[ModelConfig], Callable[[FilePart], Tensor]]
    tokenizer_folder: Path | None


def open_weights(path: str | Path) -> TrainedWeights:
    """Find the weights of a run's folder (its newest checkpoint), a checkpoint's folder, or a Hugging Face folder.

    Raises:
        UserError: there is no such folder, or it holds no weights that can be read.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise UserError(f"{path}: no such folder; give a run's, a checkpoint's or a Hugging Face folder")
    if (folder / SINGLE).is_file() or (folder / INDEX).is_file():
        try:
            config = ModelConfig.from_file(folder / "config.json")
        except ConfigError as error:
            raise UserError(*error.faults) from None
        has_tokenizer = (folder / "tokenizer.json").is_file()
        return TrainedWeights(config, lambda wanted: parts_of_folder(folder, wanted), folder if has_tokenizer else None)
    config, state, tokenizer_folder = load_model_state(folder)
    if has_adapters(config):
        merged = MergedTensors(with_frozen(state, tokenizer_folder.parent), config)
        return TrainedWeights(without_adapters(config), lambda wanted: parts_of_state(merged, wanted), tokenizer_folder)
    return TrainedWeights(config, lambda wanted: parts_of_state(state, wanted), tokenizer_folder)


@torch.no_grad()
def load_trained_model(
    weights: TrainedWeights, *, device: torch.device | str, dtype: torch.dtype
) -> DeepseekForCausalLM:
    """Build the main model without its MTP layers, in eval mode; each tensor is read, cast and copied by itself.

    Raises:
        UserError: weights are missing or unlike the config.
    """
    choose_grouped_products(device)
    config = without_mtp(weights.config)
    with torch.device("meta"):  # nothing is held twice, nor in another dtype first
        model = DeepseekForCausalLM(config).to(dtype)
    model = model.to_empty(device=device)
    if config.tie_word_embeddings:  # to_empty made two of the one table
        model.lm_head.register_parameter("weight", model.model.embed_tokens.get_parameter("weight"))
    for _, router in iter_routers(model):
        router.tokens_per_expert.zero_()
    state = model.state_dict()
    try:
        source = weights.source(config)
        for part in file_parts(config):
            part.of(state[part.name]).copy_(source(part))
    except WeightsError as error:
        raise UserError(*error.faults) from None
    return model.eval()


def without_mtp(config: ModelConfig) -> ModelConfig:
    """The same architecture without multi-token prediction."""
    return ModelConfig.from_dict(json.loads(json.dumps(config.to_dict())) | {"num_nextn_predict_layers": 0})
