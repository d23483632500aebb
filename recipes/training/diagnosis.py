"""Where a step first went wrong: its micro-batches run again, with a look at every activation and gradient."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from deepspeed.moe.ep_experts import GroupedExperts
from torch import Tensor, nn

from recipes.training.loss_scale import UpdateControl


def first_nonfinite(
    engine: Any, control: UpdateControl, micro_batches: list[dict[str, Tensor]], denominator: float, loss_scale: float
) -> str:
    """Run the micro-batches of a step that was not finite forward and backward again, and say what was first so.

    Every rank calls it, at any ZeRO stage; the engine is of no use for training afterwards. The weights must be those
    that the step began with, as they are after a step that was left out.

    Args:
        micro_batches: this rank's; every rank has as many.
        denominator: of the loss, as in the step [tokens].
        loss_scale: of the step.
    Returns:
        A sentence's part: the module or the parameter, the micro-batch and the rank.
    """
    control.loss_scale = loss_scale
    found: list[str] = []
    with _watched(engine.module, found):
        for number, batch in enumerate(micro_batches):
            before = len(found)
            output = engine(**batch, loss_denominator=denominator)
            engine.backward(output["loss"])
            found[before:] = [f"{text}, in micro-batch {number}" for text in found[before:]]
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, found[0] if found else None)
    for rank, text in enumerate(everyone):
        if text:
            return f"{text} of rank {rank}"
    return "no activation and no rank's gradient, but their sum over ranks and micro-batches"


@contextmanager
def _watched(model: nn.Module, found: list[str]) -> Iterator[None]:
    """Note, in the order in which they appear, outputs of modules and gradients of parameters that are not finite."""

    def look_at_output(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if not all(map(_finite, _tensors(output))):
            found.append(f"the output of {name} ({type(module).__name__})")

    def look_at_gradient(name: str, gradient: Tensor) -> None:
        if not _finite(gradient):
            found.append(f"the gradient of {name}")

    hooks = [
        module.register_forward_hook(partial(look_at_output, name or "the model"))
        for name, module in model.named_modules()
        # AutoEP's products end in rows that no expert wrote and nobody reads: whatever the memory held before
        if not isinstance(module, GroupedExperts)
    ]
    hooks += [
        p.register_hook(partial(look_at_gradient, name)) for name, p in model.named_parameters() if p.requires_grad
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _finite(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() and tensor.numel()) or math.isfinite(float(tensor.detach().abs().max()))


@torch.no_grad()
def nonfinite_parameter(model: nn.Module) -> str | None:
    """The first parameter with a value that is not finite on any rank, found by one message; None where all are finite.

    Under ZeRO-3 each rank looks at its own parts.
    """
    named = list(model.named_parameters())
    device = named[0][1].device
    parts = [_held_part(parameter) for _, parameter in named]
    # The largest magnitude is NaN or infinite where any value is.
    largest = [
        part.abs().amax().float().to(device) if part.numel() else torch.zeros((), device=device) for part in parts
    ]
    bad = (~torch.isfinite(torch.stack(largest))).int()  # (parameters,)
    torch.distributed.all_reduce(bad, op=torch.distributed.ReduceOp.MAX)
    return next((name for (name, _), is_bad in zip(named, bad.tolist(), strict=True) if is_bad), None)


def _held_part(parameter: Any) -> Tensor:
    """What this rank has of a parameter, without the memory that ZeRO-3 adds to make the ranks' parts equally long."""
    if not hasattr(parameter, "ds_tensor"):
        return parameter
    size = parameter.partition_numel()
    start = size * torch.distributed.get_rank(parameter.ds_process_group)
    return parameter.ds_tensor.flatten()[: max(0, min(size, parameter.ds_numel - start))]
