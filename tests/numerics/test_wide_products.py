"""bfloat16 where a CPU multiplies float32 faster: which CPUs those are, that nothing is multiplied narrow there, and
that the numbers are those of float64 but for the roundings of what goes in and out."""

import pytest
import torch
import torch.nn.functional as F
from model_cases import MOE_16B, V3, build_model, random_ids
from torch.utils._python_dispatch import TorchDispatchMode

from model import wide_products
from model.attention import attend, document_mask
from model.causal_attention import CausalAttentionFunction
from model.losses import LMHead
from model.wide_products import Linear, widens

ROUNDING = 2.0**-8  # of a bfloat16, relative: 8 bits; float32's sums of a few hundred terms are far below
X86 = {"architecture": "x86_64"}


@pytest.fixture
def slow_bf16(monkeypatch):
    monkeypatch.setattr(wide_products, "_BF16_IS_SLOW", True)


@pytest.mark.parametrize(
    ("capabilities", "slow"),
    [
        (X86 | {"cpu_name": "Intel Xeon", "avx512_bf16": True, "amx_bf16": True}, False),
        (X86 | {"cpu_name": "Intel Xeon", "avx512_bf16": True, "amx_bf16": False}, True),
        (X86 | {"cpu_name": "AMD EPYC", "avx512_bf16": True}, False),
        (X86 | {"cpu_name": "AMD EPYC", "avx512_bf16": False}, True),
        ({"architecture": "aarch64"}, False),  # not measured: left as it is
        ({}, False),
    ],
)
def test_which_cpus_multiply_float32_faster(capabilities, slow):
    assert wide_products._is_slow(capabilities) is slow


def test_few_rows_and_other_dtypes_are_left_alone(slow_bf16):
    x = torch.ones(4, dtype=torch.bfloat16)
    assert widens(x) and widens(x, 96) and not widens(x, 95)
    assert not widens(x.half(), 96) and not widens(x.float(), 96) and not widens(x.to("meta"), 96)


class _Products(TorchDispatchMode):
    """Notes the dtypes that are multiplied, by operation."""

    def __init__(self):
        super().__init__()
        self.dtypes = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name()
        if any(part in name for part in ("mm", "linear", "attention", "matmul")):
            found = {x.dtype for x in args if isinstance(x, torch.Tensor) and x.is_floating_point()}
            self.dtypes.setdefault(name, set()).update(found)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("values", [V3 | {"num_nextn_predict_layers": 1}, MOE_16B])
@pytest.mark.parametrize("documents", [False, True])
def test_a_step_multiplies_nothing_narrow(slow_bf16, values, documents):
    model = build_model(values).bfloat16()
    batch = {"input_ids": random_ids(1, 128), "labels": random_ids(1, 128, seed=2)}
    if documents:
        batch["document_ids"] = torch.arange(128).unsqueeze(0) // 50
    with _Products() as products:
        model(**batch)["loss"].backward()
    assert products.dtypes, "nothing was noted"
    assert set().union(*products.dtypes.values()) == {torch.float32}, products.dtypes
    assert all(p.grad.dtype == torch.bfloat16 for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("trained", ["both", "input", "weight"])
def test_a_linear_layer_rounds_once(slow_bf16, trained):
    torch.manual_seed(0)
    layer = Linear(48, 80).bfloat16()
    x = torch.randn(2, 64, 48).bfloat16()
    layer.weight.requires_grad_(trained != "input")
    x.requires_grad_(trained != "weight")
    grad = torch.randn(2, 64, 80).bfloat16()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.dtype) or t, lambda t: t):
        out = layer(x)
    assert kept == [torch.bfloat16] * (2 if trained == "both" else 1)  # no more than F.linear keeps
    out.backward(grad)
    wide_x, wide_weight, wide_grad = (t.detach().double() for t in (x, layer.weight, grad))
    truths = [
        (out, wide_x @ wide_weight.mT),
        (x.grad, wide_grad @ wide_weight),
        (layer.weight.grad, wide_grad.flatten(0, 1).mT @ wide_x.flatten(0, 1)),
    ]
    if trained != "both":
        assert truths.pop(1 if trained == "weight" else 2)[0] is None  # a frozen one gets no gradient
    for ours, truth in truths:
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.double(), truth, rtol=ROUNDING, atol=1e-4)


@pytest.mark.parametrize("length", [200, 600])  # with the probabilities kept and not
def test_attention_by_blocks_rounds_what_goes_in_and_out(slow_bf16, length):
    torch.manual_seed(0)
    inputs = [torch.randn(1, 2, length, width).bfloat16().requires_grad_() for width in (16, 16, 10)]
    grad = torch.randn(1, 2, length, 10).bfloat16()
    out = CausalAttentionFunction.apply(*inputs, 0.3)
    twins = [x.detach().double().requires_grad_() for x in inputs]
    expected = F.scaled_dot_product_attention(*twins, is_causal=True, scale=0.3)
    out.backward(grad)
    expected.backward(grad.double())
    torch.testing.assert_close(out.double(), expected, rtol=ROUNDING, atol=1e-5)
    # Gradients are sums with both signs; the kept probabilities were rounded, each by at most half of ROUNDING.
    for ours, theirs in zip(inputs, twins, strict=True):
        assert ours.grad.dtype == torch.bfloat16
        assert (ours.grad.double() - theirs.grad).norm() < ROUNDING * theirs.grad.norm()


def test_attention_between_documents_rounds_what_goes_in_and_out(slow_bf16):
    torch.manual_seed(0)
    query, key = (torch.randn(1, 2, 128, 16).bfloat16() for _ in range(2))
    value = torch.randn(1, 2, 128, 10).bfloat16()
    mask = document_mask(torch.arange(128).unsqueeze(0) // 50)
    wide = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), attn_mask=mask, scale=0.3)
    out = attend(query, key, value, 0.3, mask)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), wide.transpose(1, 2).flatten(2), rtol=ROUNDING, atol=1e-5)


def test_the_head_rounds_its_gradients_once(slow_bf16):
    """Over several blocks of rows: 700 of them at 256 a block."""
    torch.manual_seed(0)
    rows, vocab = 700, 40_000
    head = LMHead(24, vocab)
    torch.nn.init.normal_(head.weight, std=0.1)
    head.bfloat16()
    hidden, labels = torch.randn(rows, 24).bfloat16().requires_grad_(), torch.randint(vocab, (rows,))
    total, sums = head(hidden, labels, [rows], [1.0])
    (total / rows).backward()
    wide_hidden, wide_weight = (t.detach().double().requires_grad_() for t in (hidden, head.weight))
    truth = F.cross_entropy(wide_hidden @ wide_weight.mT, labels, reduction="sum")
    (truth / rows).backward()
    assert abs(sums[0].item() - truth.item()) < 1e-5 * truth.item()  # float32 logits; bfloat16's would be off by 1e-4
    for ours, theirs in ((hidden.grad, wide_hidden.grad), (head.weight.grad, wide_weight.grad)):
        assert ours.dtype == torch.bfloat16
        assert (ours.double() - theirs).norm() < ROUNDING * theirs.norm()
