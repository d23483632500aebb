"""The planned bytes of weights, gradients and optimizer state are those that DeepSpeed holds, on one rank and two."""

import json

import pytest
import torch
from launching import run_ranks
from measure_memory import PARTS, cases

from model.config import ModelConfig
from model.transformer import DeepseekForCausalLM
from recipes.cluster.memory import model_state_bytes
from recipes.training.optimizer import parameter_groups

CASES = dict(cases())


@pytest.fixture(scope="module")
def wider_model(tmp_path_factory, small_model):
    """Wide enough that padding and the few scalars of an optimizer are far below the tolerance."""
    config = json.loads(small_model.read_text()) | {"hidden_size": 64, "vocab_size": 512, "moe_intermediate_size": 32}
    path = tmp_path_factory.mktemp("model") / "wider.json"
    path.write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def measured(tmp_path_factory, wider_model):
    """{ranks: {case: {part: bytes}}}; one start of the process group for all cases."""
    found = {}
    for ranks in (1, 2):
        output = tmp_path_factory.mktemp("memory") / f"{ranks}.json"
        run_ranks(["tests/distributed/measure_memory.py", str(wider_model), str(output)], ranks=ranks, PYTHONPATH=".")
        found[ranks] = json.loads(output.read_text())
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_planned_is_measured(measured, wider_model, ranks, case):
    with torch.device("meta"):
        model = DeepseekForCausalLM(ModelConfig.from_file(wider_model))
    groups = [
        [(name, parameter.numel()) for name, parameter in zip(group["names"], group["params"], strict=True)]
        for group in parameter_groups(model.named_parameters(), 0.1)
    ]
    planned = model_state_bytes(groups, CASES[case], ranks)
    for part in PARTS:
        # 2%: flat buffers are padded, and a step counter of each tensor is no part of the plan
        assert getattr(planned, part) == pytest.approx(measured[ranks][case][part], rel=0.02), part
