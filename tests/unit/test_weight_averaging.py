"""The average of checkpoints, against the mean worked out on whole state dicts."""

import json

import pytest
import torch
from chat_facts import conversations, write_untrained

from model.hf_layout import file_parts
from recipes.config.errors import UserError
from recipes.training.trained_model import load_trained_model, open_weights
from recipes.training.weight_averaging import average, open_average


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    folder = tmp_path_factory.mktemp("several")
    train, _ = conversations()
    weights = [open_weights(write_untrained(folder / f"seed{seed}", train, initializer_range=0.05)) for seed in (0, 1)]
    return [weights[0], _scaled(weights[1], 3.0), _scaled(weights[1], -1.0)]


def _scaled(weights, factor):
    """Other values of the same architecture."""
    import dataclasses

    def source(config):
        read = weights.source(config)
        return lambda part: read(part) * factor

    return dataclasses.replace(weights, source=source)


def test_it_is_the_weighted_mean_of_every_tensor(several):
    mean = load_trained_model(average(several, [1.0, 2.0, 1.0]), device="cpu", dtype=torch.float32).state_dict()
    states = [load_trained_model(one, device="cpu", dtype=torch.float32).state_dict() for one in several]
    for part in file_parts(several[0].config):
        one, two, three = (part.of(state[part.name]).double() for state in states)
        expected = (one + 2 * two + three) / 4
        # the parts are float32; their mean is rounded once more
        torch.testing.assert_close(part.of(mean[part.name]).double(), expected, rtol=1e-6, atol=1e-7)


@pytest.fixture
def run(tmp_path, monkeypatch, several):
    """A run with checkpoints at steps 10, 20 and 30, whose weights are those above."""
    for step in (10, 20, 30):
        folder = tmp_path / "run" / "checkpoints" / f"step_{step:08d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(json.dumps({"files": {}}))
        (folder / "state.json").write_text(json.dumps({"step": step}))
    by_name = {f"step_{step:08d}": weights for step, weights in zip((10, 20, 30), several, strict=True)}
    monkeypatch.setattr("recipes.training.weight_averaging.open_weights", lambda path: by_name[path.name])
    return tmp_path / "run"


def value(weights):
    part = next(iter(file_parts(weights.config)))
    return weights.source(weights.config)(part).double()


def test_the_newest_ones_alike_or_decaying_with_their_age(run, several):
    first, second, third = (value(weights) for weights in several)
    torch.testing.assert_close(value(open_average(run, 2)), (second + third) / 2)
    decayed = (third + 0.9**10 * second + 0.9**20 * first) / (1 + 0.9**10 + 0.9**20)
    torch.testing.assert_close(value(open_average(run, 3, decay=0.9)), decayed, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("last", "decay", "fault"),
    [(1, None, "--average_last 1"), (4, None, "has 3 complete checkpoints, 4"), (2, 1.0, "--average_decay 1.0")],
)
def test_what_cannot_be_averaged_is_named(run, last, decay, fault):
    with pytest.raises(UserError, match=fault):
        open_average(run, last, decay)
