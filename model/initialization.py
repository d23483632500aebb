"""Initial values: a function of the seed and the parameter's name alone, whatever the ranks or the ZeRO stage."""

import hashlib
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

_CHUNK_ELEMENTS = 1 << 24  # drawn at a time: bounds the memory beside the parameter itself


@torch.no_grad()
def initialize_parameter_(name: str, tensor: Tensor, *, std: float, seed: int, rows: range | None = None) -> None:
    """Fill one parameter in place: norms with 1, every other weight from normal(0, std).

    Drawn in float32 on the CPU, so that device and dtype do not change the values beyond rounding. Each chunk has a
    generator of its own, so that a rank draws only the chunks that it keeps, several at a time.

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
    flat = tensor.view(-1)
    row = flat.numel() // tensor.shape[0]
    first, end = (0, flat.numel()) if rows is None else (rows.start * row, rows.stop * row)

    def fill(start: int) -> None:
        piece = flat[start : start + _CHUNK_ELEMENTS]
        drawn = torch.empty(piece.shape, dtype=torch.float32)
        drawn.normal_(0.0, std, generator=_generator(seed, name, start // _CHUNK_ELEMENTS))
        wanted = slice(max(first - start, 0), max(end - start, 0))
        with torch.no_grad():  # the mode is a thread's own
            piece[wanted].copy_(drawn[wanted])

    starts = range(first // _CHUNK_ELEMENTS * _CHUNK_ELEMENTS, min(end, flat.numel()), _CHUNK_ELEMENTS)
    if len(starts) == 1:
        fill(starts[0])
        return
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        list(threads.map(fill, starts))  # the list raises what a thread raised


def _generator(seed: int, name: str, chunk: int) -> torch.Generator:
    key = f"{seed}/{name}" + (f"/{chunk}" if chunk else "")
    digest = hashlib.sha256(key.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
