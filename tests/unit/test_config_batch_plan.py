"""The growing global batch: no sample twice, none left out, and the same from any step on."""

import pytest

from recipes.config.batch import BatchFault, resolve_batch
from recipes.config.batch_plan import BatchPlan, BatchRamp
from recipes.config.errors import UserError


def walk(plan, steps):
    """Samples before each step, by adding up the batches one by one."""
    taken = 0
    for step in range(steps):
        yield step, taken
        taken += plan.batch_at(step)


@pytest.mark.parametrize(
    "start, end, tokens, unit",
    [(2, 10, 1000, None), (4, 16, 4096, 4), (3, 3, 100, None), (1, 7, 50, 2), (2, 64, 10, 2)],
)  # the last ramp is over before its first batches are
def test_every_sample_once_and_in_order(start, end, tokens, unit):
    plan = BatchPlan(end, 8, BatchRamp(start, tokens, unit))
    for step, taken in walk(plan, 300):
        assert plan.samples_before(step) == taken
        assert plan.tokens_before(step) == taken * 8
    assert plan.batch_at(0) == start if tokens > 10 else plan.batch_at(0) >= start
    assert plan.batch_at(299) == end


def test_the_batch_follows_a_straight_line_in_tokens():
    plan = BatchPlan(10, 8, BatchRamp(2, 1000))  # 2, 4, 6, 8, 10: a stair each 250 tokens
    assert plan.batches == [2, 4, 6, 8, 10]
    for step, taken in walk(plan, 100):
        line = 2 + 8 * min(1.0, taken * 8 / 1000)
        assert line - 2 < plan.batch_at(step) <= line  # on the stair below the line


def test_v3_and_v2_ramps():
    # V3 sec. 4.2: 3,072 to 15,360 over 469B tokens; V2 sec. 3.1: 2,304 to 9,216 over 225B; sequences of 4,096
    for start, end, tokens, stairs in ((3072, 15360, 469e9, 4), (2304, 9216, 225e9, 3)):
        plan = BatchPlan(end, 4096, BatchRamp(start, tokens))
        assert plan.batches == [start * k for k in range(1, stairs + 2)]
        full = next(step for step in range(0, 40_000, 1) if plan.batch_at(step) == end)
        assert 0 <= plan.tokens_before(full) - tokens < end * 4096  # at the first step past it


def test_steps_for_tokens_is_the_inverse():
    plan = BatchPlan(10, 8, BatchRamp(2, 1000))
    for tokens in (1, 16, 17, 250, 999, 1000, 5000):
        steps = plan.steps_for_tokens(tokens)
        assert plan.tokens_before(steps) >= tokens > plan.tokens_before(steps - 1)
    assert BatchPlan(4, 8).steps_for_tokens(64) == 2


def test_without_a_ramp_the_batch_is_one():
    plan = BatchPlan(4, 8)
    assert [plan.batch_at(0), plan.batch_at(9), plan.samples_before(3), plan.tokens_before(3)] == [4, 4, 12, 96]


def test_parsing():
    assert BatchRamp.parse("3072:469e9") == BatchRamp(3072, 469e9)
    assert BatchRamp.parse("3072:469e9:1024") == BatchRamp(3072, 469e9, 1024)
    for text in ("3072", "a:1", "0:5", "4:0", "1:2:3:4", "4:9:0"):
        with pytest.raises(UserError, match="--batch_ramp .*: write START:TOKENS"):
            BatchRamp.parse(text)


def test_every_batch_of_a_ramp_has_to_fit_the_ranks():
    def resolve(world_size, ramp, micro="auto"):
        config = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": micro}
        return resolve_batch(config, world_size=world_size, seq_length=8, flag=None, ramp=ramp)

    batch = resolve(2, BatchRamp(4, 100))  # 4, 8, 12: all multiples of 4, 2 sequences a rank
    assert (batch.micro_batch_size, batch.accumulation_steps) == (2, 3)
    with pytest.raises(BatchFault, match="from 4 to 12 is a multiple of 4, which is not a multiple of the 3 ranks"):
        resolve(3, BatchRamp(4, 100))
    with pytest.raises(BatchFault, match="above the global batch"):
        resolve(1, BatchRamp(16, 100))
    with pytest.raises(BatchFault, match="steps of 3 do not lead from 4"):
        resolve(1, BatchRamp(4, 100, 3))
