"""Parameter groups: which parameters decay.

The optimizer itself is DeepSpeed's, as the ds_config names it; it gets these groups. A group's `name` and
`weight_decay` go through every ZeRO stage. With Muon, DeepSpeed splits each group again: hidden matrices (the routed
experts' too) to Muon, embeddings, head, norms and biases to AdamW, each with its group's weight decay.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from model.config import ModelConfig
from model.transformer import DeepseekForCausalLM
from recipes.cluster.memory import Parameter

DECAYED, NOT_DECAYED = "decayed", "not_decayed"
# Before a step ZeRO 1 and 2 copy a rank's gradients of each group into one block, so groups of a part of the model keep
# that block small; smaller ones than this would only cost calls.
_LEAST_ELEMENTS, _MOST_PARTS = 8 << 20, 16
# To be counted up with every change of which parameters make a group: DeepSpeed loads its own checkpoints by group, and
# those of another number are converted first, by name.
GROUPING = 2


def parameter_groups(named_parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Split parameters into decayed matrices and the rest: norms, biases and embeddings; and both of a large model into
    several groups.

    Args:
        named_parameters: as `model.named_parameters()` gives them; frozen ones are left out.
        weight_decay: of the matrices, times the learning rate [1/step].
    Returns:
        Groups with `params`, their `names`, `weight_decay` and a `name` of their own; no group is empty.
    Source: V3 sec. 4.2, V2 sec. 3.1, MoE sec. 5.1, LLM sec. 2.3: weight decay 0.1. Which parameters are left out is
        not stated there: a norm's weight is a scale, and an embedding's row would decay also in the steps that never
        read it.
    """
    members: dict[str, list[tuple[str, nn.Parameter]]] = {DECAYED: [], NOT_DECAYED: []}
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            matrix = len(_whole_shape(parameter)) >= 2
            members[DECAYED if matrix and "embed_tokens" not in name else NOT_DECAYED].append((name, parameter))
    elements = sum(_whole_shape(parameter).numel() for kind in members.values() for _, parameter in kind)
    limit = max(_LEAST_ELEMENTS, elements // _MOST_PARTS)
    return [
        {
            "params": [parameter for _, parameter in part],
            "names": [name for name, _ in part],
            "weight_decay": weight_decay if kind == DECAYED else 0.0,
            "name": f"{kind}_{number}",  # DeepSpeed's groups of experts go by it
        }
        for kind, named in members.items()
        for number, part in enumerate(_parts(named, limit))
    ]


def _whole_shape(parameter: nn.Parameter) -> torch.Size:
    # ZeRO-3 leaves an empty tensor in place of the weight and keeps the shape in ds_shape.
    return getattr(parameter, "ds_shape", parameter.shape)


def _parts(named: list[tuple[str, nn.Parameter]], limit: int) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Cut into runs of at most `limit` elements; a larger parameter is a run of its own."""
    part: list[tuple[str, nn.Parameter]] = []
    elements = 0
    for name, parameter in named:
        more = _whole_shape(parameter).numel()
        if part and elements + more > limit:
            yield part
            part, elements = [], 0
        part.append((name, parameter))
        elements += more
    if part:
        yield part


def parameter_sizes(model: ModelConfig) -> list[list[Parameter]]:
    """Name and elements of every parameter, by optimizer group: of the model itself, built without memory."""
    with torch.device("meta"):
        groups = parameter_groups(DeepseekForCausalLM(model).named_parameters(), weight_decay=0.0)
    return [[(n, p.numel()) for n, p in zip(group["names"], group["params"], strict=True)] for group in groups]
