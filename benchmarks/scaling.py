"""How a step's cost grows: with the number of experts, with the tokens, and with the length of the sequence.

    python benchmarks/scaling.py [--dtype bf16] [--parts experts lengths memory]

experts: 8 against 128 experts of equal width and as many chosen, so equal active parameters; transformers' beside it.
lengths: the same tokens as longer sequences, forward and backward, beside what the FLOP count says; with 8 experts, as
         all shapes take turns and are held at once.
memory:  the same tokens as sequences of 1,024 and as one of 8,192, every layer recomputed; peak of a step.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.train_step import BENCH_MODEL, JOB, Side
from model.config import ModelConfig
from model.flops import flops_per_token


def measure(jobs: dict[str, dict[str, Any]], rounds: int = 3) -> dict[str, dict[str, Any]]:
    """Results of several jobs that take turns."""
    sides = {name: Side(job, name) for name, job in jobs.items()}
    for number in range(rounds + 1):
        for side in sides.values():
            side.take_turn(2 if number == 0 else 1)
    for side in sides.values():
        side.close()
    return {name: side.result() for name, side in sides.items()}


def forward_backward(result: dict[str, Any]) -> float:
    """Seconds of a step without its optimizer."""
    return result["parts"]["forward"] + result["parts"]["backward"]


def experts(job: dict[str, Any]) -> None:
    """Print both sides' ratio of 128 experts to 8."""
    print("| side | 8 experts: step, forward and backward (s) | 128 experts | ratio of steps | without the optimizer |")
    print("|---|---|---|---|---|")
    for side in ("ours", "transformers"):
        models = {str(n): BENCH_MODEL | {"n_routed_experts": n, "moe_intermediate_size": 64} for n in (8, 128)}
        jobs = {n: job | {"side": side, "model": model, "keeps_memory": side == "ours"} for n, model in models.items()}
        few, many = measure(jobs).values()
        steps, rest = (f(many) / f(few) for f in (lambda r: r["step_seconds"], forward_backward))
        cells = [f"{r['step_seconds']:.2f}, {forward_backward(r):.2f}" for r in (few, many)]
        print(f"| {side} | {cells[0]} | {cells[1]} | {steps:.2f} | {rest:.2f} |", flush=True)


def lengths(job: dict[str, Any]) -> None:
    """Print seconds of the same tokens at several lengths, and of fewer tokens at one length."""
    job = job | {"model": BENCH_MODEL | {"n_routed_experts": 8}}
    tokens = job["micro_batch"] * job["seq_length"]
    shapes = {(tokens // n, n) for n in (1024, 2048, 4096)} | {(2, 1024), (1, 1024)}
    jobs = {
        f"{batch} x {length}": job | {"side": "ours", "micro_batch": batch, "seq_length": length, "keeps_memory": True}
        for batch, length in sorted(shapes)
    }
    results = measure(jobs)
    print("| sequences | forward and backward (s) | microseconds a token | GFLOP/s | attention's share of the FLOPs |")
    print("|---|---|---|---|---|")
    for name, result in results.items():
        batch, length = (int(number) for number in name.split(" x "))
        seconds, flops = forward_backward(result), flops_per_token(ModelConfig.from_dict(job["model"]), length)
        rate = 3 * sum(flops.values()) * batch * length / seconds / 1e9
        share = flops["attention_scores"] / sum(flops.values())
        print(f"| {name} | {seconds:.2f} | {seconds / batch / length * 1e6:.0f} | {rate:.0f} | {share:.0%} |")


def memory(job: dict[str, Any]) -> None:
    """Print the peak at both lengths, every layer recomputed, with malloc's defaults, which give memory back."""
    common = job | {"side": "ours", "checkpointing": "full", "keeps_memory": False}
    jobs = {f"{b} x {n}": common | {"micro_batch": b, "seq_length": n} for b, n in ((8, 1024), (1, 8192))}
    short, long = measure(jobs, rounds=1).values()
    gigabytes = [result["peak_bytes"] / 1e9 for result in (short, long)]
    print(f"8,192 tokens: {gigabytes[0]:.2f} GB as 8 x 1,024, {gigabytes[1]:.2f} GB as 1 x 8,192: ", end="")
    print(f"{gigabytes[1] / gigabytes[0]:.2f} times as much a token")


def main() -> None:
    """Measure the parts asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--parts", nargs="+", choices=["experts", "lengths", "memory"], default=None)
    parser.add_argument("--threads", type=int, default=JOB["threads"])
    arguments = parser.parse_args()
    job = JOB | {"dtype": arguments.dtype, "threads": arguments.threads, "micro_batch": 4, "experts": "grouped_mm"}
    for part in arguments.parts or ["experts", "lengths", "memory"]:
        {"experts": experts, "lengths": lengths, "memory": memory}[part](job)


if __name__ == "__main__":
    main()
