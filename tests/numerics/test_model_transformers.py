"""Logits and the gradient of every parameter equal transformers' classes on the same weights."""

import pytest
import torch
import torch.nn.functional as F
from model_cases import CASES, build_model, random_ids, relative_difference
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

_CLASSES = {
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
    "deepseek_v2": (DeepseekV2Config, DeepseekV2ForCausalLM),
}
# Both sides round in float32 (eps 6e-8) in another order over some hundreds of terms; 1e-5 is what is asked for.
TOLERANCE = 1e-5


def transformers_twin(ours):
    config_class, model_class = _CLASSES[ours.config.model_type]
    theirs = model_class(config_class(**ours.config.to_dict()))
    state = ours.state_dict()
    if ours.config.tie_word_embeddings:
        theirs.tie_weights()
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    # transformers always builds shared experts; without any they hold no elements.
    assert all(theirs.get_parameter(name).numel() == 0 for name in missing), missing
    assert not unexpected
    return theirs


@pytest.mark.parametrize("name", CASES)
def test_logits_and_every_gradient(name, record_property):
    ours = build_model(CASES[name])
    theirs = transformers_twin(ours)
    ids, labels = random_ids(2, 24), random_ids(2, 24, seed=2)

    logits = theirs(ids).logits
    with torch.no_grad():
        difference = {"logits": relative_difference(ours(ids)["logits"], logits)}
    F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    ours(ids, labels)["loss"].backward()

    expected = {n: p.grad for n, p in theirs.named_parameters() if p.numel()}
    actual = {n: p.grad for n, p in ours.named_parameters()}
    assert actual.keys() == expected.keys()
    difference |= {n: relative_difference(actual[n], expected[n]) for n in expected}
    worst = max(difference, key=difference.__getitem__)
    record_property("largest_relative_difference", difference[worst])
    print(f"{name}: {difference[worst]:.1e} ({worst})")
    assert difference[worst] <= TOLERANCE, worst


def test_the_comparison_sees_a_wrong_bias():
    """The biases matter in these cases: without them other experts are chosen."""
    ours = build_model(CASES["v3"])
    theirs = transformers_twin(ours)
    for layer in theirs.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias.zero_()
    ids = random_ids(2, 24)
    with torch.no_grad():
        assert relative_difference(ours(ids)["logits"], theirs(ids).logits) > 1e-2
