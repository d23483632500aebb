"""Run several fine-tuning runs, then evaluations, in one process: `python train_finetunes.py JSON_FILE`.

The file holds {"finetune": [arguments, ...], "evaluate": [arguments, ...]}; the way is otherwise the commands' own.
"""

import contextlib
import json
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from recipes.cluster.launch import quiet_deepspeed, read_launch, stop_process_group
from recipes.config.finetune_config import parse_finetune_config

if __name__ == "__main__":
    quiet_deepspeed()
    from recipes import evaluate
    from recipes.cluster import guard, launch
    from recipes.training import finetuning, heldout_loss
    from recipes.training.finetuning import finetune, plan_finetune

    jobs = json.loads(Path(sys.argv[1]).read_text())
    finetuning.PREPARED_FOLDER = heldout_loss.PREPARED_FOLDER = Path(sys.argv[1]).parent / "prepared"
    for arguments in jobs["finetune"]:
        finetune(plan_finetune(parse_finetune_config(arguments), read_launch()))
    launch.stop_process_group = lambda: None  # an evaluation ends its process's group; the next one needs it
    guard.guarded = lambda launch: contextlib.nullcontext()  # nor a guardian, which begins before there is a group
    for arguments in jobs["evaluate"]:
        evaluate.main(arguments)
    stop_process_group()
