"""Multi-head latent attention, the plain multi-head attention of DeepSeekMoE 16B, and the latent cache for decoding."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.causal_attention import CausalAttentionFunction, beats_fused
from model.config import ModelConfig
from model.layers import RMSNorm
from model.rope import apply_rotary, softmax_scale
from model.wide_products import Linear, widens

# Local names: B batch, S new tokens, L tokens attended to, N heads, D head size, C kv_lora_rank, R rotary part.


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """Scaled dot-product attention; causal when there is no mask. Chooses the kernel: the one place that does.

    Args:
        query: (B, N, S, D). key: (B, N, L, D). value: (B, N, L, Dv).
        mask: (B, 1, S, L) bool, True where a query may look; None means causal with S = L.
    Returns:
        (B, S, N * Dv)
    """
    value_dim, dtype = value.shape[-1], query.dtype
    if query.device.type == "cpu" and mask is None and beats_fused(query.shape[2], query.dtype):
        return CausalAttentionFunction.apply(query, key, value, scale).transpose(1, 2).flatten(2)
    if widens(query, query.shape[2]):  # twice the memory until the backward pass, and half of the time
        query, key, value = query.float(), key.float(), value.float()
    if value_dim != query.shape[-1]:
        # The fused kernels take one head size only; zeros in the values add nothing to the kept part.
        width = max(value_dim, query.shape[-1])
        # one that is wide enough is left alone: padding by nothing would copy it
        query, key, value = (
            x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (query, key, value)
        )
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale)
    return out[..., :value_dim].to(dtype).transpose(1, 2).flatten(2)  # (B, N, S, Dv) -> (B, S, N * Dv)


def document_mask(document_ids: Tensor) -> Tensor:
    """(B, S) document of each token -> (B, 1, S, S) bool: the same document, and not later."""
    length = document_ids.shape[1]
    same = document_ids.unsqueeze(2) == document_ids.unsqueeze(1)
    causal = torch.ones(length, length, dtype=torch.bool, device=document_ids.device).tril()
    return (same & causal).unsqueeze(1)


def _join_heads(*parts: Tensor) -> Tensor:
    """Parts of every head, (B, S, N, .) each, -> (B, N, S, D) in memory of its own."""
    return torch.cat([part.transpose(1, 2) for part in parts], dim=-1)


class LatentCache:
    """What decoding keeps of the tokens seen: for each layer and token kv_lora_rank + qk_rope_head_dim numbers.

    With plain multi-head attention, keys and values are kept instead.

    Args:
        config: the architecture. batch_size: sequences. capacity: the most tokens of a sequence.
    Source: DeepSeek-V2 (arXiv 2405.04434), sec. 2.1.2 and 2.1.3: only the latent and the rotated key need caching.
    """

    def __init__(
        self, config: ModelConfig, batch_size: int, capacity: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        places = _filled_up(capacity)
        if config.kv_lora_rank is not None:  # latent and rotated key in one row: they are multiplied as one
            shapes: list[tuple[int, ...]] = [(batch_size, places, config.kv_lora_rank + config.rotary_dim)]
        else:
            shapes = [(batch_size, config.num_attention_heads, places, config.rotary_dim)] * 2
        self.capacity = capacity
        self.length = 0  # tokens that every layer has seen
        self.layers = [
            tuple(torch.zeros(shape, dtype=dtype, device=device) for shape in shapes)
            for _ in range(config.num_hidden_layers)
        ]

    def extend(self, layer_index: int, *new: Tensor) -> tuple[Tensor, ...]:
        """Append what the layer keeps of the new tokens, (..., S, width) each; return it of all, (..., L, width).

        After the first call L is filled up, with zeros that `mask` hides.
        """
        end = self.length + new[0].shape[-2]
        if end > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} tokens, {end} are needed")
        kept = self.layers[layer_index]
        for buffer, part in zip(kept, new, strict=True):
            buffer[..., self.length : end, :] = part
        seen = end if self.length == 0 else _filled_up(end)
        return tuple(buffer[..., :seen, :] for buffer in kept)

    def mask(self, new_tokens: int) -> Tensor | None:
        """(1, 1, S, L) bool of which tokens the new ones may look at; None while the cache is empty: plain causal."""
        if self.length == 0:
            return None
        device = self.layers[0][0].device
        every = torch.ones(new_tokens, _filled_up(self.length + new_tokens), dtype=torch.bool, device=device)
        return every.tril(self.length)[None, None]


def _filled_up(tokens: int) -> int:
    """Up to a multiple: a CPU's half-precision products are compiled for each length, so few shall be new."""
    return -(-tokens // 64) * 64


class MultiheadLatentAttention(nn.Module):
    """Attention whose keys and values are expanded from one compressed vector a token; rotation in a part of its own.

    Source: DeepSeek-V2 (arXiv 2405.04434), sec. 2.1, eq. 37-47; DeepSeek-V3 (arXiv 2412.19437), eq. 1-11.
    """

    attend = staticmethod(attend)  # replaced where ranks share a sequence

    def __init__(self, config: ModelConfig, layer_index: int) -> None:
        super().__init__()
        assert config.kv_lora_rank and config.qk_nope_head_dim and config.qk_rope_head_dim and config.v_head_dim
        self.layer_index = layer_index
        self.heads = config.num_attention_heads
        self.latent_dim, self.rope_dim = config.kv_lora_rank, config.qk_rope_head_dim
        self.nope_dim, self.value_dim = config.qk_nope_head_dim, config.v_head_dim
        self.interleave = config.rope_interleave
        self.scale = softmax_scale(config)
        query_size = self.heads * config.qk_head_dim
        self.compresses_queries = config.q_lora_rank is not None
        if config.q_lora_rank is None:
            self.q_proj = Linear(config.hidden_size, query_size)
        else:
            self.q_a_proj = Linear(config.hidden_size, config.q_lora_rank)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, _LATENT_NORM_EPS)
            self.q_b_proj = Linear(config.q_lora_rank, query_size)
        self.kv_a_proj_with_mqa = Linear(config.hidden_size, self.latent_dim + self.rope_dim)
        self.kv_a_layernorm = RMSNorm(self.latent_dim, _LATENT_NORM_EPS)
        self.kv_b_proj = Linear(self.latent_dim, self.heads * (self.nope_dim + self.value_dim))
        self.o_proj = Linear(self.heads * self.value_dim, config.hidden_size)

    def forward(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: LatentCache | None = None
    ) -> Tensor:
        """
        Args:
            hidden: (B, S, hidden_size). cos, sin: (B or 1, S, R / 2).
            mask: (B, 1, S, L) bool, or None for plain causal attention.
        Returns:
            (B, S, hidden_size)
        """
        batch, length, _ = hidden.shape
        cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)  # (B or 1, S, 1, R / 2): the same for every head
        if self.compresses_queries:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden)))
        else:
            query = self.q_proj(hidden)
        query = query.view(batch, length, self.heads, -1)  # (B, S, N, nope + R)
        query_nope, query_rope = query.split([self.nope_dim, self.rope_dim], dim=-1)
        rotated_query = apply_rotary(query_rope, cos, sin, self.interleave)
        latent, key_rope = self.kv_a_proj_with_mqa(hidden).split([self.latent_dim, self.rope_dim], dim=-1)
        latent = self.kv_a_layernorm(latent)  # (B, S, C)
        rotated_key: tuple[Tensor, ...] = apply_rotary(
            key_rope.unsqueeze(2), cos, sin, self.interleave
        )  # (B, S, 1, R / 2)
        if cache is not None:
            new = torch.cat([latent.unsqueeze(2), *rotated_key], dim=-1).squeeze(2)  # (B, S, C + R)
            (rows,) = cache.extend(self.layer_index, new)
            # ZeRO-3 leaves an empty placeholder outside kv_b_proj's own forward; then every token is expanded again.
            if mask is not None and self.kv_b_proj.weight.numel():
                return self.o_proj(self._attend_in_latent_space(query_nope, rotated_query, rows, mask))
            latent, key_rope = rows.split([self.latent_dim, self.rope_dim], dim=-1)
            rotated_key = key_rope.unsqueeze(2).chunk(2, dim=-1)
        expanded = self.kv_b_proj(latent).unflatten(-1, (self.heads, -1))  # (B, L, N, nope + v)
        key_nope, value = expanded.split([self.nope_dim, self.value_dim], dim=-1)
        shared_key = (part.expand(-1, -1, self.heads, -1) for part in rotated_key)  # one rotated key for all heads
        key = _join_heads(key_nope, *shared_key)
        query = _join_heads(query_nope, *rotated_query)
        return self.o_proj(self.attend(query, key, value.transpose(1, 2), self.scale, mask))

    def _attend_in_latent_space(
        self, query_nope: Tensor, rotated_query: tuple[Tensor, Tensor], rows: Tensor, mask: Tensor
    ) -> Tensor:
        """Attention on the cached latents themselves, without expanding the keys and values of old tokens.

        kv_b_proj's key half is folded into the query and its value half into the output, so a new token costs L * C a
        head instead of expanding L tokens anew. It reads kv_b_proj's weight outside that module's forward.

        Args:
            query_nope: (B, S, N, nope). rotated_query: two of (B, S, N, R / 2). rows: (B, L, C + R), of the cache.
            mask: (1, 1, S, L) bool.
        Returns:
            (B, S, N * Dv)
        Source: DeepSeek-V2 (arXiv 2405.04434), sec. 2.1.2 (absorbing W^UK and W^UV).
        """
        batch, length = query_nope.shape[:2]
        weight = self.kv_b_proj.weight.view(self.heads, self.nope_dim + self.value_dim, self.latent_dim)
        key_weight, value_weight = weight.split([self.nope_dim, self.value_dim], dim=1)  # (N, D, C)
        query_latent = query_nope.flatten(0, 1).transpose(0, 1) @ key_weight  # (N, B * S, C)
        query_latent = query_latent.transpose(0, 1).unflatten(0, (batch, length))  # (B, S, N, C)
        query = torch.cat([query_latent, *rotated_query], dim=-1).flatten(1, 2)  # (B, S * N, C + R)
        if batch == 1:  # two matrices; a batch of one is multiplied at half the speed
            query, rows = query[0], rows[0]
        # All heads look at the same rows, so this is one matrix product and nothing is copied for each head.
        scores = ((rows @ query.mT).mT).unflatten(-2, (length, self.heads))  # (B, S, N, L), or (S, N, L)
        scores = scores.to(torch.promote_types(rows.dtype, torch.float32)) * self.scale
        weights = torch.where(mask.transpose(1, 2), scores, float("-inf")).softmax(-1)  # (B, S, N, L)
        seen = weights.to(rows.dtype).flatten(1, 2) @ rows[..., : self.latent_dim]  # (B, S * N, C)
        seen = seen.view(batch * length, self.heads, -1).transpose(0, 1)  # (N, B * S, C)
        out = seen @ value_weight.mT  # (N, B * S, Dv)
        return out.transpose(0, 1).unflatten(0, (batch, length)).flatten(2)


