"""The training loss: cross-entropy that never holds all logits in float32, and the sum of the losses."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from model.wide_products import widens

IGNORE_INDEX = -100
# Of logits held at a time, were they float32. Measured on a CPU, where the vocabulary is 16,384: a quarter makes the
# step 4% faster, as fewer leave its caches. On a GPU each further block reads and writes the whole table's gradient, so
# there are few of them.
_CPU_BLOCK_BYTES = 32 << 20
_GPU_BLOCK_BYTES, _GPU_CHUNK_BYTES = 2 << 30, 128 << 20
_LEAST_ROWS = 256

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
        predicts: bool = False,
    ) -> Tensor | tuple[Tensor, ...]:
        """Logits, or with labels the summed cross-entropy of several parts of the rows.

        Args:
            hidden: (..., H), with labels (R, H).
            labels: (R,) int64; IGNORE_INDEX rows count nothing.
            parts: P lengths that add up to R. weights: P factors of the parts in the total.
            predicts: whether to look for each row's best token, too.
        Returns:
            logits (..., V); or the weighted total (), differentiable, and the unweighted sums (P,) [nats], not so; with
            `predicts` also the best tokens (R,) int64.
        """
        if labels is None:
            return F.linear(hidden, self.weight)
        # Inside its forward a function cannot tell that gradients are off, and would make them in every evaluation.
        differentiates = torch.is_grad_enabled() and (hidden.requires_grad or self.weight.requires_grad)
        total, sums, best = _CrossEntropyFunction.apply(
            hidden, self.weight, labels, parts, weights, predicts, differentiates
        )
        return (total, sums, best) if predicts else (total, sums)


def rows_at_a_time(device_type: str, table: torch.Size, rows: int, element_bytes: int) -> tuple[int, int]:
    """How many rows' logits are held at a time, as gradients in the head's dtype, and of these in at least float32.

    The first bounds the memory, but takes rows enough for a matrix product to pay; the second is what a CPU's caches
    like, and on a GPU what its kernels need to be busy.

    Args:
        table: (V, H), the shape of the head's weight. rows: R, in all. element_bytes: of the head's dtype.
    """
    vocab_size, hidden_size = table
    rows = max(1, rows)
    row = 4 * vocab_size
    if device_type == "cpu":
        return min(rows, max(_LEAST_ROWS, _CPU_BLOCK_BYTES // row)), min(rows, _LEAST_ROWS)
    block = min(rows, max(_LEAST_ROWS, _GPU_BLOCK_BYTES // row))
    # Over several blocks of half precision the table's gradient is summed in float32, which takes as much as the logits
    # of 2 H rows: with that few more, one block is smaller, and faster.
    if element_bytes == 2 and rows <= block + 2 * hidden_size:
        block = rows
    return block, min(rows, max(_LEAST_ROWS, _GPU_CHUNK_BYTES // row))


class _CrossEntropyFunction(torch.autograd.Function):
    """Works through the rows in chunks, so that only a chunk's logits exist. The gradients are computed in the same
    pass, while a chunk's logits are there: recomputing them in the backward would cost a third more matrix products."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        parts: list[int],
        weights: list[float],
        predicts: bool,
        differentiates: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        ctx.dtype = hidden.dtype
        if widens(hidden):  # once, for all blocks
            hidden, weight = hidden.float(), weight.float()
        wide = torch.promote_types(hidden.dtype, torch.float32)
        valid = labels != IGNORE_INDEX
        targets = labels.masked_fill(~valid, 0).unsqueeze(-1)  # (R, 1)
        row_weights = torch.cat([valid.new_full((n,), w, dtype=wide) for n, w in zip(parts, weights, strict=True)])
        row_weights.mul_(valid)
        losses = hidden.new_empty(labels.shape, dtype=wide)
        best = torch.empty_like(labels) if predicts else None
        grad_hidden = torch.empty_like(hidden) if differentiates else None
        grad_weight = None
        block, chunk = rows_at_a_time(hidden.device.type, weight.shape, labels.numel(), weight.element_size())
        buffer = hidden.new_empty(block, weight.shape[0])
        for block_start in range(0, labels.numel(), block):
            rows = slice(block_start, min(block_start + block, labels.numel()))
            grad_logits = buffer[: rows.stop - rows.start]
            for start in range(rows.start, rows.stop, chunk):
                piece = slice(start, min(start + chunk, rows.stop))
                logits = torch.mm(
                    hidden[piece], weight.mT, out=grad_logits[start - rows.start : piece.stop - rows.start]
                )
                if best is not None:
                    best[piece] = logits.argmax(-1)  # before the gradient takes the logits' place
                losses[piece] = _losses_and_gradients(logits, targets[piece], row_weights[piece].unsqueeze(-1), wide)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[rows])
                if grad_weight is None:  # one block is summed wide inside its product
                    grad_weight = grad_logits.mT @ hidden[rows]
                elif wide == hidden.dtype:
                    torch.addmm(grad_weight, grad_logits.mT, hidden[rows], out=grad_weight)
                else:  # over several blocks the sum is kept wide
                    grad_weight = grad_weight.to(wide).add_(grad_logits.mT @ hidden[rows])
        losses.mul_(valid)
        total_loss = (losses * row_weights).sum()
        sums = torch.stack([part.sum() for part in losses.split(parts)])
        ctx.mark_non_differentiable(sums, *([] if best is None else [best]))
        ctx.save_for_backward(None if grad_hidden is None else grad_hidden.to(ctx.dtype), grad_weight)
        return total_loss, sums, best

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        grad_hidden = (grad_hidden * grad_total).to(grad_hidden.dtype)
        return grad_hidden, grad_weight.mul_(grad_total).to(ctx.dtype), None, None, None, None, None


def _losses_and_gradients(logits: Tensor, targets: Tensor, row_weights: Tensor, wide: torch.dtype) -> Tensor:
    """Cross-entropy of each row (R,) [nats]; row_weights (R, 1) times its gradient overwrites the logits (R, V)."""
    exponentials = logits.to(wide)  # the logits themselves where they are wide enough
    highest = exponentials.amax(-1, keepdim=True)
    target_logits = exponentials.gather(1, targets) - highest
    total = exponentials.sub_(highest).exp_().sum(-1, keepdim=True)
    exponentials.mul_(row_weights / total).scatter_add_(1, targets, -row_weights)
    if exponentials is not logits:
        logits.copy_(exponentials)
    return (total.log() - target_logits).squeeze(-1)
