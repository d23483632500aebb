"""What one ds_config takes on a cluster: memory by part, communication, time. Nothing is allocated."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from model.config import ModelConfig
from model.flops import flops_per_token, training_flops_per_token
from recipes.cluster.activations import Activations, activation_bytes
from recipes.cluster.communication import all_to_all_bytes, bytes_sent_per_step
from recipes.cluster.memory import (
    ELEMENT_BYTES,
    ModelState,
    Parameter,
    expert_parallel_size,
    model_state_bytes,
)
from recipes.config.batch import MICRO_BATCH, divisors
from recipes.config.ds_check import autotp_size, precision, section
from recipes.config.ds_config import ResolvedDsConfig, RunFacts, resolve_ds_config

# Of a GPU's memory: CUDA's context, NCCL's buffers and what the allocator cannot use between blocks
USABLE_SHARE = 0.92
POLICIES = ("none", "selective", "full")


@dataclass(frozen=True)
class Cluster:
    """The machines.

    Args:
        gpus: data-parallel ranks.
        gpu_memory_bytes: of one GPU.
        gpus_per_node: that share a node's fast network.
        peak_flops: of one GPU in half precision, dense [FLOP/s].
        utilization: the share of it that training reaches (MFU).
        node_bytes_per_second, network_bytes_per_second: of one GPU, to its node's and to other nodes' GPUs.
    """

    gpus: int
    gpu_memory_bytes: float
    gpus_per_node: int
    peak_flops: float
    utilization: float
    node_bytes_per_second: float
    network_bytes_per_second: float


@dataclass(frozen=True)
class Plan:
    """One ds_config, planned with the least recomputation and the largest micro-batch that fit.

    Args:
        name: the file's.
        resolved: with the micro-batch chosen.
        activations: policy -> bytes, for the micro-batch chosen.
        policy: the recomputation that `total_bytes` is with.
        communication_bytes: that one rank sends in a step.
        all_to_all_bytes: of them, tokens on their way to experts of other ranks and back.
        step_seconds: computing, then communicating, without any overlap.
    """

    name: str
    resolved: ResolvedDsConfig
    state: ModelState
    activations: dict[str, Activations]
    policy: str
    total_bytes: int
    fits: bool
    tokens_per_step: int
    communication_bytes: int
    all_to_all_bytes: int
    step_seconds: float

    @property
    def token_seconds(self) -> float:
        """Of one token, on the whole cluster."""
        return self.step_seconds / self.tokens_per_step

    def days(self, tokens: float) -> float:
        """Days that so many tokens take, by `step_seconds`."""
        return tokens * self.token_seconds / 86400


def total_bytes(state: ModelState, activations: Activations) -> int:
    """The fullest moment of a step: a micro-batch at work, or the optimizer."""
    at_work = state.communication + activations.peak
    return state.weights + state.gradients + state.optimizer + max(at_work, state.step)


def plan_ds_config(
    name: str,
    config: dict[str, Any],
    groups: Sequence[Sequence[Parameter]],
    facts: RunFacts,
    cluster: Cluster,
    policy: str | None = None,
) -> Plan:
    """Plan one ds_config.

    Args:
        config: not yet resolved.
        groups: name and elements of each parameter, by optimizer group.
        policy: the recomputation asked for; None: the least that fits.
    Raises:
        UserError: the ds_config cannot be resolved for these facts.
    """
    first = resolve_ds_config(config, source=name, facts=facts)
    plans = [
        _plan(name, _with_micro_batch(config, micro_batch, first, facts), groups, facts, cluster, tried)
        for micro_batch in _micro_batches(first, config)
        for tried in ((policy,) if policy else POLICIES)
    ]
    # the fastest that fits, of equals the one with the largest micro-batch; or else the one that misses least
    fitting = [plan for plan in plans if plan.fits]
    return (
        min(fitting, key=lambda plan: plan.step_seconds) if fitting else min(plans, key=lambda plan: plan.total_bytes)
    )


def _micro_batches(resolved: ResolvedDsConfig, config: dict[str, Any]) -> list[int]:
    """Micro-batches to try, largest first: only the file's own, where it states one."""
    stated = config.get(MICRO_BATCH, "auto") != "auto"
    per_rank = resolved.micro_batch_size * resolved.gradient_accumulation_steps
    smaller = [d for d in divisors(per_rank) if d <= resolved.micro_batch_size]
    return [resolved.micro_batch_size] if stated else sorted(smaller, reverse=True)


def _with_micro_batch(
    config: dict[str, Any], micro_batch: int, first: ResolvedDsConfig, facts: RunFacts
) -> ResolvedDsConfig:
    if micro_batch == first.micro_batch_size:
        return first
    return resolve_ds_config(config | {MICRO_BATCH: micro_batch}, source="", facts=facts)


