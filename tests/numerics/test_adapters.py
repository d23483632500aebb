"""Low-rank adapters: they begin by changing nothing, only they train, and merged weights compute the same."""

import dataclasses

import pytest
import torch
from chat_facts import conversations, write_untrained

pytest.importorskip("peft", reason="needs peft, which is optional: pip install peft")

TARGETS = ["q_b_proj", "kv_b_proj", "o_proj"]


@pytest.fixture
def models(tmp_path):
    """(the plain model, the same with adapters, the latter's config)."""
    from recipes.config.finetune_config import FinetuneConfig
    from recipes.training.adapters import add_adapters, with_adapters
    from recipes.training.trained_model import load_trained_model, open_weights

    train, _ = conversations()
    weights = open_weights(write_untrained(tmp_path / "hf", train))
    config = FinetuneConfig(init_from="x", data=["y"], lora_rank=4, lora_alpha=6.0, lora_target=TARGETS)
    adapted_config = with_adapters(config, weights.config)
    plain, adapted = (load_trained_model(weights, device="cpu", dtype=torch.float32) for _ in range(2))
    adapted.config = adapted_config
    add_adapters(adapted, seed=1)
    return plain, adapted, adapted_config


def logits(model):
    with torch.no_grad():
        return model(torch.arange(24).reshape(2, 12))["logits"]


def test_they_begin_by_changing_nothing_and_only_they_train(models):
    plain, adapted, _ = models
    assert torch.equal(logits(plain), logits(adapted))
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    layers = {f"model.layers.{layer}.self_attn.{target}" for layer in range(2) for target in TARGETS}
    assert trained == {f"{layer}.lora_{part}.default.weight" for layer in layers for part in "AB"}


def test_merged_weights_compute_what_the_adapters_do(models):
    from model.hf_layout import file_parts
    from model.hf_weights import parts_of_state
    from recipes.training.merged_adapters import MergedTensors, without_adapters

    plain, adapted, config = models
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
    merged_config = without_adapters(config)
    assert merged_config == dataclasses.replace(plain.config) and "adapters" not in merged_config.to_dict()
    source = parts_of_state(MergedTensors(adapted.state_dict(), config), merged_config)
    state = plain.state_dict()
    for part in file_parts(merged_config):
        part.of(state[part.name]).copy_(source(part))
    before = logits(plain)
    # one sum of products in another order, in float32
    torch.testing.assert_close(before, logits(adapted), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(before, before * 0)
