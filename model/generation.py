"""Sampling text from a model, one token at a time, with the latent cache or without."""

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from model.attention import LatentCache
from model.transformer import DeepseekForCausalLM


@torch.no_grad()
def generate_tokens(
    model: DeepseekForCausalLM,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
    stop_ids: Collection[int] = (),
    use_cache: bool = True,
) -> Iterator[Tensor]:
    """Continue sequences of equal length; yields each new token of all of them as it is drawn.

    Args:
        model: in eval mode. input_ids: (B, S) int64, S at least 1.
        max_new_tokens: to draw at most [tokens].
        temperature: the logits' divisor; 0 takes the likeliest token.
        top_p: draws among the likeliest tokens whose probabilities reach this sum.
        generator: on the CPU, whatever the model's device, so that a seed means the same everywhere.
        stop_ids: tokens that end a sequence; it then repeats its stop token until all have ended.
        use_cache: False runs the whole sequence for each token: the same tokens, slower.
    Yields:
        (B,) int64 on the CPU.
    Raises:
        ValueError: a value out of range, or more tokens than the model's context holds.
    """
    batch_size, length = input_ids.shape
    context = model.config.max_position_embeddings
    if length < 1 or max_new_tokens < 1 or length + max_new_tokens > context:
        raise ValueError(f"{length} + {max_new_tokens} tokens: need at least 1 of each, and {context} in all at most")
    if temperature < 0 or not 0 < top_p <= 1:
        raise ValueError(f"temperature {temperature} must be at least 0, top_p {top_p} above 0 and at most 1")
    device, dtype = model.lm_head.weight.device, model.lm_head.weight.dtype
    cache = (
        LatentCache(model.config, batch_size, length + max_new_tokens, dtype=dtype, device=device)
        if use_cache
        else None
    )
    stops = torch.tensor(sorted(stop_ids), dtype=torch.int64)
    ended = torch.zeros(batch_size, dtype=torch.bool)
    seen = fresh = input_ids.to(device)
    tokens = torch.zeros(batch_size, dtype=torch.int64)
    for _ in range(max_new_tokens):
        output = model(fresh if use_cache else seen, cache=cache, logits_to_keep=1)
        logits = output["logits"][:, -1].cpu()
        tokens = torch.where(ended, tokens, draw(logits, temperature, top_p, generator))
        yield tokens
        ended = torch.isin(tokens, stops)
        if ended.all():
            return
        fresh = tokens.unsqueeze(1).to(device)
        seen = torch.cat([seen, fresh], dim=1)


def draw(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator | None) -> Tensor:
    """One token of each row: (B, V) logits -> (B,) int64.

    Source: nucleus sampling, Holtzman et al. (arXiv 1904.09751), eq. 2 and 3.
    """
    if temperature == 0:
        return logits.argmax(-1)
    probabilities = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).softmax(-1)
    if top_p < 1:
        ordered, places = probabilities.sort(-1, descending=True)
        before = ordered.cumsum(-1) - ordered  # of the likelier tokens; the likeliest one always stays
        ordered = ordered.masked_fill(before >= top_p, 0.0)
        probabilities = torch.zeros_like(probabilities).scatter_(-1, places, ordered)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)
