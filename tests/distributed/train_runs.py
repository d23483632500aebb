"""Run several pre-training runs in one process, one after another: `python train_runs.py JSON_LIST_OF_ARGUMENT_LISTS`.

Starting a process costs more than a tiny run; the way through `recipes/pretrain.py` is otherwise the command's own.
Ranks but 0 see the run's folder one checkpoint behind, as another host may see a shared one.
"""

import json
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from recipes.cluster.launch import quiet_deepspeed, read_launch, stop_process_group
from recipes.config.run_config import parse_pretrain_config
from tests.distributed.emulated_fp16 import allow_fp16

if __name__ == "__main__":
    quiet_deepspeed()
    allow_fp16()
    from recipes.training import optimizer
    from recipes.training import plan_run as planning
    from recipes.training.pretraining import pretrain

    optimizer._LEAST_ELEMENTS = 15_000  # so that a small model gets several groups of parameters, as a large one does
    launch, find_candidates = read_launch(), planning.find_candidates
    if not launch.is_main:
        planning.find_candidates = lambda run, resume: find_candidates(run, resume)[1:]
    for arguments in json.loads(Path(sys.argv[1]).read_text()):
        pretrain(planning.plan_run(parse_pretrain_config(arguments), launch))
    stop_process_group()
