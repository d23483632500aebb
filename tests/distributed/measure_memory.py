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

from model.config import ModelConfig
from recipes.cluster.launch import quiet_deepspeed, read_launch, start_process_group, stop_process_group
from recipes.training.engine import build_engine, build_model
from recipes.training.initial_weights import draw_weights

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


def storages(tensors):
    """Address -> bytes of every storage behind the tensors."""
    found = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes():
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return found


def all_tensors():
    gc.collect()
    return [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]


def sizes(engine, before):
    """Bytes of PARTS now. What is neither weights nor optimizer state, nor was there before, is gradients."""
    optimizer, basic = engine.optimizer, engine.basic_optimizer
    parameters = list(engine.module.parameters())
    weights = storages([*parameters, *(getattr(p, "ds_tensor", None) for p in parameters)])
    for name in ("bit16_groups_flat", "fp16_partitioned_groups_flat", "bf16_groups_flat"):
        weights |= storages(getattr(optimizer, name, []))
    state = [p for group in basic.param_groups for p in group["params"]]
    for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups_flat_partition"):
        state += getattr(optimizer, name, [])
    state += [value for values in basic.state.values() for value in values.values()]
    state = {address: size for address, size in storages(state).items() if address not in weights}
    # gradients hang on the parameters without a Python object of their own until they are asked for
    held = storages(
        [*all_tensors(), *(p.grad for p in parameters), *(getattr(p, "grad_accum", None) for p in parameters)]
    )
    rest = {a: size for a, size in held.items() if a not in weights and a not in state and a not in before}
    return [sum(part.values()) for part in (weights, state, rest)]


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
    start_process_group(read_launch(), ds_config("fp32", 0))
    config = ModelConfig.from_file(sys.argv[1])
    gc.freeze()  # what the imports made is not looked through again and again
    report = {name: measure(config, settings) for name, settings in cases()}
    if torch.distributed.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(report))
    torch.distributed.barrier()
    stop_process_group()
    os._exit(0)  # the report is written; gloo's threads have been seen to abort an interpreter's own shutdown
