"""The weights that a run begins with: drawn from the seed, or read from a folder; the same on every rank.

Under expert parallelism a rank writes its own experts alone (`own_experts` of recipes/training/expert_parallel.py). The
memory of the others is never touched, so the system never provides it, until AutoEP drops it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from model.hf_layout import FilePart, file_parts
from model.hf_weights import WeightsError
from model.moe import iter_routers
from model.transformer import DeepseekForCausalLM
from recipes.config.errors import TrainingFault, UserError
from recipes.training.expert_parallel import is_expert
from recipes.training.trained_model import TrainedWeights, without_mtp

_PIECE_ELEMENTS = 1 << 24


@contextmanager
def whole(parameter: nn.Parameter) -> Iterator[bool]:
    """Hold a parameter whole to write into it; tells whether this rank writes (under ZeRO-3 rank 0 alone does)."""
    partitioned = hasattr(parameter, "ds_id")
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=partitioned):
        yield not partitioned or torch.distributed.get_rank() == 0


@torch.no_grad()
def draw_weights(model: DeepseekForCausalLM, seed: int, experts: range | None = None) -> None:
    """Fill every parameter from (seed, name) alone, so it is the same for any world size and ZeRO stage.

    Args:
        experts: the only routed experts to fill; None: all.
    """
    for name, parameter in model.named_parameters():
        with whole(parameter) as writes:
            if writes:
                model.init_parameter_(name, parameter.data, seed, experts if is_expert(name) else None)
    for _, router in iter_routers(model):
        router.tokens_per_expert.zero_()
        if router.e_score_correction_bias is not None:
            router.e_score_correction_bias.zero_()


@torch.no_grad()
def copy_weights(model: DeepseekForCausalLM, weights: TrainedWeights, experts: range | None = None) -> str:
    """Copy trained weights and balancing biases into the model, one tensor at a time.

    MTP layers that the folder lacks keep what they were drawn as.

    Args:
        experts: the only routed experts to copy; None: all.
    Returns:
        What was left as drawn, in words; empty if nothing.
    Raises:
        UserError: weights are missing or unlike the model's.
    """
    config, note = model.config, ""
    if weights.config.num_nextn_predict_layers < config.num_nextn_predict_layers:
        config = without_mtp(config)
        note = "the multi-token prediction layers begin as drawn from the seed: the folder has none"
    targets: dict[str, Tensor] = dict(model.named_parameters()) | dict(model.named_buffers())
    try:
        source = weights.source(config)
        for name, parts in groupby(file_parts(config), key=lambda part: part.name):
            wanted = [part for part in parts if part.expert is None or experts is None or part.expert in experts]
            _copy_one(targets[name], wanted, source)
    except WeightsError as error:
        raise UserError(*error.faults) from None
    return note


def _copy_one(target: Tensor, parts: list[FilePart], source: object) -> None:
    assert callable(source)
    if not isinstance(target, nn.Parameter):
        target.copy_(source(parts[0]))
        return
    with whole(target) as writes:
        if writes:
            for part in parts:
                part.of(target.data).copy_(source(part))


def check_same_on_every_rank(model: nn.Module, experts: range | None = None) -> None:
    """Compare a fingerprint of each parameter and buffer between the ranks, before the first step.

    Under ZeRO-3 a rank holds only its part of a parameter, which rank 0 gave it, so only buffers are compared.

    Args:
        experts: this rank's own; they are compared with the first rank's that has the same. None: all.
    Raises:
        TrainingFault: naming a tensor and a rank that differ from another.
    """
    named = [(n, t) for n, t in (*model.named_parameters(), *model.named_buffers()) if not hasattr(t, "ds_id")]
    own = slice(None) if experts is None else slice(experts.start, experts.stop)
    prints = [_fingerprint(tensor[own] if is_expert(name) else tensor) for name, tensor in named]
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    # As objects: the model is still in host memory, and NCCL's collectives take tensors of a GPU alone.
    torch.distributed.all_gather_object(everyone, (experts.start if experts else 0, prints))
    twins: dict[int, int] = {}  # first expert -> the first rank that has it
    for rank, (first_expert, theirs) in enumerate(everyone):
        twin = twins.setdefault(first_expert, rank)
        for index, (name, _) in enumerate(named):
            other = twin if is_expert(name) else 0
            if theirs[index] != everyone[other][1][index]:
                raise TrainingFault(
                    f"{name}: rank {rank} begins with other values than rank {other}; all must begin the same"
                )


def _fingerprint(tensor: Tensor) -> int:
    """A number of 64 bits that changes when a value or its place does; taken by pieces, whose copies are of 64 bits."""
    as_integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    total = 0
    for start, piece in enumerate(tensor.detach().reshape(-1).view(as_integers).split(_PIECE_ELEMENTS)):
        first = start * _PIECE_ELEMENTS + 1
        places = torch.arange(first, first + piece.numel(), device=piece.device)
        total += int((piece.long() * (places * 2 + 1)).sum())  # wraps around, the same everywhere
    return total % (1 << 64)
