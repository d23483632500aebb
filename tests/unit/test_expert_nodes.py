"""Group-limited routing keeps a token on few nodes, where a node holds whole groups of AutoEP's experts."""

import dataclasses

import pytest
import torch

from model.config import load_model_config
from model.moe import TopkRouter

TOKENS, HIDDEN, GPUS_PER_NODE = 4096, 32, 8


def reached(config, autoep_size):
    """How many nodes each token's experts lie on. AutoEP gives a rank consecutive experts, a launcher a node
    consecutive ranks."""
    torch.manual_seed(0)
    router = TopkRouter(config)
    torch.nn.init.normal_(router.weight)
    if router.e_score_correction_bias is not None:
        router.e_score_correction_bias.normal_(std=0.1)  # the bias steers the choice, but not past the groups
    indices, _ = router(torch.randn(TOKENS, HIDDEN))
    experts_per_node = config.n_routed_experts // autoep_size * GPUS_PER_NODE
    return [len({expert // experts_per_node for expert in token}) for token in indices.tolist()]


def config_of(name, **changes):
    return dataclasses.replace(load_model_config(name), hidden_size=HIDDEN, **changes)


@pytest.mark.parametrize(
    "name, autoep_size, most",
    [
        ("v3", 64, 4),  # 8 groups on 8 nodes, topk_group 4
        ("v3", 32, 4),  # two groups a node, so fewer can only be
        ("v3", 128, 8),  # half a group a node: as shipped for 2,048 GPUs
        ("v2", 80, 6),  # 8 groups on 10 nodes, so a group of 20 experts lies on up to 3 nodes; 6 experts a token
        ("v2", 32, 3),  # two groups a node, topk_group 3
    ],
)
def test_no_token_reaches_more_nodes_than_its_groups_lie_on(name, autoep_size, most):
    nodes = reached(config_of(name), autoep_size)
    assert max(nodes) <= most
    assert max(nodes) > 1, "everything was on one node, so nothing was shown"


def test_without_groups_tokens_reach_more():
    """So the bound comes from the groups, not from the counting."""
    free = config_of("v3", n_group=1, topk_group=1)
    nodes = reached(free, 64)
    assert max(nodes) > 4 and sum(nodes) / TOKENS > 4
