"""Pre-training runs with planted faults, in one process: `python train_planted.py JSON_LIST_OF_RUNS`.

A run is {"arguments": [...]} as for train_runs.py, and may have
    "copy": [RUN, NAME, STEP]: first copy a run's folder, without its checkpoints after a step, and say nothing of it;
    "spoiled": {"sequences": [by their place in the run], "module": NAME, "factor": F, "gradient": bool}, whose
    activations there, or their gradients, are multiplied with F.
Beside each run's folder, NAME.outcome.RANK.json tells of each step that was taken, and of the fault that ended the run.
"""

import json
import shutil
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from recipes.cluster.launch import quiet_deepspeed, read_launch, stop_process_group
from recipes.config.errors import TrainingFault
from recipes.config.run_config import parse_pretrain_config
from tests.distributed.emulated_fp16 import allow_fp16

MARK = 7  # an input of this token alone is a spoiled sequence


def plant(run):
    """Change the sequences and the model of one run; returns what undoes it."""
    from recipes.data.loader import TrainingData
    from recipes.training import pretraining

    sample, build_engine = TrainingData.sample, pretraining.build_engine
    spoiled = run.get("spoiled", {"sequences": []})

    def planted_sample(self, index):
        fields = sample(self, index)
        if index in spoiled["sequences"]:
            fields["input_ids"][:] = MARK
        return fields

    def planted_engine(*arguments):
        engine = build_engine(*arguments)
        if spoiled["sequences"]:
            marked = []

            def look(module, inputs, keywords):
                marked[:] = [bool((keywords["input_ids"] == MARK).all(dim=1).any())]

            def spoil(module, inputs, output):
                if marked[0] and spoiled["gradient"]:
                    output.register_hook(lambda gradient: gradient * spoiled["factor"])
                elif marked[0]:
                    return output * spoiled["factor"]

            engine.module.register_forward_pre_hook(look, with_kwargs=True)
            engine.module.get_submodule(spoiled["module"]).register_forward_hook(spoil)
        return engine

    TrainingData.sample, pretraining.build_engine = planted_sample, planted_engine

    def undo():
        TrainingData.sample, pretraining.build_engine = sample, build_engine

    return undo


def copy(source, target, last_step, rank):
    import torch

    if rank == 0:
        shutil.copytree(source, target)
        for folder in (Path(target) / "checkpoints").glob("step_*"):
            if int(folder.name.split("_")[1]) > last_step:
                shutil.rmtree(folder)
    torch.distributed.barrier()


def train(run, launch):
    from recipes.training import loop, pretraining
    from recipes.training.loop import TrainingRun
    from recipes.training.plan_run import plan_run

    # what comes at a run's end is no part of these tests and would take most of their time
    loop.evaluate_heldout = lambda *_: None
    pretraining.sample_text = lambda *_: None
    if "copy" in run:
        copy(*run["copy"], launch.rank)
    plan = plan_run(parse_pretrain_config(run["arguments"]), launch)
    outcome = {"trained": [], "fault": None}
    take_step = TrainingRun._take_step

    def recorded(self, batch):
        result = take_step(self, batch)
        ids = batch.sample_ids.flatten().tolist()
        outcome["trained"].append({"step": self.state.step, "applied": result.applied, "ids": ids, "loss": result.loss})
        return result

    TrainingRun._take_step = recorded
    undo = plant(run)
    try:
        pretraining.pretrain(plan)
    except TrainingFault as fault:
        outcome["fault"] = str(fault)
    undo()
    TrainingRun._take_step = take_step
    path = plan.folder.with_name(f"{plan.folder.name}.outcome.{launch.rank}.json")
    path.write_text(json.dumps(outcome))


if __name__ == "__main__":
    quiet_deepspeed()
    allow_fp16()
    launch = read_launch()
    for run in json.loads(Path(sys.argv[1]).read_text()):
        print(f"run {run['arguments'][-1]}", flush=True)
        train(run, launch)
    stop_process_group()
