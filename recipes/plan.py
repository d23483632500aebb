"""Plan a run without any GPU: `python recipes/plan.py --model v3 --gpus 2048 --gpu_memory 80`.

For each ds_config it says what memory a GPU needs, by part, whether that fits, and how long a token budget takes; it
recommends one. `--plot_schedule out.png` draws the learning rate of the run instead.
"""

import sys
from pathlib import Path

if not __package__:  # run as a script: the repository's root, not recipes/, must be importable
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import json
from typing import Any, NoReturn

import torch

from model.config import ConfigError, ModelConfig, load_model_config
from model.flops import count_parameters
from model.transformer import DeepseekForCausalLM
from recipes.cluster.memory import Parameter
from recipes.cluster.planning import (
    Cluster,
    Plan,
    is_offloaded,
    plan_ds_config,
    scaling_law,
    shortfall,
    tokens_per_second_per_gpu,
)
from recipes.config.batch_plan import BatchRamp
from recipes.config.ds_check import precision
from recipes.config.ds_config import DS_CONFIGS, RunFacts, apply_overrides, load_ds_config, resolve_ds_config
from recipes.config.errors import EXIT_SUCCESS, UserError, run_command
from recipes.config.run_config import PretrainConfig, parse_pretrain_config
from recipes.training.optimizer import parameter_groups

LONGEST_DEFAULT_SEQUENCE = 4096  # what DeepSeek's models are pre-trained with
DEFAULT_TOKENS = 1_000_000_000_000
# files for clusters up to so many times smaller or larger are planned, too, unless --all
NEIGHBOURHOOD = 8
GB = 1e9


def main(argv: list[str] | None = None) -> int:
    """Plan every ds_config in question, or draw the schedule of one."""
    arguments, rest = _parser().parse_known_args(argv)
    config = parse_pretrain_config(rest)
    model = _model(config.model)
    seq_length = config.seq_length or min(model.max_position_embeddings, LONGEST_DEFAULT_SEQUENCE)
    gpus = _gpus(arguments)
    facts = RunFacts(
        world_size=gpus,
        device_type="cuda",
        device_dtypes=frozenset({"fp32", "bf16", "fp16"}),
        model=model,
        seq_length=seq_length,
        global_batch_size=config.global_batch_size,
        max_steps=config.max_steps,
        train_tokens=None if config.max_steps else config.train_tokens or DEFAULT_TOKENS,
        lr_scaling=config.lr_scaling,
        reference_batch_size=config.reference_batch_size,
        async_io_available=True,
        output_dir=Path("runs"),
        batch_ramp=BatchRamp.parse(config.batch_ramp) if config.batch_ramp else None,
    )
    if arguments.plot_schedule:
        return _plot(arguments.plot_schedule, config, facts)
    cluster = Cluster(
        gpus=gpus,
        gpu_memory_bytes=arguments.gpu_memory * GB,
        gpus_per_node=arguments.gpus_per_node,
        peak_flops=arguments.peak_tflops * 1e12,
        utilization=arguments.mfu,
        node_bytes_per_second=arguments.node_gbits * 1e9 / 8,
        network_bytes_per_second=arguments.network_gbits * 1e9 / 8,
    )
    groups = _parameter_sizes(model)
    plans: list[Plan] = []
    refused: dict[str, list[str]] = {}
    for path in _files(config.deepspeed_config, gpus, arguments.all):
        overridden = apply_overrides(load_ds_config(path), config.set)
        # a GPU machine's files only: on a CPU there is nothing to plan
        policy = None if config.gradient_checkpointing == "none" else config.gradient_checkpointing
        try:
            plans.append(plan_ds_config(path.stem, overridden, groups, facts, cluster, policy))
        except UserError as error:
            refused[path.stem] = error.faults
    tokens = facts.train_tokens or (facts.max_steps or 0) * (plans[0].tokens_per_step if plans else 0)
    best = _recommended(plans)
    lines = [
        *_heading(config.model, model, facts, cluster, tokens),
        "",
        *_table(plans, tokens),
        "",
        *_verdict(plans, refused, best, cluster, tokens),
    ]
    print("\n".join(lines))
    if config.json:
        print(json.dumps(_result(plans, refused, best, cluster, tokens)))
    return EXIT_SUCCESS


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="recipes/plan.py",
        description="Plan a run without any GPU. Beside the flags below it takes those of recipes/pretrain.py "
        "(--model, --config PRESET, --deepspeed_config, --seq_length, --global_batch_size, --train_tokens, --set, "
        "--gradient_checkpointing, --json, ...).",
        allow_abbrev=False,
    )
    parser.add_argument("--gpus", type=int, help="GPUs of the cluster; default: the hostfile's, or 8")
    parser.add_argument("--hostfile", help="count the GPUs of a DeepSpeed hostfile")
    parser.add_argument("--gpus_per_node", type=int, default=8, help="that share a node's fast network (default 8)")
    parser.add_argument("--gpu_memory", type=float, default=80, help="GB of one GPU (default 80)")
    parser.add_argument(
        "--peak_tflops", type=float, default=989, help="of one GPU in bf16 without sparsity (default 989, an H100)"
    )
    parser.add_argument(
        "--mfu", type=float, default=0.3, help="share of the peak that training reaches (default 0.3; V3 had 0.4)"
    )
    parser.add_argument("--node_gbits", type=float, default=3600, help="one GPU to its node [Gbit/s] (default 3600)")
    parser.add_argument("--network_gbits", type=float, default=400, help="one GPU to other nodes [Gbit/s] (default 400)")
    parser.add_argument("--all", action="store_true", help="plan every ds_config, not only those for such a cluster")
    parser.add_argument("--plot_schedule", metavar="PNG", help="draw the learning rate over the run, and stop")
    return parser


