"""Training steps of this model and of transformers' class: same weights, tokens and DeepSpeed JSON, in turn in one run.

    python benchmarks/train_step.py --vs transformers [--dtypes fp32 bf16] [--ranks 1] [--threads 2]

Prints tokens/s, GFLOP/s of model work, its share of the rate of a plain matrix product measured between the turns, the
step's parts, peak memory, and the ratios. A ratio counts only where the losses of both sides agree.
"""

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from benchmarks.training_worker import DS_CONFIGS, DTYPES
from model.config import ModelConfig
from model.flops import training_flops_per_token

BENCH_MODEL: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 16384,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "first_k_dense_replace": 1,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": None,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "n_routed_experts": 32,
    "n_shared_experts": 1,
    "moe_intermediate_size": 256,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 16384,
    "initializer_range": 0.02,
}
# What a worker is told; each benchmark names what differs.
JOB: dict[str, Any] = {
    "model": BENCH_MODEL,
    "ranks": 1,
    "threads": len(os.sched_getaffinity(0)),
    "seq_length": 1024,
    "micro_batch": 2,
    "checkpointing": "none",
    "compile": False,
    "keeps_memory": False,  # theirs: whether malloc keeps what is freed, as it does in ours
}
LOSSES_AGREE = 1e-3  # relative, at every step


class Side:
    """One process group of `ranks` workers that waits while it has no turn."""

    def __init__(self, job: dict[str, Any], name: str) -> None:
        self.name, self.job, self.turns = name, job, []
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        self._workers = []
        for rank in range(job["ranks"]):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job["ranks"])}
            environment = os.environ | place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            environment["OMP_NUM_THREADS"] = str(job["threads"])
            if not job["keeps_memory"]:
                environment["GLIBC_TUNABLES"] = "glibc.malloc.check=0"  # the default; naming it leaves malloc as it is
            worker = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("training_worker.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                text=True,
            )
            self._workers.append(worker)
        self._ask(json.dumps(job))

    def _ask(self, line: str) -> list[dict[str, Any]]:
        for worker in self._workers:
            assert worker.stdin
            worker.stdin.write(line + "\n")
            worker.stdin.flush()
        answers = []
        for worker in self._workers:
            assert worker.stdout
            answer = worker.stdout.readline()
            if not answer:
                raise SystemExit(f"{self.name}: a worker ended with code {worker.wait()}")
            answers.append(json.loads(answer))
        return answers

    def take_turn(self, steps: int) -> None:
        """Take some steps and keep what was measured."""
        self.turns.append(self._ask(str(steps)))

    def profile(self) -> dict[str, float]:
        """Take one more step under torch's profiler: operator -> seconds of rank 0 in it alone."""
        return self._ask("profile")[0]

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.communicate()

    def result(self) -> dict[str, Any]:
        """Medians over all turns but the first; bytes of the heaviest rank."""
        counted = [answers[0] for answers in self.turns[1:]]
        seconds = [s for turn in counted for s in turn["seconds"]]
        step_seconds = statistics.median(seconds)
        tokens = self.job["micro_batch"] * self.job["seq_length"] * self.job["ranks"]
        flops = training_flops_per_token(ModelConfig.from_dict(self.job["model"]), self.job["seq_length"])
        parts = [part for turn in counted for part in turn["parts"]]
        return {
            "name": self.name,
            "dtype": self.job["dtype"],
            "steps": len(seconds),
            "step_seconds": step_seconds,
            "step_seconds_range": [min(seconds), max(seconds)],
            "tokens_per_second": tokens / step_seconds,
            "gflops_per_second": tokens / step_seconds * flops / 1e9,
            "parts": {key: statistics.median(part[key] for part in parts) for key in parts[0]},
            "peak_bytes": max(answer["peak_bytes"] for answers in self.turns[1:] for answer in answers),
            # a rank of theirs knows the loss of its own sequences, one of ours that of all
            "losses": [
                statistics.mean(each)
                for answers in self.turns
                for each in zip(*(answer["losses"] for answer in answers), strict=True)
            ],
        }


