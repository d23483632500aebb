"""The batch identity: global batch = micro-batch * accumulation * ranks, and what an error says when none fits."""

import itertools

import pytest

from recipes.config.batch import (
    ACCUMULATION,
    AUTO_MICRO_BATCH_TOKENS,
    MICRO_BATCH,
    TRAIN_BATCH,
    BatchFault,
    divisors,
    nearest_multiples,
    resolve_batch,
)


def resolve(train=None, micro=None, accumulation=None, world_size=1, seq_length=256, flag=None):
    config = {TRAIN_BATCH: train, MICRO_BATCH: micro, ACCUMULATION: accumulation}
    config = {key: value for key, value in config.items() if value is not None}
    batch = resolve_batch(config, world_size=world_size, seq_length=seq_length, flag=flag)
    return batch.global_batch_size, batch.micro_batch_size, batch.accumulation_steps


@pytest.mark.parametrize(
    "arguments, expected",
    [
        # worked by hand: train, micro, accumulation, world -> global, micro, accumulation
        (dict(train=8, micro="auto", accumulation="auto", world_size=1), (8, 8, 1)),
        (dict(train=8, micro="auto", accumulation="auto", world_size=2), (8, 4, 1)),
        (dict(train=256, micro=4, accumulation="auto", world_size=8), (256, 4, 8)),
        (dict(train=256, micro=4, world_size=64), (256, 4, 1)),
        (dict(train=256, micro=4, world_size=128), (256, 2, 1)),  # micro lowered, the global batch stays
        (dict(train=24, micro=5, world_size=2), (24, 4, 3)),  # 12 a rank: 4 is the largest divisor below 5
        (dict(train=256, micro="auto", accumulation=16, world_size=8), (256, 2, 16)),
        (dict(train=32, micro=4, accumulation=2, world_size=4), (32, 4, 2)),
        (dict(micro=4, accumulation=2, world_size=4), (32, 4, 2)),
        (dict(micro=4, world_size=4), (16, 4, 1)),
        (dict(train=256, micro=4, accumulation=8, world_size=8, flag=512), (512, 4, 16)),  # the flag wins
        (dict(train=256, micro="auto", accumulation="auto", world_size=8, seq_length=4096), (256, 2, 16)),
        (dict(train=256, micro="auto", accumulation="auto", world_size=8, seq_length=100_000), (256, 1, 32)),
    ],
)
def test_worked_examples(arguments, expected):
    assert resolve(**arguments) == expected


def test_the_identity_holds_for_every_auto_batch_that_divides():
    for train, world_size, micro in itertools.product(range(1, 41), range(1, 9), ("auto", 1, 3, 8)):
        if train % world_size:
            continue
        batch, chosen, accumulation = resolve(train, micro, "auto", world_size)
        assert batch == train == chosen * accumulation * world_size
        limit = AUTO_MICRO_BATCH_TOKENS // 256 if micro == "auto" else micro
        better = [d for d in range(chosen + 1, limit + 1) if (train // world_size) % d == 0]
        assert chosen <= limit and not better


def test_a_world_size_that_does_not_divide_names_batches_and_world_sizes():
    with pytest.raises(BatchFault) as fault:
        resolve(train=10, micro="auto", accumulation="auto", world_size=4)
    assert str(fault.value) == (
        "train_batch_size 10: is not a multiple of the 4 ranks; write 8 or 12, "
        "or use a world size that divides it (1, 2, 5, 10 are the nearest)"
    )


def test_the_flag_is_named_when_it_is_at_fault():
    with pytest.raises(BatchFault, match=r"^--global_batch_size 10: is not a multiple of the 4 ranks; write 8 or 12"):
        resolve(train=256, world_size=4, flag=10)


def test_three_stated_numbers_that_disagree_name_the_two_nearest_batches():
    with pytest.raises(BatchFault) as fault:
        resolve(train=30, micro=4, accumulation=2, world_size=2)
    # 4 * 2 = 8 sequences a micro-step: 24 and 32 are the multiples on both sides of 30
    assert "is not train_micro_batch_size_per_gpu 4 * gradient_accumulation_steps 2 * 2 ranks = 16" in str(fault.value)
    assert "24 with gradient_accumulation_steps 3 or 32 with gradient_accumulation_steps 4" in str(fault.value)


def test_accumulation_that_does_not_divide():
    with pytest.raises(BatchFault, match="not a multiple of gradient_accumulation_steps 3 .* 2 ranks; write 30 or 36"):
        resolve(train=32, micro="auto", accumulation=3, world_size=2)


@pytest.mark.parametrize("value", [0, -8, 2.5, True, "eight"])
def test_values_that_are_no_batch_size(value):
    with pytest.raises(BatchFault, match='train_batch_size .*: must be a whole number of at least 1, or "auto"'):
        resolve(train=value)


def test_a_lowered_micro_batch_and_an_overruled_accumulation_are_said():
    lowered = resolve_batch({TRAIN_BATCH: 6, MICRO_BATCH: 4}, world_size=1, seq_length=8, flag=None)
    assert "4 does not divide the 6 sequences of a rank; lowered to 3" in lowered.notes[0]
    overruled = resolve_batch({TRAIN_BATCH: 8, ACCUMULATION: 2}, world_size=1, seq_length=8, flag=16)
    assert "the file's 2 gives way to --global_batch_size 16" in overruled.notes[0]


def test_divisors_and_nearest_multiples():
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]
    assert nearest_multiples(30, 8) == [24, 32]
    assert nearest_multiples(3, 8) == [8]  # never zero
