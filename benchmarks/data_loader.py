"""How many batches the loader makes beside what the tiny model consumes: `python benchmarks/data_loader.py`.

Both are measured in this run, in one process without loading workers, on the default corpus.
"""

import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from model.config import load_model_config
from model.transformer import DeepseekForCausalLM
from recipes.config.batch_plan import BatchPlan
from recipes.config.run_config import PretrainConfig
from recipes.data.loader import TrainingData, step_batches
from recipes.training.data_sources import open_sources

SEQUENCE, BATCH = 4096, 8
BATCHES = 200


def loader_batches_per_second(data: TrainingData) -> float:
    """Batches of 8 sequences of 4,096 tokens that one process makes in a second."""
    batches = step_batches(
        data, batch_plan=BatchPlan(BATCH, SEQUENCE), first_step=0, micro_batch_size=BATCH, rank=0, world_size=1
    )
    next(batches)
    begin = time.perf_counter()
    for _ in range(BATCHES):
        next(batches)
    return BATCHES / (time.perf_counter() - begin)


def model_batches_per_second(dtype: torch.dtype) -> float:
    """Such batches' worth of tokens that forward and backward of the tiny model take in a second."""
    model = DeepseekForCausalLM(load_model_config("tiny"))
    model.init_weights(0)
    model.to(dtype).train()
    tokens = torch.randint(0, 4096, (8, 257))
    best = float("inf")
    for _ in range(6):
        begin = time.perf_counter()
        model(tokens[:, :-1], tokens[:, 1:])["loss"].backward()
        best = min(best, time.perf_counter() - begin)
    return 8 * 256 / best / (BATCH * SEQUENCE)


def main() -> None:
    """Print both and their ratio."""
    sources, _ = open_sources(PretrainConfig(), load_model_config("tiny"))
    made = loader_batches_per_second(TrainingData(sources, SEQUENCE, seed=0))
    print(f"loader: {made:,.0f} batches of {BATCH} x {SEQUENCE} a second")
    for dtype in (torch.float32, torch.bfloat16):
        taken = model_batches_per_second(dtype)
        print(
            f"tiny, {dtype}: takes {taken:.3f} such batches a second; the loader makes {made / taken:,.0f} times that"
        )


if __name__ == "__main__":
    main()
