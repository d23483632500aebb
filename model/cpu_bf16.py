"""bfloat16 products on CPUs that multiply float32 faster: taken in float32, rounded once."""

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


_SLOW = _is_slow(torch.cpu.get_capabilities())  # asked once: torch.compile cannot ask it


def widens(x: Tensor, rows: int = _LEAST_ROWS) -> bool:
    """Whether `rows` vectors of `x` are better multiplied in float32."""
    return _SLOW and rows >= _LEAST_ROWS and x.dtype == torch.bfloat16 and x.device.type == "cpu"


class Linear(nn.Linear):
    """nn.Linear without a bias, in the faster way."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        if widens(input, input.shape[:-1].numel()):
            return _WideLinearFunction.apply(input, self.weight)
        return F.linear(input, self.weight)


class _WideLinearFunction(torch.autograd.Function):
    """Keeps for its backward pass no more than F.linear would, where recorded conversions would keep float32 copies."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor) -> Tensor:
        for_input, for_weight = ctx.needs_input_grad
        ctx.save_for_backward(input if for_weight else None, weight if for_input else None)
        return F.linear(input.float(), weight.float()).to(input.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        input, weight = ctx.saved_tensors
        wide_grad = grad.float()  # (..., out)
        grad_input = grad_weight = None
        if weight is not None:
            grad_input = (wide_grad @ weight.float()).to(grad.dtype)
        if input is not None:
            grad_weight = (wide_grad.flatten(0, -2).mT @ input.flatten(0, -2).float()).to(grad.dtype)  # (out, in)
        return grad_input, grad_weight