def _plan(
    name: str,
    resolved: ResolvedDsConfig,
    groups: Sequence[Sequence[Parameter]],
    facts: RunFacts,
    cluster: Cluster,
    policy: str,
) -> Plan:
    config, model = resolved.config, facts.model
    # What AutoTP leaves whole, ZeRO shares out over so many ranks; what it cuts is counted as if whole.
    world_size = facts.world_size // autotp_size(config)
    state = model_state_bytes(groups, config, world_size)
    micro_tokens = resolved.micro_batch_size * facts.seq_length
    state = replace(state, communication=state.communication + _dispatch_bytes(model, config, micro_tokens))
    activations = {
        tried: activation_bytes(
            model,
            micro_batch_size=resolved.micro_batch_size,
            seq_length=facts.seq_length,
            element_bytes=ELEMENT_BYTES[precision(config)],
            checkpointing=tried,
        )
        for tried in POLICIES
    }
    total = total_bytes(state, activations[policy])
    sent = bytes_sent_per_step(
        groups, model, config, world_size=world_size, tokens_per_micro_batch=micro_tokens, policy=policy
    )
    tokens = resolved.global_batch_size * facts.seq_length
    return Plan(
        name=name,
        resolved=resolved,
        state=state,
        activations=activations,
        policy=policy,
        total_bytes=total,
        fits=total <= USABLE_SHARE * cluster.gpu_memory_bytes,
        tokens_per_step=tokens,
        communication_bytes=sent,
        all_to_all_bytes=all_to_all_bytes(model, config, tokens_per_micro_batch=micro_tokens, policy=policy),
        step_seconds=_compute_seconds(model, facts.seq_length, tokens, policy, cluster) + _send_seconds(sent, cluster),
    )


def _dispatch_bytes(model: ModelConfig, config: dict[str, Any], tokens: int) -> int:
    """Rows on their way to the experts of other ranks and back, under AutoEP."""
    if expert_parallel_size(config) == 1:
        return 0
    return 2 * tokens * (model.num_experts_per_tok or 0) * model.hidden_size * ELEMENT_BYTES[precision(config)]


def _compute_seconds(model: ModelConfig, seq_length: int, tokens: int, policy: str, cluster: Cluster) -> float:
    """Of one step: the model's FLOPs at the stated utilization, and the recomputed ones at the same pace."""
    parts = flops_per_token(model, seq_length)
    layers = sum(parts.values()) - parts["head"]
    attention = parts["attention_projections"] + parts["attention_scores"]
    recomputed = {"none": 0.0, "full": layers, "selective": layers - attention}[policy]
    flops = (training_flops_per_token(model, seq_length) + recomputed) * tokens
    return flops / (cluster.gpus * cluster.peak_flops * cluster.utilization)


def _send_seconds(sent: int, cluster: Cluster) -> float:
    inside = cluster.gpus <= cluster.gpus_per_node
    return sent / (cluster.node_bytes_per_second if inside else cluster.network_bytes_per_second)


def scaling_law(model: ModelConfig, seq_length: int, tokens: float) -> dict[str, float]:
    """The optimal learning rate and batch by DeepSeek LLM's scaling law.

    Args:
        tokens: D, of the whole run.
    Returns:
        flops_per_token: M, non-embedding; compute: C = M * D [FLOP]; learning_rate; batch_tokens.
    Source: DeepSeek LLM (arXiv 2401.02954), section 3; the four constants were seen in a secondary source. M is the
        paper's for dense models: of a mixture of experts it is the dense model of the same depth and width.
    """
    layers, width = model.num_hidden_layers, model.hidden_size
    flops = 72.0 * layers * width**2 + 12.0 * layers * width * seq_length
    compute = flops * tokens
    return {
        "flops_per_token": flops,
        "compute": compute,
        "learning_rate": 0.3118 * compute**-0.1250,
        "batch_tokens": 0.2920 * compute**0.3271,
    }


def shortfall(plan: Plan, cluster: Cluster) -> str:
    """Why a plan does not fit, in one line."""
    state, activations = plan.state, plan.activations[plan.policy]
    parts = {
        "weights": state.weights,
        "gradients": state.gradients,
        "optimizer": state.optimizer,
        "activations": activations.peak,
        "communication": state.communication,
    }
    largest = max(parts, key=lambda key: parts[key])
    usable = USABLE_SHARE * cluster.gpu_memory_bytes
    return (
        f"needs {plan.total_bytes / 1e9:.1f} GB of the {usable / 1e9:.1f} GB usable; "
        f"most of it {largest}, {parts[largest] / 1e9:.1f} GB"
    )


def is_offloaded(plan: Plan) -> bool:
    """Whether the optimizer works in the host's memory."""
    return bool(section(plan.resolved.config, "zero_optimization", "offload_optimizer"))
