"""The batch identity: global batch = micro-batch * accumulation * world size, all in sequences."""

from dataclasses import dataclass
from typing import Any

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


def resolve_batch(config: dict[str, Any], *, world_size: int, seq_length: int, flag: int | None) -> Batch:
    """Fill the three batch keys of a ds_config.

    The global batch is the flag's, else the file's; it never changes with the world size. Accumulation follows
    where the file leaves it "auto" (or out), with the file's micro-batch kept or lowered.

    Args:
        config: a ds_config; each of the three keys is a positive number, "auto" or absent.
        world_size: data-parallel ranks.
        seq_length: tokens per sequence.
        flag: `--global_batch_size`, in sequences.
    Raises:
        BatchFault: no whole numbers fit; it names what does.
    """
    train = _number(config, TRAIN_BATCH)
    micro = _number(config, MICRO_BATCH)
    accumulation = _number(config, ACCUMULATION)
    notes: list[str] = []
    origin = f"{TRAIN_BATCH} {train}"
    if flag is not None and flag != train:
        origin = f"--global_batch_size {flag}"
        if accumulation is not None:
            notes.append(f"{ACCUMULATION}: the file's {accumulation} gives way to {origin}")
            accumulation = None
        train = flag
    if train is None:
        # without a global batch the other two state it, as in DeepSpeed
        micro = micro or _auto_micro_batch(None, seq_length)
        accumulation = accumulation or 1
        return Batch(micro * accumulation * world_size, micro, accumulation, tuple(notes))
    per_rank, rest = divmod(train, world_size)
    if rest:
        worlds = divisors(train)
        near = sorted(sorted(worlds, key=lambda w: abs(w - world_size))[:4])
        sizes = " or ".join(map(str, nearest_multiples(train, world_size)))
        raise BatchFault(
            f"{origin}: is not a multiple of the {world_size} ranks; write {sizes}, "
            f"or use a world size that divides it ({', '.join(map(str, near))} are the nearest)"
        )
    if micro is not None and accumulation is not None:
        return _stated_batch(train, micro, accumulation, world_size)
    if accumulation is not None:
        if per_rank % accumulation:
            unit = accumulation * world_size
            sizes = " or ".join(map(str, nearest_multiples(train, unit)))
            raise BatchFault(
                f"{TRAIN_BATCH} {train}: is not a multiple of {ACCUMULATION} {accumulation} * {world_size} ranks; "
                f'write {sizes}, or {ACCUMULATION} "auto"'
            )
        return Batch(train, per_rank // accumulation, accumulation, tuple(notes))
    chosen = _auto_micro_batch(per_rank, seq_length) if micro is None else _at_most(per_rank, micro)
    if micro is not None and chosen != micro:
        notes.append(
            f"{MICRO_BATCH}: {micro} does not divide the {per_rank} sequences of a rank; lowered to {chosen}, "
            f"accumulation follows"
        )
    return Batch(train, chosen, per_rank // chosen, tuple(notes))


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


def _at_most(per_rank: int, limit: int) -> int:
    """The largest micro-batch of at most `limit` that splits a rank's sequences evenly."""
    return max(d for d in divisors(per_rank) if d <= limit)


def _auto_micro_batch(per_rank: int | None, seq_length: int) -> int:
    limit = max(1, AUTO_MICRO_BATCH_TOKENS // seq_length)
    return limit if per_rank is None else _at_most(per_rank, limit)
