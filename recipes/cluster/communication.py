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
) -> int:
    """What a rank sends in one optimizer step when collectives go round a ring.

    A ring sends (n - 1) / n of the data for an all-gather or a reduce-scatter over n ranks, and twice that for an
    all-reduce. At stages 1 and 2 DeepSpeed reduces its buckets by all-reduce unless
    `use_multi_rank_bucket_allreduce` is false.

    Args:
        groups: name and elements of each parameter of the whole model.
        config: a resolved ds_config.
        tokens_per_micro_batch: of one rank.
    """
    stage, element = zero_stage(config), ELEMENT_BYTES[precision(config)]
    zero = section(config, "zero_optimization")
    accumulation = config["gradient_accumulation_steps"]
    wire = ELEMENT_BYTES.get(config.get("communication_data_type") or "", element)
    expert_size = expert_parallel_size(config)
    sent = 0.0
    for numel, ranks in split_experts(groups, config, world_size):
        share = (ranks - 1) / ranks
        all_reduces = stage == 0 or zero.get("use_multi_rank_bucket_allreduce", True)
        if stage == 3:
            # every micro-batch gathers the weights for its forward and for its backward pass
            sent += accumulation * numel * share * (2 * element + wire)
        else:
            gradient = accumulation_bytes(config) if stage == 1 else wire
            times = accumulation if stage == 2 else 1
            sent += times * numel * share * gradient * (2 if all_reduces else 1)
            sent += numel * share * element if stage else 0  # the updated weights
    if expert_size > 1:
        layers = range(model.num_hidden_layers + model.num_nextn_predict_layers)
        moe_layers = sum(model.is_moe_layer(index) for index in layers)
        rows = tokens_per_micro_batch * (model.num_experts_per_tok or 0)
        # tokens go to their experts and back, in the forward pass and, their gradients, in the backward pass
        sent += 4 * accumulation * moe_layers * rows * model.hidden_size * element * (expert_size - 1) / expert_size
    return int(sent)
