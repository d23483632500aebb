"""--torch_compile changes how a layer is computed, not what."""

import dataclasses

import pytest
import torch

from model import experts
from model.config import load_model_config
from model.rope import rotary_tables
from model.transformer import DeepseekForCausalLM
from recipes.cluster.op_builds import has_compiler
from recipes.training.engine import compile_layers


@pytest.mark.skipif(not has_compiler(), reason="torch.compile needs a C++ compiler, and there is none")
def test_a_compiled_layer_gives_the_same_loss_gradients_and_counts():
    config = dataclasses.replace(
        load_model_config("tiny"), vocab_size=64, hidden_size=32, num_hidden_layers=1, first_k_dense_replace=0
    )
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    losses, norms, counts = [], [], []
    for compiles in (False, True):
        model = DeepseekForCausalLM(config)
        model.init_weights(0)
        if compiles:
            compile_layers(model)
        output = model(ids, ids)
        output["loss"].backward()
        losses.append(output["loss"].item())
        norms.append([parameter.grad.norm().item() for parameter in model.parameters()])
        counts.append(model.model.layers[0].router.tokens_per_expert.tolist())
    # the same float32 operations, fused: another order of sums
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    assert counts[1] == counts[0] and sum(counts[0]) == 2 * 16 * 2


@pytest.mark.parametrize("dense", [True, False])
def test_a_gpus_layer_is_one_graph(monkeypatch, dense):
    """Each break would be a kernel launched by Python again. bfloat16, the only dtype in which grouped_mm is traced."""
    monkeypatch.setattr(experts, "_GROUPED_DEVICES", {"cpu"})
    config = dataclasses.replace(
        load_model_config("tiny"), vocab_size=64, hidden_size=32, num_hidden_layers=1, first_k_dense_replace=int(dense)
    )
    model = DeepseekForCausalLM(config).to(torch.bfloat16)
    model.init_weights(0)
    hidden = torch.randn(2, 16, 32, dtype=torch.bfloat16, requires_grad=True)
    cos, sin = rotary_tables(config, torch.arange(16).unsqueeze(0), torch.bfloat16)
    explained = torch._dynamo.explain(model.model.layers[0].forward)(hidden, cos, sin, None, None)
    assert explained.graph_count == 1, explained.break_reasons
