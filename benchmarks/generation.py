"""Tokens a second of generation, this model's latent cache and transformers' cache in turn in one process.

    python benchmarks/generation.py [--dtypes fp32 bf16] [--batches 1 8] [--context 1024] [--new_tokens 32]

Same weights and prompts, greedy; on the way both must draw the same tokens (in float32) or the ratio does not count.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from benchmarks.train_step import BENCH_MODEL, JOB
from benchmarks.training_worker import DTYPES, our_model, their_model
from model.generation import generate_tokens


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
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print("| dtype | batch | ours, tokens/s | transformers, tokens/s | ratio | after the first: ours, theirs, ratio |")
    print("|---|---|---|---|---|---|")
    results = []
    for dtype in arguments.dtypes:
        job = JOB | {"experts": arguments.experts}
        ours, theirs = (build(job).to(DTYPES[dtype]).eval() for build in (our_model, their_model))
        for batch in arguments.batches:
            generator = torch.Generator().manual_seed(batch)
            prompt = torch.randint(BENCH_MODEL["vocab_size"], (batch, arguments.context), generator=generator)
            result = measure(ours, theirs, prompt, arguments.new_tokens, arguments.rounds)
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
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


def measure(ours: Any, theirs: Any, prompt: torch.Tensor, new_tokens: int, rounds: int) -> dict[str, Any]:
    """Medians of tokens/s over the rounds, ours and theirs in turn: whole, and without prompt and first token."""
    sides: list[tuple[Callable[..., torch.Tensor], Any]] = [(our_generation, ours), (their_generation, theirs)]
    seconds: dict[tuple[int, int], list[float]] = {(side, tokens): [] for side in (0, 1) for tokens in (1, new_tokens)}
    drawn: dict[int, torch.Tensor] = {}
    for number in range(rounds + 1):
        for (side, tokens), times in seconds.items():
            function, model = sides[side]
            begin = time.perf_counter()
            drawn[side] = function(model, prompt, tokens)
            if number:  # the first round warms up
                times.append(time.perf_counter() - begin)
    batch = len(prompt)
    first, whole = ([statistics.median(seconds[side, tokens]) for side in (0, 1)] for tokens in (1, new_tokens))
    return {
        "same_tokens": torch.equal(drawn[0], drawn[1]),
        "whole": [batch * new_tokens / total for total in whole],
        "decode": [batch * (new_tokens - 1) / max(total - one, 1e-9) for total, one in zip(whole, first, strict=True)],
    }


if __name__ == "__main__":
    main()
