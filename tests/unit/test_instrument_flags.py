"""The flags that switch instruments on: which steps are meant, and that none of them does nothing."""

import pytest

from recipes.config.errors import UserError
from recipes.config.instrument_flags import ProfileSteps, check_instruments
from recipes.config.run_config import PretrainConfig


@pytest.mark.parametrize(
    ("text", "done", "expected"), [("10:13", 0, (10, 13)), ("7:7", 6, (7, 7)), ("3", 0, (6, 8)), ("1", 14, (20, 20))]
)
def test_steps(text, done, expected):
    steps = ProfileSteps.parse(text, done, 20)
    assert (steps.first, steps.last) == expected


@pytest.mark.parametrize("text", ["", "ten", "10-13", "13:10", "0:3", "5:8", "18:21", "0", "99"])
def test_steps_that_the_run_does_not_take_are_refused(text):
    with pytest.raises(UserError, match=f"--profile {text}: "):
        ProfileSteps.parse(text, done_steps=5, max_steps=20)


def test_what_would_do_nothing_on_a_cpu_is_refused_all_at_once():
    config = PretrainConfig(memory_snapshot=True, empty_cache_steps=10, profile="30:40")
    with pytest.raises(UserError) as error:
        check_instruments(config, "cpu", 0, 20)
    assert [fault.split(":")[0] for fault in error.value.faults] == [
        "--memory_snapshot",
        "--empty_cache_steps 10",
        "--profile 30",
    ]
    assert all("GPU" in fault for fault in error.value.faults[:2])
    check_instruments(PretrainConfig(memory_snapshot=True, empty_cache_steps=10, profile="3"), "cuda", 0, 20)
