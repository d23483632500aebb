"""What of a DeepSpeed engine is in this process's memory: weights, optimizer state, gradients; each storage once."""

import gc
from collections.abc import Iterable
from typing import Any

import torch


def storages(tensors: Iterable[Any]) -> dict[int, int]:
    """Address -> bytes of every storage behind the tensors; what is no tensor is passed over."""
    found = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes():
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return found


def all_tensors() -> list[torch.Tensor]:
    gc.collect()
    return [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]


def sizes(engine: Any, before: set[int]) -> list[int]:
    """Bytes of weights, optimizer state and the rest now; what was there `before` counts nowhere.

    Between two micro-batches the rest is gradients, and buffers on their way.
    """
    optimizer, basic = engine.optimizer, engine.basic_optimizer
    parameters = list(engine.module.parameters())
    weights = storages([*parameters, *(getattr(p, "ds_tensor", None) for p in parameters)])
    for name in ("bit16_groups_flat", "fp16_partitioned_groups_flat", "bf16_groups_flat"):
        weights |= storages(getattr(optimizer, name, []))
    state = [p for group in basic.param_groups for p in group["params"]]
    for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups_flat_partition"):
        state += getattr(optimizer, name, [])
    state += [value for values in basic.state.values() for value in values.values()]
    in_state = {address: size for address, size in storages(state).items() if address not in weights}
    # gradients hang on the parameters without a Python object of their own until they are asked for
    held = storages(
        [*all_tensors(), *(p.grad for p in parameters), *(getattr(p, "grad_accum", None) for p in parameters)]
    )
    rest = {a: size for a, size in held.items() if a not in weights and a not in in_state and a not in before}
    return [sum(part.values()) for part in (weights, in_state, rest)]
