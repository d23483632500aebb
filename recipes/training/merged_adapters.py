"""Weights of a run that trained low-rank adapters, as those of the plain model.

Such a run's model config says what adapters its checkpoints hold, under the key `adapters`.
"""

import dataclasses
from collections import ChainMap
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from model.config import ModelConfig

ADAPTERS_KEY = "adapters"
A, B, BASE = ".lora_A.default.weight", ".lora_B.default.weight", ".base_layer.weight"  # peft's names
MODEL_STATES = "mp_rank_00_model_states.pt"


def without_adapters(model: ModelConfig) -> ModelConfig:
    """The architecture that merged weights have."""
    extras = {key: value for key, value in model.extras.items() if key != ADAPTERS_KEY}
    return dataclasses.replace(model, extras=extras)


def has_adapters(model: ModelConfig) -> bool:
    """Whether a run of this config trains adapters."""
    return ADAPTERS_KEY in model.extras


def with_frozen(state: Mapping[str, Tensor], checkpoint: Path) -> Mapping[str, Tensor]:
    """Add the frozen weights, which DeepSpeed's reader leaves out at ZeRO stage 1, in the dtype they trained in."""
    if any(name.endswith(BASE) for name in state):
        return state
    saved = torch.load(checkpoint / MODEL_STATES, map_location="cpu", mmap=True, weights_only=False)["module"]
    return ChainMap(dict(state), saved)


class MergedTensors(Mapping[str, Tensor]):
    """The tensors of a checkpoint with adapters, under the plain model's names: weight + alpha / rank * B A.

    Args:
        state: name -> parameter or buffer, as the run saved them.
        model: the run's config.
    """

    def __init__(self, state: Mapping[str, Tensor], model: ModelConfig) -> None:
        self._state = state
        self._scale = model.extras[ADAPTERS_KEY]["alpha"] / model.extras[ADAPTERS_KEY]["rank"]
        self._names = {
            name.replace(BASE, ".weight"): name for name in state if not name.endswith((A, B))
        }  # the plain name -> the saved one

    def __getitem__(self, name: str) -> Tensor:
        saved = self._names[name]
        tensor = self._state[saved]
        if not saved.endswith(BASE):
            return tensor
        layer = saved.removesuffix(BASE)
        low_rank = self._state[layer + B].float() @ self._state[layer + A].float()  # (out, r) (r, in) -> (out, in)
        return tensor.float() + self._scale * low_rank

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
