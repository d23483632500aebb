"""Causal attention for short sequences on a CPU, out of batched matrix products."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.wide_products import widens

# Up to here the probabilities are kept for the backward pass, B * N * S^2 / 2 numbers a layer; beyond, it computes them
# once more.
_KEPT_LENGTH = 512
_HAS_AMX = torch.cpu.get_capabilities().get("amx_bf16", False)  # asked once: torch.compile cannot ask it


def beats_fused(length: int, dtype: torch.dtype) -> bool:
    """Whether this is faster on a CPU than torch's fused kernel, forward and backward, for S = `length` queries.

    Measured on two cores with head sizes 96 and 64, by the fused kernel's time: float32 0.7 at 512, 0.97 at 1,024, 1.06
    at 2,048; bfloat16 0.45, 0.72, 0.77, and at 4,096 the same. With matrix units for bfloat16 (AMX), which the fused
    kernel uses: 0.65 at 256 and 1.6 at 1,024. Where both multiply bfloat16 in float32: 0.95 at 1,024, 1.1 at 2,048, but
    the fused kernel then keeps twice as much for the backward pass.
    """
    if dtype == torch.bfloat16:
        return length <= (_KEPT_LENGTH if _HAS_AMX else 2048)
    return length <= 1024


class CausalAttentionFunction(torch.autograd.Function):
    """softmax(query key^T * scale) value, the future masked, block of queries by block; softmax in at least float32.

    Where a CPU multiplies bfloat16 slowly all of it happens in float32, but what is kept for the backward pass.

    query, key: (B, N, S, D). value: (B, N, S, Dv). Returns (B, N, S, Dv).
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        batch = query.shape[:2]
        query, key, value = given = tuple(x.flatten(0, 1) for x in (query, key, value))  # (B, N, ...) -> (B * N, ...)
        if widens(query):
            query, key, value = (x.float() for x in given)
        out = query.new_empty(*query.shape[:2], value.shape[2])
        kept = []
        for start, end in _blocks(query.shape[1]):
            probabilities = _probabilities(query[:, start:end], key[:, :end], scale)
            out[:, start:end] = probabilities @ value[:, :end]
            if query.shape[1] <= _KEPT_LENGTH:
                kept.append(probabilities.to(given[0].dtype))
        ctx.save_for_backward(*given, *kept)
        ctx.scale = scale
        return out.to(given[0].dtype).unflatten(0, batch)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *kept = ctx.saved_tensors
        batch, dtype = grad_out.shape[:2], grad_out.dtype
        grad_out = grad_out.flatten(0, 1)
        if widens(query):
            query, key, value, grad_out = (x.float() for x in (query, key, value, grad_out))
        wide = torch.promote_types(query.dtype, torch.float32)
        grad_query = torch.empty_like(query)
        grad_key, grad_value = (torch.zeros_like(x, dtype=wide) for x in (key, value))
        for number, (start, end) in enumerate(_blocks(query.shape[1])):
            query_block, grad_block = query[:, start:end], grad_out[:, start:end]
            probabilities = (
                kept[number].to(query.dtype) if kept else _probabilities(query_block, key[:, :end], ctx.scale)
            )
            grad_probabilities = grad_block @ value[:, :end].mT
            grad_scores = torch._softmax_backward_data(grad_probabilities, probabilities, -1, query.dtype)
            grad_query[:, start:end] = (grad_scores @ key[:, :end]).mul_(ctx.scale)
            _add_product(grad_key[:, :end], grad_scores.mT, query_block, ctx.scale)
            _add_product(grad_value[:, :end], probabilities.mT, grad_block, 1.0)
        grads = (grad_query, grad_key, grad_value)
        return (*(grad.to(dtype).unflatten(0, batch) for grad in grads), None)


def _probabilities(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Of a block of queries (B * N, Q, D), the last Q of the keys (B * N, L, D) up to them -> (B * N, Q, L)."""
    block = query.shape[1]
    scores = torch.baddbmm(query.new_empty(()), query, key.mT, beta=0, alpha=scale)
    future = torch.ones(block, block, dtype=torch.bool).triu(1)
    scores[:, :, -block:].masked_fill_(future, float("-inf"))
    return scores.softmax(-1)


def _add_product(total: Tensor, left: Tensor, right: Tensor, alpha: float) -> None:
    """total += alpha * left @ right, in one pass where the dtypes are the same."""
    if total.dtype == left.dtype:
        total.baddbmm_(left, right, alpha=alpha)
    else:
        total.add_(left @ right, alpha=alpha)


def _blocks(length: int) -> Iterator[tuple[int, int]]:
    """Queries that share a matrix product; the keys after them are left out."""
    block = 64 if length <= 256 else 128
    for start in range(0, length, block):
        yield start, min(start + block, length)
