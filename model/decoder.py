"""One decoder layer, and which of its activations are recomputed in the backward pass."""

from collections.abc import Callable
from typing import Any, Literal, get_args

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model.attention import LatentCache, MultiheadAttention, MultiheadLatentAttention
from model.config import ModelConfig
from model.layers import RMSNorm, SwiGLU
from model.moe import DeepseekMoE, Router, RoutingStatistics

CheckpointPolicy = Literal["none", "full", "selective"]
CheckpointFunction = Callable[..., Any]  # (function, *tensors) -> the function's result


def torch_checkpoint(function: Callable[..., Any], *tensors: Any) -> Any:
    """torch.utils.checkpoint without reentry; nothing here draws random numbers, so their state is not kept."""
    return checkpoint(function, *tensors, use_reentrant=False, preserve_rng_state=False)


class DecoderLayer(nn.Module):
    """Attention and a feed-forward part, dense or mixture of experts, each behind a norm and around a residual.

    Source: DeepSeek-V3 (arXiv 2412.19437), fig. 2.
    """

    def __init__(self, config: ModelConfig, layer_index: int) -> None:
        super().__init__()
        attention = MultiheadLatentAttention if config.uses_latent_attention else MultiheadAttention
        self.self_attn = attention(config, layer_index)
        if config.is_moe_layer(layer_index):
            self.mlp: nn.Module = DeepseekMoE(config)
        else:
            self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.set_gradient_checkpointing("none")

    def set_gradient_checkpointing(
        self, policy: CheckpointPolicy, checkpoint_function: CheckpointFunction = torch_checkpoint
    ) -> None:
        """Choose what the backward pass recomputes: nothing, the whole layer, or (selective) its feed-forward half with
        its norm, so that attention, whose recomputation costs most per byte, keeps its activations.

        Raises:
            ValueError: an unknown policy.
        """
        if policy not in get_args(CheckpointPolicy):
            raise ValueError(f"checkpointing policy {policy!r}; write {', '.join(get_args(CheckpointPolicy))}")
        self._policy, self._checkpoint = policy, checkpoint_function

    @property
    def router(self) -> Router | None:
        """The router of this layer's MoE block, ours or one put in its place; None in a dense layer."""
        return next((child for child in self.mlp.children() if isinstance(child, Router)), None)

    def forward(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None,
        valid_tokens: Tensor | None = None,
        cache: LatentCache | None = None,
        keep: int = 0,
    ) -> tuple[Tensor, RoutingStatistics | None]:
        """
        Args:
            hidden: (B, S, H). cos, sin: (B or 1, S, rotary_dim / 2). mask: (B, 1, S, L) bool or None for causal.
            valid_tokens: (B, S) bool, False for padding.
            keep: with a cache, how many of the last positions to go on with behind attention; 0 is all S.
        Returns:
            (B, S or keep, H); and what the router decided, None without one, or with a cache: decoding counts nothing.
            The statistics leave the recomputed region as its results, so whoever adds them up does so once, however
            often the region runs.
        """
        if cache is not None:
            return self._decode(hidden, cos, sin, mask, cache, keep), None
        if not self.training or self._policy == "none":
            attended = self._attention_half(hidden, cos, sin, mask)
            return _statistics_apart(self._feed_forward_half(attended, valid_tokens))
        if self._policy == "full":
            return _statistics_apart(self._checkpoint(self._both_halves, hidden, cos, sin, mask, valid_tokens))
        attended = self._attention_half(hidden, cos, sin, mask)
        return _statistics_apart(self._checkpoint(self._feed_forward_half, attended, valid_tokens))

    def _decode(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: LatentCache, keep: int
    ) -> Tensor:
        out = self._feed_forward(self._attention_half(hidden, cos, sin, mask, cache)[:, -keep:])
        if self.router is not None:
            self.router.take_last_routing()
        return out

    def _attention_half(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: LatentCache | None = None
    ) -> Tensor:
        return hidden + self.self_attn(self.input_layernorm(hidden), cos, sin, mask, cache)

    def _feed_forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

    def _feed_forward_half(self, hidden: Tensor, valid_tokens: Tensor | None) -> tuple[Tensor, ...]:
        """(hidden,) or (hidden, tokens_per_expert, balance_loss): plain tensors, for any checkpoint function."""
        out = self._feed_forward(hidden)
        router = self.router
        if router is None:
            return (out,)
        statistics = router.statistics(router.take_last_routing(), valid_tokens, hidden.shape[0])
        return (out, *statistics)

    def _both_halves(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, valid_tokens: Tensor | None
    ) -> tuple[Tensor, ...]:
        return self._feed_forward_half(self._attention_half(hidden, cos, sin, mask), valid_tokens)


def _statistics_apart(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, RoutingStatistics | None]:
    if isinstance(outputs, Tensor):  # what DeepSpeed's checkpoint function makes of a tuple of one
        return outputs, None
    return outputs[0], RoutingStatistics(*outputs[1:]) if len(outputs) > 1 else None
