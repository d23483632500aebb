"""The gradient's norm by kind of parameter: which part of the model a large gradient comes from."""

import math
from typing import Any

import torch
from deepspeed.utils import safe_get_full_grad


def kind_of(name: str) -> str:
    """What a parameter, by its name, is part of."""
    if "norm" in name:
        return "norm"
    for part, kind in (
        ("embed_tokens", "embedding"),
        ("lm_head", "head"),
        ("self_attn.", "attention"),
        ("mlp.gate.", "router"),
        ("mlp.router.", "router"),
        ("mlp.experts.", "experts"),
        ("mlp.shared_experts.", "shared_experts"),
        ("mlp.", "dense_mlp"),
    ):
        if part in name:
            return kind
    return "other"


@torch.no_grad()
def group_norms(engine: Any, loss_scale: float) -> dict[str, float]:
    """The norm of the accumulated gradient before clipping, by kind of parameter; every rank calls it.

    To be called after the last backward of a step and before engine.step(). It puts each gradient together from the
    ranks' parts, one parameter at a time, which costs about one more reduction of all gradients.

    Args:
        loss_scale: what the gradients are still multiplied with.
    Returns:
        kind -> norm; their squares sum to the square of the whole gradient's norm.
    """
    squares: dict[str, Any] = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            gradient = safe_get_full_grad(parameter)
            if gradient is not None:
                kind = kind_of(name)
                squares[kind] = squares.get(kind, 0.0) + torch.linalg.vector_norm(gradient, dtype=torch.float32) ** 2
    return {kind: math.sqrt(float(square)) / loss_scale for kind, square in sorted(squares.items())}
