"""Pre-train a DeepSeek-style transformer: `deepspeed [--hostfile F] [--num_gpus N] recipes/pretrain.py [flags]`."""

import sys
from pathlib import Path

if not __package__:  # run as a script: the repository's root, not recipes/, must be importable
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import json
import os
from typing import TYPE_CHECKING

from recipes.config.errors import EXIT_SUCCESS, run_command
from recipes.config.run_config import PretrainConfig, parse_pretrain_config

if TYPE_CHECKING:
    from recipes.cluster.launch import Launch


def main(argv: list[str] | None = None) -> int:
    """Plan, check, and, unless told otherwise, train."""
    config = parse_pretrain_config(argv)  # before anything heavy is imported: a wrong flag answers at once
    from recipes.cluster.guard import guarded
    from recipes.cluster.launch import quiet_deepspeed, read_launch

    quiet_deepspeed()
    launch = read_launch()
    if config.dry_run:
        return run(config, launch)
    with guarded(launch):  # first of all: a mistake that one host alone finds must end the others, too
        return run(config, launch)


def run(config: PretrainConfig, launch: "Launch") -> int:
    """Plan and train, or only plan."""
    from recipes.cluster.launch import stop_process_group
    from recipes.cluster.preflight import run_preflight
    from recipes.training.finished import write_finished
    from recipes.training.plan_run import plan_run
    from recipes.training.summary import plan_lines, plan_result

    plan = plan_run(config, launch)
    if launch.is_main:
        print("\n".join(plan_lines(plan)), flush=True)
    if not config.skip_preflight:
        run_preflight(launch, plan.needs)
    if config.dry_run:
        if launch.is_main and config.json:
            print(json.dumps(plan_result(plan)))
        return EXIT_SUCCESS
    state = plan.saved_state()
    if state and state.step >= plan.resolved.max_steps:
        if launch.is_main:
            print(f"this run is finished: step {state.step} of {plan.resolved.max_steps}; raise --max_steps to go on")
            write_finished(plan.folder, state.step)
        return EXIT_SUCCESS
    from recipes.training.pretraining import pretrain

    code = pretrain(plan)
    stop_process_group()
    return code


if __name__ == "__main__":
    exit_code = run_command(main)
    sys.stdout.flush()
    if exit_code:
        # A rank that cannot go on must be gone at once; the interpreter's own end would wait for the other ranks.
        os._exit(exit_code)
