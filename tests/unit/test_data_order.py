"""The order of an epoch is a permutation, without a table."""

import pytest

from recipes.data.order import mix64, permute


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 9, 31, 33, 64, 100, 257, 1000, 4097])
@pytest.mark.parametrize("seed, epoch", [(0, 0), (0, 1), (17, 3), (2**63, 10**6)])
def test_every_index_is_hit_once(size, seed, epoch):
    assert sorted(permute(index, size, seed, epoch) for index in range(size)) == list(range(size))


def test_epochs_and_seeds_differ():
    orders = [tuple(permute(i, 500, seed, epoch) for i in range(500)) for seed in range(4) for epoch in range(4)]
    assert len(set(orders)) == 16
    for order in orders:
        # 500 places of a random permutation have one fixed point on average; 8 or more has a chance of 1e-6
        assert sum(place == index for index, place in enumerate(order)) < 8


def test_ten_billion_sequences_need_no_table():
    size = 10**10
    places = [permute(index, size, 3, 0) for index in range(0, size, size // 2000)]
    assert len(set(places)) == len(places) and all(0 <= place < size for place in places)
    # 2,001 uniform draws: the mean's standard deviation is 0.289 / sqrt(2001) = 0.0065 of the size; five of them
    assert abs(sum(places) / len(places) / size - 0.5) < 5 * 0.0065


def test_first_place_is_uniform_over_seeds():
    counts = [0] * 10
    for seed in range(2000):
        counts[permute(0, 10, seed, 0)] += 1
    chi_squared = sum((count - 200) ** 2 / 200 for count in counts)
    assert chi_squared < 27.9  # 9 degrees of freedom: exceeded by chance once in a thousand


@pytest.mark.parametrize("index", [-1, 5])
def test_index_outside_is_an_error(index):
    with pytest.raises(IndexError, match="not in"):
        permute(index, 5, 0, 0)


def test_mix64_is_splitmix64():
    # The first outputs of SplitMix64 from state 1234567 (the reference C code of Vigna)
    state, outputs = 1234567, []
    for _ in range(3):
        outputs.append(mix64(state))
        state = (state + 0x9E3779B97F4A7C15) & (2**64 - 1)
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]
