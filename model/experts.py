"""The routed experts as one function: sort by expert, multiply each expert's rows, weigh, and sum per token."""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from model.config import ModelConfig
from model.wide_products import widens

# Shape letters: T tokens, K experts a token, N rows sorted by expert (T * K or some more), E experts,
# H hidden, I intermediate.

_FEW_ROWS = 8  # (token, expert) pairs for which a loop over them is quicker than sorting them
# Where one kernel multiplies all experts' rows. The CPU's grouped_mm is a slower loop than ours, but serves in tests.
_GROUPED_DEVICES = {"cuda"}


class RoutedExperts(nn.Module):
    """All routed experts, fused in two parameters as transformers and DeepSpeed's AutoEP lay them out.

    Source: DeepSeekMoE (arXiv 2401.06066), eq. 9; DeepSeek-V3 (arXiv 2412.19437), eq. 12.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.n_routed_experts and config.moe_intermediate_size
        experts, inner, hidden = config.n_routed_experts, config.moe_intermediate_size, config.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, inner))

    def forward(self, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """
        Args:
            hidden: (T, H). indices: (T, K) experts of each token. weights: (T, K) of their outputs.
        Returns:
            (T, H): sum over k of weights[t, k] * expert indices[t, k] of hidden[t]; no token is dropped.
        """
        # not in training, where recomputation must meet the same bits with gradients on
        decodes = not self.training and not torch.is_grad_enabled()
        if decodes and indices.device.type == "cpu" and indices.numel() <= _FEW_ROWS:
            return self._row_by_row(hidden, indices, weights)
        return _ExpertsFunction.apply(hidden, weights, indices, self.gate_up_proj, self.down_proj)

    def _row_by_row(self, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """The same for the few tokens of a decoding step, for which sorting takes longer than multiplying."""
        out = torch.zeros_like(hidden)
        choices = zip(indices.tolist(), weights.tolist(), strict=True)
        for row, sums, (experts, shares) in zip(hidden.split(1), out.split(1), choices, strict=True):
            for expert, share in zip(experts, shares, strict=True):
                gate, up = F.linear(row, self.gate_up_proj[expert]).chunk(2, dim=-1)
                sums.add_(F.linear(F.silu(gate).mul_(up), self.down_proj[expert]), alpha=share)
        return out


class _ExpertsFunction(torch.autograd.Function):
    """Written as one function for two reasons. A slice of a stacked parameter has a gradient of the whole stack's size,
    one for each expert; here each expert's gradient is written into its place once. And only the parameters themselves
    are saved, no views of them, so that ZeRO-3 can release the gathered weights between forward and backward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weights: Tensor, indices: Tensor, gate_up_proj: Tensor, down_proj: Tensor
    ) -> Tensor:
        rows = rows_by_expert(indices, gate_up_proj.shape[0], fills_up(hidden, indices))
        gate_up_N2I = rows.multiply(rows.of_tokens(hidden), gate_up_proj.mT)
        gate_NI, up_NI = gate_up_N2I.chunk(2, dim=-1)
        weight_N1 = rows.spread(weights).to(hidden.dtype)
        # down() is linear, so the rows are weighed before it, where they are narrower.
        weighed_NI = F.silu(gate_NI).mul_(up_NI).mul_(weight_N1)
        out_NH = rows.multiply(weighed_NI, down_proj.mT)
        # Every tensor is saved, none is an attribute: what recomputation drops is what was saved.
        places = rows.row_of_place, rows.token_of_row, rows.offsets
        ctx.save_for_backward(hidden, gate_up_N2I, weight_N1, gate_up_proj, down_proj, *places)
        ctx.segments, ctx.weights_dtype = rows.segments, weights.dtype
        return rows.sum_by_token(out_NH)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor | None, ...]:
        hidden, gate_up_N2I, weight_N1, gate_up_proj, down_proj, row_of_place, token_of_row, offsets = ctx.saved_tensors
        rows = ExpertRows(row_of_place, token_of_row, offsets, ctx.segments, gate_up_proj.shape[0])
        gate_NI, up_NI = gate_up_N2I.chunk(2, dim=-1)
        silu_NI = F.silu(gate_NI)
        inner_NI = silu_NI * up_NI

        # What is done with is let go of at once: together these are twice what the function has saved.
        grad_NH = rows.of_tokens(grad_TH)
        grad_weighed_NI = rows.multiply(grad_NH, down_proj)
        grad_down = rows.outer(grad_NH, inner_NI * weight_N1)
        del grad_NH
        grad_weight_N = inner_NI.mul_(grad_weighed_NI).sum(-1, dtype=ctx.weights_dtype)
        del inner_NI
        grad_inner_NI = grad_weighed_NI.mul_(weight_N1)
        grad_up_NI = silu_NI.mul_(grad_inner_NI)
        grad_gate_NI = torch.ops.aten.silu_backward(grad_inner_NI.mul_(up_NI), gate_NI)
        grad_N2I = torch.cat([grad_gate_NI, grad_up_NI], dim=-1)
        del silu_NI, grad_up_NI, grad_weighed_NI, grad_inner_NI, grad_gate_NI
        grad_gate_up = rows.outer(grad_N2I, rows.of_tokens(hidden))
        grad_hidden = rows.sum_by_token(rows.multiply(grad_N2I, gate_up_proj))
        return grad_hidden, rows.collect(grad_weight_N), None, grad_gate_up, grad_down


