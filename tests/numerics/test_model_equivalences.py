"""Ways to the same numbers: recomputed activations, the latent cache, attention by blocks, half precision."""

import pytest
import torch
import torch.nn.functional as F
from model_cases import CASES, MOE_16B, V3, build_model, random_ids, relative_difference

from model import wide_products
from model.attention import LatentCache, attend, document_mask
from model.causal_attention import CausalAttentionFunction
from model.config import ModelConfig
from model.experts import RoutedExperts, fills_up, rows_by_expert
from model.moe import iter_routers

MTP = V3 | {"num_nextn_predict_layers": 1, "balance_loss_alpha": 0.01}


def gradients(model, **batch):
    model.zero_grad()
    loss = model(**batch)["loss"]
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_recomputation_changes_no_bit(policy):
    model = build_model(MTP)
    batch = {"input_ids": random_ids(2, 20), "labels": random_ids(2, 20, seed=2)}
    loss, expected = gradients(model, **batch)
    model.set_gradient_checkpointing(policy)
    again, actual = gradients(model, **batch)
    assert torch.equal(loss, again)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    with pytest.raises(ValueError, match="selective"):
        model.set_gradient_checkpointing("some")


@pytest.mark.parametrize(("policy", "regions"), [("none", 0), ("full", 4), ("selective", 4)])
def test_policies_recompute_what_they_say(policy, regions):
    """With a checkpoint function of one's own; attention runs again under full only."""
    model = build_model(MTP)
    calls, attention_runs = [], []
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda *_: attention_runs.append(1))

    def checkpoint_function(function, *tensors):
        calls.append(function)
        outputs = torch.utils.checkpoint.checkpoint(function, *tensors, use_reentrant=False)
        return outputs if len(outputs) > 1 else outputs[0]  # as DeepSpeed's

    model.set_gradient_checkpointing(policy, checkpoint_function)
    model(random_ids(1, 8), random_ids(1, 8))["loss"].backward()
    assert len(calls) == regions
    assert len(attention_runs) == (8 if policy == "full" else 4)


@pytest.mark.parametrize("name", ["v3_yarn", "v3_without_q_lora_tied", "v2_lite", "v3_half_split_rope", "16b"])
def test_decoding_with_the_cache_equals_the_whole_sequence(name):
    """Prompt, then single tokens, then several at once; absorbing weights changes the rounding alone, in float64."""
    model = build_model(CASES.get(name, MOE_16B), torch.float64).eval()
    ids = random_ids(3, 20)
    with torch.no_grad():
        whole = model(ids)["logits"]
        cache = LatentCache(model.config, 3, 20, dtype=torch.float64, device="cpu")
        pieces = [7, *[1] * 9, 4]
        parts = [model(piece, cache=cache)["logits"] for piece in ids.split(pieces, dim=1)]
        assert relative_difference(torch.cat(parts, dim=1), whole) < 1e-12
        assert cache.length == 20
        with pytest.raises(ValueError, match="holds 20 tokens"):
            model(ids[:, :1], cache=cache)


def test_the_cache_without_whole_weights_at_hand():
    """As under ZeRO-3, where a weight is there during its own module's forward only."""

    class Gathering(torch.nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight, self._whole = torch.empty(0), weight

        def forward(self, x):
            return F.linear(x, self._whole)

    model = build_model(V3, torch.float64).eval()
    ids = random_ids(2, 9)
    with torch.no_grad():
        whole = model(ids)["logits"]
        for layer in model.model.layers:
            layer.self_attn.kv_b_proj = Gathering(layer.self_attn.kv_b_proj.weight)
        cache = LatentCache(model.config, 2, 9, dtype=torch.float64, device="cpu")
        parts = [model(piece, cache=cache)["logits"] for piece in ids.split([4, 1, 3, 1], dim=1)]
    assert relative_difference(torch.cat(parts, dim=1), whole) < 1e-12


def test_what_the_cache_keeps():
    config = build_model(V3).config
    cache = LatentCache(config, 2, 100, dtype=torch.float32, device="cpu")
    numbers = sum(part.numel() for layer in cache.layers for part in layer)  # 100 places, filled up to 128
    assert numbers == 2 * 128 * config.num_hidden_layers * (config.kv_lora_rank + config.qk_rope_head_dim)


def test_a_cache_takes_no_labels():
    model = build_model(V3)
    cache = LatentCache(model.config, 1, 4, dtype=torch.float32, device="cpu")
    with pytest.raises(ValueError, match="decoding"):
        model(random_ids(1, 4), labels=random_ids(1, 4), cache=cache)


@pytest.mark.parametrize("length", [2, 63, 64, 65, 200, 600])
def test_attention_by_blocks_equals_torch(length):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 3, length, 16), (2, 3, length, 16), (2, 3, length, 10), (2, 3, length, 10))
    query, key, value, grad = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    inputs = [x.clone().requires_grad_() for x in (query, key, value)]
    twins = [x.clone().requires_grad_() for x in (query, key, value)]
    out = CausalAttentionFunction.apply(*inputs, 0.3)
    expected = F.scaled_dot_product_attention(*twins, is_causal=True, scale=0.3)
    out.backward(grad)
    expected.backward(grad)
    assert relative_difference(out, expected) < 1e-12
    for ours, theirs in zip(inputs, twins, strict=True):
        assert relative_difference(ours.grad, theirs.grad) < 1e-12


