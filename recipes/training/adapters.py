"""Low-rank adapters (LoRA) through `peft`, put into the model before the engine is made.

Source: Hu et al., "LoRA" (arXiv 2106.09685).
"""

import dataclasses
from importlib.util import find_spec

import torch
from torch import nn

from model.config import ModelConfig
from model.initialization import initialize_parameter_
from model.transformer import DeepseekForCausalLM
from recipes.config.errors import UserError
from recipes.config.finetune_config import FinetuneConfig
from recipes.training.initial_weights import whole
from recipes.training.merged_adapters import ADAPTERS_KEY, B

ATTENTION = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "k_proj", "v_proj", "o_proj")
FUSED = ("gate_up_proj", "experts", "experts.down_proj", "experts.gate_up_proj")


def with_adapters(config: FinetuneConfig, model: ModelConfig) -> ModelConfig:
    """The model's config with the adapters that --lora_rank and its kin ask for.

    Raises:
        UserError: peft is not installed, or a target names no linear layer.
    """
    if not config.lora_rank:
        return model
    if find_spec("peft") is None:
        raise UserError(f"--lora_rank {config.lora_rank}: adapters need the package peft; run `pip install peft`")
    with torch.device("meta"):
        modules = dict(DeepseekForCausalLM(model).named_modules())
    linear = {name for name, module in modules.items() if isinstance(module, nn.Linear)}
    kinds = sorted({name.rpartition(".")[2] for name in linear})
    faults = []
    for target in config.lora_target:
        if any(name == target or name.endswith(f".{target}") for name in linear):
            continue
        if target in FUSED or target.endswith(FUSED):
            faults.append(
                f"--lora_target {target}: the routed experts are fused into one three-dimensional parameter, which "
                f"adapters cannot be put on; choose among {', '.join(kinds)}"
            )
        else:
            faults.append(f"--lora_target {target}: no linear layer has that name; choose among {', '.join(kinds)}")
    if faults:
        raise UserError(*faults)
    adapters = {
        "rank": config.lora_rank,
        "alpha": config.lora_alpha or 2.0 * config.lora_rank,
        "target_modules": config.lora_target or [name for name in ATTENTION if name in kinds],
    }
    return dataclasses.replace(model, extras={**model.extras, ADAPTERS_KEY: adapters})


def add_adapters(model: DeepseekForCausalLM, seed: int) -> None:
    """Freeze the weights and give the config's target layers adapters that begin by changing nothing.

    The first factor is drawn from (seed, name), as all weights are, the second is 0.
    """
    from peft import LoraConfig, inject_adapter_in_model

    wanted = model.config.extras[ADAPTERS_KEY]
    lora = LoraConfig(r=wanted["rank"], lora_alpha=wanted["alpha"], target_modules=wanted["target_modules"])
    inject_adapter_in_model(lora, model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            with torch.no_grad(), whole(parameter) as writes:
                if writes and name.endswith(B):
                    parameter.zero_()
                elif writes:
                    # peft's Kaiming-uniform draw has this deviation: 1 / sqrt(3 * fan in)
                    std = (3 * parameter.shape[1]) ** -0.5
                    initialize_parameter_(name, parameter.data, std=std, seed=seed)