# oneDNN, which multiplies half precision on a CPU, compiles a kernel for every number of rows that it meets, and that
# takes longer than most products; so an expert's rows are filled up to a multiple, and the same few numbers return.
_CPU_HALF_PRECISION_ROWS = 32


def fills_up(hidden: Tensor, indices: Tensor) -> bool:
    """Whether an expert's rows are filled up: not for few choices, as in decoding. (T, H) `hidden`, (T, K) choices."""
    half = hidden.dtype not in (torch.float32, torch.float64)
    return half and indices.numel() > _CPU_HALF_PRECISION_ROWS and not widens(hidden)


def rows_by_expert(indices: Tensor, experts: int, fill_up: bool) -> "ExpertRows":
    """Sort the choices by expert.

    Args:
        indices: (T, K) experts of each token. fill_up: the experts' rows, on a CPU, to a multiple.
    """
    counts = count_choices(indices, experts)
    order = indices.flatten().argsort(stable=True)  # (T * K,): sorted place -> place in (T, K)
    row = torch.arange(order.numel(), device=order.device)
    ends = counts.cumsum(0)
    offsets, length, segments = None, order.numel(), []
    if indices.device.type in _GROUPED_DEVICES:
        offsets = ends.to(torch.int32)
    else:
        multiple = _CPU_HALF_PRECISION_ROWS
        if fill_up:
            filled = (counts + multiple - 1) // multiple * multiple
            filled_ends = filled.cumsum(0)
            row += (filled_ends - filled - (ends - counts)).repeat_interleave(counts)
            ends = filled_ends
        bounds = [0, *ends.tolist()]
        length = bounds[-1]
        segments = [(e, start, end) for e, (start, end) in enumerate(pairwise(bounds)) if end > start]
    row_of_place = torch.empty_like(order)
    row_of_place[order] = row
    # The rows that fill up are copies of token 0's whose weight is 0, so that they add nothing to any gradient.
    token_of_row = order.new_zeros(length)
    token_of_row[row] = order // indices.shape[1]
    return ExpertRows(row_of_place.view_as(indices), token_of_row, offsets, segments, experts)


