"""Fine-tune a model on conversations: `deepspeed [...] recipes/finetune.py --init_from runs/tiny --data chat.jsonl`."""

import sys
from pathlib import Path

if not __package__:  # run as a script: the repository's root, not recipes/, must be importable
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import json
import os
from typing import TYPE_CHECKING

from recipes.config.errors import EXIT_SUCCESS, run_command
from recipes.config.finetune_config import FinetuneConfig, parse_finetune_config

if TYPE_CHECKING:
    from recipes.cluster.launch import Launch


def main(argv: list[str] | None = None) -> int:
    """Plan, check, and, unless told otherwise, train."""
    config = parse_finetune_config(argv)  # before anything heavy is imported: a wrong flag answers at once
    from recipes.cluster.guard import guarded
    from recipes.cluster.launch import quiet_deepspeed, read_launch

    quiet_deepspeed()
    launch = read_launch()
    if config.dry_run:
        return run(config, launch)
    with guarded(launch):  # first of all: a mistake that one host alone finds must end the others, too
        return run(config, launch)


def run(config: FinetuneConfig, launch: "Launch") -> int:
    """Plan and train, or only plan."""
    from recipes.cluster.launch import stop_process_group
    from recipes.cluster.preflight import run_preflight
    from recipes.training.finetuning import finetune, plan_finetune
    from recipes.training.finished import write_finished
    from recipes.training.summary import plan_lines, plan_result

    plan = plan_finetune(config, launch)
    if launch.is_main:
        lines = [f"packing        {note}" for note in plan.data.notes()]
        lines.append("note           --learning_rate and a cosine stand in place of the ds_config's rate and schedule")
        print("\n".join([*plan_lines(plan.run), *lines]), flush=True)
    if not config.skip_preflight:
        run_preflight(launch, plan.run.needs)
    if config.dry_run:
        if launch.is_main and config.json:
            print(json.dumps(plan_result(plan.run)))
        return EXIT_SUCCESS
    state = plan.run.saved_state()
    if state and state.step >= plan.run.resolved.max_steps:
        if launch.is_main:
            longer = "raise --num_train_epochs or --max_steps to go on"
            print(f"this run is finished: step {state.step} of {plan.run.resolved.max_steps}; {longer}")
            write_finished(plan.run.folder, state.step)
        return EXIT_SUCCESS
    code = finetune(plan)
    stop_process_group()
    return code


if __name__ == "__main__":
    exit_code = run_command(main)
    sys.stdout.flush()
    if exit_code:
        # A rank that cannot go on must be gone at once; the interpreter's own end would wait for the other ranks.
        os._exit(exit_code)
