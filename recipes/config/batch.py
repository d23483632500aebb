"""The batch identity: global batch = micro-batch * accumulation * world size, all in sequences."""

import math
from dataclasses import dataclass
from typing import Any

from recipes.config.batch_plan import BatchRamp

# "auto" micro-batches hold at most this many tokens on one device: enough to fill its matrix units, and little
# enough that activations stay small beside the weights. More needs a number in the file.
AUTO_MICRO_BATCH_TOKENS = 8192

TRAIN_BATCH = "train_batch_size"
MICRO_BATCH = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"


@dataclass(frozen=True)
class Batch:
    """A batch that fits: `global_batch_size == micro_batch_size * accumulation_steps * world_size`."""

    global_batch_size: int
    micro_batch_size: int
    accumulation_steps: int
    notes: tuple[str, ...] = ()


class BatchFault(ValueError):
    """The batch cannot be split; the message starts with the key path or flag."""


def divisors(n: int) -> list[int]:
    """The positive divisors of n, ascending."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def nearest_multiples(value: int, unit: int) -> list[int]:
    """The multiples of `unit` next to `value`: one at each side, never below one unit."""
    below = value // unit * unit
    return [below, below + unit] if below else [unit]


def resolve_batch(
    config: dict[str, Any], *, world_size: int, seq_length: int, flag: int | None, ramp: BatchRamp | None = None
) -> Batch:
    """Fill the three batch keys of a ds_config.

    The global batch is the flag's, else the file's; it never changes with the world size. Accumulation follows
    where the file leaves it "auto" (or out), with the file's micro-batch kept or lowered.

    Args:
        config: a ds_config; each of the three keys is a positive number, "auto" or absent.
        world_size: data-parallel ranks.
        seq_length: tokens per sequence.
        flag: `--global_batch_size`, in sequences.
        ramp: how the global batch grows; every batch on the way has to fit, too.
    Raises:
        BatchFault: no whole numbers fit; it names what does.
    """
    train = _number(config, TRAIN_BATCH)
    micro = _number(config, MICRO_BATCH)
    accumulation = _number(config, ACCUMULATION)
    notes: list[str] = []
    origin = f"{TRAIN_BATCH} {train}:"
    if flag is not None and flag != train:
        origin = f"--global_batch_size {flag}:"
        if accumulation is not None:
            notes.append(f"{ACCUMULATION}: the file's {accumulation} gives way to {origin[:-1]}")
            accumulation = None
        train = flag
    if train is None:
        # without a global batch the other two state it, as in DeepSpeed
        micro = micro or max(1, AUTO_MICRO_BATCH_TOKENS // seq_length)
        train = micro * (accumulation or 1) * world_size
    common = train
    if ramp is not None:
        if fault := ramp.fault(train):
            raise BatchFault(fault)
        if accumulation is not None:
            raise BatchFault(f'{ACCUMULATION} {accumulation}: grows with --batch_ramp; write "auto"')
        common = math.gcd(ramp.start, ramp.step_size(train), train)
        origin = f"--batch_ramp: every batch from {ramp.start} to {train} is a multiple of {common}, which"
    per_rank = _share(common, world_size, origin)
    if micro is not None and accumulation is not None:
        return _stated_batch(train, micro, accumulation, world_size)
    if accumulation is not None:
        return Batch(train, _micro_batch_of(train, accumulation, world_size), accumulation, tuple(notes))
    limit = micro or max(1, AUTO_MICRO_BATCH_TOKENS // seq_length)
    chosen = max(d for d in divisors(per_rank) if d <= limit)
    if micro is not None and chosen != micro:
        notes.append(
            f"{MICRO_BATCH}: {micro} does not divide the {per_rank} sequences of a rank; lowered to {chosen}, "
            f"accumulation follows"
        )
    return Batch(train, chosen, train // world_size // chosen, tuple(notes))


def _share(batch: int, world_size: int, origin: str) -> int:
    """A rank's part of the batch."""
    per_rank, rest = divmod(batch, world_size)
    if rest:
        near = sorted(sorted(divisors(batch), key=lambda w: abs(w - world_size))[:4])
        sizes = " or ".join(map(str, nearest_multiples(batch, world_size)))
        raise BatchFault(
            f"{origin} is not a multiple of the {world_size} ranks; write {sizes}, "
            f"or use a world size that divides it ({', '.join(map(str, near))} are the nearest)"
        )
    return per_rank


def _micro_batch_of(train: int, accumulation: int, world_size: int) -> int:
    micro, rest = divmod(train, accumulation * world_size)
    if rest:
        sizes = " or ".join(map(str, nearest_multiples(train, accumulation * world_size)))
        raise BatchFault(
            f"{TRAIN_BATCH} {train}: is not a multiple of {ACCUMULATION} {accumulation} * {world_size} ranks; "
            f'write {sizes}, or {ACCUMULATION} "auto"'
        )
    return micro


def _stated_batch(train: int, micro: int, accumulation: int, world_size: int) -> Batch:
    unit = micro * world_size
    if train == unit * accumulation:
        return Batch(train, micro, accumulation)
    near = " or ".join(
        f"{size} with {ACCUMULATION} {size // unit}" if size // unit != accumulation else str(size)
        for size in nearest_multiples(train, unit)
    )
    raise BatchFault(
        f"{TRAIN_BATCH} {train}: is not {MICRO_BATCH} {micro} * {ACCUMULATION} {accumulation} * {world_size} ranks "
        f'= {unit * accumulation}; write {unit * accumulation}, or {near}, or leave {ACCUMULATION} "auto"'
    )


def _number(config: dict[str, Any], key: str) -> int | None:
    value = config.get(key)
    if value is None or value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BatchFault(f'{key} {value!r}: must be a whole number of at least 1, or "auto"')
    return value
