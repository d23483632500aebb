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
from dataclasses import replace
from typing import Any, NoReturn

from model.config import ConfigError, ModelConfig, load_model_config
from recipes.cluster.hostfile import read_hostfile
from recipes.cluster.launch import quiet_deepspeed
from recipes.cluster.plan_report import PlanReport
from recipes.cluster.planning import Cluster, Plan, plan_ds_config
from recipes.config.batch import TRAIN_BATCH, nearest_multiples
from recipes.config.batch_plan import BatchRamp
from recipes.config.ds_config import (
    DS_CONFIGS,
    RunFacts,
    apply_overrides,
    choose_ds_config,
    load_ds_config,
    resolve_ds_config,
)
from recipes.config.errors import EXIT_SUCCESS, UserError, run_command
from recipes.config.run_config import parse_pretrain_config
from recipes.training.optimizer import parameter_sizes
from recipes.training.schedule_plot import plot_schedule

LONGEST_DEFAULT_SEQUENCE = 4096  # what DeepSeek's models are pre-trained with
DEFAULT_TOKENS = 1_000_000_000_000
SMALLEST_FILE = 8  # files for clusters so many times smaller are planned, too; smaller ones with --all only
GB = 1e9


def main(argv: list[str] | None = None) -> int:
    """Plan every ds_config in question, or draw the schedule of one."""
    quiet_deepspeed()
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
        path = config.deepspeed_config or choose_ds_config("cuda", gpus, bf16=True)
        resolved = resolve_ds_config(
            apply_overrides(load_ds_config(path), config.set), source=str(path), facts=replace(facts, world_size=1)
        )
        plot_schedule(resolved, config, model, Path(arguments.plot_schedule))
        print(f"{arguments.plot_schedule}: {resolved.scheduler['type']} over {resolved.max_steps} steps")
        return EXIT_SUCCESS
    cluster = Cluster(
        gpus=gpus,
        gpu_memory_bytes=arguments.gpu_memory * GB,
        gpus_per_node=arguments.gpus_per_node,
        peak_flops=arguments.peak_tflops * 1e12,
        utilization=arguments.mfu,
        node_bytes_per_second=arguments.node_gbits * 1e9 / 8,
        network_bytes_per_second=arguments.network_gbits * 1e9 / 8,
    )
    groups = parameter_sizes(model)
    plans: list[Plan] = []
    refused: dict[str, list[str]] = {}
    for path in _files(config.deepspeed_config, gpus, arguments.all):
        overridden = apply_overrides(load_ds_config(path), config.set)
        try:
            plans.append(
                plan_ds_config(
                    path.stem,
                    overridden,
                    groups,
                    _with_batch(facts, overridden),
                    cluster,
                    config.gradient_checkpointing,
                )
            )
        except UserError as error:
            refused[path.stem] = error.faults
    report = PlanReport(config.model, facts, cluster, plans, refused)
    print("\n".join(report.lines()))
    if config.json:
        print(json.dumps(report.result()))
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
    parser.add_argument(
        "--network_gbits", type=float, default=400, help="one GPU to other nodes [Gbit/s] (default 400)"
    )
    parser.add_argument(
        "--all", action="store_true", help="plan every ds_config, not only those for clusters of about this size"
    )
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
    return sum(read_hostfile(arguments.hostfile).values())


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
    near = [path for path, size in sizes.items() if every or gpus / SMALLEST_FILE <= size <= gpus]
    return sorted(near or sizes, key=lambda path: (sizes[path], path.name))


def _with_batch(facts: RunFacts, config: dict[str, Any]) -> RunFacts:
    """The facts with the file's global batch brought to the next multiple of the ranks, where it is none."""
    stated = config.get(TRAIN_BATCH)
    if facts.global_batch_size or not isinstance(stated, int) or stated % facts.world_size == 0:
        return facts
    return replace(facts, global_batch_size=nearest_multiples(stated, facts.world_size)[-1])


if __name__ == "__main__":
    sys.exit(run_command(main))
