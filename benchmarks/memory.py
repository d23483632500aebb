"""Memory that offload, recomputation, torch.compile and bf16 gradients save, planned beside measured, and the losses.

    python benchmarks/memory.py --compile

Each row is a run of the recipes in this process, on one CPU rank, by the flags that the row stands for, over a few
optimizer steps; planned is what recipes/plan.py computes. All bytes are of tensors that live just before an update,
except "a step's peak": what the process had at most until then, beyond what it has between steps.
"""

import argparse
import gc
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

STEPS = 3
# A sub-group is what is fetched from the disk at once: small here, so that the model has several of them.
SUB_GROUP = 1_000_000
LARGEST = 4096 * 256  # elements of tiny's embedding
DISK = "DISK"  # in flags: a folder of the run's own
TITLES = {
    "offload": f"ZeRO 3, fp32, sub-groups of {SUB_GROUP:,} elements",
    "recomputation": "One micro-batch of 8 sequences, fp32; what is measured holds the gradients that came so far, too",
    "accumulation": "ZeRO 2, 16 micro-batches added up, SGD",
}
# block -> column -> parts of the plan and of what was measured that it adds up
COLUMNS = {
    "offload": {
        "in memory": (("weights", "gradients", "optimizer", "host"), ("weights", "gradients", "optimizer")),
        "on disk": (("disk",), ("disk",)),
    },
    "recomputation": {"a step's peak": (("activations",), ("step",))},
    "accumulation": {"gradients": (("gradients",), ("gradients",))},
}


@dataclass(frozen=True)
class Case:
    """A run. block: rows whose losses are compared. flags: of pretrain.py."""

    block: str
    name: str
    flags: str


@dataclass(frozen=True)
class Row:
    """Bytes, measured and planned, and the losses of each step."""

    case: Case
    measured: dict[str, float]
    planned: dict[str, float]
    losses: list[float]


def cases(nvme: bool, compiles: bool, torch_adam: bool) -> Iterator[Case]:
    """Every policy; those on NVMe and those that compile only where asked for."""
    zero = f"zero_optimization.stage=3 zero_optimization.sub_group_size={SUB_GROUP} "
    # buckets so small that they vanish beside the gradients
    zero += "zero_optimization.reduce_bucket_size=1000 zero_optimization.stage3_prefetch_bucket_size=1000"
    fp32, batch = "--deepspeed_config ds_configs/cpu.json", "--global_batch_size 4"
    if torch_adam:
        zero += " optimizer.params.torch_adam=true zero_force_ds_cpu_optimizer=false"
    state = f"{fp32} {batch} --set {zero}"
    yield Case("offload", "none", state)
    yield Case("offload", "optimizer on the CPU", f"{state} zero_optimization.offload_optimizer.device=cpu")
    if nvme:
        disk = f"zero_optimization.{{0}}.device=nvme zero_optimization.{{0}}.nvme_path={DISK}"
        optimizer = f"{state} {disk.format('offload_optimizer')}"
        # a buffer holds the largest parameter; DeepSpeed's own take 100,000,000 elements each
        params = disk.format("offload_param") + " zero_optimization.offload_param.max_in_cpu=0"
        params += (
            f" zero_optimization.offload_param.buffer_size={LARGEST} zero_optimization.stage3_max_reuse_distance=0"
        )
        yield Case("offload", "optimizer on NVMe", optimizer)
        yield Case("offload", "optimizer and parameters on NVMe", f"{optimizer} {params}")
    # one sequence a micro-batch, 16 of them accumulated; SGD's update is the gradient
    sums = "--global_batch_size 16 --set train_micro_batch_size_per_gpu=1 zero_optimization.stage=2 optimizer.type=SGD"
    sums += ' optimizer.params={"lr":0.1} zero_allow_untested_optimizer=true gradient_clipping=0.0'
    half = "--deepspeed_config ds_configs/cpu_bf16.json"
    yield Case("accumulation", "fp32", f"{fp32} {sums}")
    for dtype in ("fp32", "bf16"):
        yield Case("accumulation", f"bf16, gradients in {dtype}", f"{half} {sums} data_types.grad_accum_dtype={dtype}")
    # last: what torch.compile leaves among the tensors of the process has no storage to count
    for policy in ("none", "selective", "full"):
        yield Case("recomputation", policy, f"{fp32} --global_batch_size 8 --gradient_checkpointing {policy}")
    if compiles:
        yield Case("recomputation", "none, torch.compile", f"{fp32} --global_batch_size 8 --torch_compile")


def run_case(case: Case, words: list[str], folder: Path) -> tuple[Row, Any]:
    """Train a few steps of one case; also gives the update of the first step, (P,) float32."""
    from benchmarks.held_bytes import all_tensors, sizes, storages
    from benchmarks.training_worker import peak_bytes
    from recipes.cluster.launch import read_launch
    from recipes.config.run_config import parse_pretrain_config
    from recipes.data.loader import step_batches
    from recipes.training.loss_scale import UpdateControl
    from recipes.training.plan_run import plan_run
    from recipes.training.pretraining import open_run
    from recipes.training.step import train_step

    words = [*words, "--max_steps", str(STEPS), "--output_dir", str(folder)]
    before = set(storages(all_tensors()))
    plan = plan_run(parse_pretrain_config(words), read_launch())
    run = open_run(plan)
    engine, control = run.engine, UpdateControl(run.engine)
    batches = step_batches(
        run.data,
        batch_plan=plan.resolved.batch_plan,
        first_step=0,
        micro_batch_size=plan.resolved.micro_batch_size,
        rank=0,
        world_size=1,
    )
    before |= set(storages(engine.module.buffers()))
    held: dict[str, float] = {}

    def at_the_end_of_the_backward_pass() -> list[float]:
        if case.block == "recomputation":  # the last step's: the first one also compiles, and allocates the state
            held["step"] = peak_bytes(engine.device) - rest
        elif len(losses) == STEPS - 1:
            parts = sizes(engine, before | in_batch | set(storages([update])))
            held.update(dict(zip(("weights", "optimizer", "gradients"), parts, strict=True)))
        return [0.0]

    losses: list[float] = []
    start = weights(engine)
    for batch in islice(batches, STEPS):
        in_batch = set(storages([tensor for micro in batch.micro_batches for tensor in micro.values()]))
        rest = reset_peak()
        result = train_step(
            engine, control, batch.micro_batches, 0.001, batch.source_ids, 1, at_the_end_of_the_backward_pass
        )
        losses.append(result.loss)
        if len(losses) == 1:
            update = weights(engine) - start
            del start
    held["disk"] = sum(path.stat().st_size for path in folder.parent.rglob("*.swp"))
    engine.destroy()
    return Row(case, held, planned_bytes(plan), losses), update


