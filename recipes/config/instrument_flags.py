"""The flags of what watches a run: which steps `--profile` means, and what would do nothing on this device."""

import re
from dataclasses import dataclass

from recipes.config.errors import UserError
from recipes.config.run_config import RunConfig

STEPS_BEFORE_A_COUNT = 5  # the first steps are not like the others: caches fill, the optimizer makes its state


@dataclass(frozen=True)
class ProfileSteps:
    """Optimizer steps `first` to `last`, both included."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str, done_steps: int, max_steps: int) -> "ProfileSteps":
        """Read `10:13`, or `3` for three steps after the first few of this start.

        Args:
            done_steps: that a resumed run has behind it. max_steps: of the whole run.
        Raises:
            UserError: neither form, or steps that this run will not take.
        """
        match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
        if not match:
            raise UserError(f"--profile {text}: write FIRST:LAST, e.g. 10:13, or a number of steps")
        if match[2] is None:
            first = done_steps + STEPS_BEFORE_A_COUNT + 1
            steps = cls(first, first + int(match[1]) - 1)
        else:
            steps = cls(int(match[1]), int(match[2]))
        if steps.last < steps.first or steps.first <= done_steps or steps.last > max_steps:
            raise UserError(
                f"--profile {text}: steps {steps.first} to {steps.last}, but this run takes steps {done_steps + 1} to "
                f"{max_steps}; name some of them, in order"
            )
        return steps


def check_instruments(config: RunConfig, device_type: str, done_steps: int, max_steps: int) -> None:
    """Refuse what would do nothing in this run.

    Raises:
        UserError: with everything that is wrong.
    """
    faults = []
    if device_type != "cuda":
        if config.memory_snapshot:
            faults.append(
                "--memory_snapshot: records torch's allocator on a GPU, and this run is on a CPU; leave it out"
            )
        if config.empty_cache_steps:
            faults.append(
                f"--empty_cache_steps {config.empty_cache_steps}: empties torch's cache on a GPU, and this run is on a "
                "CPU; leave it out"
            )
    if config.profile and done_steps < max_steps:  # a finished run takes no step, and says so
        try:
            ProfileSteps.parse(config.profile, done_steps, max_steps)
        except UserError as error:
            faults += error.faults
    if faults:
        raise UserError(*faults)
