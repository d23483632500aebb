"""Bytes of weights, gradients and optimizer state on one rank, as DeepSpeed lays them out.

Only sizes come in: nothing is allocated and no device is needed. How much each ZeRO stage keeps was measured on
DeepSpeed 0.19.8 on 1 and 2 ranks, and a test measures it again. Where ranks differ, the fullest one counts.
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from recipes.config.ds_check import autoep_size, offload_device, precision, section, zero_stage

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_ALLREDUCE_ELEMENTS = 500_000_000  # that DeepSpeed's engine reduces at once where no ZeRO bucket does
_LEAST_SWAPPED = 1 << 20  # bytes of a tensor that DeepSpeed writes to NVMe
_ALIGNMENT = 2  # elements: DeepSpeed aligns each rank's part of a flat buffer for NCCL
# Tensors of a parameter's size that an optimizer keeps beside the weights
_STATES = {"adam": 2, "adamw": 2, "lamb": 2, "muon": 1, "lion": 1, "adagrad": 1, "sgd": 0}

Parameter = tuple[str, int]  # name, number of elements


@dataclass(frozen=True)
class ModelState:
    """Bytes on one rank at the fullest moment of each part.

    Args:
        weights: in the compute dtype; at stage 3 this rank's part and what is small enough to be kept whole.
        gradients: accumulated over the micro-batches of a step.
        optimizer: float32 weights and the optimizer's state.
        communication: buckets, and at stage 3 the weights gathered for use.
        step: what the optimizer step needs besides, when no activations are there.
        host: in the host's memory, by offloading.
        disk: in files, by offloading to NVMe.
    """

    weights: int
    gradients: int
    optimizer: int
    communication: int
    step: int
    host: int = 0
    disk: int = 0


@dataclass(frozen=True)
class _FlatGroup:
    """Parameters that one optimizer group lays out one after the other and `ranks` ranks share."""

    parameters: Sequence[Parameter]
    ranks: int
    states: int

    @property
    def numel(self) -> int:
        return sum(numel for _, numel in self.parameters)

    @property
    def part(self) -> int:
        """Elements of one rank's part of the flat buffer at stages 1 and 2."""
        return math.ceil(self.numel / (_ALIGNMENT * self.ranks)) * _ALIGNMENT

    @property
    def parts_by_parameter(self) -> int:
        """Elements of one rank at stage 3, where each parameter is split on its own."""
        return sum(math.ceil(numel / self.ranks) for _, numel in self.parameters)

    def touched(self) -> list[int]:
        """For each rank, the elements of all parameters that its part of the flat buffer touches."""
        bounds = [0]
        for _, numel in self.parameters:
            bounds.append(bounds[-1] + numel)
        found = []
        for rank in range(self.ranks):
            low, high = rank * self.part, min((rank + 1) * self.part, self.numel)
            # the bounds around [low, high): from the last one at or below low to the first one at or above high
            first, last = bisect.bisect_right(bounds, low) - 1, bisect.bisect_left(bounds, high)
            found.append(bounds[last] - bounds[first] if low < high else 0)
        return found


def model_state_bytes(groups: Sequence[Sequence[Parameter]], config: dict[str, Any], world_size: int) -> ModelState:
    """What a rank holds of the model, its gradients and its optimizer.

    Args:
        groups: the optimizer's parameter groups, in order: name and elements of each parameter of the whole model.
        config: a resolved ds_config.
        world_size: ranks; without expert parallelism all of them share everything.
    """
    stage = zero_stage(config)
    element = ELEMENT_BYTES[precision(config)]
    gradient = accumulation_bytes(config)
    flat = _flat_groups(groups, config, world_size)
    if stage == 0:
        return _unpartitioned(flat, config, element)
    if stage == 3:
        state = _stage_3(flat, config, element, gradient)
    else:
        state = _stage_1_or_2(flat, config, stage, element, gradient)
    return _offloaded(state, flat, config, element)


def accumulation_bytes(config: dict[str, Any]) -> int:
    """Bytes of an element of the gradients that are added up over micro-batches."""
    element = ELEMENT_BYTES[precision(config)]
    dtype = section(config, "data_types").get("grad_accum_dtype")
    return ELEMENT_BYTES[dtype] if dtype in ELEMENT_BYTES and zero_stage(config) else element


