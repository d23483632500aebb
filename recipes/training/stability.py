"""Steps that are not finite: each is counted and said; where no later one can be good, the run ends with the cause."""

import math
from pathlib import Path
from typing import Any

from torch import Tensor

from recipes.config.errors import TrainingFault
from recipes.training.checkpoint_files import list_checkpoints
from recipes.training.diagnosis import first_nonfinite, nonfinite_parameter
from recipes.training.loss_scale import UpdateControl
from recipes.training.step import StepResult

# Dynamic loss scaling leaves a few steps out to find its scale; so many in a row never recover.
MOST_NONFINITE_STEPS = 50


class FiniteWatch:
    """Follows a run's steps and checkpoints for values that are not finite; every rank has one and asks it alike.

    Args:
        limit: steps in a row after which the run ends; None is 50 in half precision, and 1 in fp32, whose range no loss
            scale can help.
    """

    def __init__(self, engine: Any, control: UpdateControl, checkpoints: Path, dtype: str, limit: int | None) -> None:
        self._engine, self._control, self._checkpoints, self._dtype = engine, control, checkpoints, dtype
        self._limit = limit or (1 if dtype == "fp32" else MOST_NONFINITE_STEPS)
        self.in_a_row = 0

    def look(self, step: int, result: StepResult, skipped_steps: int) -> str | None:
        """Count a step; returns a warning for one that was not finite.

        Args:
            skipped_steps: updates left out so far.
        """
        if result.finite:
            self.in_a_row = 0
            return None
        self.in_a_row += 1
        scale = ""
        if self._dtype == "fp16":
            scale = f", loss scale {result.loss_scale:g}, now {self._control.loss_scale:g}"
        return (
            f"warning: step {step}: {_what(result)} (loss {result.loss:.4g}{scale}); its update is left out, "
            f"{skipped_steps} so far"
        )

    def hopeless(self, result: StepResult) -> str | None:
        """Why waiting for a better step than the last is of no use; None where it may be."""
        if result.finite:
            return None
        if self._control.at_floor:
            return f"{_what(result)} at the smallest loss scale, {result.loss_scale:g}"
        if self.in_a_row < self._limit:
            return None
        in_fp16 = f", loss scale {result.loss_scale:g}" if self._dtype == "fp16" else ""
        steps = f"{self.in_a_row} steps in a row were not finite" if self.in_a_row > 1 else _what(result)
        return f"{steps} in {self._dtype} (loss {result.loss:.4g}{in_fp16})"

    def fault(self, step: int, why: str, result: StepResult, micro_batches: list[dict[str, Tensor]]) -> TrainingFault:
        """What ends the run: why, where it began, and what to go back to; all ranks call it.

        Args:
            micro_batches: this rank's of the step; they run once more.
        """
        first = first_nonfinite(self._engine, self._control, micro_batches, result.loss_denominator, result.loss_scale)
        return TrainingFault(f"step {step}: {why}; the first was {first}; {self._newest_good()}")

    def check_weights(self, step: int) -> None:
        """Raises TrainingFault: a weight is not finite, so nothing is saved."""
        name = nonfinite_parameter(self._engine.module)
        if name:
            raise TrainingFault(
                f"step {step}: {name} holds values that are not finite, and is not saved; {self._newest_good()}"
            )

    def _newest_good(self) -> str:
        saved = list_checkpoints(self._checkpoints)
        return f"the newest good checkpoint is {saved[0]}" if saved else "no checkpoint had been saved before it"


def _what(result: StepResult) -> str:
    return "a gradient is not finite" if math.isfinite(result.loss) else "the loss is not finite"
