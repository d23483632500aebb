"""Fine-tune a model on conversations: `deepspeed [...] recipes/finetune.py --init_from runs/tiny --data chat.jsonl`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if not __package__:  # run as a script: the repository's root, not recipes/, must be importable
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from recipes.config.errors import run_rank
from recipes.config.finetune_config import FinetuneConfig, parse_finetune_config
from recipes.training.training_command import TrainingJob, run_training

if TYPE_CHECKING:
    from recipes.cluster.launch import Launch


def main(argv: list[str] | None = None) -> int:
    """Plan, check, and, unless told otherwise, train."""
    config = parse_finetune_config(argv)  # before anything heavy is imported: a wrong flag answers at once
    return run_training(config, lambda launch: prepare(config, launch))


def prepare(config: FinetuneConfig, launch: "Launch") -> TrainingJob:
    """Prepare the conversations, whose number decides the run's length, and plan the run."""
    from recipes.training.finetuning import finetune, plan_finetune

    plan = plan_finetune(config, launch)
    lines = [f"packing        {note}" for note in plan.data.notes()]
    lines.append("note           --learning_rate and a cosine stand in place of the ds_config's rate and schedule")
    longer = "raise --num_train_epochs or --max_steps to go on"
    return TrainingJob(plan.run, lambda: finetune(plan), longer, lines)


if __name__ == "__main__":
    run_rank(main)
