"""A checkpoint's weights alone, put together from whatever ranks and ZeRO stage saved them."""

import contextlib
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.config import ModelConfig
from recipes.cluster.launch import quiet_deepspeed
from recipes.config.errors import UserError
from recipes.training.checkpoint_files import (
    MANIFEST,
    CheckpointError,
    checkpoints_folder,
    list_checkpoints,
    read_state,
    verify_sizes,
)
from recipes.training.expert_parallel_weights import assemble_weights, load_saved
from recipes.training.tensor_parallel_weights import assemble_shards


class WholeTensors(Mapping[str, Tensor]):
    """A checkpoint's tensors, each put together from the ranks' parts when it is asked for."""

    def __init__(self, parts: dict[str, Any]) -> None:
        self._parts = parts

    def __getitem__(self, name: str) -> Tensor:
        return self._parts[name].contiguous()

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a path means: itself, or a run's newest complete one.

    Raises:
        UserError: there is no complete checkpoint.
    """
    checkpoint = path
    if not (path / MANIFEST).is_file():
        found = list_checkpoints(checkpoints_folder(path))
        if not found:
            raise UserError(f"{path}: holds no complete checkpoint; give a run's or a checkpoint's folder")
        checkpoint = found[0]
    try:
        verify_sizes(checkpoint)
    except CheckpointError as error:
        raise UserError(str(error)) from None
    return checkpoint


def load_model_state(path: Path) -> tuple[ModelConfig, WholeTensors, Path]:
    """The weights of a checkpoint in float32, from any ZeRO stage and world size, read when they are used.

    Args:
        path: a run's folder (its newest complete checkpoint) or a checkpoint's folder.
    Returns:
        The model's configuration; name -> parameter or buffer; the tokenizer's folder.
    Raises:
        UserError: there is no complete checkpoint.
    """
    checkpoint = find_checkpoint(path)
    quiet_deepspeed()
    config, tokenizer = ModelConfig.from_file(checkpoint / "config.json"), checkpoint / "tokenizer"
    state = read_state(checkpoint)
    if state.autoep_size:
        return config, WholeTensors(assemble_weights(checkpoint)), tokenizer
    if state.autotp_size > 1:
        return config, WholeTensors(assemble_shards(checkpoint, state.autotp_size)), tokenizer
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    if state.zero_stage == 0:
        tensors = dict(load_saved(checkpoint / "mp_rank_00_model_states.pt")["module"])
    else:
        silence = io.StringIO()  # DeepSpeed prints its own progress, which is no part of a command's result
        with contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
            tensors = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint.parent), checkpoint.name, lazy_mode=True)
    tensors |= torch.load(checkpoint / "buffers.pt", map_location="cpu", weights_only=True)
    return config, WholeTensors(tensors), tokenizer