def weights(engine: Any) -> Any:
    """All weights in float32, (P,)."""
    import torch
    from deepspeed.utils import safe_get_full_fp32_param

    return torch.cat(
        [safe_get_full_fp32_param(p).detach().float().flatten().clone() for p in engine.module.parameters()]
    )


def planned_bytes(plan: Any) -> dict[str, float]:
    """The same parts as recipes/plan.py computes them."""
    from recipes.cluster.activations import activation_bytes
    from recipes.cluster.memory import ELEMENT_BYTES, model_state_bytes
    from recipes.training.optimizer import parameter_sizes

    state = model_state_bytes(parameter_sizes(plan.model), plan.resolved.config, 1)
    activations = activation_bytes(
        plan.model,
        micro_batch_size=plan.resolved.micro_batch_size,
        seq_length=plan.seq_length,
        element_bytes=ELEMENT_BYTES[plan.dtype],
        checkpointing=plan.config.gradient_checkpointing or "none",
        device_type="cpu",
    )
    return asdict(state) | {"activations": activations.peak}


def reset_peak() -> int:
    """Forget the process's peak so far; gives what it has now [bytes]."""
    import torch

    from benchmarks import training_worker
    from recipes.training.memory_watch import host_memory

    gc.collect()
    training_worker.reset_peak(torch.device("cpu"))
    return host_memory()[0]


def print_tables(rows: list[Row], errors: dict[str, float]) -> str:
    """One table for each block, in MB."""
    blocks: dict[str, list[Row]] = {}
    for row in rows:
        blocks.setdefault(row.case.block, []).append(row)
    lines = []
    for block, members in blocks.items():
        columns = COLUMNS[block]
        lines += ["", f"{TITLES[block]}:", ""]
        names = [f"{name}, planned / measured" for name in columns]
        more = ["first update's distance to fp32's"] if block == "accumulation" else []
        lines.append("| " + " | ".join([block, *names, "largest relative difference of a loss", *more]) + " |")
        lines.append("|---" * (2 + len(names) + len(more)) + "|")
        for row in members:
            cells = [
                f"{sum(row.planned[part] for part in planned) / 1e6:.1f} / "
                f"{sum(row.measured[part] for part in measured) / 1e6:.1f}"
                for planned, measured in columns.values()
            ]
            cells.append(f"{difference(row.losses, members[0].losses):.1e}")
            cells += [f"{errors[row.case.name]:.4f}"] if more else []
            lines.append("| " + " | ".join([row.case.name, *cells]) + " |")
    return "\n".join(lines[1:])


def difference(losses: list[float], reference: list[float]) -> float:
    return max(abs(a - b) / b for a, b in zip(losses, reference, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true", help="also torch.compile, which takes minutes")
    parser.add_argument(
        "--torch_adam", action="store_true", help="build no cpu_adam, and async_io only if it was built"
    )
    parser.add_argument("--data", default="stdlib", help="as pretrain.py's")
    parser.add_argument("--seq_length", default="256")
    parser.add_argument("--json", type=Path, help="write all numbers into this file")
    arguments = parser.parse_args()
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        # freed blocks then go back to the system at once, so that the process's peak is what was held
        os.environ |= {"MALLOC_MMAP_THRESHOLD_": "524288", "MALLOC_TRIM_THRESHOLD_": "524288"}
        os.execv(sys.executable, [sys.executable, *sys.argv])
    from recipes.cluster.launch import quiet_deepspeed, stop_process_group
    from recipes.cluster.op_builds import extensions_folder, has_compiler, has_libaio

    quiet_deepspeed()
    shared = ["--model", "tiny", "--data", arguments.data, "--seq_length", arguments.seq_length]
    rows, errors, exact = [], {}, None
    is_built = (extensions_folder() / "async_io" / "async_io.so").exists()
    nvme = has_libaio() and (is_built or not arguments.torch_adam)
    for case in cases(nvme, arguments.compile and has_compiler(), arguments.torch_adam):
        print(f"{case.block}: {case.name}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            words = [word.replace(DISK, f"{folder}/disk") for word in case.flags.split()]
            row, update = run_case(case, [*words, *shared], Path(folder, "run"))
        rows.append(row)
        if case.block == "accumulation":
            exact = update if exact is None else exact
            errors[case.name] = float((update - exact).norm() / exact.norm())
    stop_process_group()
    print(print_tables(rows, errors))
    if arguments.json:
        numbers = [asdict(row) | {"update_error": errors.get(row.case.name)} for row in rows]
        arguments.json.write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()
