"""From a model configuration and a resolved ds_config to a DeepSpeed engine."""

from collections.abc import Callable
from typing import Any

import deepspeed
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from model.config import ModelConfig
from model.moe import iter_routers
from model.transformer import DeepseekForCausalLM
from recipes.training.optimizer import parameter_groups


def build_model(config: ModelConfig, ds_config: dict[str, Any], seed: int) -> DeepseekForCausalLM:
    """Build the model with its initial weights; under ZeRO-3 no rank ever holds the whole.

    The values of a parameter are a function of (seed, name) alone, so they are the same on every rank, for any
    world size and ZeRO stage.
    """
    partitioned = ds_config.get("zero_optimization", {}).get("stage", 0) == 3
    with deepspeed.zero.Init(config_dict_or_path=ds_config, enabled=partitioned):
        model = DeepseekForCausalLM(config)
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=partitioned):
            if not partitioned or torch.distributed.get_rank() == 0:
                model.init_parameter_(name, parameter.data, seed)
    for _, router in iter_routers(model):
        router.tokens_per_expert.zero_()
        if router.e_score_correction_bias is not None:
            router.e_score_correction_bias.zero_()
    return model


def build_engine(
    model: nn.Module, ds_config: dict[str, Any], multiplier: Callable[[int], float]
) -> deepspeed.DeepSpeedEngine:
    """Hand the model to DeepSpeed: its ZeRO stage, precision, accumulation, clipping and optimizer as the file says.

    Args:
        multiplier: learning rate over its peak, as a function of the optimizer steps already applied. DeepSpeed's own
            schedules have traps (steps at rate 0, overwritten betas); a LambdaLR is resumed exactly.
    """
    weight_decay = ds_config["optimizer"]["params"].get("weight_decay", 0.0)
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        model_parameters=parameter_groups(model.named_parameters(), weight_decay),
        lr_scheduler=lambda optimizer: LambdaLR(optimizer, multiplier),
        config=ds_config,
    )
    # Lets ds_to_universal convert checkpoints of ZeRO stages 1 and 2.
    engine.module.universal_checkpoint_info = {"universal_checkpoint_version": 0.2}
    return engine
