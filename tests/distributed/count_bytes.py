"""Let DeepSpeed's communication logger count one step of each case: `count_bytes.py MODEL OUTPUT_JSON CASES_JSON`.

Written is {case: {"logged": {operation: {message bytes: times}}, "planned": bytes, "planned_all_to_all": bytes}}.
"""

import json
import os
import sys
from pathlib import Path

import torch
from train_expert_parallel import LENGTH, SPEED, micro_batches, resolve

from model.config import ModelConfig
from recipes.cluster.communication import all_to_all_bytes, bytes_sent_per_step
from recipes.cluster.launch import quiet_deepspeed, read_launch, start_process_group, stop_process_group
from recipes.training.engine import build_engine, build_model
from recipes.training.initial_weights import draw_weights
from recipes.training.loss_scale import UpdateControl
from recipes.training.optimizer import parameter_groups
from recipes.training.schedule import build_schedule
from recipes.training.step import train_step


def count(settings, config, ranks, rank):
    import deepspeed.comm.comm as comm

    policy = "full" if "full" in settings else "none"
    resolved = resolve([word for word in settings if "=" in word], config, ranks)
    model = build_model(config, resolved.config)
    groups = [
        [(name, getattr(p, "ds_numel", p.numel())) for name, p in zip(group["names"], group["params"], strict=True)]
        for group in parameter_groups(model.named_parameters(), 0.1)
    ]
    draw_weights(model, seed=1)
    engine = build_engine(model, resolved.config, build_schedule(resolved.scheduler, 10).multiplier)
    engine.module.set_gradient_checkpointing(policy)
    control = UpdateControl(engine)
    for step in range(3):  # the first are unlike the later ones: ZeRO-3 learns in which order it will gather
        if step == 2:
            comm.comms_logger.comms_dict.clear()
        batches = list(micro_batches(step, config.vocab_size, resolved.micro_batch_size, ranks, rank))
        sources = torch.zeros(len(batches), resolved.micro_batch_size, dtype=torch.int64)
        train_step(engine, control, batches, SPEED, sources, num_sources=1)
    logged = {
        operation: {size: record[0] for size, record in sizes.items()}
        for operation, sizes in comm.comms_logger.comms_dict.items()
    }
    engine.destroy()
    tokens = resolved.micro_batch_size * LENGTH
    planned = bytes_sent_per_step(
        groups, config, resolved.config, world_size=ranks, tokens_per_micro_batch=tokens, policy=policy
    )
    exchanged = all_to_all_bytes(config, resolved.config, tokens_per_micro_batch=tokens, policy=policy)
    return {"logged": logged, "planned": planned, "planned_all_to_all": exchanged}


if __name__ == "__main__":
    quiet_deepspeed()
    launch = read_launch()
    config = ModelConfig.from_file(sys.argv[1])
    start_process_group(launch, {})
    cases = json.loads(sys.argv[3])
    logger = 'comms_logger={"enabled": true, "verbose": false, "prof_all": true, "debug": false}'
    report = {name: count([*words, logger], config, launch.world_size, launch.rank) for name, words in cases.items()}
    if launch.is_main:
        Path(sys.argv[2]).write_text(json.dumps(report))
    torch.distributed.barrier()
    stop_process_group()
    os._exit(0)  # the report is written; gloo's threads have been seen to abort an interpreter's own shutdown
