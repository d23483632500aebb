"""Adam's step counters after a converted checkpoint was loaded."""

from types import SimpleNamespace

import pytest
import torch

from recipes.training.universal import place_step_counters


@pytest.mark.parametrize(("group", "device"), [({"fused": True}, "meta"), ({"fused": None}, "cpu"), ({}, "cpu")])
def test_each_parameter_counts_for_itself_and_fused_adam_beside_the_weights(group, device):
    """`meta` stands for a GPU here, where torch's fused Adam refuses counters that lie on the host."""
    shared = torch.tensor(7.0)
    weights = [torch.nn.Parameter(torch.empty(2, device="meta")) for _ in range(2)]
    optimizer = SimpleNamespace(
        param_groups=[{"params": weights, **group}], state={w: {"step": shared} for w in weights}
    )
    place_step_counters(optimizer)
    first, second = (optimizer.state[weight]["step"] for weight in weights)
    assert first is not second and first is not shared
    assert first.device.type == second.device.type == device
