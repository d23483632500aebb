"""Mixtures: each source's share holds to one sequence over any prefix."""

from fractions import Fraction

import numpy as np
import pytest

from recipes.config.errors import UserError
from recipes.data.mixture import LARGEST_PERIOD, Mixture, parse_data_spec, resolve_weights, to_shares

WEIGHTS = [
    [0.7, 0.3],
    [1, 2, 4],
    [0.98, 0.01, 0.01],
    [0.5, 0.25, 0.125, 0.125],
    [13, 8, 5, 3, 2, 1, 1],  # Fibonacci numbers: the worst case of splitting in two again and again
    [0.333, 0.333, 0.334],
    [1] * 11,
    [0.9999, 0.0001],
]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_every_prefix_is_exact_to_one(weights):
    mixture = Mixture(weights)
    num_places = 2 * mixture.period + 7
    counts = [0] * len(weights)
    exact = [Fraction(str(weight)) / sum(Fraction(str(w)) for w in weights) for weight in weights]
    for place in range(num_places):
        source, turn = mixture.locate(place)
        assert turn == counts[source], "a source's turns are numbered without a gap"
        counts[source] += 1
        assert all(abs(count - share * (place + 1)) < 1 for count, share in zip(counts, exact, strict=True))
    assert counts == mixture.count(num_places)


def test_random_weights_are_exact_to_one():
    random = np.random.default_rng(0)
    for _ in range(30):
        shares = random.integers(1, 60, size=random.integers(2, 8))
        mixture = Mixture(shares.tolist())
        hits = mixture.table[:, None] == np.arange(len(shares))
        lag = np.cumsum(hits, axis=0) - np.arange(1, mixture.period + 1)[:, None] * (shares / shares.sum())
        assert np.abs(lag).max() < 1 - 1e-9


def test_shares_are_exact_where_the_decimals_allow():
    assert to_shares([0.7, 0.3]) == [7, 3]
    assert to_shares([2, 1]) == [2, 1]
    irrational = [2**0.5, 3**0.5, 1e-9]
    shares = to_shares(irrational)
    assert sum(shares) == LARGEST_PERIOD and shares[2] == 1
    assert shares[0] / LARGEST_PERIOD == pytest.approx(irrational[0] / sum(irrational), abs=2 / LARGEST_PERIOD)


def test_far_places_cost_nothing():
    mixture = Mixture([0.7, 0.3])
    source, turn = mixture.locate(10**15)
    assert turn == 10**14 * [7, 3][source]
    assert mixture.count(10**15) == [7 * 10**14, 3 * 10**14]


def test_temperature_by_hand():
    assert resolve_weights([1000, 8000], [None, None]) == pytest.approx([1 / 9, 8 / 9])
    assert resolve_weights([1000, 8000], [None, None], 3.0) == pytest.approx([1 / 3, 2 / 3])  # cube roots: 10, 20
    assert resolve_weights([5, 5], [3.0, 1.0]) == pytest.approx([0.75, 0.25])


@pytest.mark.parametrize(
    "weights, temperature, message",
    [
        ([0.5, None], 1.0, "1 of 2 sources have a weight"),
        ([0.5, 0.5], 2.0, "drop one of the two"),
        ([None, None], 0.5, "at least 1"),
    ],
)
def test_contradictions_are_refused(weights, temperature, message):
    with pytest.raises(UserError, match=message):
        resolve_weights([10, 10], weights, temperature)


def test_specs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a=3").mkdir()
    assert parse_data_spec("stdlib") == ("stdlib", None)
    assert parse_data_spec("x.jsonl=0.7") == ("x.jsonl", 0.7)
    assert parse_data_spec("a=3") == ("a=3", None)  # the folder of that name
    assert parse_data_spec("a=3=2") == ("a=3", 2.0)
    for wrong in ("x=much", "x=0", "x=-1", "x=inf"):
        with pytest.raises(UserError, match="weight"):
            parse_data_spec(wrong)
