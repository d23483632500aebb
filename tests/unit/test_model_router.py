"""The balancing bias: its update, its dtype under casts, and counts that are added exactly once."""

import dataclasses
import math

import pytest
import torch

from model.config import load_model_config
from model.moe import count_choices, iter_routers, routing_entropy_sum, update_expert_bias
from model.transformer import DeepseekForCausalLM


@pytest.fixture
def model():
    model = DeepseekForCausalLM(dataclasses.replace(load_model_config("tiny"), num_nextn_predict_layers=1))
    model.init_weights(0)
    return model


def batch(rows=2, length=16):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 4096, (rows, length), generator=generator)


def test_bias_update_by_hand():
    bias = torch.tensor([0.5, 0.0, -0.25, 0.0])
    update_expert_bias(bias, torch.tensor([10, 4, 2, 0]), 0.25)  # the mean is 4
    assert bias.tolist() == [0.25, 0.0, 0.0, 0.25]


def test_bias_update_decides_by_exact_integers():
    """A mean that is no float32: 2^25 + 1 choices over 4 experts; only the equal ones would not move, and none is."""
    bias = torch.zeros(4)
    update_expert_bias(bias, torch.tensor([2**23, 2**23, 2**23, 2**23 + 1]), 1.0)
    assert bias.tolist() == [1.0, 1.0, 1.0, -1.0]


def test_bias_update_refuses_what_cannot_be_right():
    with pytest.raises(ValueError, match="shape"):
        update_expert_bias(torch.zeros(4), torch.zeros(5, dtype=torch.int64), 0.1)
    with pytest.raises(ValueError, match="float32"):
        update_expert_bias(torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int64), 0.1)


def test_routers_of_all_moe_layers_mtp_included(model):
    names = [name for name, _ in iter_routers(model)]
    assert names == [f"model.layers.{index}.mlp.gate" for index in (1, 2, 3, 4)]  # layer 0 is dense, 4 is MTP's


@pytest.mark.parametrize("cast", ["half", "bfloat16", "double"])
def test_the_bias_stays_float32_with_its_values(model, cast):
    for _, router in iter_routers(model):
        router.e_score_correction_bias.fill_(0.123456789)
    getattr(model, cast)()
    for _, router in iter_routers(model):
        assert router.weight.dtype != torch.float32
        assert router.e_score_correction_bias.dtype == torch.float32
        assert torch.equal(router.e_score_correction_bias, torch.full((8,), 0.123456789))
        assert router.tokens_per_expert.dtype == torch.int64
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in model.state_dict()
    assert not any("tokens_per_expert" in name for name in model.state_dict())


def test_the_bias_stays_float32_from_meta_and_through_load(model):
    with torch.device("meta"):
        empty = DeepseekForCausalLM(
            dataclasses.replace(load_model_config("tiny"), num_nextn_predict_layers=1)
        ).bfloat16()
    empty.to_empty(device="cpu")
    empty.load_state_dict(model.state_dict())
    for _, router in iter_routers(empty):
        assert router.e_score_correction_bias.dtype == torch.float32


def test_counts_are_added_in_training_only_once_a_micro_batch(model):
    ids = batch()
    model.eval()
    with torch.no_grad():
        model(ids, ids)
    assert all(router.tokens_per_expert.sum() == 0 for _, router in iter_routers(model))
    model.train()
    for micro_batch in (1, 2, 3):
        model(ids, ids)["loss"].backward()
        counts = {name: router.tokens_per_expert.sum().item() for name, router in iter_routers(model)}
        tokens = 32 * 2 * micro_batch  # two experts a token; the MTP layer has one position less in each row
        assert list(counts.values()) == [tokens, tokens, tokens, tokens - 2 * 2 * micro_batch]


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_recomputed_activations_are_not_counted_again(model, policy):
    ids = batch()
    model(ids, ids)["loss"].backward()
    expected = [router.tokens_per_expert.clone() for _, router in iter_routers(model)]
    for _, router in iter_routers(model):
        router.tokens_per_expert.zero_()
    model.set_gradient_checkpointing(policy)
    model(ids, ids)["loss"].backward()
    assert all(torch.equal(r.tokens_per_expert, e) for (_, r), e in zip(iter_routers(model), expected, strict=True))


def test_routing_entropy_by_hand():
    scores = torch.tensor([[0.5, 0.5, 0.5, 0.5], [1.0, 0.0, 0.0, 0.0], [0.3, 0.3, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    # ln 4; a certain choice; ln 2; and scores that have all vanished
    assert routing_entropy_sum(scores).item() == pytest.approx(math.log(4) + math.log(2))
    valid = torch.tensor([[True, True], [False, True]])
    assert routing_entropy_sum(scores, valid).item() == pytest.approx(math.log(4))


@pytest.mark.parametrize("policy", ["none", "full", "selective"])
def test_entropy_is_that_of_the_scores_whatever_is_recomputed(model, policy):
    """Against torch's own Categorical on the scores that each router gave; float32 sums of 64 terms."""
    expected = {}

    def listen(name):
        def hook(router, inputs, _):
            logits = torch.nn.functional.linear(inputs[0], router.weight)
            entropy = torch.distributions.Categorical(probs=logits.sigmoid()).entropy().sum()
            expected.setdefault(name, []).append(entropy.item())  # the recomputation comes later

        return hook

    handles = [router.register_forward_hook(listen(name)) for name, router in iter_routers(model)]
    model.set_gradient_checkpointing(policy)
    ids = batch()
    model(ids, ids)["loss"].backward()
    for handle in handles:
        handle.remove()
    for name, router in iter_routers(model):
        counts, entropy_sum = router.take_counts()
        assert entropy_sum.item() == pytest.approx(expected[name][0], rel=1e-5)
        assert not entropy_sum.requires_grad
        assert counts.sum() > 0 == router.tokens_per_expert.sum() and router.take_counts()[1] == 0


def test_padding_is_not_counted(model):
    ids = batch()
    valid = torch.ones_like(ids, dtype=torch.bool)
    valid[1, 10:] = False
    model(ids, ids, valid_tokens=valid)
    counts = [router.tokens_per_expert.sum().item() for _, router in iter_routers(model)]
    assert counts == [2 * 26] * 3 + [2 * (15 + 9)]


def test_count_choices_by_hand():
    indices = torch.tensor([[0, 2], [2, 3]])
    assert count_choices(indices, 5).tolist() == [1, 0, 2, 1, 0]
    assert count_choices(indices, 5, torch.tensor([[True, True], [False, False]])).tolist() == [1, 0, 1, 0, 0]


def test_the_update_balances_a_skewed_router(model):
    """Scores that favour two experts: without the bias they get everything, with it the load evens out."""
    router = model.model.layers[1].mlp.gate
    router.groups = 1
    generator = torch.Generator().manual_seed(0)
    scores = 0.3 * torch.rand(512, 8, generator=generator) + torch.tensor([0.4, 0.4] + [0.0] * 6)
    violation = []
    for _ in range(100):
        counts = count_choices(router.choose(scores), 8)
        violation.append((counts.max() / counts.float().mean()).item())
        update_expert_bias(router.e_score_correction_bias, counts, 0.01)
    assert violation[0] == 4.0  # 8 experts, 2 of them take all: the worst there is
    assert max(violation[-20:]) < 1.3
