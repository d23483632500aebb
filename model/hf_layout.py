"""Hugging Face's file layout of the weights: which tensor of a file is which part of which of our tensors."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from model.config import ModelConfig
from model.transformer import DeepseekForCausalLM


class FilePart(NamedTuple):
    """One tensor of the files: its name there, our tensor's name, and where in it it lies."""

    file_name: str
    name: str
    shape: tuple[int, ...]
    expert: int | None = None  # first index into our fused tensor
    rows: slice = slice(None)  # of that expert: gate and up lie below one another
    keeps_float32: bool = False  # whatever dtype was asked for

    def of(self, tensor: Tensor) -> Tensor:
        """The part of our tensor, a view."""
        return tensor if self.expert is None else tensor[self.expert, self.rows]


def file_parts(config: ModelConfig) -> Iterator[FilePart]:
    """Every tensor of an architecture's files, layer by layer; experts one by one, MTP at num_hidden_layers + k.

    Tied heads are not repeated. Router weights and balancing biases stay float32.
    """
    with torch.device("meta"):
        model = DeepseekForCausalLM(config)
    inner = config.moe_intermediate_size or 0
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        prefix, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for expert in range(tensor.shape[0]):
                for row, part in ((0, "gate_proj"), (inner, "up_proj")):
                    file_name = f"{prefix}.{expert}.{part}.weight"
                    shape = (inner, config.hidden_size)
                    yield FilePart(file_name, name, shape, expert, slice(row, row + inner))
        elif last == "down_proj":
            for expert in range(tensor.shape[0]):
                yield FilePart(f"{prefix}.{expert}.down_proj.weight", name, tuple(tensor.shape[1:]), expert)
        else:
            routes = name.endswith(("mlp.gate.weight", "e_score_correction_bias"))
            yield FilePart(name, name, tuple(tensor.shape), keeps_float32=routes)


def empty_shared_experts(config: ModelConfig) -> Iterator[tuple[str, tuple[int, int]]]:
    """The tensors without elements that transformers' classes expect where an architecture has no shared experts."""
    if config.n_shared_experts or config.n_routed_experts is None:
        return
    for index in range(config.first_k_dense_replace, config.num_hidden_layers):
        for part, shape in (
            ("gate_proj", (0, config.hidden_size)),
            ("up_proj", (0, config.hidden_size)),
            ("down_proj", (config.hidden_size, 0)),
        ):
            yield f"model.layers.{index}.mlp.shared_experts.{part}.weight", shape


def is_redundant(file_name: str, config: ModelConfig) -> bool:
    """Whether a tensor of a file that is no part of the model may be passed over.

    Such are copies of the embedding and the head in MTP layers, MTP layers that the model leaves out, a tied head, the
    shared experts without elements, and the rotary frequencies that old files carry.
    """
    layer = file_name.split(".")[2] if file_name.startswith("model.layers.") else ""
    if layer.isdigit() and int(layer) >= config.num_hidden_layers:
        left_out = int(layer) >= config.num_hidden_layers + config.num_nextn_predict_layers
        return left_out or file_name.endswith((".embed_tokens.weight", ".shared_head.head.weight"))
    if file_name == "lm_head.weight":
        return config.tie_word_embeddings
    return file_name.endswith(".rotary_emb.inv_freq") or file_name in dict(empty_shared_experts(config))
