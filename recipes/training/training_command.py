"""What the commands that train share: from the launcher's variables to the exit code."""

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from recipes.config.errors import EXIT_SUCCESS
from recipes.config.run_config import RunConfig

if TYPE_CHECKING:
    from recipes.cluster.launch import Launch
    from recipes.training.plan_run import RunPlan


@dataclass(frozen=True)
class TrainingJob:
    """A run that a command has planned.

    Args:
        train: carries the plan out; returns the exit code.
        longer: what makes a finished run go on.
        lines: shown below the plan's own.
    """

    plan: "RunPlan"
    train: Callable[[], int]
    longer: str
    lines: list[str] = field(default_factory=list)


def run_training(config: RunConfig, prepare: Callable[["Launch"], TrainingJob]) -> int:
    """Plan, check, and, unless told otherwise, train.

    Args:
        prepare: plans the run; called once the rank is guarded.
    """
    from recipes.cluster.guard import guarded
    from recipes.cluster.launch import quiet_deepspeed, raise_open_files, read_launch

    quiet_deepspeed()
    raise_open_files()
    launch = read_launch()
    # first of all: a mistake that one host alone finds must end the others, too
    with contextlib.nullcontext() if config.dry_run else guarded(launch):
        return _run(config, launch, prepare(launch))


def _run(config: RunConfig, launch: "Launch", job: TrainingJob) -> int:
    from recipes.cluster.launch import stop_process_group
    from recipes.cluster.preflight import run_preflight
    from recipes.training.finished import RunIsFinished, write_finished
    from recipes.training.summary import plan_lines, plan_result

    plan = job.plan
    if launch.is_main:
        print("\n".join([*plan_lines(plan), *job.lines]), flush=True)
    if not config.skip_preflight:
        run_preflight(launch, plan.needs)
    if config.dry_run:
        if launch.is_main and config.json:
            print(json.dumps(plan_result(plan)))
        return EXIT_SUCCESS
    try:
        code = job.train()
    except RunIsFinished as finished:
        code = EXIT_SUCCESS
        if launch.is_main:
            print(f"this run is finished: step {finished.step} of {plan.resolved.max_steps}; {job.longer}")
            write_finished(plan.folder, finished.step)
    stop_process_group()
    return code
