"""Train a few steps under shipped ds_configs: `train_shipped.py MODEL_CONFIG OUTPUT_JSON NAME...` on each rank.

Only what a small machine asks for is changed in them: the batch, the buckets, and the ranks that share the experts.
"""

import json
import os
import sys
from pathlib import Path

import torch

from model.config import ModelConfig
from recipes.cluster.launch import quiet_deepspeed, read_launch, start_process_group, stop_process_group
from recipes.config.ds_config import DS_CONFIGS, RunFacts, apply_overrides, load_ds_config, resolve_ds_config
from recipes.training.engine import build_engine, build_model
from recipes.training.initial_weights import draw_weights
from recipes.training.schedule import build_schedule
from tests.distributed.emulated_fp16 import allow_fp16

STEPS, BATCH, MICRO_BATCH, LENGTH = 4, 8, 2, 16


def resolve(name, model, ranks, *overrides):
    config = load_ds_config(DS_CONFIGS / f"{name}.json")
    small = ["optimizer.params.lr=3e-3", "scheduler.params.warmup_num_steps=0", "tensorboard.enabled=false"]
    small += [f"train_micro_batch_size_per_gpu={MICRO_BATCH}", "zero_optimization.reduce_bucket_size=100000"]
    if "fp16" in config:
        small.append("fp16.initial_scale_power=8")  # from 2^16 the first steps are skipped
    if "expert_parallel" in config:
        small.append(f"expert_parallel.autoep_size={ranks}")
    small += overrides
    facts = RunFacts(
        world_size=ranks,
        device_type="cpu",
        device_dtypes=frozenset({"fp32", "bf16", "fp16"}),
        model=model,
        seq_length=LENGTH,
        global_batch_size=BATCH,
        max_steps=10,
        lr_scaling="none",
        output_dir=Path("unused"),
    )
    return resolve_ds_config(apply_overrides(config, small), source=name, facts=facts)


def train(name, config, ranks, rank, steps=STEPS, overrides=()):
    """Of each step the main cross-entropy [nats per token] over the global batch; (skipped steps, rate) after it."""
    resolved = resolve(name, config, ranks, *overrides)
    model = build_model(config, resolved.config)
    draw_weights(model, seed=1)
    schedule = build_schedule(resolved.scheduler, resolved.max_steps)
    engine = build_engine(model, resolved.config, schedule.multiplier)
    ids = torch.arange(BATCH * (LENGTH + 1)).view(BATCH, LENGTH + 1) * 7919 % config.vocab_size
    losses, rates = [], []
    for _ in range(steps):
        total = torch.zeros(())
        for micro in range(resolved.gradient_accumulation_steps):
            first = (micro * ranks + rank) * MICRO_BATCH
            rows = ids[first : first + MICRO_BATCH]
            output = engine(input_ids=rows[:, :-1], labels=rows[:, 1:])
            engine.backward(output["loss"])
            engine.step()
            total += output["cross_entropy_sum"].float()
        torch.distributed.all_reduce(total)
        losses.append(total.item() / (BATCH * LENGTH))
        rates.append([engine.skipped_steps, engine.get_lr()[0]])
    engine.destroy()
    return {"losses": losses, "rates": rates}


if __name__ == "__main__":
    quiet_deepspeed()
    allow_fp16()
    launch = read_launch()
    config = ModelConfig.from_file(sys.argv[1])
    start_process_group(launch, resolve("cpu", config, launch.world_size).config)
    place = (config, launch.world_size, launch.rank)
    report = {name: train(name, *place) for name in sys.argv[3:]}
    too_large = ["fp16.initial_scale_power=22", "scheduler.params.warmup_num_steps=5"]
    report["a scale too large"] = train("1gpu_fp16", *place, steps=9, overrides=too_large)
    if launch.is_main:
        Path(sys.argv[2]).write_text(json.dumps(report))
    torch.distributed.barrier()
    stop_process_group()
    os._exit(0)  # the report is written; gloo's threads have been seen to abort an interpreter's own shutdown
