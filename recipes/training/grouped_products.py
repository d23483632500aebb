"""Kernels for the experts' products on GPUs where torch has none."""

import torch
from torch import Tensor

from model.experts import ExpertRows, GroupedProducts

_HALF = frozenset({torch.bfloat16, torch.float16})


class TritonGroupedProducts(GroupedProducts):
    """DeepSpeed's grouped kernels in half precision; float32 stays with torch, for in these it is rounded to TF32.

    Args:
        native: dtypes for which torch has a kernel of its own on this GPU.
    """

    def __init__(self, native: frozenset[torch.dtype]) -> None:
        self._dtypes = _HALF - native

    def multiply(self, rows: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
        if not self._takes(rows):
            return super().multiply(rows, matrices, offsets)
        from deepspeed.ops.triton_ops import group_gemm_triton

        transposed = not matrices.is_contiguous()  # it asks for the matrices as they lie in memory
        return group_gemm_triton(rows, matrices.mT if transposed else matrices, offsets, trans_b=transposed)

    def outer(self, left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
        if not self._takes(left):
            return super().outer(left, right, offsets)
        from deepspeed.ops.triton_ops.group_gemm_triton import _grouped_dw

        return _grouped_dw(left.contiguous(), right.contiguous(), offsets, len(offsets))

    def _takes(self, rows: Tensor) -> bool:
        # a traced graph has torch's operation in it, which inductor knows
        return rows.dtype in self._dtypes and not torch.compiler.is_compiling()


def choose_grouped_products(device: torch.device | str) -> None:
    """See to it that the experts' products on this device are one kernel each, without waiting for the host."""
    if torch.device(device).type != "cuda" or torch.version.hip is not None:
        return
    from deepspeed.ops.triton_ops import is_triton_available

    major, _ = torch.cuda.get_device_capability(device)
    if major >= 8 and is_triton_available():  # Triton's oldest is Ampere
        ExpertRows.grouped = TritonGroupedProducts(frozenset({torch.bfloat16}) if major in (9, 10) else frozenset())
