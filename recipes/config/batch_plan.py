"""Which samples each optimizer step takes, also while the global batch grows.

Everything is a function of the step alone, so a resumed run takes the very samples that an unbroken one would have,
none twice and none left out. The learning-rate schedules that count in tokens count with the same plan.
"""

import math
from dataclasses import dataclass

from recipes.config.errors import UserError


@dataclass(frozen=True)
class BatchRamp:
    """A global batch that grows in proportion to the tokens consumed.

    Args:
        start: the first global batch [sequences].
        tokens: where the ramp ends and the run's global batch is reached [tokens].
        unit: the batch grows by so many sequences at once; None: by the greatest that divides both ends.
    Source: V3 sec. 4.2 and V2 sec. 3.1 state both ends and the tokens between them; the stairs are this project's,
        because a batch has to divide over the ranks.
    """

    start: int
    tokens: float
    unit: int | None = None

    @classmethod
    def parse(cls, text: str) -> "BatchRamp":
        """Read `START:TOKENS` or `START:TOKENS:UNIT`, such as `3072:469e9`.

        Raises:
            UserError: it is none of them.
        """
        parts = text.split(":")
        try:
            start, tokens = int(parts[0]), float(parts[1])
            unit = int(parts[2]) if len(parts) > 2 else None
        except (ValueError, IndexError):
            start, tokens, unit = 0, 0.0, None
        if len(parts) > 3 or start < 1 or tokens <= 0 or (unit is not None and unit < 1):
            raise UserError(
                f"--batch_ramp {text}: write START:TOKENS or START:TOKENS:UNIT, such as 3072:469e9 for a batch that "
                "grows from 3072 sequences to the global batch over the first 469e9 tokens"
            )
        return cls(start, tokens, unit)

    def step_size(self, end: int) -> int:
        """The sequences by which the batch grows at once."""
        return self.unit or math.gcd(self.start, end)

    def fault(self, end: int) -> str | None:
        """Why this ramp cannot lead to a global batch of `end`; None if it can."""
        if self.start > end:
            return f"--batch_ramp: starts at {self.start}, above the global batch of {end} sequences"
        unit = self.step_size(end)
        if (end - self.start) % unit:
            return f"--batch_ramp: steps of {unit} do not lead from {self.start} to the global batch of {end}"
        return None


@dataclass(frozen=True)
class _Level:
    """Steps that share one global batch; the next level begins where this one ends."""

    first_step: int
    first_sample: int
    batch: int


class BatchPlan:
    """The global batch over a run.

    Args:
        global_batch_size: once a ramp is over, or always [sequences].
        seq_length: tokens per sequence.
        ramp: None for a batch that does not change.
    """

    def __init__(self, global_batch_size: int, seq_length: int, ramp: BatchRamp | None = None) -> None:
        self.global_batch_size = global_batch_size
        self.seq_length = seq_length
        self._levels = [_Level(0, 0, global_batch_size)]
        if ramp is not None and ramp.start < global_batch_size:
            assert ramp.fault(global_batch_size) is None, "a ramp is checked before it is planned"
            self._levels = self._climb(ramp)

    def _climb(self, ramp: BatchRamp) -> list[_Level]:
        unit = ramp.step_size(self.global_batch_size)
        rises = (self.global_batch_size - ramp.start) // unit
        levels = [_Level(0, 0, ramp.start)]
        for rise in range(1, rises + 1):
            last = levels[-1]
            begins_at_tokens = ramp.tokens * rise / rises
            samples_left = begins_at_tokens / self.seq_length - last.first_sample
            steps = max(0, math.ceil(samples_left / last.batch))  # a short ramp may leave a level out
            batch = ramp.start + rise * unit
            levels.append(_Level(last.first_step + steps, last.first_sample + steps * last.batch, batch))
        return levels

    def _level(self, step: int) -> _Level:
        return next(level for level in reversed(self._levels) if level.first_step <= step)

    def batch_at(self, step: int) -> int:
        """The global batch of a step [sequences]."""
        return self._level(step).batch

    def samples_before(self, step: int) -> int:
        """Samples consumed before a step: the index of its first one."""
        level = self._level(step)
        return level.first_sample + (step - level.first_step) * level.batch

    def tokens_before(self, step: int) -> int:
        """Tokens consumed before a step."""
        return self.samples_before(step) * self.seq_length

    def steps_for_tokens(self, tokens: float) -> int:
        """The fewest steps that consume so many tokens."""
        samples = tokens / self.seq_length
        level = next(level for level in reversed(self._levels) if level.first_sample < samples or level.first_step == 0)
        return level.first_step + math.ceil((samples - level.first_sample) / level.batch)

    @property
    def batches(self) -> list[int]:
        """Every global batch that occurs, in order."""
        return [level.batch for level in self._levels]
