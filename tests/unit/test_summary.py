"""What a run says of itself."""

import pytest

from recipes.training.summary import _flops_text


@pytest.mark.parametrize(
    "flops, text",
    [
        (249_300.0, "249 kFLOP"),
        (999.0, "999 FLOP"),
        (999.9, "1 kFLOP"),
        (1500.0, "1.5 kFLOP"),
        (2.21e7, "22.1 MFLOP"),
        (2.5e11, "250 GFLOP"),
    ],
)
def test_flops_have_a_fitting_unit(flops, text):
    assert _flops_text(flops) == text
