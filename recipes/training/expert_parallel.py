"""Expert parallelism by DeepSpeed's AutoEP, with our routing, counts and balance loss.

AutoEP puts a block of its own in the place of each MoE block, MTP's included, and shares its experts out over ranks.
Its router rounds the logits to the model's type, counts recomputed, evaluated and padding tokens, and has no balance
loss. So the router alone becomes ours again: it chooses as without expert parallelism, and the decoder layer collects
from it what it collects from `model.moe.TopkRouter`.
"""

from typing import Any

import torch
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from torch import Tensor, nn

from model.config import ModelConfig
from model.moe import Router, count_choices, iter_routers, wide_logits
from recipes.config.ds_check import autoep_size, zero_stage


class WideLinear(nn.Linear):
    """A projection computed in at least float32."""

    def forward(self, input: Tensor) -> Tensor:
        """(T, H) -> (T, E)."""
        return wide_logits(input, self.weight)


class ExpertParallelRouter(Router):
    """The router of an AutoEP block. Its weight is `gate.weight`, under AutoEP's name."""

    gate: nn.Linear

    def forward(self, hidden: Tensor, expert_bias: None = None) -> tuple[Tensor, Tensor, Tensor]:
        """
        Args:
            hidden: (T, H). expert_bias: AutoEP's own balancing bias, which it refuses to have.
        Returns:
            weights (T, K) float32, indices (T, K) int64, and how many of these tokens each expert gets, (E,) int32.
        """
        indices, weights = self.route(self.gate(hidden))
        return weights, indices, count_choices(indices, self.experts).to(torch.int32)


def is_expert(name: str) -> bool:
    """Whether a parameter of the model's own holds routed experts, fused along its first dimension."""
    return ".mlp.experts." in name


def own_experts(config: ModelConfig, ds_config: dict[str, Any], rank: int) -> range | None:
    """The routed experts that AutoEP will leave to a rank; None where a rank has to begin with all of them.

    Under ZeRO-3 that is so: rank 0 gives every rank its part of each.
    """
    size = autoep_size(ds_config)
    if size <= 1 or zero_stage(ds_config) == 3:
        return None
    assert config.n_routed_experts
    count = config.n_routed_experts // size
    first = rank % size * count  # consecutive ranks share out one set of experts
    return range(first, first + count)


def routing_biases(model: nn.Module) -> dict[str, Tensor]:
    """Each router's balancing bias by its name, (E,) float32 each."""
    routers = iter_routers(model)
    return {name: r.e_score_correction_bias.clone() for name, r in routers if r.e_score_correction_bias is not None}


@torch.no_grad()
def take_over_routers(model: nn.Module, config: ModelConfig, biases: dict[str, Tensor]) -> None:
    """Make the router of every AutoEP block ours; does nothing where there is none.

    Args:
        model: as `deepspeed.initialize` leaves it.
        config: the model's ModelConfig.
        biases: from `routing_biases` before `deepspeed.initialize`, which may have rounded them.
    """
    for name, block in model.named_modules():
        if not isinstance(block, AutoEPMoELayer):
            continue
        router, device = block.router, block.router.gate.weight.device
        # The modules stay and change their class: the optimizer has their parameters, and ZeRO-3 its hooks on them.
        router.gate.__class__ = WideLinear
        router.__class__ = ExpertParallelRouter
        router.__dict__.pop("e_score_correction_bias", None)  # AutoEP's placeholder where there is none
        router.configure(config)
        router.to(device)
        if router.e_score_correction_bias is not None:
            router.e_score_correction_bias.copy_(biases[f"{name}.gate"])
