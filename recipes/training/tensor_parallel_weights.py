"""The weights of a checkpoint that was saved under tensor parallelism, whole.

DeepSpeed's zero_to_fp32 knows no matrices that are cut: every rank of a group has optimizer files of its own,
`mp_rank_00` and so on, from which its part of each comes.
"""

import re
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes.config.ds_auto import TENSOR_PARTITION
from recipes.training.expert_parallel_weights import Assembled, load_saved, parts_of_rank

_DIMENSION = {"column": 0, "row": 1}  # that AutoTP cuts


def assemble_shards(checkpoint: Path, size: int) -> dict[str, Any]:
    """The weights of a checkpoint saved under AutoTP, at ZeRO stage 1 or 2 and on any number of ranks.

    Args:
        size: ranks that shared every matrix.
    Returns:
        The name of each parameter -> Assembled, in float32; of each buffer -> itself.
    """
    pieces: dict[tuple[str, int], list[Tensor]] = defaultdict(list)
    shapes: list[dict[str, torch.Size]] = []
    for shard in range(size):
        model = load_saved(checkpoint / f"mp_rank_{shard:02d}_model_states.pt")
        shapes.append({name: torch.Size(shape) for group in model["param_shapes"] for name, shape in group.items()})
        for rank in range(len(list(checkpoint.glob(f"*zero_pp_rank_*_mp_rank_{shard:02d}_optim_states.pt")))):
            for name, part in parts_of_rank(checkpoint, rank, shard):
                pieces[name, shard].append(part)

    def whole(name: str) -> Tensor:
        dimension = _cut_dimension(name)
        shards = range(1 if dimension is None else size)  # what is not cut is the same everywhere
        parts = [torch.cat(pieces[name, shard]).view(shapes[shard][name]) for shard in shards]
        return torch.cat(parts, dim=dimension or 0)

    state: dict[str, Any] = {name: Assembled(partial(whole, name)) for name in shapes[0]}
    for name, source in (load_saved(checkpoint / "mp_rank_00_model_states.pt")["shared_params"] or {}).items():
        state[name] = state[source]
    return state | torch.load(checkpoint / "buffers.pt", map_location="cpu", weights_only=True)


def _cut_dimension(name: str) -> int | None:
    """The dimension along which a parameter is cut; None where every rank has all of it."""
    for spec in TENSOR_PARTITION["layer_specs"]:  # type: ignore[attr-defined]
        if any(re.match(pattern, name) for pattern in spec["patterns"]):
            return _DIMENSION[spec["partition_type"]]
    return None