def matrix_rate(dtype: str, threads: int, size: int = 2048) -> float:
    """Of a plain matrix product of that size, the median of five [GFLOP/s]."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(threads)
    left, right = (torch.randn(size, size, device=device).to(DTYPES[dtype]) for _ in range(2))
    rates = []
    for _ in range(7):
        begin = time.perf_counter()
        torch.mm(left, right)
        if device == "cuda":
            torch.cuda.synchronize()
        rates.append(2 * size**3 / (time.perf_counter() - begin) / 1e9)
    return statistics.median(rates[2:])


def compare(
    job: dict[str, Any], rivals: list[str], rounds: int, steps: int, profile: bool = False
) -> list[dict[str, Any]]:
    """Ours against each rival in turn; the first turn of each side warms up and does not count."""
    results = []
    for experts in rivals or [None]:
        sides = [Side(job | {"side": "ours", "keeps_memory": True}, "ours")]
        if experts:
            sides.append(Side(job | {"side": "transformers", "experts": experts}, f"transformers, {experts}"))
        rates = []
        for number in range(rounds + 1):
            rates.append(matrix_rate(job["dtype"], job["threads"] * job["ranks"]))
            for side in sides:
                side.take_turn(2 if number == 0 else steps)
        operators = [side.profile() if profile else {} for side in sides]
        for side in sides:
            side.close()
        shared = {"matrix_gflops_per_second": statistics.median(rates)}
        measured = [side.result() | shared | {"operators": of} for side, of in zip(sides, operators, strict=True)]
        for result in measured:
            worst = max(abs(a - b) / b for a, b in zip(result["losses"], measured[0]["losses"], strict=True))
            result |= {"pair": experts or "", "loss_difference": worst, "losses_agree": worst <= LOSSES_AGREE}
        results += measured
    return results


def table(results: list[dict[str, Any]]) -> str:
    """The results as a Markdown table, ours before its rival."""
    head = "dtype | side | tokens/s | GFLOP/s | of a product's rate | forward, backward, optimizer, communication (s)"
    lines = [f"| {head} | peak GB | losses differ by |", "|" + "---|" * 8]
    for result in results:
        parts = ", ".join(f"{seconds:.2f}" for seconds in result["parts"].values())
        share = result["gflops_per_second"] / result["matrix_gflops_per_second"]
        name = result["name"] + (f" (beside {result['pair']})" if result["name"] == "ours" and result["pair"] else "")
        lines.append(
            f"| {result['dtype']} | {name} | {result['tokens_per_second']:,.0f} | {result['gflops_per_second']:.0f} "
            f"| {share:.0%} | {parts} | {result['peak_bytes'] / 1e9:.2f} | {result['loss_difference']:.1e} |"
        )
    return "\n".join(lines)


def profiles(results: list[dict[str, Any]], most: int = 10) -> str:
    """Where one step of each result went, as a Markdown table; matrix products, whatever their operator, in one."""
    lines = ["| dtype | side | seconds of a profiled step by operator |", "|---|---|---|"]
    for result in results:
        seconds: dict[str, float] = {}
        for name, spent in result["operators"].items():
            kind = "matrix products" if re.fullmatch(r"aten::\w*mm_?", name) else name.removeprefix("aten::")
            seconds[kind] = seconds.get(kind, 0.0) + spent
        largest = sorted(seconds, key=lambda kind: -seconds[kind])[:most]
        cells = ", ".join(f"{kind} {seconds[kind]:.2f}" for kind in largest)
        lines.append(f"| {result['dtype']} | {result['name']} | {cells}; all {sum(seconds.values()):.2f} |")
    return "\n".join(lines)


def ratios(results: list[dict[str, Any]]) -> list[str]:
    """Ours over transformers' best, by dtype: the lower of the ratios to its implementations, each from one pair."""
    lines = []
    for dtype in dict.fromkeys(result["dtype"] for result in results):
        pairs = [r for r in results if r["dtype"] == dtype]
        speeds, memories = [], []
        for ours, theirs in zip(pairs[::2], pairs[1::2], strict=True):
            if not theirs["losses_agree"]:
                lines.append(f"{dtype}: the losses differ by {theirs['loss_difference']:.1e}: no ratio")
                continue
            speeds.append(ours["tokens_per_second"] / theirs["tokens_per_second"])
            memories.append(ours["peak_bytes"] / theirs["peak_bytes"])
        if speeds:
            lines.append(f"{dtype}: {min(speeds):.2f} times the tokens/s, {max(memories):.2f} times the peak memory")
    return lines


def main() -> None:
    """Measure, print, and with --json write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vs", choices=["transformers", "nothing"], default="transformers")
    parser.add_argument("--dtypes", nargs="+", choices=list(DS_CONFIGS), default=list(DS_CONFIGS))
    parser.add_argument("--experts", nargs="+", default=["eager", "grouped_mm"], help="transformers' implementations")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--threads", type=int, default=None, help="of each rank (default: the cores over the ranks)")
    parser.add_argument("--rounds", type=int, default=3, help="counted turns of each side")
    parser.add_argument("--steps", type=int, default=2, help="steps a turn")
    parser.add_argument("--seq_length", type=int, default=1024)
    parser.add_argument("--micro_batch", type=int, default=2)
    parser.add_argument("--checkpointing", choices=["none", "full", "selective"], default="none")
    parser.add_argument("--compile", action="store_true", help="ours with torch.compile of the layers")
    parser.add_argument("--same_malloc", action="store_true", help="theirs with the recipe's setting of malloc, too")
    parser.add_argument("--model", default="{}", help="JSON of fields that differ from the bench model")
    parser.add_argument("--profile", action="store_true", help="also show where one more step of each side goes")
    parser.add_argument("--json", type=Path, default=None, help="write everything measured into this file")
    arguments = parser.parse_args()
    threads = arguments.threads or max(1, len(os.sched_getaffinity(0)) // arguments.ranks)
    results = []
    for dtype in arguments.dtypes:
        job = JOB | {
            "model": BENCH_MODEL | json.loads(arguments.model),
            "dtype": dtype,
            "ranks": arguments.ranks,
            "threads": threads,
            "seq_length": arguments.seq_length,
            "micro_batch": arguments.micro_batch,
            "checkpointing": arguments.checkpointing,
            "compile": arguments.compile,
            "keeps_memory": arguments.same_malloc,
        }
        rivals = arguments.experts if arguments.vs == "transformers" else []
        results += compare(job, rivals, arguments.rounds, arguments.steps, arguments.profile)
    print(table(results))
    if arguments.vs == "transformers":
        print("\n".join(ratios(results)))
    if arguments.profile:
        print("\n" + profiles(results))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