class GroupedProducts:
    """All experts' products at once, by torch. In bf16 on Hopper and Blackwell's data center GPUs that is one kernel;
    elsewhere it is a loop over the experts that waits for the host, so recipes/ puts other kernels in its place."""

    def multiply(self, rows: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
        """(N, A) sorted by expert, (E, A, B), ends (E,) int32 of each expert's rows -> (N, B)."""
        return F.grouped_mm(rows, matrices, offs=offsets)

    def outer(self, left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
        """(N, A), (N, B), (E,) -> (E, A, B): each expert's left^T right; zeros where it has no rows."""
        return F.grouped_mm(left.mT, right, offs=offsets)


class ExpertRows:
    """Where each expert's rows lie in a matrix sorted by expert, and what is done to such matrices.

    On a GPU the row counts stay there and one grouped kernel takes them, without the host waiting; on a CPU they are
    plain integers and each expert is one matrix product.

    Args:
        row_of_place: (T, K). token_of_row: (N,).
        offsets: (E,) int32, the end of each expert's rows, where a grouped kernel takes them; else None.
        segments: otherwise (expert, first row, end) of the experts that have rows. experts: E.
    """

    grouped = GroupedProducts()

    def __init__(
        self,
        row_of_place: Tensor,
        token_of_row: Tensor,
        offsets: Tensor | None,
        segments: list[tuple[int, int, int]],
        experts: int,
    ) -> None:
        self.row_of_place, self.token_of_row, self.offsets = row_of_place, token_of_row, offsets
        self.segments, self.experts = segments, experts

    def spread(self, weights: Tensor) -> Tensor:
        """(T, K) -> (N, 1): each row's weight; 0 where no token asked for the row."""
        rows = weights.new_zeros(len(self.token_of_row))
        rows[self.row_of_place.flatten()] = weights.flatten()
        return rows.unsqueeze(-1)

    def collect(self, rows: Tensor) -> Tensor:
        """(N,) -> (T, K): of each row what belongs to its place."""
        return rows.index_select(0, self.row_of_place.flatten()).view_as(self.row_of_place)

    def sum_by_token(self, rows: Tensor) -> Tensor:
        """(N, H) -> (T, H): each token's sum of its K rows, read where they lie and added in at least float32."""
        return F.embedding_bag(self.row_of_place, rows, mode="sum")

    def of_tokens(self, tokens: Tensor) -> "Tensor | _TokenRows":
        """(T, H) -> (N, H): each row its token's; on a CPU gathered where it is used, for one expert at a time."""
        if self.offsets is not None:
            return tokens.index_select(0, self.token_of_row)
        return _TokenRows(tokens, self.token_of_row)

    def multiply(self, rows: "Tensor | _TokenRows", matrices: Tensor) -> Tensor:
        """(N, A) sorted by expert, (E, A, B) -> (N, B): each row by its expert's matrix."""
        if self.offsets is not None:
            return self.grouped.multiply(rows[:], matrices, self.offsets)
        out = matrices.new_empty(len(self.token_of_row), matrices.shape[2])
        for expert, start, end in self.segments:
            self._product(rows[start:end], matrices[expert], out[start:end])
        return out

    def outer(self, left: "Tensor | _TokenRows", right: "Tensor | _TokenRows") -> Tensor:
        """(N, A), (N, B) sorted by expert -> (E, A, B): each expert's sum over its rows of left^T right."""
        if self.offsets is not None:
            return self.grouped.outer(left[:], right[:], self.offsets)
        new = left.new_empty if len(self.segments) == self.experts else left.new_zeros  # no rows: zeros
        out = new(self.experts, left.shape[1], right.shape[1])
        for expert, start, end in self.segments:
            self._product(left[start:end].mT, right[start:end], out[expert])
        return out

    def _product(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        if len(self.token_of_row) > _CPU_HALF_PRECISION_ROWS and widens(left):
            out.copy_(torch.mm(left.float(), right.float()))
        else:
            torch.mm(left, right, out=out)


class _TokenRows:
    """(N, H) rows that are tokens', gathered from (T, H) `tokens` slice by slice: the whole is never in memory."""

    def __init__(self, tokens: Tensor, token_of_row: Tensor) -> None:
        self.tokens, self.token_of_row = tokens, token_of_row
        self.shape = torch.Size([len(token_of_row), tokens.shape[1]])
        self.new_empty, self.new_zeros = tokens.new_empty, tokens.new_zeros

    def __getitem__(self, rows: slice) -> Tensor:
        return self.tokens.index_select(0, self.token_of_row[rows])


def count_choices(indices: Tensor, experts: int, weights: Tensor | None = None) -> Tensor:
    """How often each expert is named: (...) int64 indices -> (E,) int64; `weights`, shaped alike, counts 0 or 1."""
    flat = indices.flatten()
    ones = torch.ones_like(flat) if weights is None else weights.flatten().to(flat.dtype)
    # bincount would make the host wait for a GPU.
    return torch.zeros(experts, dtype=flat.dtype, device=flat.device).scatter_add_(0, flat, ones)
