"""What changes with the tokens besides the learning rate: bias speed, MTP weight, and a rate that follows the batch."""

import math

import pytest

from recipes.config.batch_plan import BatchPlan, BatchRamp
from recipes.config.errors import UserError
from recipes.training.token_schedules import (
    bias_update_speed_at,
    follow_batch,
    mtp_loss_weight_at,
    parse_later_weight,
)


def test_bias_speed_stands_still_from_its_token_on():
    assert [bias_update_speed_at(tokens, 0.001, 100) for tokens in (0, 99, 100, 101)] == [0.001, 0.001, 0.0, 0.0]
    assert bias_update_speed_at(1e15, 0.001, None) == 0.001


def test_mtp_weight_changes_at_its_token():
    assert [mtp_loss_weight_at(tokens, 0.3, (0.1, 50)) for tokens in (0, 49, 50, 51)] == [0.3, 0.3, 0.1, 0.1]
    assert mtp_loss_weight_at(1e15, 0.3, None) == 0.3


def test_parsing_a_later_weight():
    assert parse_later_weight("0.1:10e12") == (0.1, 10e12)
    for text in ("0.1", "x:1", "1:2:3", "-1:5"):
        with pytest.raises(UserError, match="--mtp_loss_weight_later .*: write WEIGHT:TOKENS"):
            parse_later_weight(text)


def test_a_rate_that_follows_the_batch():
    plan = BatchPlan(16, 1, BatchRamp(4, 100, 12))  # 4 sequences for 100 tokens, then 16
    assert (plan.batch_at(24), plan.batch_at(25)) == (4, 16)
    rates = {rule: follow_batch(lambda step: 1.0, plan, rule) for rule in ("sqrt", "linear", "none")}
    assert [rates["sqrt"](step) for step in (0, 24, 25)] == [math.sqrt(4 / 16)] * 2 + [1.0]
    assert rates["linear"](0) == 4 / 16 and rates["none"](0) == 1.0
