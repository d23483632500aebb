"""Pre-train a DeepSeek-style transformer: `deepspeed [--hostfile F] [--num_gpus N] recipes/pretrain.py [flags]`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if not __package__:  # run as a script: the repository's root, not recipes/, must be importable
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from recipes.config.errors import run_rank
from recipes.config.run_config import PretrainConfig, parse_pretrain_config
from recipes.training.training_command import TrainingJob, run_training

if TYPE_CHECKING:
    from recipes.cluster.launch import Launch


def main(argv: list[str] | None = None) -> int:
    """Plan, check, and, unless told otherwise, train."""
    config = parse_pretrain_config(argv)  # before anything heavy is imported: a wrong flag answers at once
    return run_training(config, lambda launch: prepare(config, launch))


def prepare(config: PretrainConfig, launch: "Launch") -> TrainingJob:
    """Plan the run."""
    from recipes.training.plan_run import plan_run

    plan = plan_run(config, launch)

    def train() -> int:
        from recipes.training.pretraining import pretrain

        return pretrain(plan)

    return TrainingJob(plan, train, longer="raise --max_steps to go on")


if __name__ == "__main__":
    run_rank(main)
