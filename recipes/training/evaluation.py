"""Loss on the held-out documents."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Evaluation:
    """Loss over held-out tokens, each predicted once."""

    loss: float  # nats per token
    bits_per_byte: float  # of the held-out texts' UTF-8 bytes
    tokens: int
    mtp_acceptance: float | None  # of the first MTP depth's drafts, in speculative decoding; None without MTP


def evaluate(engine: Any, batches: Iterable[dict[str, Tensor]], text_bytes: float, copies: int = 1) -> Evaluation:
    """Run the engine over this rank's batches; every rank must have the same number of them.

    Args:
        text_bytes: UTF-8 bytes of the texts that are evaluated, all ranks' together.
        copies: ranks that have the same batches.
    """
    engine.eval()
    totals = sum_losses(engine, batches, engine.device)
    engine.train()
    torch.distributed.all_reduce(totals)
    totals /= copies
    return as_evaluation(totals, text_bytes)


@torch.no_grad()
def sum_losses(model: Callable[..., Any], batches: Iterable[dict[str, Tensor]], device: torch.device | str) -> Tensor:
    """(nats, tokens, MTP drafts accepted, drafts) over the batches, (4,) float64; `model` is in eval mode."""
    totals = torch.zeros(4, device=device, dtype=torch.float64)
    for batch in batches:
        output = model(**{name: tensor.to(device) for name, tensor in batch.items()})
        totals[:2] += torch.stack([output["cross_entropy_sum"].double(), output["label_count"].double()])
        if "mtp_accepted_count" in output:
            totals[2:] += torch.stack([output["mtp_accepted_count"], output["mtp_label_count"][0]])
    return totals


def as_evaluation(totals: Tensor, text_bytes: float) -> Evaluation:
    """From the sums over all ranks."""
    nats, tokens, accepted, drafts = totals.tolist()
    return Evaluation(
        loss=nats / tokens,
        bits_per_byte=nats / math.log(2) / text_bytes,
        tokens=int(tokens),
        mtp_acceptance=accepted / drafts if drafts else None,
    )
