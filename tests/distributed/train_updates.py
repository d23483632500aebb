"""Engines of each ZeRO stage and precision under UpdateControl: `train_updates.py MODEL_CONFIG OUTPUT_JSON`, two ranks.

Writes what a left-out update changed, how far the loss scale's growth bends an update, what clipping left of one,
and the gradient's norms.
"""

import hashlib
import json
import sys
from pathlib import Path

import torch
from deepspeed.utils import safe_get_full_fp32_param

from model.config import ModelConfig
from recipes.cluster.launch import quiet_deepspeed, read_launch, start_process_group, stop_process_group
from recipes.training.diagnosis import nonfinite_parameter
from recipes.training.engine import build_engine, build_model
from recipes.training.initial_weights import draw_weights
from recipes.training.loss_scale import UpdateControl
from recipes.training.step import train_step
from tests.distributed.emulated_fp16 import allow_fp16

ADAMW = {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True}}
POISONED = "model.layers.1.mlp.experts.down_proj"
LEFT_OUT = {
    **{f"fp32 {stage}": {"zero_optimization": {"stage": stage}} for stage in (0, 1, 2, 3)},
    "bf16 1": {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}},
    "bf16 1 fp32 gradients": {
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
    **{
        f"fp16 {stage}": {
            "zero_optimization": {"stage": stage},
            "fp16": {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 2, "hysteresis": 1},
        }
        for stage in (2, 3)  # stage 1's optimizer is stage 2's
    },
}


def sgd(lr):
    return {"type": "SGD", "params": {"lr": lr}}


def started(config, settings, optimizer, clip=1.0):
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": clip,
        "optimizer": optimizer,
        "zero_allow_untested_optimizer": True,
        **settings,
    }
    model = build_model(config, settings)
    draw_weights(model, seed=1)
    engine = build_engine(model, settings, lambda step: 1.0 / (1 + step))
    return engine, UpdateControl(engine)


def batches(number):
    """This rank's two micro-batches of a step; the labels of two steps have nothing in common."""
    generator = torch.Generator().manual_seed(100 * number + torch.distributed.get_rank())
    rows = torch.randint(8 * number, 8 * number + 8, (2, 2, 17), generator=generator)
    return [{"input_ids": row[:, :-1], "labels": row[:, 1:]} for row in rows]


def step(engine, control, number, **keywords):
    return train_step(engine, control, batches(number), 0.01, torch.zeros(2, 2, dtype=torch.int64), 1, **keywords)


def weights(engine):
    """All parameters as one flat float32 vector, the master copies where there are any."""
    flat = []
    for parameter in engine.module.parameters():
        whole = safe_get_full_fp32_param(parameter) if engine.zero_optimization() else parameter
        flat.append(whole.detach().float().flatten())
    return torch.cat(flat)


def digest(engine):
    """Of all ranks' weights, moments, step counts, biases, schedule and loss scale."""
    parts = [weights(engine)]
    for state in engine.basic_optimizer.state.values():
        assert {"exp_avg", "exp_avg_sq", "step"} <= set(state)
        parts += [torch.as_tensor(state[key]) for key in sorted(state)]
    parts += [buffer for name, buffer in engine.module.named_buffers() if "bias" in name]
    rest = [engine.get_lr(), engine.lr_scheduler.last_epoch, float(getattr(engine.optimizer, "cur_scale", 1.0))]
    content = b"".join(part.detach().float().cpu().contiguous().numpy().tobytes() for part in parts)
    ours = hashlib.sha256(content + repr(rest).encode()).hexdigest()
    everyone = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, ours)
    return everyone


def left_out(config, settings):
    """Steps 0 to 2, then 9 left out, then 3; and the same without 9."""
    found = {}
    for kind in ("with", "without"):
        engine, control = started(config, settings, ADAMW)
        for number in (0, 1, 2):
            step(engine, control, number)
        found[f"{kind} before"] = digest(engine)
        if kind == "with":
            result = step(engine, control, 9, leave_out=lambda loss: True)
            found |= {"applied": result.applied, "finite": result.finite, "with after": digest(engine)}
        result = step(engine, control, 3)
        found[f"{kind} next"] = [digest(engine), result.loss, result.grad_norm]
        if kind == "without":
            found["healthy"] = nonfinite_parameter(engine.module)
            if torch.distributed.get_rank() == 1:
                weight = engine.module.get_parameter(POISONED)
                getattr(weight, "ds_tensor", weight).data.view(-1)[3] = float("nan")
            found["poisoned"] = nonfinite_parameter(engine.module)
        engine.destroy()
    return found


def updates(config, settings, optimizer, clip, steps):
    """The update of each step (a flat vector), and the steps' results."""
    engine, control = started(config, settings, optimizer, clip)
    found, results, before = [], [], weights(engine)
    for number in range(steps):
        results.append(step(engine, control, number, log_group_norms=True))
        after = weights(engine)
        found.append(after - before)
        before = after
    engine.destroy()
    return found, results


def growth(config):
    """Step by step: the loss scale, and |fp16's update - fp32's| over |fp32's|, from equal weights by a tiny rate."""
    exact, _ = updates(config, {"zero_optimization": {"stage": 1}}, sgd(1e-3), 0.0, 6)
    found = {}
    for stage, clip in ((2, 0.0), (2, 1.0), (3, 0.0)):
        half, results = updates(config, LEFT_OUT[f"fp16 {stage}"], sgd(1e-3), clip, 6)
        lengths = [min(1.0, clip / (u.norm() / (1e-3 / (1 + n)))) if clip else 1.0 for n, u in enumerate(exact)]
        found[f"{stage} clip {clip}"] = {
            "scales": [result.loss_scale for result in results],
            "errors": [
                float((ours - theirs * length).norm() / (theirs * length).norm())
                for ours, theirs, length in zip(half, exact, lengths, strict=True)
            ],
        }
    return found


def clipping(config):
    """One SGD step at clip 1e-9, at a rate that makes the bound visible in float32."""
    found = {}
    for stage in (0, 1, 2, 3):
        settings = {"zero_optimization": {"stage": stage}}
        (clipped,), (result,) = updates(config, settings, sgd(1e8), 1e-9, 1)
        if stage == 0:
            (free,), _ = updates(config, settings, sgd(1.0), 0.0, 1)
        found[stage] = {
            "update": float(clipped.double().norm()),
            "logged": result.grad_norm,
            "gradient": float(free.double().norm()),
            "by_kind": result.grad_norms,
        }
    return found


if __name__ == "__main__":
    quiet_deepspeed()
    allow_fp16()
    start_process_group(read_launch(), {})
    config = ModelConfig.from_file(sys.argv[1])
    report = {
        "left_out": {name: left_out(config, settings) for name, settings in LEFT_OUT.items()},
        "growth": growth(config),
        "clipping": clipping(config),
    }
    Path(f"{sys.argv[2]}.{torch.distributed.get_rank()}").write_text(json.dumps(report))
    stop_process_group()
