"""Rotary position embedding, and its extension to longer contexts by YaRN."""

import math

import torch
from torch import Tensor

from model.config import ModelConfig


def rotary_tables(config: ModelConfig, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles.

    Computed afresh from the config, in float64, instead of kept in a buffer: a buffer would lose its precision when the
    model is cast to half precision.

    Args:
        config: names rope_theta and rope_scaling.
        position_ids: (..., S) integers [tokens].
        dtype: of the vectors to rotate; the tables are in it, or in float32 where it is narrower.
    Returns:
        cos, sin: (..., S, rotary_dim / 2).
    """
    angles = position_ids.unsqueeze(-1).double() * rotary_frequencies(config, position_ids.device)
    scale = _table_scale(config)
    table_dtype = torch.promote_types(dtype, torch.float32)
    return (angles.cos() * scale).to(table_dtype), (angles.sin() * scale).to(table_dtype)


def rotary_frequencies(config: ModelConfig, device: torch.device) -> Tensor:
    """Angle per position of each rotated pair, (rotary_dim / 2,) float64 [radians per token].

    Source: RoFormer (arXiv 2104.09864), eq. 15; YaRN (arXiv 2309.00071), sec. 3.2 (NTK-by-parts), as DeepSeek-V3
    sec. 4.3 applies it to the decoupled part of the keys and queries alone.
    """
    dim = config.rotary_dim
    exponent = torch.arange(0, dim, 2, device=device, dtype=torch.int64).double() / dim
    frequencies = torch.pow(config.rope_theta, -exponent)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    low = math.floor(_pair_that_turns(config, scaling.get("beta_fast") or 32))
    high = math.ceil(_pair_that_turns(config, scaling.get("beta_slow") or 1))
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001  # pairs below `low` turn often enough to stay as they are, those above `high` never
    pair = torch.arange(dim // 2, device=device, dtype=torch.int64).double()
    interpolated = ((pair - low) / width).clamp(0, 1)
    return frequencies * (1 - interpolated) + frequencies / scaling["factor"] * interpolated


def softmax_scale(config: ModelConfig) -> float:
    """What the products of queries and keys are multiplied by; YaRN's temperature included.

    Source: DeepSeek-V3's published config (mscale_all_dim); YaRN (arXiv 2309.00071), eq. 22.
    """
    scale = config.qk_head_dim**-0.5
    if config.rope_scaling is not None:
        scale *= _magnitude(config.rope_scaling["factor"], config.rope_scaling.get("mscale_all_dim") or 0.0) ** 2
    return scale


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleave: bool) -> tuple[Tensor, Tensor]:
    """Rotate the pairs of the last dimension.

    The first members of all pairs and the second ones come back apart, for the caller to join with what else belongs to
    the head in one copy. Their order does not matter: queries and keys are permuted alike.

    Args:
        x: (..., S, N, D): N heads.
        cos, sin: (..., S, 1, D / 2).
        interleave: pairs are neighbours (DeepSeek-V2 and V3), else x[i] pairs with x[i + D / 2] (DeepSeekMoE 16B).
    Returns:
        two of (..., S, N, D / 2)
    """
    if interleave:
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    else:
        first, second = x.chunk(2, dim=-1)
    return (first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype)


def _pair_that_turns(config: ModelConfig, turns: float) -> float:
    """The (fractional) index of the pair that makes that many turns within the original context."""
    assert config.rope_scaling is not None
    length = config.rope_scaling["original_max_position_embeddings"]
    return config.rotary_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))


def _magnitude(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _table_scale(config: ModelConfig) -> float:
    scaling = config.rope_scaling
    if scaling is None:
        return 1.0
    mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim") or 0.0
    return _magnitude(scaling["factor"], 1.0 if mscale is None else mscale) / _magnitude(scaling["factor"], all_dim)