@pytest.mark.parametrize("masked", [False, True])
def test_long_sequences_take_the_fused_kernel_to_the_same_end(masked, monkeypatch):
    """Unequal head sizes are padded; a mask goes along."""
    import model.attention as attention

    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, 3, 40, 16, generator=generator, dtype=torch.float64) for _ in range(2))
    value = torch.randn(2, 3, 40, 10, generator=generator, dtype=torch.float64)
    expected = CausalAttentionFunction.apply(query, key, value, 0.3).transpose(1, 2).flatten(2)
    mask = document_mask(torch.zeros(2, 40)) if masked else None
    monkeypatch.setattr(attention, "beats_fused", lambda *_: False)
    assert relative_difference(attend(query, key, value, 0.3, mask), expected) < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_trains_to_about_the_same(dtype):
    """Loss within the dtype's rounding of some hundred operations, gradients finite and in the dtype, bias float32."""
    batch = {"input_ids": random_ids(2, 20), "labels": random_ids(2, 20, seed=2)}
    expected, _ = gradients(build_model(MTP), **batch)
    model = build_model(MTP).to(dtype)
    loss, actual = gradients(model, **batch)
    assert loss.dtype == torch.float32
    assert relative_difference(loss, expected) < 0.02
    assert all(grad.dtype == dtype and torch.isfinite(grad).all() for grad in actual.values())
    assert all(router.e_score_correction_bias.dtype == torch.float32 for _, router in iter_routers(model))


def test_fp16_gradients_of_the_head_do_not_vanish():
    """Gradients are formed before the division by the tokens, so that fp16 keeps them; the loss scale comes on top."""
    model = build_model(V3 | {"num_hidden_layers": 1}).half()
    batch = {"input_ids": random_ids(2, 20), "labels": random_ids(2, 20, seed=2)}
    model.zero_grad()
    (model(**batch, loss_denominator=1e6)["loss"] * 2.0**16).backward()
    half = model.lm_head.weight.grad.float()
    model = model.float()
    model.zero_grad()
    (model(**batch, loss_denominator=1e6)["loss"] * 2.0**16).backward()
    assert relative_difference(half, model.lm_head.weight.grad) < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_of_gpus_equal_those_of_cpus(dtype):
    """The branch that a GPU takes runs on a CPU too: an expert without rows, one with all others' share."""
    generator = torch.Generator().manual_seed(0)
    indices = torch.tensor([[0], [2], [2], [3], [2], [0], [2]])  # expert 1 has no row
    by_expert, grouped = (rows_by_expert(indices, 4, fill_up=False) for _ in range(2))
    grouped.offsets = torch.tensor([2, 2, 6, 7], dtype=torch.int32)
    left, right = (torch.randn(7, n, generator=generator).to(dtype) for n in (16, 24))
    matrices = torch.randn(4, 16, 24, generator=generator).to(dtype)
    # The same sums of at most 16 terms, in another order.
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    assert relative_difference(grouped.multiply(left, matrices), by_expert.multiply(left, matrices)) < tolerance
    assert relative_difference(grouped.outer(left, right), by_expert.outer(left, right)) < tolerance
    assert by_expert.outer(left, right)[1].abs().sum() == 0


@pytest.mark.parametrize("slow_bf16", [False, True])
def test_rows_that_fill_up_add_nothing(slow_bf16, monkeypatch):
    """In half precision on a CPU an expert's rows are filled up, unless they are multiplied in float32; outputs and
    gradients stay those of the plain sum."""
    monkeypatch.setattr(wide_products, "_BF16_IS_SLOW", slow_bf16)
    torch.manual_seed(0)
    experts = RoutedExperts(ModelConfig(**V3 | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1}))
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    experts.bfloat16()
    tokens = 150
    hidden = torch.randn(tokens, V3["hidden_size"]).bfloat16().requires_grad_()
    # expert 1 has no row, 2 more than are worth filling up (and not a multiple), 3 few
    indices = torch.stack([torch.full((tokens,), 2), torch.where(torch.arange(tokens) < 10, 3, 0)], dim=1)
    weights = torch.rand(tokens, 2, requires_grad=True)
    grad = torch.randn(tokens, V3["hidden_size"]).bfloat16()
    rows = 2 * tokens if slow_bf16 else 32 + 160 + 160
    assert len(rows_by_expert(indices, 4, fills_up(hidden, indices)).token_of_row) == rows
    assert not fills_up(hidden[:16], indices[:16]), "few choices are not filled up"
    assert fills_up(hidden[:24], indices[:24]) is not slow_bf16

    inputs = [hidden, weights, experts.gate_up_proj, experts.down_proj]
    out = experts(hidden, indices, weights)
    actual = [out, *torch.autograd.grad(out, inputs, grad)]

    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected_out = torch.zeros(tokens, V3["hidden_size"], dtype=torch.float64)
    for token in range(tokens):
        for place, expert in enumerate(indices[token].tolist()):
            gate, up = (wide[2][expert] @ wide[0][token]).chunk(2)
            inner = torch.nn.functional.silu(gate) * up
            expected_out[token] += wide[1][token, place] * (wide[3][expert] @ inner)
    expected = [expected_out, *torch.autograd.grad(expected_out, wide, grad.double())]
    for ours, truth in zip(actual, expected, strict=True):
        # bfloat16 keeps 8 bits (4e-3 a rounding), and a value goes through about four roundings
        assert (ours.double() - truth).norm() < 1.5e-2 * truth.norm()


def test_in_training_a_forward_without_gradients_gives_the_same_bits():
    """A checkpoint function that reenters runs without gradients first and with them later; both must route alike."""
    model = build_model(V3).train()
    ids = random_ids(1, 4)  # so few that decoding's ways would do
    with torch.no_grad():
        without = model(ids)["logits"]
    assert torch.equal(without, model(ids)["logits"])
