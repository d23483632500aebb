"""Train, then resume under other layouts, and compare what was restored: `python resume_matrix.py JOBS.json`.

Each job: {"arguments": [...], "then": "train" | "dump" | "compare", "truth": FILE}. `dump` writes the state of the run
just opened, `compare` holds the opened run against it, to the bit, and then trains on.
"""

import json
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from recipes.cluster.launch import quiet_deepspeed, read_launch, stop_process_group
from recipes.config.run_config import parse_pretrain_config
from tests.distributed.emulated_fp16 import allow_fp16


def whole_state(engine) -> dict:
    """Master weights, moments, steps, buffers, groups, scheduler and scaler of a live engine, put together."""
    optimizer, state = engine.optimizer, {}
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state") and optimizer.optimizer.state:
        optimizer._lazy_init_hp_params_optimizer_state()
    for name, parameter in engine.module.named_parameters():
        if engine.zero_optimization_stage():
            state[f"{name} fp32"] = safe_get_full_fp32_param(parameter).clone().view(-1)
            for key in ("exp_avg", "exp_avg_sq"):
                state[f"{name} {key}"] = safe_get_full_optimizer_state(parameter, key).clone().view(-1)
            with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
                state[f"{name} in the forward pass"] = parameter.detach().float().clone().view(-1)
        else:
            state[f"{name} fp32"] = parameter.detach().clone().view(-1)
            state[f"{name} in the forward pass"] = state[f"{name} fp32"]
            for key in ("exp_avg", "exp_avg_sq"):
                state[f"{name} {key}"] = optimizer.state[parameter][key].clone().view(-1)
    base = getattr(optimizer, "optimizer", optimizer)
    state["steps"] = torch.tensor(sorted({float(entry["step"]) for entry in base.state.values()}))
    state |= {f"buffer {name}": buffer.clone() for name, buffer in engine.module.named_buffers()}
    numbers = [(group["lr"], group["weight_decay"], *group["betas"]) for group in optimizer.param_groups]
    state["groups"] = torch.tensor(sorted(numbers), dtype=torch.float64)
    scheduler = engine.lr_scheduler
    counts = [scheduler.last_epoch, engine.global_steps, engine.skipped_steps, engine.global_samples]
    state["counts"] = torch.tensor([*counts, *scheduler.get_last_lr()], dtype=torch.float64)
    if torch.distributed.get_rank() == 0:  # each rank has its own; the state that is compared with is rank 0's
        state["random numbers"] = torch.get_rng_state()
    if engine.fp16_enabled():
        scaler = optimizer.loss_scaler
        state["scaler"] = torch.tensor([scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter])
    return state


def compare(found: dict, truth: dict, same_dtype: bool) -> list[str]:
    """Names of what differs; another precision keeps its own copy for the forward pass and its own scaler."""
    own = ("in the forward pass", "scaler")
    names = [name for name in truth if name in found and (same_dtype or not name.endswith(own))]
    assert len(names) > 50 and {"steps", "groups", "counts"} <= set(names)
    return [name for name in names if not torch.equal(found[name], truth[name])]


if __name__ == "__main__":
    quiet_deepspeed()
    allow_fp16()
    from recipes.training.plan_run import plan_run
    from recipes.training.pretraining import open_run

    for job in json.loads(Path(sys.argv[1]).read_text()):
        plan = plan_run(parse_pretrain_config(job["arguments"]), read_launch())
        run = open_run(plan)
        if job["then"] == "train":
            run.train()
            continue
        state = whole_state(run.engine)
        if job["then"] == "dump":
            if plan.launch.is_main:
                torch.save({"dtype": plan.dtype, "state": state}, job["truth"])
            continue
        truth = torch.load(job["truth"])
        different = compare(state, truth["state"], truth["dtype"] == plan.dtype)
        assert not different, f"{job['arguments']}: {len(different)} differ, such as {different[:5]}"
        run.train()
    stop_process_group()