def _gpus(arguments: argparse.Namespace) -> int:
    for name in ("gpus", "gpus_per_node", "gpu_memory", "peak_tflops", "mfu", "node_gbits", "network_gbits"):
        value = getattr(arguments, name)
        if value is not None and value <= 0:
            raise UserError(f"--{name} {value}: must be above 0")
    if arguments.hostfile is None:
        return arguments.gpus or 8
    if arguments.gpus is not None:
        raise UserError("--gpus and --hostfile: both state the size of the cluster; give one")
    from deepspeed.launcher.runner import fetch_hostfile

    if not Path(arguments.hostfile).is_file():
        raise UserError(f"--hostfile {arguments.hostfile}: no such file")
    try:
        hosts = fetch_hostfile(arguments.hostfile)
    except ValueError as error:
        raise UserError(f"--hostfile {arguments.hostfile}: {' '.join(str(error).split())}") from None
    return sum(hosts.values())


def _model(name: str) -> ModelConfig:
    try:
        return load_model_config(name)
    except ConfigError as error:
        raise UserError(*(f"--model {name}: {fault}" for fault in error.faults)) from None


def _files(named: str | None, gpus: int, every: bool) -> list[Path]:
    """The ds_configs to plan, smallest cluster first."""
    if named:
        return [Path(named)]
    sizes = {path: int(path.stem.split("gpu")[0]) for path in DS_CONFIGS.glob("*gpu_*.json")}
    near = [path for path, size in sizes.items() if every or gpus / NEIGHBOURHOOD <= size <= gpus * NEIGHBOURHOOD]
    return sorted(near or sizes, key=lambda path: (sizes[path], path.name))


def _parameter_sizes(model: ModelConfig) -> list[list[Parameter]]:
    """Name and elements of every parameter, by optimizer group: of the model itself, built without memory."""
    with torch.device("meta"):
        named = DeepseekForCausalLM(model).named_parameters()
        groups = parameter_groups(named, weight_decay=0.0)
    return [[(n, p.numel()) for n, p in zip(group["names"], group["params"], strict=True)] for group in groups]


def _recommended(plans: list[Plan]) -> Plan | None:
    """Of those that fit the fastest; an optimizer in the host's memory only where nothing else fits."""
    fitting = [plan for plan in plans if plan.fits]
    return min(
        fitting,
        key=lambda plan: (is_offloaded(plan), plan.step_seconds, precision(plan.resolved.config) != "bf16"),
        default=None,
    )


def _heading(name: str, model: ModelConfig, facts: RunFacts, cluster: Cluster, tokens: float) -> list[str]:
    count = count_parameters(model)
    law = scaling_law(model, facts.seq_length, tokens)
    return [
        f"{name}: {count.total / 1e9:.2f}B parameters and {count.mtp / 1e9:.2f}B for multi-token prediction, "
        f"{count.active / 1e9:.2f}B active per token; sequences of {facts.seq_length} tokens",
        f"{cluster.gpus} GPUs of {cluster.gpu_memory_bytes / GB:.0f} GB; {tokens / 1e9:,.0f}B tokens at an MFU of "
        f"{cluster.utilization:.0%} of {cluster.peak_flops / 1e12:.0f} TFLOP/s",
        f"DeepSeek LLM's scaling law at {law['compute']:.2e} FLOP: lr {law['learning_rate']:.2e}, batch "
        f"{law['batch_tokens'] / 1e6:.1f}M tokens = {law['batch_tokens'] / facts.seq_length:,.0f} sequences"
        + (" (for a dense model of this depth and width)" if model.n_routed_experts else ""),
    ]


_COLUMNS = (
    "ds_config", "fits", "GB", "weights", "grads", "optim.", "comm.", "act. none", "sel.", "full", "logits", "host",
    "recompute", "micro x acc.", "M tok/step", "sent/step", "tok/s/GPU", "days",
)  # fmt: skip


def _table(plans: list[Plan], tokens: float) -> list[str]:
    """A line for each plan; memory of one GPU in GB, activations under each recomputation."""
    rows = [list(_COLUMNS)]
    for plan in plans:
        state, activations, resolved = plan.state, plan.activations, plan.resolved
        sizes = [plan.total_bytes, state.weights, state.gradients, state.optimizer, state.communication]
        sizes += [activations[p].kept + activations[p].layer for p in ("none", "selective", "full")]
        sizes += [activations["none"].logits, state.host]
        rows.append(
            [
                plan.name,
                "yes" if plan.fits else "NO",
                *(f"{size / GB:.1f}" for size in sizes),
                plan.policy,
                f"{resolved.micro_batch_size} x {resolved.gradient_accumulation_steps}",
                f"{plan.tokens_per_step / 1e6:.2f}",
                f"{plan.communication_bytes / GB:.1f}",
                f"{plan.tokens_per_step / plan.step_seconds / resolved.config['train_batch_size']:.0f}"
                if False
                else f"{plan.tokens_per_step / plan.step_seconds:.0f}",
                f"{plan.days(tokens):.1f}",
            ]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    return ["  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
            for row in rows]  # fmt: skip
