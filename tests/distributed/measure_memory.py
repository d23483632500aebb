"""Measure what DeepSpeed really holds, on one or more ranks: `measure_memory.py MODEL_CONFIG OUTPUT_JSON`.

For each case the bytes of weights, optimizer state and gradients on the fullest rank, each storage counted once, at
the fullest moment between two micro-batches of a step.
"""

import gc
import json
import os
import sys
import time
from pathlib import Path

import torch

from benchmarks.held_bytes import all_tensors, sizes, storages
from model.config import ModelConfig
from recipes.cluster.launch import quiet_deepspeed, read_launch, start_process_group, stop_process_group
from recipes.training.engine import build_engine, build_model
from recipes.training.initial_weights import draw_weights
from tests.distributed.emulated_fp16 import allow_fp16

PARTS = ("weights", "optimizer", "gradients")


def cases():
    """Name -> the ds_config of each case."""
    for dtype in ("fp32", "bf16"):
        for stage in (0, 1, 2, 3):
            yield f"{dtype} {stage}", ds_config(dtype, stage)
            if dtype == "bf16" and stage:
                yield (
                    f"{dtype} {stage} fp32 gradients",
                    ds_config(dtype, stage, data_types={"grad_accum_dtype": "fp32"}),
                )
    yield "fp16 2", ds_config("fp16", 2)
    scattered = ds_config("fp32", 1, gradient_accumulation_steps=1)
    scattered["zero_optimization"]["contiguous_gradients"] = False
    yield "fp32 1 scattered gradients", scattered


def ds_config(dtype, stage, **more):
    # buckets so small that they vanish beside the gradients; what buckets take is arithmetic on their size
    zero = {"stage": stage, "reduce_bucket_size": 500, "allgather_bucket_size": 500}
    if stage == 3:
        zero |= {"stage3_prefetch_bucket_size": 500, "stage3_param_persistence_threshold": 100}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        **more,
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True} | ({"initial_scale_power": 8} if dtype == "fp16" else {})
    return config


def drawn(config, settings):
    model = build_model(config, settings)
    draw_weights(model, seed=1)
    return model


def measure(config, settings):
    before = set(storages(all_tensors()))
    engine = build_engine(drawn(config, settings), settings, lambda step: 1.0)
    before |= set(storages(engine.module.buffers()))
    ids = torch.arange(9).unsqueeze(0)
    before |= set(storages([ids]))
    fullest = torch.zeros(len(PARTS), dtype=torch.int64)
    for micro_step in range(4):  # two steps: the optimizer's state comes with the first
        engine.backward(engine(input_ids=ids[:, :-1], labels=ids[:, 1:])["loss"])
        if micro_step >= 2:
            held = torch.tensor(sizes(engine, before))
            time.sleep(0.1)  # gloo's threads may still hold what they have sent; what is held on purpose stays
            fullest = torch.maximum(fullest, torch.minimum(held, torch.tensor(sizes(engine, before))))
        engine.step()
    engine.destroy()
    torch.distributed.all_reduce(fullest, op=torch.distributed.ReduceOp.MAX)
    return dict(zip(PARTS, fullest.tolist(), strict=True))


if __name__ == "__main__":
    quiet_deepspeed()
    allow_fp16()
    start_process_group(read_launch(), ds_config("fp32", 0))
    config = ModelConfig.from_file(sys.argv[1])
    gc.freeze()  # what the imports made is not looked through again and again
    report = {name: measure(config, settings) for name, settings in cases()}
    if torch.distributed.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(report))
    torch.distributed.barrier()
    stop_process_group()
    os._exit(0)  # the report is written; gloo's threads have been seen to abort an interpreter's own shutdown
