"""The mixture of experts: routing, its balancing bias and its update, and the sequence-wise balance loss."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from model.config import ModelConfig
from model.experts import RoutedExperts, count_choices
from model.layers import SwiGLU
from model.wide_products import wide_linear

# Shape letters: B sequences, S tokens a sequence, T = B * S, E experts, K experts a token, G groups of experts.


class Routing(NamedTuple):
    """What one pass through a router decided: scores (T, E), differentiable, and the chosen experts (T, K)."""

    scores: Tensor
    indices: Tensor


class RoutingStatistics(NamedTuple):
    """Of one MoE layer and micro-batch: choices of each expert (E,) int64, the balance loss (), alpha included, and the
    sum over the tokens of their routing entropy (), not differentiable [nats]."""

    tokens_per_expert: Tensor
    balance_loss: Tensor
    entropy_sum: Tensor


class Router(nn.Module):
    """Decides which K of E experts a token goes to, from its logits; in at least float32, whatever the model's type.

    A subclass computes the logits. `e_score_correction_bias` (E,) float32 enters the choice alone and is moved by
    `update_expert_bias`; it exists for topk_method noaux_tc only. `tokens_per_expert` (E,) counts the choices of all
    micro-batches since it was zeroed, and `entropy_sum` () adds up their tokens' routing entropy; as a buffer DeepSpeed
    would round it to half precision.
    Source: DeepSeek-V3 (arXiv 2412.19437), eq. 13-16 and sec. 2.1.2; DeepSeek-V2 (arXiv 2405.04434), sec. 2.2.2.
    """

    e_score_correction_bias: Tensor | None
    tokens_per_expert: Tensor
    add_up: Callable[[Tensor], Tensor] | None = None  # over the ranks, where several share a sequence

    def configure(self, config: ModelConfig) -> None:
        """Take the rules of routing from a model's configuration, and start with no bias and no counts."""
        assert config.n_routed_experts and config.num_experts_per_tok
        self.experts, self.top_k = config.n_routed_experts, config.num_experts_per_tok
        self.groups, self.kept_groups = config.n_group, config.topk_group
        self.scoring_func, self.topk_method = config.scoring_func, config.topk_method
        self.normalizes, self.scaling_factor = config.norm_topk_prob, config.routed_scaling_factor
        self.balance_loss_alpha = config.balance_loss_alpha
        # Made of integers: DeepSpeed's zero.Init turns what torch.zeros makes in floating point to half precision.
        bias = torch.zeros(self.experts, dtype=torch.int64).to(torch.float32) if config.balances_by_bias else None
        self.register_buffer("e_score_correction_bias", bias)
        self.register_buffer("tokens_per_expert", torch.zeros(self.experts, dtype=torch.int64), persistent=False)
        self.entropy_sum: Tensor | None = None
        self._last_routing: Routing | None = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        """Follow .to(), .half() and their like, but keep the bias float32: steps of 0.001 vanish in half precision."""
        before = self.e_score_correction_bias
        super()._apply(fn, recurse)
        after = self.e_score_correction_bias
        if before is not None and after is not None and after.dtype != before.dtype:
            source = after if before.is_meta else before
            self.e_score_correction_bias = source.to(device=after.device, dtype=before.dtype)
        return self

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """
        Args:
            logits: (T, E), at least float32.
        Returns:
            indices (T, K) int64; weights (T, K) of their outputs, in the logits' dtype.
        """
        scores = logits.sigmoid() if self.scoring_func == "sigmoid" else logits.softmax(-1)
        indices = self.choose(scores.detach())
        weights = scores.gather(1, indices)  # unbiased: eq. 16
        if self.normalizes:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        self._last_routing = Routing(scores, indices)
        return indices, weights * self.scaling_factor

    def choose(self, scores: Tensor) -> Tensor:
        """(T, E) scores -> (T, K) chosen experts: the best of the groups that the bias and the scores favour."""
        if self.e_score_correction_bias is not None:
            scores = scores + self.e_score_correction_bias
        if self.groups > 1 and self.topk_method != "greedy":
            grouped = scores.unflatten(1, (self.groups, -1))  # (T, G, E / G)
            if self.topk_method == "noaux_tc":
                group_scores = grouped.topk(2, dim=-1).values.sum(-1)
            else:
                group_scores = grouped.amax(-1)
            kept = group_scores.topk(self.kept_groups, dim=-1).indices
            dropped = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, kept, False)
            scores = grouped.masked_fill(dropped.unsqueeze(-1), float("-inf")).flatten(1)
        return scores.topk(self.top_k, dim=-1).indices

    def take_last_routing(self) -> Routing:
        """Hand over what the last forward decided, and keep no reference to its graph."""
        routing, self._last_routing = self._last_routing, None
        assert routing is not None, "the router has not run"
        return routing

    def statistics(self, routing: Routing, valid_tokens: Tensor | None, batch_size: int) -> RoutingStatistics:
        """Count the choices and compute the balance loss of one micro-batch.

        Args:
            routing: from `take_last_routing`. valid_tokens: (B, S) bool, False for padding; None when there is none.
        """
        scores, indices = routing
        mask = None if valid_tokens is None else valid_tokens.reshape(-1, 1).expand_as(indices)
        counts = count_choices(indices, self.experts, mask)
        entropy_sum = routing_entropy_sum(scores.detach(), valid_tokens)
        if self.balance_loss_alpha == 0:
            return RoutingStatistics(counts, scores.new_zeros(()), entropy_sum)
        if self.e_score_correction_bias is not None or self.groups > 1:
            indices = scores.detach().topk(self.top_k, dim=-1).indices  # eq. 18 ranks the scores without the bias
        loss = sequence_balance_loss(
            scores.unflatten(0, (batch_size, -1)),
            indices.unflatten(0, (batch_size, -1)),
            valid_tokens,
            self.add_up if self.training else None,
        )
        return RoutingStatistics(counts, self.balance_loss_alpha * loss, entropy_sum)

    def collect(self, statistics: RoutingStatistics) -> None:
        """Add one micro-batch's to what has been counted since the counts were zeroed."""
        self.tokens_per_expert.add_(statistics.tokens_per_expert)
        entropy_sum = statistics.entropy_sum.detach()
        self.entropy_sum = entropy_sum if self.entropy_sum is None else self.entropy_sum + entropy_sum

    def take_counts(self) -> tuple[Tensor, Tensor]:
        """The choices of each expert (E,) int64 and the entropy's sum () [nats] so far; counting starts anew."""
        counts, entropy_sum = self.tokens_per_expert.clone(), self.entropy_sum
        self.tokens_per_expert.zero_()
        self.entropy_sum = None
        return counts, torch.zeros((), device=counts.device) if entropy_sum is None else entropy_sum


