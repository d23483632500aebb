"""From a model configuration and a resolved ds_config to a DeepSpeed engine."""

from collections.abc import Callable
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch.optim.lr_scheduler import LambdaLR

from model.config import ModelConfig
from model.transformer import DeepseekForCausalLM
from recipes.config.ds_check import autotp_size, sequence_parallel_size, zero_stage
from recipes.training.expert_parallel import routing_biases, take_over_routers
from recipes.training.grouped_products import choose_grouped_products
from recipes.training.optimizer import parameter_groups
from recipes.training.sequence_parallel import sequence_groups, share_sequences
from recipes.training.tensor_parallel import share_heads, tensor_groups


def build_model(config: ModelConfig, ds_config: dict[str, Any]) -> DeepseekForCausalLM:
    """Build the model without values; under ZeRO-3 no rank ever holds the whole."""
    if zero_stage(ds_config) != 3:
        return DeepseekForCausalLM(config)
    with deepspeed.zero.Init(config_dict_or_path=ds_config):
        return DeepseekForCausalLM(config)


def build_engine(
    model: DeepseekForCausalLM, ds_config: dict[str, Any], multiplier: Callable[[int], float]
) -> deepspeed.DeepSpeedEngine:
    """Hand the model to DeepSpeed: its ZeRO stage, precision, accumulation, clipping and optimizer as the file says.

    Args:
        multiplier: learning rate over its peak, as a function of the optimizer steps already applied. DeepSpeed's own
            schedules have traps (steps at rate 0, overwritten betas); a LambdaLR is resumed exactly.
    """
    weight_decay = ds_config["optimizer"]["params"].get("weight_decay", 0.0)
    biases = routing_biases(model)
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        model_parameters=parameter_groups(model.named_parameters(), weight_decay),
        lr_scheduler=lambda optimizer: LambdaLR(optimizer, multiplier),
        config=ds_config,
        mpu=tensor_groups(autotp_size(ds_config)) or sequence_groups(sequence_parallel_size(ds_config)),
    )
    share_float32_weights(engine)
    choose_grouped_products(engine.device)
    take_over_routers(engine.module, model.config, biases)
    share_heads(engine.module, autotp_size(ds_config))
    if check := getattr(engine, "first_dataloader_check", None):
        check.remove()  # it sends the first batch as a pickle, and with it a CUDA context onto the leader's GPU
    share_sequences(engine, sequence_parallel_size(ds_config))
    # Lets ds_to_universal convert checkpoints of ZeRO stages 1 and 2; AutoTP has said itself what it cut, and how.
    if not hasattr(engine.module, "universal_checkpoint_info"):
        engine.module.universal_checkpoint_info = {"universal_checkpoint_version": 0.2}
    return engine


def share_float32_weights(engine: deepspeed.DeepSpeedEngine) -> None:
    """At ZeRO 1 and 2, have the optimizer work on float32 weights themselves where one rank owns them alone.

    DeepSpeed gives its optimizer a float32 copy of the weights also where they are float32 already: 4 bytes a parameter
    for the same numbers. A rank's part of a larger group stays a copy: a checkpoint would write the whole group for it.
    """
    zero = engine.optimizer
    if not isinstance(zero, DeepSpeedZeroOptimizer) or zero.cpu_offload:
        return
    for parts, copy in zip(zero.parallel_partitioned_bit16_groups, zero.single_partition_of_fp32_groups, strict=True):
        if len(parts) == 1 and parts[0].dtype == copy.dtype == torch.float32:
            copy.data = parts[0]  # the same tensor object as before: the optimizer's group holds it
    zero._link_all_hp_params()  # what reads and loads a parameter by name looked at the copies


def compile_layers(model: DeepseekForCausalLM) -> None:
    """Let torch.compile fuse each decoder layer at its first run; all layers of a kind share what it made.

    Embedding, head and losses stay as they are: the cross-entropy works through its rows in chunks by itself.
    """
    for layer in model.model.layers:
        layer.compile()
