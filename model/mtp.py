"""Multi-token prediction: depth k predicts, at each position t, token t + 1 + k."""

import torch
from torch import Tensor, nn

from model.config import ModelConfig
from model.decoder import DecoderLayer
from model.layers import RMSNorm
from model.losses import IGNORE_INDEX
from model.moe import RoutingStatistics
from model.wide_products import Linear


class SharedHead(nn.Module):
    """The norm before the head that all depths share with the main model; the published layout names it so."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: Tensor) -> Tensor:
        """(B, S, H) -> (B, S, H)."""
        return self.norm(hidden)


class MultiTokenPredictionLayer(DecoderLayer):
    """One depth: joins the hidden states of the depth before with the embeddings of the tokens that they predict.

    Source: DeepSeek-V3 (arXiv 2412.19437), sec. 2.2, eq. 21-23. The order [norm(embedding); norm(hidden)], and hidden
    states taken after the final norm, are how the published weights are used (transformers and Megatron agree).
    """

    def __init__(self, config: ModelConfig, layer_index: int) -> None:
        super().__init__(config, layer_index)
        self.enorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = Linear(2 * config.hidden_size, config.hidden_size)
        self.shared_head = SharedHead(config)

    def predict(
        self,
        hidden: Tensor,
        embedded: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None,
        valid_tokens: Tensor | None,
    ) -> tuple[Tensor, RoutingStatistics | None]:
        """
        Args:
            hidden: (B, S, H) of the depth before, normed.
            embedded: (B, S, H) of the tokens one further than it has seen.
            The rest as DecoderLayer.forward.
        Returns:
            (B, S, H) normed, for the head and for the next depth; and the router's statistics.
        """
        joined = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))  # (B, S, 2H) -> (B, S, H)
        out, statistics = self(joined, cos, sin, mask, valid_tokens)
        return self.shared_head(out), statistics


def shifted_labels(labels: Tensor, document_ids: Tensor | None, depth: int) -> Tensor:
    """The targets of one depth, cut to the positions that have one.

    Args:
        labels: (B, S), labels[:, t] follows token t. document_ids: (B, S), or None when documents are not kept apart.
        depth: k, from 1.
    Returns:
        (B, S - k): labels[:, t + k], IGNORE_INDEX where the target or a token on the way to it is of another document.
    """
    targets = labels[:, depth:]
    if document_ids is None:
        return targets
    kept = labels.shape[1] - depth
    crosses = document_ids[:, :kept] != document_ids[:, depth:]
    # Token t + 1 + k itself; of the last position it is beyond the row, and only its label can tell.
    crosses[:, :-1] |= document_ids[:, : kept - 1] != document_ids[:, depth + 1 :]
    return targets.masked_fill(crosses, IGNORE_INDEX)
