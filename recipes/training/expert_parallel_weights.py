"""The weights of a checkpoint that was saved under expert parallelism, whole and under the model's own names.

DeepSpeed's zero_to_fp32 knows no experts that are shared out over ranks. A rank's optimizer file holds its parts of the
float32 weights; what belongs where, the files say themselves.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_ROUTER, _GATE = ".mlp.router.", ".mlp.gate."


@dataclass(frozen=True)
class Assembled:
    """A tensor that is put together when it is asked for."""

    build: Callable[[], Tensor]

    def contiguous(self) -> Tensor:
        """The tensor, in new memory."""
        return self.build().contiguous()


def is_expert_parallel(checkpoint: Path) -> bool:
    """Whether the blocks were AutoEP's when this checkpoint was saved, be it with `autoep_size` 1."""
    return bool(load_saved(_model_file(checkpoint, 0)).get("ds_autoep_layers"))


def assemble_weights(checkpoint: Path) -> dict[str, Any]:
    """The weights of a checkpoint saved under AutoEP, at ZeRO stage 1, 2 or 3 and on any number of ranks.

    Returns:
        The model's own name of each parameter and balancing bias -> Assembled, in float32.
    """
    model = load_saved(_model_file(checkpoint, 0))
    size = model["ds_autoep_layers"][0]["ep_size"]
    pieces: dict[tuple[str, int], list[Tensor]] = defaultdict(list)
    shapes: dict[str, torch.Size] = {}
    for group in model["param_shapes"]:
        shapes |= {name: torch.Size(shape) for name, shape in group.items()}
    for rank in range(len(list(checkpoint.glob("*zero_pp_rank_*_optim_states.pt")))):
        for name, part in parts_of_rank(checkpoint, rank):
            pieces[name, rank % size if _is_expert(name) else 0].append(part)

    def whole(name: str, expert_rank: int = 0) -> Tensor:
        flat = torch.cat(pieces[name, expert_rank])
        return flat[: shapes[name].numel()].view(shapes[name])  # ZeRO-3 pads a parameter to a multiple of the ranks

    def experts(*names: str) -> Tensor:
        """(E / size, I, H) of each rank and name -> (E, I of all names, H)."""
        return torch.cat([torch.cat([whole(name, rank) for rank in range(size)]) for name in names], dim=1)

    state: dict[str, Any] = {}
    for name in shapes:
        if not _is_expert(name):
            state[own_name(name)] = Assembled(partial(whole, name))
        elif name.endswith(".w1"):
            block = name.removesuffix("w1")
            state[f"{block}gate_up_proj"] = Assembled(partial(experts, f"{block}w1", f"{block}w3"))
            state[f"{block}down_proj"] = Assembled(partial(experts, f"{block}w2"))
    for name, source in (model["shared_params"] or {}).items():
        state[own_name(name)] = state[own_name(source)]
    for name, buffer in load_saved(checkpoint / "buffers.pt").items():
        if not name.endswith("tokens_per_expert"):
            state[own_name(name)] = buffer
    return state


def own_name(name: str) -> str:
    """The model's own name for what AutoEP calls `name`; of experts it has no counterpart one by one."""
    return name.replace(".mlp.router.gate.", _GATE).replace(_ROUTER, _GATE)


def _is_expert(name: str) -> bool:
    return name.endswith((".mlp.experts.w1", ".mlp.experts.w2", ".mlp.experts.w3"))


def parts_of_rank(checkpoint: Path, rank: int, shard: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Name and flat float32 part of every parameter of which a rank holds one; `shard` counts tensor-parallel ranks."""
    path = next(
        checkpoint.glob(f"*zero_pp_rank_{rank}_mp_rank_{shard:02d}_optim_states.pt")
    )  # bf16's begin with "bf16_"
    optimizer = load_saved(path)["optimizer_state_dict"]
    if "fp32_flat_groups" not in optimizer:  # stages 1 and 2 list what lies where
        for group, flat in zip(
            optimizer["param_slice_mappings"], optimizer["single_partition_of_fp32_groups"], strict=True
        ):
            for name, place in group.items():
                yield name, flat.detach()[place.start : place.start + place.numel]
        return
    # Stage 3 cuts every parameter evenly over the ranks of its group, and lays the parts one after another.
    for group, shapes, flat in zip(
        optimizer["ds_zero_partition_groups"],
        load_saved(_model_file(checkpoint, rank))["param_shapes"],
        optimizer["fp32_flat_groups"],
        strict=True,
    ):
        start = 0
        for name, shape in shapes.items():
            length = -(-math.prod(shape) // group["partition_count"])
            yield name, flat.detach()[start : start + length]
            start += length


def _model_file(checkpoint: Path, rank: int) -> Path:
    """A rank's model states: one file for all at stages 1 and 2, one a rank at stage 3."""
    shared = checkpoint / "mp_rank_00_model_states.pt"
    return shared if shared.is_file() else checkpoint / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"


def load_saved(path: Path) -> Any:
    """What a file of a DeepSpeed checkpoint holds; its tensors are mapped, not read."""
    return torch.load(path, map_location="cpu", mmap=True, weights_only=False)
