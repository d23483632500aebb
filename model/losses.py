"""The training loss: cross-entropy that never holds all logits in float32, and the sum of the losses."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

IGNORE_INDEX = -100

# Shape letters: R rows (predictions), H hidden, V vocabulary, P parts (the main prediction and each MTP depth).


class LMHead(nn.Module):
    """The projection to the vocabulary, and the cross-entropy of its logits.

    Both happen inside this module's forward because ZeRO-3 gathers a parameter around its own module's forward only.
    """

    def __init__(self, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))

    def forward(
        self,
        hidden: Tensor,
        labels: Tensor | None = None,
        parts: list[int] | None = None,
        weights: list[float] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Logits, or with labels the summed cross-entropy of several parts of the rows.

        Args:
            hidden: (..., H), with labels (R, H).
            labels: (R,) int64; IGNORE_INDEX rows count nothing.
            parts: P lengths that add up to R. weights: P factors of the parts in the total.
        Returns:
            logits (..., V); or the weighted total (), differentiable, and the unweighted sums (P,) [nats], not so.
        """
        if labels is None:
            return F.linear(hidden, self.weight)
        return _CrossEntropyFunction.apply(hidden, self.weight, labels, parts, weights)


def _chunk_rows(device: torch.device, vocab_size: int) -> int:
    """How many rows' logits to hold at a time: on a CPU what its caches like, on a GPU half a gigabyte in float32."""
    if device.type == "cpu":
        return 256
    return max(256, (1 << 27) // vocab_size)


class _CrossEntropyFunction(torch.autograd.Function):
    """Works through the rows in chunks, so that only a chunk's logits exist. The gradients are computed in the same
    pass, while a chunk's logits are there: recomputing them in the backward would cost a third more matrix products."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, parts: list[int], weights: list[float]
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        differentiates = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        grad_hidden = torch.empty_like(hidden) if differentiates else None
        grad_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if differentiates else None
        row_weights = torch.repeat_interleave(
            torch.tensor(weights, dtype=wide), torch.tensor(parts), output_size=labels.numel()
        ).to(labels.device, non_blocking=True)
        valid = labels != IGNORE_INDEX
        row_weights = row_weights * valid
        targets = labels.masked_fill(~valid, 0).unsqueeze(-1)  # (R, 1)
        losses = hidden.new_empty(labels.shape, dtype=wide)
        chunk = _chunk_rows(hidden.device, weight.shape[0])
        for start in range(0, labels.numel(), chunk):
            piece = slice(start, start + chunk)
            logits = (hidden[piece] @ weight.mT).to(wide)  # (chunk, V)
            highest = logits.amax(-1, keepdim=True)
            target_logits = logits.gather(1, targets[piece]) - highest
            exponentials = logits.sub_(highest).exp_()
            total = exponentials.sum(-1, keepdim=True)
            losses[piece] = (total.log() - target_logits).squeeze(-1)
            if grad_hidden is None or grad_weight is None:
                continue
            scale = row_weights[piece].unsqueeze(-1)
            grad_logits = exponentials.mul_(scale / total).scatter_add_(1, targets[piece], -scale).to(hidden.dtype)
            torch.mm(grad_logits, weight, out=grad_hidden[piece])
            if wide == hidden.dtype:
                torch.addmm(grad_weight, grad_logits.mT, hidden[piece], out=grad_weight)
            else:
                grad_weight.add_(grad_logits.mT @ hidden[piece])
        ctx.save_for_backward(grad_hidden, grad_weight)
        losses.mul_(valid)
        total_loss = (losses * row_weights).sum()
        sums = torch.stack([part.sum() for part in losses.split(parts)])
        ctx.mark_non_differentiable(sums)
        ctx.weight_dtype = weight.dtype
        return total_loss, sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        grad_hidden = (grad_hidden * grad_total).to(grad_hidden.dtype)
        return grad_hidden, grad_weight.mul_(grad_total).to(ctx.weight_dtype), None, None, None
