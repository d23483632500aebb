"""Products of half precision taken in float32: where they need it, and bfloat16's on CPUs that are faster so."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# Of a few rows' product converting the other matrix takes longer than the faster product saves.
_LEAST_ROWS = 96


def multiplies_bf16_fast(capabilities: Mapping[str, Any]) -> bool:
    """Whether an x86 CPU of these capabilities, as `torch.cpu` gives them, multiplies bfloat16 faster than float32.

    Intel's AVX-512 BF16 without AMX does so at half of float32's rate, AMD's at twice of it; without either, bfloat16
    is emulated, at a quarter (benchmarks/README.md).
    """
    intel = str(capabilities.get("cpu_name", "")).startswith("Intel")
    return bool(capabilities.get("amx_bf16") or (capabilities.get("avx512_bf16") and not intel))


def _is_slow(capabilities: Mapping[str, Any]) -> bool:
    return capabilities.get("architecture") == "x86_64" and not multiplies_bf16_fast(capabilities)


_BF16_IS_SLOW = _is_slow(torch.cpu.get_capabilities())  # asked once: torch.compile cannot ask it


def widens(x: Tensor, rows: int = _LEAST_ROWS) -> bool:
    """Whether `rows` vectors of `x` are better multiplied in float32."""
    return _BF16_IS_SLOW and rows >= _LEAST_ROWS and x.dtype == torch.bfloat16 and x.device.type == "cpu"


class Linear(nn.Linear):
    """nn.Linear without a bias, in the faster way."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        if widens(input, input.shape[:-1].numel()):
            return wide_linear(input, self.weight, input.dtype)
        return F.linear(input, self.weight)


def wide_linear(input: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """(..., in), (out, in) -> (..., out) of `dtype`, multiplied and summed in at least float32."""
    return _WideLinearFunction.apply(input, weight, dtype)


class _WideLinearFunction(torch.autograd.Function):
    """Keeps for its backward pass no more than F.linear would, where recorded conversions would keep wide copies."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        for_input, for_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(input if for_weight else None, weight if for_input else None)
        ctx.dtypes = input.dtype, weight.dtype
        wide = torch.promote_types(input.dtype, torch.float32)
        return F.linear(input.to(wide), weight.to(wide)).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        input, weight = ctx.saved_tensors
        input_dtype, weight_dtype = ctx.dtypes
        wide = torch.promote_types(input_dtype, torch.float32)
        wide_grad = grad.to(wide)  # (..., out)
        grad_input = grad_weight = None
        if weight is not None:
            grad_input = (wide_grad @ weight.to(wide)).to(input_dtype)
        if input is not None:
            grad_rows, input_rows = wide_grad.flatten(0, -2), input.flatten(0, -2)  # (R, out), (R, in)
            grad_weight = (grad_rows.mT @ input_rows.to(wide)).to(weight_dtype)
        return grad_input, grad_weight, None
