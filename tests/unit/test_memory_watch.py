"""The watcher warns of steady growth and of nothing else; readings are what the system says."""

import mmap

import numpy as np
import pytest

from recipes.training.memory_watch import GrowthWatcher, host_memory, peak_host_memory, theil_sen

MIB = 1 << 20
STEPS = 500


def warnings(values):
    watcher = GrowthWatcher()
    return [(step, slope) for step, value in enumerate(values, start=1) if (slope := watcher.add(float(value)))]


def clean_runs():
    """Name -> 500 readings [bytes] of runs that leak nothing, of every kind that one meets."""
    steps = np.arange(STEPS)
    for seed in range(10):
        random = np.random.default_rng(seed)
        yield f"noise {seed}", 500 * MIB + random.normal(0, 5 * MIB, STEPS)
        yield f"walk {seed}", 500 * MIB + np.cumsum(random.choice([-1, 0, 1], STEPS)) * 32 * 1024
        peaks = (random.random(STEPS) < 0.1) * random.exponential(200 * MIB, STEPS)
        yield f"peaks {seed}", 500 * MIB + peaks
    yield "warm-up", 500 * MIB - 100 * MIB * np.exp(-steps / 12)
    for step in range(60, STEPS, 20):
        yield f"jump at {step}", 500 * MIB + 80 * MIB * (steps > step)
    yield "sawtooth, collected every 30 steps", 500 * MIB + (steps % 30) * 2 * MIB
    yield "an evaluation every 100 steps keeps a little", 500 * MIB + (steps // 100) * 6 * MIB
    yield "nothing changes", np.full(STEPS, 500 * MIB)
    yield "too slow to matter", 500 * MIB + steps * 8 * 1024  # 8 MiB per 1,000 steps


@pytest.mark.parametrize(("name", "values"), clean_runs(), ids=lambda value: value if isinstance(value, str) else "")
def test_clean_runs_of_500_steps_are_silent(name, values):
    assert warnings(values) == []


@pytest.mark.parametrize("per_step", [100 * 1024, MIB, 20 * MIB])
@pytest.mark.parametrize("seed", range(3))
def test_a_leak_is_found_with_its_slope(per_step, seed):
    noise = np.random.default_rng(seed).normal(0, 1 * MIB, STEPS)
    found = warnings(500 * MIB + np.arange(STEPS) * per_step + noise)
    assert found[0][0] <= 250, "found after half of the run only"
    for _, slope in found:
        # medians of 5 readings have 0.56 MiB of noise, a line through 12 of them a slope uncertain by 9.6 KiB a step
        assert slope == pytest.approx(1000 * per_step, abs=6 * 1000 * 9.6 * 1024)


def test_a_large_leak_is_found_as_soon_as_12_medians_of_5_steps_are_there():
    assert warnings(500 * MIB + np.arange(STEPS) * 10 * MIB)[0][0] == 50 + 12 * 5


def test_theil_sen_by_hand():
    # pairs: 1, 10, 2, 9, 0.5 (of 1 over 2 points), -8: the median of 1, 5, 2/3, 9, 0.5, -8
    assert theil_sen(np.array([0.0, 1.0, 10.0, 2.0])) == (pytest.approx((2 / 3 + 1) / 2), pytest.approx(4 / 6))
    assert theil_sen(np.array([1.0, 1.0, 1.0])) == (0.0, 0.0)


def test_host_memory_grows_by_what_is_allocated_and_not_by_a_file_that_is_read(tmp_path):
    resident, own = host_memory()
    kept = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # malloc may have room left over
    for page in range(0, len(kept), mmap.PAGESIZE):
        kept[page] = 1
    more_resident, more_own = host_memory()
    # the interpreter may give or take a little of its own meanwhile
    assert more_own - own == pytest.approx(len(kept), abs=4 * MIB)
    assert more_resident - resident == pytest.approx(len(kept), abs=4 * MIB)
    assert peak_host_memory() >= more_resident - MIB  # the kernel adds up both late
    path = tmp_path / "corpus"
    path.write_bytes(kept)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        resident, own = host_memory()
        assert sum(mapped[:: mmap.PAGESIZE]) > 0
        read_resident, read_own = host_memory()
    assert read_resident - resident > 60 * MIB
    assert read_own - own < 4 * MIB
