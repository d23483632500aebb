"""Parameter groups: which parameters decay."""

from collections.abc import Iterable
from typing import Any

from torch import nn


def parameter_groups(named_parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Split parameters into decayed matrices and the rest (norms, biases, embeddings).

    Args:
        named_parameters: as `model.named_parameters()` gives them; frozen ones are left out.
        weight_decay: of the matrices [1/step, times lr].
    Returns:
        Groups with `params`, `names` and `weight_decay`; no group is empty.
    """
    decayed: list[tuple[str, nn.Parameter]] = []
    kept: list[tuple[str, nn.Parameter]] = []
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            # ZeRO-3 leaves an empty tensor in place of the weight and keeps the shape in ds_shape.
            matrix = len(getattr(parameter, "ds_shape", parameter.shape)) >= 2 and "embed_tokens" not in name
            (decayed if matrix else kept).append((name, parameter))
    groups = [(decayed, weight_decay), (kept, 0.0)]
    return [
        {"params": [p for _, p in members], "names": [n for n, _ in members], "weight_decay": decay}
        for members, decay in groups
        if members
    ]