def expert_parallel_size(config: dict[str, Any]) -> int:
    """Ranks over which AutoEP spreads the routed experts of a layer; 1 without it."""
    return max(1, autoep_size(config))


def split_experts(
    groups: Sequence[Sequence[Parameter]], config: dict[str, Any], world_size: int
) -> list[tuple[list[int], int]]:
    """Elements of the parameters that a rank has a part in, and over how many ranks these are split: routed experts
    apart under AutoEP."""
    return [([n for _, n in group.parameters], group.ranks) for group in _flat_groups(groups, config, world_size)]


def _flat_groups(groups: Sequence[Sequence[Parameter]], config: dict[str, Any], world_size: int) -> list[_FlatGroup]:
    size = expert_parallel_size(config)
    name = str(section(config, "optimizer").get("type", "")).lower()
    states = _STATES.get(name, 2)
    if name == "sgd" and section(config, "optimizer", "params").get("momentum"):
        states = 1
    flat = []
    for group in groups:
        experts = [(n, numel // size) for n, numel in group if size > 1 and ".mlp.experts." in n]
        others = [(n, numel) for n, numel in group if size == 1 or ".mlp.experts." not in n]
        if others:
            flat.append(_FlatGroup(others, world_size, states))
        if experts:
            flat.append(_FlatGroup(experts, world_size // size, states))
    return flat


def _master_and_states(config: dict[str, Any], elements: int, states: int) -> int:
    half = section(config, precision(config))
    reduced = half.get("bf16_master_weights_and_grads") or half.get("fp16_master_weights_and_grads")
    return elements * ((2 if reduced else 4) + states * (2 if half.get("bf16_optimizer_states") else 4))


def _unpartitioned(flat: list[_FlatGroup], config: dict[str, Any], element: int) -> ModelState:
    numel = sum(group.numel for group in flat)
    half = element < 4
    return ModelState(
        weights=numel * element,
        gradients=numel * element,
        # in float32 the optimizer works on the weights themselves
        optimizer=sum(group.numel * 4 * (group.states + half) for group in flat),
        communication=min(numel, _ALLREDUCE_ELEMENTS) * element,
        step=numel * 4 if half else 0,
    )


def _stage_1_or_2(
    flat: list[_FlatGroup], config: dict[str, Any], stage: int, element: int, gradient: int
) -> ModelState:
    numel = sum(group.numel for group in flat)
    own = sum(group.part for group in flat)
    accumulates = config.get("gradient_accumulation_steps", 1) > 1
    largest = max(n for group in flat for _, n in group.parameters)
    arriving = largest  # gradients of a micro-batch that are not yet where they belong
    if stage == 1 and gradient != element:
        gradients = sum(group.part * group.ranks for group in flat) * gradient
        if precision(config) == "fp16":
            arriving = numel  # added up once the backward pass is over
        elif not section(config, "bf16").get("immediate_grad_update"):
            gradients += numel * element  # kept until the step
    elif stage == 1 and accumulates:
        gradients = numel * element
    elif gradient != element:
        gradients = own * gradient
    else:
        # a parameter on the border of two ranks' parts keeps its whole gradient alive on both
        touched = [group.touched() for group in flat]
        world_size = max(group.ranks for group in flat)
        by_rank = (sum(t[rank * len(t) // world_size] for t in touched) for rank in range(world_size))
        gradients = max(by_rank) * element
    # in float32 the optimizer works on the weights themselves where they are one rank's (training/engine.py)
    shares = precision(config) == "fp32" and offload_device(config, "offload_optimizer") == "none"
    shared = sum(group.part for group in flat if group.ranks == 1) * element if shares else 0
    return ModelState(
        weights=sum(group.part * group.ranks for group in flat) * element,
        gradients=gradients,
        optimizer=sum(_master_and_states(config, group.part, group.states) for group in flat) - shared,
        communication=_buckets(config, stage, element, gradient, numel) + arriving * element,
        step=max(group.part for group in flat) * 4,
    )


def _buckets(config: dict[str, Any], stage: int, element: int, gradient: int, numel: int) -> int:
    """What gradients go through on their way to their rank; a bucket is allocated whole, however small the model."""
    wire = ELEMENT_BYTES.get(config.get("communication_data_type") or "", element)
    size = _elements(config, "reduce_bucket_size", 500_000_000)
    if stage == 1 and precision(config) == "bf16" and gradient == 4:
        return min(numel, _ALLREDUCE_ELEMENTS) * gradient  # one flat copy of some whole gradients
    buffer = gradient if stage == 1 else element
    buckets = 2 if section(config, "zero_optimization").get("overlap_comm") else 1
    converted = min(size, numel) * wire if wire != buffer else 0
    return buckets * size * buffer + converted


def _stage_3(flat: list[_FlatGroup], config: dict[str, Any], element: int, gradient: int) -> ModelState:
    zero = section(config, "zero_optimization")
    threshold = zero.get("stage3_param_persistence_threshold", 100_000)
    sizes = [n for group in flat for _, n in group.parameters]
    persistent = sum(n for n in sizes if n <= threshold) if max(group.ranks for group in flat) > 1 else 0
    own = sum(group.parts_by_parameter for group in flat)
    # gathered weights stay while they will be used again soon; at least the largest has to fit, with its gradient
    live = min(sum(sizes) - persistent, max(max(sizes), zero.get("stage3_max_live_parameters", 1_000_000_000)))
    live = live if max(group.ranks for group in flat) > 1 else 0
    wire = ELEMENT_BYTES.get(config.get("communication_data_type") or "", element)
    bucket = _elements(config, "reduce_bucket_size", 500_000_000)
    return ModelState(
        weights=(own + persistent) * element,
        gradients=own * gradient,
        optimizer=sum(_master_and_states(config, group.parts_by_parameter, group.states) for group in flat),
        communication=bucket * wire + (live + max(sizes)) * element,
        step=min(own, zero.get("sub_group_size", 1_000_000_000)) * 4,
    )


def _offloaded(state: ModelState, flat: list[_FlatGroup], config: dict[str, Any], element: int) -> ModelState:
    """Move what is offloaded to the host, or to a disk behind it."""
    optimizer, param = offload_device(config, "offload_optimizer"), offload_device(config, "offload_param")
    if optimizer == "none":
        return state
    own = sum(group.part for group in flat)
    largest = max(n for group in flat for _, n in group.parameters)
    weights, host, disk = state.weights, state.optimizer + own * (4 + element) + largest * element, 0
    if optimizer == "nvme":
        disk, buffers = _swapped_optimizer(flat, config)
        host += buffers - disk
    if param != "none":
        weights, host = 0, host + state.weights
    if param == "nvme":
        swap = section(config, "zero_optimization", "offload_param")
        disk += state.weights
        host += min(0, int(swap.get("max_in_cpu", 1_000_000_000)) * element - state.weights)
        host += int(swap.get("buffer_count", 5)) * int(swap.get("buffer_size", 100_000_000)) * element
    # gradients leave for the host as they come, through one buffer of the largest parameter's size
    return ModelState(weights, largest * element, 0, state.communication, 0, host, disk)


def _swapped_optimizer(flat: list[_FlatGroup], config: dict[str, Any]) -> tuple[int, int]:
    """Bytes of float32 weights, state and gradients on the disk, and of the host's buffers that they pass through.

    DeepSpeed fetches one sub-group of parameters at a time, and leaves in memory what is smaller than _LEAST_SWAPPED.
    """
    size = _elements(config, "sub_group_size", 1_000_000_000)
    disk = largest = 0
    for group in flat:
        numel = 0
        parts = [math.ceil(n / group.ranks) for _, n in group.parameters]
        for index, part in enumerate(parts):
            numel += part
            disk += part * 4 if part * 4 >= _LEAST_SWAPPED else 0  # its gradient
            if numel >= size or index == len(parts) - 1:
                largest = max(largest, numel)
                disk += _master_and_states(config, numel, group.states) if numel * 4 >= _LEAST_SWAPPED else 0
                numel = 0
    count = section(config, "zero_optimization", "offload_optimizer").get("buffer_count", 4)
    return disk, int(count) * largest * 4


def _elements(config: dict[str, Any], key: str, default: int) -> int:
    return int(section(config, "zero_optimization").get(key, default))
