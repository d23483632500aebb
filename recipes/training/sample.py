"""A line of text from the model in training, to see with one's own eyes what it has learned."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.attention import LatentCache
from recipes.data.tokenizer import load_tokenizer

SAMPLE_TOKENS = 48
SAMPLE_TEMPERATURE = 0.7


@torch.no_grad()
def sample_text(engine: Any, tokenizer_folder: Path, prompt: str = "def ", seed: int = 0) -> str:
    """Continue a prompt; all ranks call it, as ZeRO-3 gathers the weights for each forward.

    Every rank draws the same tokens, from the same seed and the same logits.
    """
    tokenizer = load_tokenizer(str(tokenizer_folder))
    model = engine.module
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    length = min(len(tokens) + SAMPLE_TOKENS, model.config.max_position_embeddings)
    cache = LatentCache(model.config, 1, length, dtype=next(model.parameters()).dtype, device=engine.device)
    engine.eval()
    fresh = tokens
    while len(tokens) < length and tokens[-1] != tokenizer.eos_token_id:
        input_ids = torch.tensor([fresh], device=engine.device)
        logits_V: Tensor = engine(input_ids, cache=cache)["logits"][0, -1].float().cpu()
        probabilities = torch.softmax(logits_V / SAMPLE_TEMPERATURE, dim=-1)
        fresh = [int(torch.multinomial(probabilities, 1, generator=generator))]
        tokens = tokens + fresh
    engine.train()
    return str(tokenizer.decode(tokens, skip_special_tokens=True))