# The published models' norms inside attention keep this value whatever rms_norm_eps says (transformers' default).
_LATENT_NORM_EPS = 1e-6


class MultiheadAttention(nn.Module):
    """Plain multi-head attention with full rotation.

    Source: DeepSeekMoE (arXiv 2401.06066), sec. 5.1: standard multi-head attention.
    """

    attend = staticmethod(attend)

    def __init__(self, config: ModelConfig, layer_index: int) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.heads = config.num_attention_heads
        self.interleave = config.rope_interleave
        self.scale = softmax_scale(config)
        self.q_proj = Linear(config.hidden_size, config.hidden_size)
        self.k_proj = Linear(config.hidden_size, config.hidden_size)
        self.v_proj = Linear(config.hidden_size, config.hidden_size)
        self.o_proj = Linear(config.hidden_size, config.hidden_size)

    def forward(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: LatentCache | None = None
    ) -> Tensor:
        """As MultiheadLatentAttention.forward."""
        cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
        query, key, value = (
            proj(hidden).unflatten(-1, (self.heads, -1)) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )  # (B, S, N, D)
        query = _join_heads(*apply_rotary(query, cos, sin, self.interleave))
        key = _join_heads(*apply_rotary(key, cos, sin, self.interleave))  # (B, N, S, D)
        value = value.transpose(1, 2)
        if cache is not None:
            key, value = cache.extend(self.layer_index, key, value)
        return self.o_proj(self.attend(query, key, value, self.scale, mask))