class TopkRouter(Router):
    """The router of this model's own MoE block."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.configure(config)
        self.weight = nn.Parameter(torch.empty(self.experts, config.hidden_size))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(T, H) -> indices and weights as `route` gives them."""
        return self.route(wide_logits(hidden, self.weight))


def wide_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """(T, H), (E, H) -> (T, E) in at least float32, which routing needs also where the model computes in less."""
    return wide_linear(hidden, weight, torch.promote_types(hidden.dtype, torch.float32))


class DeepseekMoE(nn.Module):
    """Shared experts that see every token, and routed experts that the router chooses.

    It takes and returns the hidden states alone, so that DeepSpeed's AutoEP can put its own block in its place; what
    the router decided is fetched from `gate` by the decoder layer.
    Source: DeepSeek-V3 (arXiv 2412.19437), eq. 12.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.moe_intermediate_size
        self.gate = TopkRouter(config)
        self.experts = RoutedExperts(config)
        self.shared_experts: SwiGLU | None = None
        if config.n_shared_experts:  # several shared experts are one, as wide as all of them
            self.shared_experts = SwiGLU(config.hidden_size, config.moe_intermediate_size * config.n_shared_experts)

    def forward(self, hidden: Tensor) -> Tensor:
        """(B, S, H) -> (B, S, H)."""
        flat = hidden.flatten(0, 1)  # (B, S, H) -> (T, H)
        indices, weights = self.gate(flat)
        out = self.experts(flat, indices, weights).view_as(hidden)
        return out if self.shared_experts is None else out + self.shared_experts(hidden)


def sequence_balance_loss(
    scores: Tensor,
    indices: Tensor,
    valid_tokens: Tensor | None = None,
    add_up: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """The complementary sequence-wise auxiliary loss without its factor alpha, mean over the sequences.

    Args:
        scores: (B, S, E) affinities of every expert, at least 0. indices: (B, S, K) each token's K best by score.
        valid_tokens: (B, S) bool, False for padding, which enters neither the counts nor the means. A sequence of
            padding alone is left out.
        add_up: sums over the ranks that have a part of these sequences each; the result is this rank's part of the
            loss then.
    Returns:
        (): 1 when balanced perfectly, up to E / K.
    Source: DeepSeek-V3 (arXiv 2412.19437), eq. 17-20.
    """
    batch, length, experts = scores.shape
    top_k = indices.shape[-1]
    if valid_tokens is None:
        valid = scores.new_ones(batch, length)
    else:
        valid = valid_tokens.to(scores.dtype)
    tokens = valid.sum(1, keepdim=True)  # (B, 1): T of eq. 18
    chosen = scores.new_zeros(batch, experts).scatter_add_(
        1, indices.flatten(1), valid.unsqueeze(-1).expand(-1, -1, top_k).flatten(1)
    )
    if add_up is not None:  # counts, through which no gradient goes; P_i is linear in the tokens and may stay a part
        tokens, chosen = add_up(torch.cat([tokens, chosen], dim=1)).split([1, experts], dim=1)
    some = tokens.clamp(min=1)
    load = chosen * experts / (top_k * some)  # f_i, eq. 18
    share = scores / scores.sum(-1, keepdim=True)  # s', eq. 19
    importance = (share * valid.unsqueeze(-1)).sum(1) / some  # P_i, eq. 20
    return (load * importance).sum() / (tokens > 0).sum().clamp(min=1)


def routing_entropy_sum(scores: Tensor, valid_tokens: Tensor | None = None) -> Tensor:
    """Sum over the tokens of the entropy of their affinities, scaled to sum to 1; ln E a token is no preference at all.

    Args:
        scores: (T, E), at least 0. valid_tokens: (B, S) bool, False for padding, which counts nothing.
    Returns:
        () [nats].
    """
    shares = scores / scores.sum(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)
    entropy = torch.special.entr(shares).sum(-1)
    return entropy.sum() if valid_tokens is None else (entropy * valid_tokens.flatten()).sum()


def update_expert_bias(bias: Tensor, tokens_per_expert: Tensor, speed: float) -> None:
    """Move the routing bias toward balanced load, in place.

    Args:
        bias: (E,) float32, used for the choice only.
        tokens_per_expert: (E,) choices over the whole optimizer step, all ranks and micro-batches [tokens].
        speed: gamma [bias units per optimizer step].
    Raises:
        ValueError: the shapes differ, or the bias is not float32.
    Source: DeepSeek-V3 (arXiv 2412.19437), section 2.1.2.
    """
    if bias.shape != tokens_per_expert.shape:
        raise ValueError(f"a bias of shape {tuple(bias.shape)} and counts of shape {tuple(tokens_per_expert.shape)}")
    if bias.dtype != torch.float32:
        raise ValueError(f"the bias is {bias.dtype}; steps of {speed} need float32")
    # Compared as E * count against the total: integers, so every rank decides alike, and a tie moves nothing.
    excess = tokens_per_expert * tokens_per_expert.numel() - tokens_per_expert.sum()
    bias.sub_(excess.sign().to(bias.dtype), alpha=speed)


def iter_routers(model: nn.Module) -> Iterator[tuple[str, Router]]:
    """Every router of a model, the MTP layers' included, in the order of the layers.

    Its name is `model.layers.N.mlp.gate` also where another block has taken the place of ours and calls it otherwise.
    """
    for name, module in model.named_modules():
        if isinstance(module, Router):
            yield f"{name.rpartition('.')[0]}.gate", module
