"""The forward pass in float64 equals a naive reference written from the papers; each part is compared by itself too."""

import naive_reference as naive
import pytest
import torch
from model_cases import CASES, MOE_16B, V3, build_model, random_ids, relative_difference

from model.attention import document_mask
from model.rope import rotary_tables

# Both sides compute in float64 (eps 1e-16) over some thousands of operations; anything above 1e-9 is another formula.
TOLERANCE = 1e-9
LENGTH = 9


def parameters(model):
    return {name: tensor.detach().double() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("name", [*CASES, "deepseek_moe_16b"])
def test_logits(name):
    values = CASES.get(name, MOE_16B)
    model = build_model(values, torch.float64)
    ids = random_ids(2, LENGTH)
    with torch.no_grad():
        logits = model(ids)["logits"]
        expected = torch.stack([naive.logits_of(values, parameters(model), row.tolist()) for row in ids])
    difference = relative_difference(logits, expected)
    print(f"{name}: {difference:.1e}")
    assert difference <= TOLERANCE


@pytest.mark.parametrize("name", ["v3_yarn", "v3_half_split_rope", "v2_lite", "deepseek_moe_16b"])
def test_attention_alone_at_far_positions(name):
    values = CASES.get(name, MOE_16B)
    model = build_model(values, torch.float64)
    attention = naive.latent_attention if "kv_lora_rank" in values else naive.plain_attention
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(1, LENGTH, 32, generator=generator, dtype=torch.float64)
    positions = torch.tensor([[0, 1, 2, 40, 41, 1000, 4095, 4096, 90000]])
    cos, sin = rotary_tables(model.config, positions, torch.float64)
    with torch.no_grad():
        out = model.model.layers[1].self_attn(x, cos, sin, None)
        expected = attention(values, parameters(model), "model.layers.1.self_attn.", x[0], positions[0].tolist())
    assert relative_difference(out[0], expected) <= TOLERANCE


@pytest.mark.parametrize("name", ["v3", "v3_no_groups_all_moe", "v2", "v2_lite", "v3_not_normalised_no_shared"])
def test_router_and_experts_alone(name):
    values = CASES[name]
    model = build_model(values, torch.float64)
    block = model.model.layers[1].mlp
    x = torch.randn(2, 20, 32, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    with torch.no_grad():
        indices, weights = block.gate(x.flatten(0, 1))
        out = block(x).flatten(0, 1)
        for t, row in enumerate(x.flatten(0, 1)):
            expected, scores, chosen = naive.mixture(values, parameters(model), "model.layers.1.mlp.", row)
            assert set(indices[t].tolist()) == set(chosen)
            raw = torch.stack([scores[e] for e in indices[t].tolist()])
            raw = raw / raw.sum() if values["norm_topk_prob"] else raw
            assert relative_difference(weights[t], raw * values["routed_scaling_factor"]) <= TOLERANCE
            assert relative_difference(out[t], expected) <= TOLERANCE


def test_group_limited_choice_by_hand():
    """Two groups of three experts, one kept: the group's two best decide for V3, the single best for V2."""
    values = V3 | {"n_routed_experts": 6, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    scores = torch.tensor([[0.9, 0.1, 0.1, 0.6, 0.5, 0.0]])
    v3 = build_model(values).model.layers[1].mlp.gate
    v3.e_score_correction_bias.zero_()
    assert set(v3.choose(scores)[0].tolist()) == {3, 4}  # 0.6 + 0.5 beats 0.9 + 0.1
    v3.e_score_correction_bias[1] = 0.2
    assert set(v3.choose(scores)[0].tolist()) == {0, 1}  # 0.9 + 0.3 beats 1.1
    v2 = (
        build_model(values | {"topk_method": "group_limited_greedy", "scoring_func": "softmax"})
        .model.layers[1]
        .mlp.gate
    )
    assert v2.choose(scores)[0, 0] == 0  # 0.9 alone beats 0.6, whatever comes second


def test_the_bias_chooses_but_does_not_weigh():
    """A bias of +10 on the experts chosen already changes nothing at all."""
    model = build_model(V3 | {"n_group": 1, "topk_group": 1})
    gate = model.model.layers[1].mlp.gate
    x = torch.randn(1, 32, generator=torch.Generator().manual_seed(0))
    indices, weights = gate(x)
    gate.e_score_correction_bias[indices[0]] += 10
    again, weights_again = gate(x)
    assert dict(zip(indices[0].tolist(), weights[0].tolist(), strict=True)) == dict(
        zip(again[0].tolist(), weights_again[0].tolist(), strict=True)
    )


def test_every_token_to_one_expert_drops_none():
    model = build_model(V3 | {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 1}, torch.float64)
    block = model.model.layers[1].mlp
    block.gate.e_score_correction_bias.zero_()
    block.gate.e_score_correction_bias[5] = 100
    x = torch.randn(1, 50, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        out = block(x)[0]
        for t in range(50):
            values = V3 | {"n_group": 1, "num_experts_per_tok": 1}
            expected, _, chosen = naive.mixture(values, parameters(model), "model.layers.1.mlp.", x[0, t])
            assert chosen == [5]
            assert relative_difference(out[t], expected) <= TOLERANCE


def test_documents_are_independent_and_equal_to_running_alone():
    values = V3 | {"num_nextn_predict_layers": 1}
    model = build_model(values, torch.float64)
    first, second = random_ids(1, 5), random_ids(1, 6, seed=9)
    packed = torch.cat([first, second], dim=1)
    documents = torch.tensor([[7] * 5 + [8] * 6])
    positions = torch.tensor([[*range(5), *range(6)]])
    with torch.no_grad():
        logits = model(packed, position_ids=positions, document_ids=documents)["logits"]
        changed = packed.clone()
        changed[0, :5] = (changed[0, :5] + 1) % 61
        again = model(changed, position_ids=positions, document_ids=documents)["logits"]
        # Other rows share an expert's matrix product, so sums run in another order: equal to rounding, not to the bit.
        assert relative_difference(again[:, 5:], logits[:, 5:]) <= TOLERANCE
        assert relative_difference(again[:, :5], logits[:, :5]) > 1e-2
        assert relative_difference(logits[:, 5:], model(second)["logits"]) <= TOLERANCE
        assert relative_difference(logits[:, :5], model(first)["logits"]) <= TOLERANCE
        # Without the mask the neighbour is seen.
        assert relative_difference(model(packed)["logits"][:, 5:], logits[:, 5:]) > 1e-2


def test_document_mask_by_hand():
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    assert document_mask(torch.tensor([[0, 0, 1, 1]]))[0, 0].int().tolist() == expected
