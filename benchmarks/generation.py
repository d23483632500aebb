"""Tokens a second of generation, this model's latent cache and transformers' cache in turn, a process each.

    python benchmarks/generation.py [--dtypes fp32 bf16] [--batches 1 8] [--context 1024] [--new_tokens 32]

Same weights and prompts, greedy; on the way both must draw the same tokens (in float32) or the ratio does not count.
Ours runs as recipes/generate.py sets it up: in inference mode, and with malloc told to keep what is freed;
`--same_malloc` tells theirs, too.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from benchmarks.train_step import BENCH_MODEL, JOB
from benchmarks.training_worker import DTYPES, our_model, their_model
from model.generation import generate_tokens
from recipes.cluster.host_memory import keep_freed_memory

_model: Any = None  # of this process


class Side:
    """A process that holds one side's model, and waits while it has no turn."""

    def __init__(self, ours: bool, dtype: str, experts: str, threads: int, keeps_memory: bool) -> None:
        self._generate = our_generation if ours else their_generation
        self._process = ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn"), _set_up, (ours, dtype, experts, threads, keeps_memory)
        )

    def take_turn(self, prompt: torch.Tensor, new_tokens: int) -> tuple[float, list[list[int]]]:
        """Seconds, and the new tokens of each sequence."""
        return self._process.submit(_timed, self._generate, prompt.tolist(), new_tokens).result()

    def stop(self) -> None:
        """End the process."""
        self._process.shutdown()


def _set_up(ours: bool, dtype: str, experts: str, threads: int, keeps_memory: bool) -> None:
    global _model
    if keeps_memory:
        keep_freed_memory()
    torch.set_num_threads(threads)
    build = our_model if ours else their_model
    _model = build(JOB | {"experts": experts}).to(DTYPES[dtype]).eval()


def _timed(generate: Any, prompt: list[list[int]], new_tokens: int) -> tuple[float, list[list[int]]]:
    tokens = torch.tensor(prompt)
    begin = time.perf_counter()
    drawn = generate(_model, tokens, new_tokens)
    return time.perf_counter() - begin, drawn.tolist()


@torch.inference_mode()  # as recipes/generate.py
def our_generation(model: Any, prompt: torch.Tensor, new_tokens: int) -> torch.Tensor:
    """The new tokens, (B, new)."""
    return torch.stack(list(generate_tokens(model, prompt, max_new_tokens=new_tokens, temperature=0)), dim=1)


def their_generation(model: Any, prompt: torch.Tensor, new_tokens: int) -> torch.Tensor:
    """The new tokens, (B, new)."""
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        do_sample=False,
        use_cache=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[:, prompt.shape[1] :]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--new_tokens", type=int, default=32)
    parser.add_argument("--experts", choices=["eager", "grouped_mm"], default="grouped_mm", help="transformers' way")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--same_malloc", action="store_true", help="theirs with the recipe's setting of malloc, too")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    print("| dtype | batch | ours, tokens/s | transformers, tokens/s | ratio | after the first: ours, theirs, ratio |")
    print("|---|---|---|---|---|---|")
    results = []
    for dtype in arguments.dtypes:
        sides = [
            Side(ours, dtype, arguments.experts, arguments.threads, ours or arguments.same_malloc)
            for ours in (True, False)
        ]
        for batch in arguments.batches:
            generator = torch.Generator().manual_seed(batch)
            prompt = torch.randint(BENCH_MODEL["vocab_size"], (batch, arguments.context), generator=generator)
            result = measure(sides, prompt, arguments.new_tokens, arguments.rounds)
            result |= {"dtype": dtype, "batch": batch}
            if dtype == "fp32" and not result["same_tokens"]:
                print(f"fp32, batch {batch}: other tokens were drawn; the ratio does not count")
            results.append(result)
            whole, decode = result["whole"], result["decode"]
            print(
                f"| {dtype} | {batch} | {whole[0]:.1f} | {whole[1]:.1f} | {whole[0] / whole[1]:.2f} "
                f"| {decode[0]:.1f}, {decode[1]:.1f}, {decode[0] / decode[1]:.2f} |",
                flush=True,
            )
        for side in sides:
            side.stop()
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


def measure(sides: list[Side], prompt: torch.Tensor, new_tokens: int, rounds: int) -> dict[str, Any]:
    """Medians of tokens/s over the rounds, ours and theirs in turn: whole, and without prompt and first token."""
    seconds: dict[tuple[int, int], list[float]] = {(side, tokens): [] for side in (0, 1) for tokens in (1, new_tokens)}
    drawn: dict[int, list[list[int]]] = {}
    for number in range(rounds + 1):
        for (side, tokens), times in seconds.items():
            taken, drawn[side] = sides[side].take_turn(prompt, tokens)
            if number:  # the first round warms up
                times.append(taken)
    batch = len(prompt)
    first, whole = ([statistics.median(seconds[side, tokens]) for side in (0, 1)] for tokens in (1, new_tokens))
    return {
        "same_tokens": drawn[0] == drawn[1],
        "whole": [batch * new_tokens / total for total in whole],
        "decode": [batch * (new_tokens - 1) / max(total - one, 1e-9) for total, one in zip(whole, first, strict=True)],
    }


if __name__ == "__main__":
    main()
