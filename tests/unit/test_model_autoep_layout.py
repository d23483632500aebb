"""DeepSpeed's AutoEP finds every MoE block through its own preset, and our decoder layer lives with its block."""

import dataclasses

import pytest
import torch
from torch import nn

from model.config import load_model_config
from model.transformer import DeepseekForCausalLM


@pytest.fixture
def model():
    model = DeepseekForCausalLM(dataclasses.replace(load_model_config("tiny"), num_nextn_predict_layers=1))
    model.init_weights(0)
    return model


def test_autoep_finds_every_moe_block_with_our_routing(model):
    from deepspeed.module_inject.auto_ep import AutoEP
    from deepspeed.module_inject.auto_ep_config import AutoEPConfig

    config = AutoEPConfig(enabled=True, autoep_size=1, preset_model="deepseek_v3")
    specs = AutoEP(model, config).ep_parser()
    assert [spec.moe_module_name for spec in specs] == [f"model.layers.{index}.mlp" for index in (1, 2, 3, 4)]
    for spec in specs:
        assert (spec.num_experts, spec.top_k, spec.score_func, spec.route_norm) == (8, 2, "sigmoid", True)
        assert (spec.num_expert_groups, spec.num_limited_groups, spec.group_score_func) == (2, 1, "top2_sum")
        assert (spec.hidden_size, spec.ffn_hidden_size, spec.route_scale) == (256, 192, 1.0)
        assert spec.has_shared_experts and spec.shared_experts_name == "shared_experts"
        assert spec.e_score_correction_bias_path == "gate"


@pytest.mark.parametrize("policy", ["none", "full", "selective"])
def test_a_block_that_returns_hidden_states_only_can_take_the_place_of_ours(model, policy):
    for layer in model.model.layers[1:]:
        layer.mlp = nn.Linear(256, 256)  # as AutoEP's: no gate of ours to ask
    model.set_gradient_checkpointing(policy)
    ids = torch.randint(0, 4096, (2, 16))
    output = model(ids, ids)
    output["loss"].backward()
    assert output["balance_loss"] == 0
    assert model.model.layers[4].mlp.weight.grad.abs().sum() > 0
