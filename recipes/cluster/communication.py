"""Bytes that one rank sends in one optimizer step, by arithmetic on the ds_config."""

from collections.abc import Sequence
from typing import Any

from model.config import ModelConfig
from recipes.cluster.memory import ELEMENT_BYTES, Parameter, accumulation_bytes, expert_parallel_size, split_experts
from recipes.config.ds_check import precision, section, zero_stage


def bytes_sent_per_step(
    groups: Sequence[Sequence[Parameter]],
    model: ModelConfig,
    config: dict[str, Any],
    *,
    world_size: int,
    tokens_per_micro_batch: int,
    policy: str = "none",
) -> int:
    """What a rank sends in one optimizer step when collectives go round a ring.

    A ring sends (n - 1) / n of the data for an all-gather or a reduce-scatter over n ranks, and twice that for an
    all-reduce. At stages 1 and 2 DeepSpeed reduces its buckets by all-reduce unless
    `use_multi_rank_bucket_allreduce` is false.

    Args:
        groups: name and elements of each parameter of the whole model.
        config: a resolved ds_config.
        tokens_per_micro_batch: of one rank.
        policy: "none", "selective" or "full", what the backward pass recomputes.
    """
    stage, element = zero_stage(config), ELEMENT_BYTES[precision(config)]
    zero = section(config, "zero_optimization")
    accumulation = config["gradient_accumulation_steps"]
    wire = ELEMENT_BYTES.get(config.get("communication_data_type") or "", element)
    split = split_experts(groups, config, world_size)
    # Weights used again before so many others stay gathered from the forward to the backward pass: the last layers'.
    near = zero.get("stage3_max_reuse_distance", 1_000_000_000) / 2
    threshold = zero.get("stage3_param_persistence_threshold", 100_000)
    sent = 0.0
    for sizes, ranks in split:
        numel, share = sum(sizes), (ranks - 1) / ranks
        all_reduces = stage == 0 or zero.get("use_multi_rank_bucket_allreduce", True)
        if stage == 3:
            kept = sum(size for size in sizes if size <= threshold)  # whole on every rank between steps
            once = numel - kept
            gathered = accumulation * (once + max(once - near, 0)) + kept
            sent += share * (gathered * element + accumulation * numel * wire)
        else:
            gradient = accumulation_bytes(config) if stage == 1 else wire
            times = accumulation if stage == 2 else 1
            sent += times * numel * share * gradient * (2 if all_reduces else 1)
            sent += numel * share * element if stage else 0  # the updated weights
    return int(sent) + all_to_all_bytes(model, config, tokens_per_micro_batch=tokens_per_micro_batch, policy=policy)


def all_to_all_bytes(
    model: ModelConfig, config: dict[str, Any], *, tokens_per_micro_batch: int, policy: str = "none"
) -> int:
    """What a rank sends in one optimizer step to carry tokens to experts on other ranks and back.

    Each of a token's experts gets a row of its own, also two experts of one rank, and all are taken to be chosen alike.

    Args:
        config, tokens_per_micro_batch, policy: as for `bytes_sent_per_step`; either recomputation runs experts again.
    """
    size = expert_parallel_size(config)
    if size == 1:
        return 0
    layers = range(model.num_hidden_layers + model.num_nextn_predict_layers)
    moe_layers = sum(model.is_moe_layer(index) for index in layers)
    rows = tokens_per_micro_batch * (model.num_experts_per_tok or 0)
    # to the experts and back: forward, once more where that is recomputed, and the gradients'
    times = 2 * (2 if policy == "none" else 3) * config["gradient_accumulation_steps"] * moe_layers
    return int(times * rows * model.hidden_size * ELEMENT_BYTES[precision(config)] * (size - 1) / size)
