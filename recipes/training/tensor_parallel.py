"""Tensor parallelism by DeepSpeed's AutoTP: what it does not know of this model's attention.

AutoTP cuts the matrices that `TENSOR_PARTITION` of recipes/config/ds_auto.py names. It adds up the partial outputs of
those cut by rows, and in the backward pass the input gradients of those cut by columns. Everything else stays whole, is
computed alike on every rank of a group, and so gets the same gradient on each.
"""

import functools
from types import ModuleType

import torch
from deepspeed.utils import groups
from torch import Tensor, nn

from model.attention import MultiheadAttention, MultiheadLatentAttention


def tensor_groups(size: int) -> ModuleType | None:
    """DeepSpeed's groups of `size` consecutive ranks that share matrices, as `deepspeed.initialize` takes them; None
    without AutoTP. Left to itself it would count every rank as one with a batch of its own."""
    if size == 1:
        return None
    groups._init_tp_mesh_device(tensor_model_parallel_size=size)
    return groups


def share_heads(model: nn.Module, size: int) -> None:
    """Tell every attention that a rank has its part of the heads alone; does nothing without AutoTP.

    Args:
        model: as `deepspeed.initialize` leaves it.
        size: ranks that share a matrix.
    """
    if size == 1:
        return
    for module in model.modules():
        if isinstance(module, MultiheadLatentAttention | MultiheadAttention):
            module.heads //= size
        if isinstance(module, MultiheadLatentAttention):
            module.kv_a_proj_with_mqa.register_forward_hook(
                functools.partial(_sum_gradient_of_shared_key, module.latent_dim)
            )


def _sum_gradient_of_shared_key(latent_dim: int, projection: nn.Module, inputs: object, output: Tensor) -> None:
    """The rotated key is one for all heads, but goes into this rank's alone, past every matrix that AutoTP cuts: so its
    gradient is a part of the whole one until it has been added up. The latent's comes through kv_b_proj and is whole.

    Args:
        output: (B, S, kv_lora_rank + qk_rope_head_dim) of kv_a_proj_with_mqa.
    """

    def add_up(gradient: Tensor) -> Tensor:
        latent, key = gradient[..., :latent_dim], gradient[..., latent_dim:].contiguous()
        torch.distributed.all_reduce(key, group=groups.get_tensor_model_parallel_group())
        return torch.cat([latent, key], dim=-1)

    if output.requires_grad:
        output.register_hook(add_up)
