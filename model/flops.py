"""Parameters and FLOPs of an architecture, by arithmetic on its config: nothing is allocated.

Run `python -m model.flops v3 --json` for a preset or a config.json.
"""

import argparse
import json
import sys
from typing import NamedTuple

from model.config import ConfigError, ModelConfig, load_model_config


class ParameterCount(NamedTuple):
    """`total` and `active` per token are the main model's, embeddings counted; `mtp` is what the MTP layers add."""

    total: int
    active: int
    mtp: int


def count_parameters(config: ModelConfig) -> ParameterCount:
    """Count the learnable parameters; the balancing biases are buffers and count nothing.

    Source: the totals of DeepSeek-V3 (arXiv 2412.19437), sec. 4.2, and DeepSeek-V2 (arXiv 2405.04434), sec. 3.1.2.
    """
    hidden, layers = config.hidden_size, config.num_hidden_layers
    embeddings = config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2)
    total = embeddings + hidden + sum(_layer_parameters(config, index) for index in range(layers))
    idle = sum(_idle_parameters(config, index) for index in range(layers))
    join = 2 * hidden * hidden + 3 * hidden  # eh_proj; enorm, hnorm, shared_head.norm
    depths = range(layers, layers + config.num_nextn_predict_layers)
    mtp = sum(join + _layer_parameters(config, index) for index in depths)
    return ParameterCount(total, total - idle, mtp)


def flops_per_token(config: ModelConfig, seq_length: int) -> dict[str, float]:
    """Forward FLOPs of one token by part: two for each multiply-add of a matrix product, nothing else.

    Attention counts the tokens that causality lets a query see, (seq_length + 1) / 2 in the mean: what a causal kernel
    has to do. Counts that take the whole square come to twice as much for attention_scores.

    Args:
        seq_length: tokens of each sequence, [tokens].
    Returns:
        attention_projections, attention_scores, dense, router, experts, shared_experts, head: the main model's; and
        mtp: the MTP layers with their use of the shared head.
    """
    parts = dict.fromkeys(
        ("attention_projections", "attention_scores", "dense", "router", "experts", "shared_experts"), 0.0
    )
    for index in range(config.num_hidden_layers):
        for part, flops in _layer_flops(config, index, seq_length).items():
            parts[part] += flops
    parts["head"] = 2.0 * config.hidden_size * config.vocab_size
    parts["mtp"] = 0.0
    for depth in range(1, config.num_nextn_predict_layers + 1):
        kept = max(seq_length - depth, 0)  # positions that still have a target
        join = 4.0 * config.hidden_size**2
        layer = sum(_layer_flops(config, config.num_hidden_layers + depth - 1, kept).values())
        parts["mtp"] += (join + layer + parts["head"]) * kept / seq_length
    return parts


def training_flops_per_token(config: ModelConfig, seq_length: int) -> float:
    """Forward and backward FLOPs of one token: the backward pass has two products for each of the forward's.

    Recomputed activations do not count: these are the model's FLOPs, of which utilization is a share.
    """
    return 3.0 * sum(flops_per_token(config, seq_length).values())


def _attention_matrices(config: ModelConfig) -> int:
    hidden, heads = config.hidden_size, config.num_attention_heads
    if config.kv_lora_rank is None:
        return 4 * hidden * hidden
    query_size = heads * config.qk_head_dim
    rank = config.q_lora_rank
    query = hidden * query_size if rank is None else hidden * rank + rank * query_size
    nope = config.qk_head_dim - config.rotary_dim
    key_value = hidden * (config.kv_lora_rank + config.rotary_dim)
    key_value += config.kv_lora_rank * heads * (nope + config.value_head_dim)
    return query + key_value + heads * config.value_head_dim * hidden


def _expert_parameters(config: ModelConfig) -> int:
    return 3 * config.hidden_size * (config.moe_intermediate_size or 0)


def _layer_parameters(config: ModelConfig, index: int) -> int:
    norms = 2 * config.hidden_size + (config.kv_lora_rank or 0) + (config.q_lora_rank or 0)
    if config.is_moe_layer(index):
        experts = (config.n_routed_experts or 0) + config.n_shared_experts
        feed_forward = experts * _expert_parameters(config) + (config.n_routed_experts or 0) * config.hidden_size
    else:
        feed_forward = 3 * config.hidden_size * config.intermediate_size
    return norms + _attention_matrices(config) + feed_forward


def _idle_parameters(config: ModelConfig, index: int) -> int:
    """Of the experts that one token does not use."""
    if not config.is_moe_layer(index):
        return 0
    return ((config.n_routed_experts or 0) - (config.num_experts_per_tok or 0)) * _expert_parameters(config)


def _layer_flops(config: ModelConfig, index: int, seq_length: int) -> dict[str, float]:
    heads = config.num_attention_heads
    flops = {
        "attention_projections": 2.0 * _attention_matrices(config),
        "attention_scores": (seq_length + 1.0) * heads * (config.qk_head_dim + config.value_head_dim),
    }
    if not config.is_moe_layer(index):
        return flops | {"dense": 6.0 * config.hidden_size * config.intermediate_size}
    return flops | {
        "router": 2.0 * config.hidden_size * (config.n_routed_experts or 0),
        "experts": 2.0 * (config.num_experts_per_tok or 0) * _expert_parameters(config),
        "shared_experts": 2.0 * config.n_shared_experts * _expert_parameters(config),
    }


def main(argv: list[str] | None = None) -> int:
    """Print an architecture's counts; 2 on a config that cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m model.flops", description=__doc__)
    parser.add_argument("model", help="a preset's name, or a config.json")
    parser.add_argument("--seq_length", type=int, help="tokens of a sequence (default: 4096 or what the model takes)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    try:
        config = load_model_config(args.model)
        seq_length = min(4096, config.max_position_embeddings) if args.seq_length is None else args.seq_length
        if seq_length < 1:
            raise ConfigError([f"--seq_length: must be at least 1, got {seq_length}"])
    except ConfigError as error:
        for fault in error.faults:
            print(f"error: {fault}", file=sys.stderr)
        return 2
    parameters, forward = count_parameters(config), flops_per_token(config, seq_length)
    training = training_flops_per_token(config, seq_length)
    if args.json:
        result = {
            "parameters": parameters._asdict(),
            "seq_length": seq_length,
            "forward_flops_per_token": forward,
            "training_flops_per_token": training,
        }
        print(json.dumps(result, indent=2))
        return 0
    print(f"parameters       {parameters.total:>20,}   active per token {parameters.active:,}   MTP {parameters.mtp:,}")
    print(f"forward FLOPs per token at {seq_length:,} tokens a sequence")
    for part, flops in forward.items():
        print(f"  {part:<22} {flops:>20,.0f}   {flops / sum(forward.values()):6.1%}")
    print(f"training FLOPs per token {training:,.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
