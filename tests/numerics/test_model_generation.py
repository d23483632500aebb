"""Sampling: the cache changes nothing, seeds repeat, temperature and top-p keep to their definitions."""

import pytest
import torch
from model_cases import CASES, MOE_16B, V3, build_model, random_ids

from model.generation import draw, generate_tokens


def run(model, ids, **kwargs):
    generator = torch.Generator().manual_seed(kwargs.pop("seed", 0))
    return torch.stack(list(generate_tokens(model, ids, generator=generator, **kwargs)), dim=1)


@pytest.mark.parametrize("name", ["v3_yarn", "v2", "v2_lite", "16b"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_same_tokens_with_and_without_the_cache(name, temperature):
    """In float64 no rounding can turn a draw."""
    model = build_model(CASES.get(name, MOE_16B), torch.float64).eval()
    ids = random_ids(2, 5)
    settings = {"max_new_tokens": 30, "temperature": temperature, "top_p": 0.9}
    tokens = run(model, ids, **settings)
    assert torch.equal(tokens, run(model, ids, use_cache=False, **settings))
    assert tokens.shape == (2, 30)
    assert len(set(tokens.flatten().tolist())) > 5  # not one token over and over


def test_greedy_decoding_by_hand():
    model = build_model(V3, torch.float64).eval()
    ids = random_ids(1, 4)
    expected = ids
    with torch.no_grad():
        for _ in range(6):
            expected = torch.cat([expected, model(expected)["logits"][:, -1:].argmax(-1)], dim=1)
    assert torch.equal(run(model, ids, max_new_tokens=6, temperature=0), expected[:, 4:])


def test_seeds():
    model = build_model(V3).eval()
    ids = random_ids(1, 4)
    runs = [run(model, ids, max_new_tokens=12, seed=seed).tolist() for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_stop_tokens_end_each_sequence_and_then_all():
    model = build_model(V3).eval()
    ids = random_ids(2, 4)
    free = run(model, ids, max_new_tokens=12)
    stop = free[0, 3].item()
    tokens = run(model, ids, max_new_tokens=12, stop_ids={stop})
    first = free[0].tolist().index(stop)
    assert tokens[0, : first + 1].tolist() == free[0, : first + 1].tolist()
    assert set(tokens[0, first:].tolist()) == {stop}
    alone = run(model, ids[:1], max_new_tokens=12, stop_ids=set(range(61)))
    assert alone.shape == (1, 1)


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().repeat(4000, 1)
    generator = torch.Generator().manual_seed(0)
    counts = torch.bincount(draw(logits, 1.0, 0.6, generator), minlength=4) / 4000
    assert counts[2:].sum() == 0
    assert counts[0].item() == pytest.approx(0.5 / 0.8, abs=0.04)  # five deviations of 4,000 draws
    assert torch.equal(draw(logits, 1.0, 1e-6, generator), torch.zeros(4000, dtype=torch.int64))


def test_temperature_sharpens():
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log().repeat(4000, 1)
    generator = torch.Generator().manual_seed(0)
    share = (draw(logits, 0.5, 1.0, generator) == 0).float().mean().item()
    assert share == pytest.approx(0.25 / (0.25 + 0.09 + 0.04), abs=0.04)


@pytest.mark.parametrize(
    "bad",
    [{"max_new_tokens": 0}, {"max_new_tokens": 163840}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}],
)
def test_values_out_of_range(bad):
    with pytest.raises(ValueError):
        next(generate_tokens(build_model(V3), random_ids(1, 4), **({"max_new_tokens": 3} | bad)))
