"""What a run tells its user: before the first step, and at the end."""

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from model.flops import count_parameters, training_flops_per_token
from recipes.cluster.launch import gpu_names
from recipes.config.run_config import REPOSITORY
from recipes.training.checkpoint_files import checkpoints_folder
from recipes.training.evaluation import Evaluation
from recipes.training.plan_run import RunPlan

PACKAGES = ("torch", "deepspeed", "transformers", "datasets", "accelerate")


def plan_lines(plan: RunPlan) -> list[str]:
    """The resolved run, a line for each thing a user would ask."""
    resolved, launch = plan.resolved, plan.launch
    parameters = count_parameters(plan.model)
    flops = training_flops_per_token(plan.model, plan.seq_length)
    state = plan.saved_state()
    start = f"step {state.step} of {plan.candidates[0]}" if state else "a fresh start"
    return [
        f"model          {plan.config.model}: {parameters.total:,} parameters, {parameters.active:,} active per token, "
        f"{parameters.mtp:,} for multi-token prediction; {_flops_text(flops)} per token",
        f"ds_config      {plan.ds_config_source}: ZeRO {plan.zero_stage}, {plan.dtype}",
        f"devices        {launch.world_size} x {plan.device_type}",
        f"batch          {resolved.global_batch_size} sequences of {plan.seq_length} tokens a step = "
        f"{resolved.micro_batch_size} a micro-batch x {resolved.gradient_accumulation_steps} accumulated "
        f"x {plan.data_ranks} ranks" + (" with sequences of their own" if plan.data_ranks < launch.world_size else ""),
        f"steps          {resolved.max_steps} ({resolved.batch_plan.tokens_before(resolved.max_steps):,} tokens)",
        f"learning rate  {resolved.lr_line}",
        f"data           {' '.join(plan.config.data)}; {plan.num_workers} loading processes a rank",
        f"run's folder   {plan.folder}",
        f"begins from    {start}",
        *plan.nccl.lines(),
        *(f"note           {note}" for note in resolved.notes),
    ]


def _flops_text(flops: float) -> str:
    """In the largest unit that leaves a digit before the point, of three digits: 1.23 GFLOP."""
    for unit, size in (("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6), ("kFLOP", 1e3)):
        if flops >= 0.9995 * size:  # what rounds to 1
            return f"{flops / size:.3g} {unit}"
    return f"{flops:.3g} FLOP"


def plan_result(plan: RunPlan) -> dict[str, Any]:
    """The resolved run for `--dry_run --json`."""
    resolved, state = plan.resolved, plan.saved_state()
    return {
        "arguments": plan.config.to_dict(),
        "model": plan.model.to_dict(),
        "seq_length": plan.seq_length,
        "ds_config_source": plan.ds_config_source,
        "ds_config": resolved.config,
        "global_batch_size": resolved.global_batch_size,
        "micro_batch_size": resolved.micro_batch_size,
        "gradient_accumulation_steps": resolved.gradient_accumulation_steps,
        "max_steps": resolved.max_steps,
        "peak_learning_rate": resolved.peak_learning_rate,
        "world_size": plan.launch.world_size,
        "output_dir": str(plan.folder),
        "resume_step": state.step if state else 0,
        "nccl_preset": plan.nccl.result(),
    }


def write_run_files(plan: RunPlan) -> None:
    """Write run.json, ds_config.json and model_config.json into the run's folder."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    run = {
        "arguments": plan.config.to_dict(),
        "command": resume_command(plan),
        "versions": {name: version(name) for name in PACKAGES} | {"python": platform.python_version()},
        "commit": _commit(),
        "host": platform.node(),
        "world_size": plan.launch.world_size,
        "device": plan.device_type,
        "seq_length": plan.seq_length,
        "parameters": count_parameters(plan.model)._asdict(),
    }
    for name, content in (
        ("run.json", run),
        ("ds_config.json", plan.resolved.config),
        ("model_config.json", plan.model.to_dict()),
    ):
        (plan.folder / name).write_text(json.dumps(content, indent=2) + "\n")


def _commit() -> str | None:
    """The recipes' commit, where they are a git checkout."""
    if not shutil.which("git"):
        return None
    result = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    return result.stdout.strip() or None


def resume_command(plan: RunPlan, **changed: Any) -> str:
    """The command that goes on with this run: its own, with some flags changed, or left out where they are None."""
    words = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]
    for flag, value in changed.items():
        words = _without(words, f"--{flag}") + ([] if value is None else [f"--{flag}", str(value)])
    launcher = Path(sys.executable).parent / "deepspeed"
    ranks = plan.launch.world_size
    if ranks > plan.launch.local_world_size:
        world = ["--hostfile", "hostfile"]
    elif plan.device_type == "cuda":  # without a word the launcher would take all of the host's GPUs
        world = ["--include", f"localhost:{','.join(gpu_names(range(ranks)))}"]
    else:
        world = ["--num_gpus", str(ranks)] if ranks > 1 else []
    script = Path(sys.argv[0]).resolve()
    return shlex.join([_short(launcher), *world, _short(script), *words])


def _without(words: list[str], flag: str) -> list[str]:
    kept = [word for word in words if not word.startswith(f"{flag}=")]
    while flag in kept:
        at = kept.index(flag)
        del kept[at : at + 2]
    return kept


def _short(path: Path) -> str:
    """A path as the user would type it from here."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def result_lines(plan: RunPlan, evaluation: Evaluation | None, sample: str | None, seconds: float) -> list[str]:
    """What a finished run leaves, and how to go on."""
    newest = checkpoints_folder(plan.folder) / (checkpoints_folder(plan.folder) / "latest").read_text().strip()
    lines = [f"finished {plan.resolved.max_steps} steps; this part took {seconds:,.0f} s"]
    if evaluation:
        lines += [
            f"held-out loss  {evaluation.loss:.4f} nats per token, {evaluation.bits_per_byte:.4f} bits per byte "
            f"({evaluation.tokens:,} tokens)"
        ]
    if sample is not None:
        lines += [f"generated      {sample!r}"]
    return lines + [
        f"checkpoint     {newest}",
        f"metrics        {plan.folder / 'metrics.jsonl'}",
        f"tensorboard    {plan.folder / 'tensorboard'}",
        f"report         {plan.folder / 'report.html'}",
        f"to go on       {resume_command(plan, max_steps=plan.resolved.max_steps * 2, profile=None)}",
    ]
