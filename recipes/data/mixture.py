"""Mixtures: which source each sequence of a run comes from, exact to one sequence over any prefix."""

import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np

from recipes.config.errors import UserError

LARGEST_PERIOD = 100_000


def parse_data_spec(spec: str) -> tuple[str, float | None]:
    """Split `SPEC=weight`; a path that itself holds a "=" and exists is taken whole.

    Raises:
        UserError: the weight is not a number above 0.
    """
    name, equals, weight = spec.rpartition("=")
    if not equals or Path(spec).exists():
        return spec, None
    try:
        value = float(weight)
    except ValueError as error:
        raise UserError(f"--data {spec}: the weight {weight!r} is not a number; write {name}=0.5") from error
    if not (math.isfinite(value) and value > 0):
        raise UserError(f"--data {spec}: the weight must be above 0; leave the source out instead")
    return name, value


def resolve_weights(
    num_tokens: Sequence[int], weights: Sequence[float | None], temperature: float = 1.0
) -> list[float]:
    """Each source's part of the tokens, summing to 1.

    Args:
        num_tokens: of each source.
        weights: as given, all or none. None given: size ** (1 / temperature), so 1 visits every source equally often,
            and more favours the small ones (Conneau et al., arXiv 1911.02116, section 3.1; alpha = 1 / temperature).
    Raises:
        UserError: some but not all weights given, weights and a temperature, or a temperature below 1.
    """
    if temperature < 1.0 or not math.isfinite(temperature):
        raise UserError(f"--mixture_temperature {temperature}: must be at least 1")
    given = [weight for weight in weights if weight is not None]
    if given and len(given) < len(weights):
        raise UserError(f"--data: {len(given)} of {len(weights)} sources have a weight; give all of them one, or none")
    if given and temperature != 1.0:
        raise UserError("--mixture_temperature: weights are given with --data; drop one of the two")
    if not given:
        given = [float(size) ** (1.0 / temperature) for size in num_tokens]
    total = math.fsum(given)
    return [weight / total for weight in given]


def to_shares(weights: Sequence[float]) -> list[int]:
    """Whole numbers in the proportion of `weights`, with a sum of at most LARGEST_PERIOD.

    Exact where the weights' decimals allow it (0.7, 0.3 -> 7, 3); otherwise rounded to 1/LARGEST_PERIOD, each source
    keeping at least one share.
    """
    total = math.fsum(weights)
    fractions = [Fraction(weight / total).limit_denominator(LARGEST_PERIOD) for weight in weights]
    period = math.lcm(*(fraction.denominator for fraction in fractions))
    if sum(fractions) == 1 and period <= LARGEST_PERIOD:
        return [int(fraction * period) for fraction in fractions]
    exact = [weight / total * LARGEST_PERIOD for weight in weights]
    shares = [max(1, int(value)) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda source: shares[source] - exact[source])
    for source in by_remainder[: max(0, LARGEST_PERIOD - sum(shares))]:
        shares[source] += 1
    return shares


class Mixture:
    """A periodic sequence of sources in which source k has, after any n places, within one of n * share_k / period.

    Each place goes, among the sources that are not ahead of their share, to the one whose next turn is due first
    (earliest deadline first is optimal for such windows on one machine: Baruah et al., "Proportionate Progress",
    Algorithmica 1996). One period is kept as a table of at most 100,000 entries; any place is found in O(1).

    Args:
        weights: each source's part, any positive scale.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.shares = to_shares(weights)
        self.period = sum(self.shares)
        self.table = schedule(self.shares)
        # occurrences[p]: how often table[p] stands before p in the period
        self.occurrences = np.zeros(self.period, dtype=np.int64)
        for source in range(len(self.shares)):
            places = np.flatnonzero(self.table == source)
            self.occurrences[places] = np.arange(len(places))

    def locate(self, index: int) -> tuple[int, int]:
        """The source of place `index`, and how many places before it went to that source."""
        period, place = divmod(index, self.period)
        source = int(self.table[place])
        return source, period * self.shares[source] + int(self.occurrences[place])

    def count(self, num_places: int) -> list[int]:
        """How many of the first `num_places` go to each source."""
        periods, rest = divmod(num_places, self.period)
        partial = np.bincount(self.table[:rest], minlength=len(self.shares))
        return [periods * share + int(extra) for share, extra in zip(self.shares, partial, strict=True)]


def schedule(shares: Sequence[int]) -> np.ndarray:
    """(period,) uint16: the source of each place of one period."""
    period = sum(shares)
    table = np.zeros(period, dtype=np.uint16)
    used = [0] * len(shares)
    deadlines = [-(-period // share) for share in shares]  # the place by which the next turn must be over
    for place in range(period):
        best, best_deadline = -1, period + 1
        for source, share in enumerate(shares):
            # Released: its share of the first place + 1 places is above what it used.
            if deadlines[source] < best_deadline and used[source] * period < (place + 1) * share:
                best, best_deadline = source, deadlines[source]
        table[place] = best
        used[best] += 1
        deadlines[best] = -(-(used[best] + 1) * period // shares[best])
    return table
