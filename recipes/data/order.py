"""The order of an epoch: a pseudo-random permutation that needs no table.

Sequence i of epoch e is a function of (seed, e, i) alone. No rank, worker or checkpoint holds a shuffled list, so a run
resumes at any step on any number of ranks, and 10^10 sequences cost what ten cost.
"""

from functools import lru_cache

NUM_ROUNDS = 6  # four make a Luby-Rackoff permutation strong; two more because our halves may be only a few bits wide
MASK64 = (1 << 64) - 1


def mix64(value: int) -> int:
    """Scramble 64 bits one-to-one: the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
    return value ^ (value >> 31)


@lru_cache(maxsize=64)
def round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    """NUM_ROUNDS keys of 64 bits that depend on the seed and the epoch."""
    state = mix64(mix64(seed & MASK64) ^ (epoch & MASK64))
    return tuple(mix64(state + round_index) for round_index in range(NUM_ROUNDS))


def permute(index: int, size: int, seed: int, epoch: int) -> int:
    """The image of `index` under the permutation of [0, size) that (seed, epoch) chooses.

    A Feistel network over the fewest bits that hold size - 1, with halves that may differ by one bit; an image outside
    [0, size) is mapped again until it falls inside (cycle walking), which takes fewer than two tries on average.

    Raises:
        IndexError: index is not in [0, size).
    Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (CT-RSA 2002), method 2 (cycle walking).
    """
    if not 0 <= index < size:
        raise IndexError(f"index {index} is not in [0, {size})")
    num_bits = max(2, (size - 1).bit_length())
    right_bits = num_bits // 2
    left_mask, right_mask = (1 << (num_bits - right_bits)) - 1, (1 << right_bits) - 1
    keys = round_keys(seed, epoch)
    while True:
        left, right = index >> right_bits, index & right_mask
        for round_index in range(0, NUM_ROUNDS, 2):
            left ^= mix64(right ^ keys[round_index]) & left_mask
            right ^= mix64(left ^ keys[round_index + 1]) & right_mask
        index = (left << right_bits) | right
        if index < size:
            return index
