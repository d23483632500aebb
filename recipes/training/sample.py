"""A line of text from the model in training, to see with one's own eyes what it has learned."""

from pathlib import Path
from typing import Any

import torch

from model.generation import generate_tokens
from recipes.data.tokenizer import load_tokenizer

SAMPLE_TOKENS = 48
SAMPLE_TEMPERATURE = 0.7


def sample_text(engine: Any, tokenizer_folder: Path, prompt: str = "def ", seed: int = 0) -> str:
    """Continue a prompt; all ranks call it, as ZeRO-3 gathers the weights for each forward."""
    tokenizer = load_tokenizer(str(tokenizer_folder))
    tokens: list[int] = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    tokens += sample_tokens(engine, tokens, tokenizer.eos_token_id, temperature=SAMPLE_TEMPERATURE, seed=seed)
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


@torch.no_grad()
def sample_tokens(
    engine: Any, prompt: list[int], stop_id: int, *, temperature: float, seed: int = 0, use_cache: bool = True
) -> list[int]:
    """What the model says after a prompt; every rank draws the same, from the same seed and the same logits."""
    engine.eval()
    # AutoTP leaves a rank a part of the heads, and plain attention's cache has room for all of them.
    use_cache = use_cache and (engine.module.config.uses_latent_attention or engine.autotp_size() <= 1)
    # Ranks that differ in a logit's last bit may differ in a token: none may stop before the others, as their forward
    # passes gather weights, or exchange tokens, with one another.
    alone = torch.distributed.get_world_size() == 1
    drawn = generate_tokens(
        engine.module,
        torch.tensor([prompt], device=engine.device),
        max_new_tokens=min(SAMPLE_TOKENS, engine.module.config.max_position_embeddings - len(prompt)),
        temperature=temperature,
        generator=torch.Generator().manual_seed(seed),
        stop_ids=[stop_id] if alone else [],
        use_cache=use_cache,
    )
    tokens = [int(token) for token in drawn]
    engine.train()
    return tokens[: tokens.index(stop_id) + 1] if stop_id in tokens else tokens
