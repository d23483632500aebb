"""Runs as train_runs.py makes them, with something planted: `train_watched.py JSON_LIST_OF_{arguments, plant}`.

`leak`: rank 1 keeps half a MiB more every step. `slow`: rank 1 takes 0.2 s longer. `none`: nothing; what the process
holds open, and what lies in the run's folder, is noted at some steps.
"""

import json
import os
import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from recipes.cluster.launch import quiet_deepspeed, read_launch, stop_process_group
from recipes.config.run_config import parse_pretrain_config
from recipes.training import run_log

NOTED_STEPS = (50, 250, 450, 490)
run_log.MAX_LOG_BYTES = 20_000  # so that 500 steps fill several
kept = []


def held_open() -> dict[str, int]:
    """Files, shared memory and threads of this process."""
    return {
        "open files": len(os.listdir("/proc/self/fd")),
        "shared memory": sum("/dev/shm/" in line for line in Path("/proc/self/maps").read_text().splitlines()),
        "threads": len(os.listdir("/proc/self/task")),
    }


def files_of(folder: Path) -> list[Path]:
    """All files of a run but its logs, whose number the rotation bounds."""
    return [path for path in folder.rglob("*") if path.is_file() and path.parent.name != "logs"]


def planted(plant: str, rank: int, folder: Path, train_step):
    """The loop's train_step, with something more."""
    steps = 0
    notes = {}

    def step(*arguments, **keywords):
        nonlocal steps
        steps += 1
        if plant == "leak" and rank == 1:
            kept.append(b"x" * (512 << 10))
        if plant == "slow" and rank == 1:
            time.sleep(0.2)
        if plant == "none" and steps in NOTED_STEPS:
            notes[steps] = held_open() | {"files": len(files_of(folder))}
            (folder.parent / f"notes_{rank}.json").write_text(json.dumps(notes))
        return train_step(*arguments, **keywords)

    return step


if __name__ == "__main__":
    quiet_deepspeed()
    from recipes.training import loop
    from recipes.training.plan_run import plan_run
    from recipes.training.pretraining import pretrain

    original = loop.train_step
    for run in json.loads(Path(sys.argv[1]).read_text()):
        plan = plan_run(parse_pretrain_config(run["arguments"]), read_launch())
        loop.train_step = planted(run["plant"], plan.launch.rank, plan.folder, original)
        pretrain(plan)
    stop_process_group()
