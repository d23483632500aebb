"""Initial values: a function of the seed and the parameter's name alone, whatever the ranks or the ZeRO stage."""

import hashlib

import torch
from torch import Tensor

_CHUNK_ELEMENTS = 1 << 24  # drawn at a time: bounds the memory beside the parameter itself


@torch.no_grad()
def initialize_parameter_(name: str, tensor: Tensor, *, std: float, seed: int, rows: range | None = None) -> None:
    """Fill one parameter in place: norms with 1, every other weight from normal(0, std).

    Drawn in float32 on the CPU, so that device and dtype do not change the values beyond rounding.

    Args:
        name: in the model, e.g. model.layers.0.self_attn.o_proj.weight.
        tensor: the whole parameter, any device and dtype.
        std: initializer_range. seed: of the run.
        rows: of the first dimension, the only ones to write; memory that nobody has written yet is then not taken up
            for the others. None: all.
    Source: DeepSeek-V3 (arXiv 2412.19437), sec. 4.2: standard deviation 0.006 for all learnable weights.
    """
    if name.endswith("norm.weight"):
        tensor.fill_(1.0)
        return
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    flat = tensor.view(-1)
    row = flat.numel() // tensor.shape[0]
    first, end = (0, flat.numel()) if rows is None else (rows.start * row, rows.stop * row)
    for start in range(0, min(end, flat.numel()), _CHUNK_ELEMENTS):
        piece = flat[start : start + _CHUNK_ELEMENTS]
        # drawn also where nothing is written: the values that follow depend on it
        drawn = torch.empty(piece.shape, dtype=torch.float32).normal_(0.0, std, generator=generator)
        wanted = slice(max(first - start, 0), max(end - start, 0))
        piece[wanted].copy_(drawn[wanted])
