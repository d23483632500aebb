"""A line of text from the model in training, to see with one's own eyes what it has learned."""

from pathlib import Path
from typing import Any

import torch

from model.generation import generate_tokens
from recipes.data.tokenizer import load_tokenizer

SAMPLE_TOKENS = 48
SAMPLE_TEMPERATURE = 0.7


@torch.no_grad()
def sample_text(engine: Any, tokenizer_folder: Path, prompt: str = "def ", seed: int = 0) -> str:
    """Continue a prompt; all ranks call it, as ZeRO-3 gathers the weights for each forward.

    Every rank draws the same tokens, from the same seed and the same logits.
    """
    tokenizer = load_tokenizer(str(tokenizer_folder))
    tokens: list[int] = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    engine.eval()
    drawn = generate_tokens(
        engine.module,
        torch.tensor([tokens], device=engine.device),
        max_new_tokens=min(SAMPLE_TOKENS, engine.module.config.max_position_embeddings - len(tokens)),
        temperature=SAMPLE_TEMPERATURE,
        generator=torch.Generator().manual_seed(seed),
        stop_ids=[tokenizer.eos_token_id],
    )
    tokens = tokens + [int(token) for token in drawn]
    engine.train()
    return str(tokenizer.decode(tokens, skip_special_tokens=True))
