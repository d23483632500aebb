"""Loss on the held-out documents."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Evaluation:
    """Loss over all held-out tokens, each predicted once."""

    loss: float  # nats per token
    bits_per_byte: float  # of the held-out texts' UTF-8 bytes
    tokens: int


@torch.no_grad()
def evaluate(engine: Any, batches: Iterable[dict[str, Tensor]], text_bytes: int) -> Evaluation:
    """Run the engine over this rank's batches; every rank must have the same number of them.

    Args:
        text_bytes: UTF-8 bytes of the held-out texts, all ranks' together.
    """
    totals = torch.zeros(2, device=engine.device, dtype=torch.float64)  # nats, tokens
    engine.eval()
    for batch in batches:
        output = engine(**{name: tensor.to(engine.device) for name, tensor in batch.items()})
        totals += torch.stack([output["cross_entropy_sum"].double(), output["label_count"].double()])
    engine.train()
    torch.distributed.all_reduce(totals)
    nats, tokens = totals.tolist()
    return Evaluation(loss=nats / tokens, bits_per_byte=nats / math.log(2) / text_bytes, tokens=int(tokens))
