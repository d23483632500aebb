"""The two layers that every block is built of: RMSNorm and SwiGLU."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class SwiGLU(nn.Module):
    """The gated feed-forward network: down(silu(gate(x)) * up(x)).

    Source: Shazeer (arXiv 2002.05202), eq. 6.
    """

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden_size) -> (..., hidden_size)."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
