"""The two layers that every block is built of: RMSNorm and SwiGLU."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from model.wide_products import Linear


class RMSNorm(nn.Module):
    """Scale each vector to unit root mean square, then by a learned weight; in at least float32.

    Source: Zhang and Sennrich (arXiv 1910.07467), eq. 4; DeepSeek-V3 (arXiv 2412.19437), section 4.2.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., size) -> (..., size), same dtype."""
        # A GPU has one kernel for each direction. torch.compile makes its own of the function below.
        if x.is_cuda and x.dtype == self.weight.dtype and not torch.compiler.is_compiling():
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        # One operation instead of nine; not in training, where recomputation must meet the same bits with gradients on.
        if not self.training and not torch.is_grad_enabled():
            wide = torch.promote_types(x.dtype, torch.float32)
            return F.rms_norm(x.to(wide), self.weight.shape, self.weight.to(wide), self.eps).to(x.dtype)
        return _RMSNormFunction.apply(x, self.weight, self.eps)


class _RMSNormFunction(torch.autograd.Function):
    """Its derivative written out: a third of the passes over memory that recording each operation takes, and of the
    activations only the input is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide_dtype = torch.promote_types(x.dtype, torch.float32)
        wide = x.to(wide_dtype)
        mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        scale = mean_square.add_(eps).rsqrt_()  # (..., 1)
        ctx.save_for_backward(x, weight, scale)
        return torch.mul(wide, scale).mul_(weight.to(wide_dtype)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """With r the scale, n the size: dx = r w g - x r^3 / n * sum(w g x); dw = sum over vectors of g x r."""
        x, weight, scale = ctx.saved_tensors
        wide_weight = weight.to(scale.dtype)
        wide_x, wide_grad = x.to(scale.dtype).flatten(0, -2), grad.to(scale.dtype).flatten(0, -2)  # (R, n)
        scale = scale.flatten(0, -2)  # (R, 1)
        product = wide_grad * wide_x
        grad_weight = scale.squeeze(1) @ product
        shrink = (product @ wide_weight).unsqueeze(1) * scale.pow(3) / x.shape[-1]
        grad_x = torch.mul(wide_grad, wide_weight, out=product).mul_(scale).addcmul_(wide_x, shrink, value=-1)
        return grad_x.view_as(x).to(x.dtype), grad_weight.to(weight.dtype), None


class SwiGLU(nn.Module):
    """The gated feed-forward network: down(silu(gate(x)) * up(x)).

    Source: Shazeer (arXiv 2002.05202), eq. 6.
    """

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size)
        self.up_proj = Linear(hidden_size, intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden_size) -> (..., hidden_size)."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
