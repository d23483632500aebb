"""Step each optimizer at each ZeRO stage, on one or more ranks: `train_optimizers.py MODEL_CONFIG OUTPUT_JSON`.

Writes for each case what a step without any gradient did to the weights, or how the loss fell.
"""

import json
import sys
from pathlib import Path

import deepspeed
import torch

from model.config import ModelConfig
from recipes.cluster.launch import quiet_deepspeed, read_launch, start_process_group, stop_process_group
from recipes.training.engine import build_engine, build_model
from recipes.training.initial_weights import draw_weights

RATE, DECAY = 0.5, 0.1
ADAMW = {"type": "AdamW", "params": {"lr": RATE, "betas": [0.9, 0.95], "weight_decay": DECAY, "torch_adam": True}}
MUON = {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 0.01, "weight_decay": DECAY, "torch_adam": True}}


def ds_config(stage, optimizer):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "reduce_scatter": False, "reduce_bucket_size": 100_000},
        "optimizer": optimizer,
    }


def drawn(config, settings):
    model = build_model(config, settings)
    draw_weights(model, seed=1)
    return model


def whole(parameter):
    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def decay_ratios(engine):
    """Name -> weights after a step without gradients over those before it; one number where all agree."""
    before = {name: whole(parameter) for name, parameter in engine.module.named_parameters()}
    ids = torch.arange(17).repeat(2, 1)
    engine.backward(engine(input_ids=ids[:, :-1], labels=ids[:, 1:])["loss"] * 0.0)
    engine.step()
    ratios = {}
    for name, parameter in engine.module.named_parameters():
        ratio = (whole(parameter) / before[name]).flatten()
        ratios[name] = [ratio.min().item(), ratio.max().item()]
    return ratios


def losses(engine, steps):
    ids = torch.arange(17).repeat(2, 1)
    found = []
    for _ in range(steps):
        loss = engine(input_ids=ids[:, :-1], labels=ids[:, 1:])["loss"]
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def groups(engine):
    return [[g.get("name"), g["weight_decay"], bool(g.get("use_muon"))] for g in engine.basic_optimizer.param_groups]


if __name__ == "__main__":
    quiet_deepspeed()
    start_process_group(read_launch(), ds_config(0, ADAMW))
    config = ModelConfig.from_file(sys.argv[1])
    report = {}
    for stage in (0, 1, 2, 3):
        for kind, optimizer in (("AdamW", ADAMW), ("Muon", MUON)):
            if kind == "Muon" and stage == 0:
                continue
            settings = ds_config(stage, optimizer)
            engine = build_engine(drawn(config, settings), settings, lambda step: 1.0)
            report[f"{kind} {stage}"] = {
                "groups": groups(engine),
                "result": decay_ratios(engine) if kind == "AdamW" else losses(engine, 12),
            }
            engine.destroy()
    if torch.distributed.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(report))
    stop_process_group()
