"""The kernels of experts on GPUs where torch has none: which are taken, and what they are called with.

DeepSpeed's kernels run on a GPU alone (tests/gpu). Here loops stand in for them, under DeepSpeed's own checks of what
they are given.
"""

import sys
from types import SimpleNamespace

import pytest
import torch
from deepspeed.ops import triton_ops

from model import experts
from model.experts import ExpertRows, GroupedProducts, RoutedExperts
from recipes.training import grouped_products
from recipes.training.grouped_products import TritonGroupedProducts, choose_grouped_products

KERNELS = sys.modules["deepspeed.ops.triton_ops.group_gemm_triton"]


def segments(offsets):
    ends = offsets.tolist()
    return zip([0, *ends[:-1]], ends, strict=True)


@pytest.fixture
def calls(monkeypatch):
    """Loops in place of DeepSpeed's kernels; what they were called for."""
    seen = []

    def multiply(rows, matrices, offsets):
        assert rows.is_contiguous()
        seen.append("multiply")
        return torch.cat([rows[a:b] @ matrices[e] for e, (a, b) in enumerate(segments(offsets))])

    def outer(left, right, offsets, count):
        assert left.is_contiguous() and right.is_contiguous() and len(offsets) == count
        seen.append("outer")
        return torch.stack([left[a:b].mT @ right[a:b] for a, b in segments(offsets)])

    monkeypatch.setattr(KERNELS, "_TRITON_AVAILABLE", True)
    monkeypatch.setattr(KERNELS, "_group_gemm", multiply)
    monkeypatch.setattr(KERNELS, "_grouped_dw", outer)
    return seen


def run(dtype):
    """Output and gradients of experts of which one has no token."""
    generator = torch.Generator().manual_seed(0)
    config = SimpleNamespace(n_routed_experts=4, moe_intermediate_size=16, hidden_size=24)
    layer = RoutedExperts(config).to(dtype)
    for parameter in layer.parameters():
        parameter.data.normal_(generator=generator)
    hidden = torch.randn(12, 24, generator=generator).to(dtype).requires_grad_()
    indices = torch.tensor([[0, 2], [2, 3], [3, 0]] * 4)  # nobody chooses expert 1
    weights = torch.rand(12, 2, generator=generator).requires_grad_()
    out = layer(hidden, indices, weights)
    out.float().square().sum().backward()
    return [out, hidden.grad, weights.grad, *(parameter.grad for parameter in layer.parameters())]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_they_compute_what_a_cpu_computes(monkeypatch, calls, dtype):
    expected = run(dtype)
    monkeypatch.setattr(experts, "_GROUPED_DEVICES", {"cpu"})
    monkeypatch.setattr(ExpertRows, "grouped", TritonGroupedProducts(frozenset()))
    got = run(dtype)
    assert calls == ["multiply"] * 3 + ["outer", "outer", "multiply"]
    for ours, theirs in zip(got, expected, strict=True):
        # the same products of at most 32 terms, rounded to 8 or 11 bits in between
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2 * float(theirs.abs().max()))
    assert got[3][1].abs().sum() == got[4][1].abs().sum() == 0


def test_torchs_own_kernel_and_float32_stay_with_torch(monkeypatch, calls):
    monkeypatch.setattr(experts, "_GROUPED_DEVICES", {"cpu"})
    monkeypatch.setattr(ExpertRows, "grouped", TritonGroupedProducts(frozenset({torch.bfloat16})))
    run(torch.bfloat16)
    run(torch.float32)
    assert not calls


@pytest.mark.parametrize(
    ("capability", "dtypes"),
    [
        ((7, 0), None),
        ((8, 0), {torch.bfloat16, torch.float16}),
        ((9, 0), {torch.float16}),
        ((10, 0), {torch.float16}),
        ((12, 0), {torch.bfloat16, torch.float16}),
    ],
)
def test_which_dtypes_go_to_deepspeeds_kernels(monkeypatch, capability, dtypes):
    """torch's own kernel is built for compute capability 9 and 10, in bf16."""
    monkeypatch.setattr(grouped_products.torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(triton_ops, "is_triton_available", lambda: True)
    monkeypatch.setattr(ExpertRows, "grouped", GroupedProducts())
    choose_grouped_products("cpu")
    assert type(ExpertRows.grouped) is GroupedProducts
    choose_grouped_products("cuda")
    assert getattr(ExpertRows.grouped, "_dtypes", None) == dtypes
