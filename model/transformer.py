"""The whole model: embedding, decoder layers, multi-token prediction, head and losses."""

import torch
from torch import Tensor, nn

from model.attention import LatentCache, document_mask
from model.config import ModelConfig
from model.decoder import CheckpointFunction, CheckpointPolicy, DecoderLayer, torch_checkpoint
from model.initialization import initialize_parameter_
from model.layers import RMSNorm
from model.losses import IGNORE_INDEX, LMHead
from model.moe import RoutingStatistics, iter_routers
from model.mtp import MultiTokenPredictionLayer, shifted_labels
from model.rope import rotary_tables

ModelOutput = dict[str, Tensor]  # a plain dict, because ZeRO-3's hooks look for tensors in those


class DeepseekModel(nn.Module):
    """Embedding, layers and final norm. The MTP layers follow the main ones in `layers`, at num_hidden_layers + k."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_main_layers = config.num_hidden_layers
        rows, width = config.vocab_size, config.hidden_size
        # With no weight given it draws values that nobody uses, for which the meta device imports seconds of code.
        self.embed_tokens = nn.Embedding(rows, width, _weight=torch.empty(rows, width))
        main = [DecoderLayer(config, index) for index in range(config.num_hidden_layers)]
        depths = [
            MultiTokenPredictionLayer(config, config.num_hidden_layers + depth)
            for depth in range(config.num_nextn_predict_layers)
        ]
        self.layers = nn.ModuleList([*main, *depths])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        embedded: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None,
        valid_tokens: Tensor | None,
        cache: LatentCache | None,
        keep: int = 0,
    ) -> tuple[Tensor, list[RoutingStatistics | None]]:
        """
        Args:
            embedded: (B, S, H). keep: the last main layer's, whose attention needs every position of the layers before
                it. The rest as DecoderLayer.forward.
        Returns:
            (B, S or keep, H) after the final norm; the statistics of each main layer.
        """
        hidden, statistics = embedded, []
        for index, layer in enumerate(self.layers[: self.num_main_layers]):
            kept = keep if index == self.num_main_layers - 1 else 0
            hidden, layer_statistics = layer(hidden, cos, sin, mask, valid_tokens, cache, kept)
            statistics.append(layer_statistics)
        return self.norm(hidden), statistics


class DeepseekForCausalLM(nn.Module):
    """A DeepSeek-style language model. Its parameters have transformers 5's names; construction leaves their values
    undefined, `init_weights` or a checkpoint sets them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.mtp_loss_weight = config.mtp_loss_weight  # lambda; a run may change it on the way
        self.model = DeepseekModel(config)
        self.lm_head = LMHead(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.lm_head.register_parameter("weight", self.model.embed_tokens.get_parameter("weight"))

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        valid_tokens: Tensor | None = None,
        loss_denominator: float | Tensor | None = None,
        cache: LatentCache | None = None,
        logits_to_keep: int = 0,
    ) -> ModelOutput:
        """Logits, or with labels the losses.

        Args:
            input_ids: (B, S) int64.
            labels: (B, S) int64, already shifted: labels[:, t] follows input_ids[:, t]; -100 is ignored.
            position_ids: (B, S), default 0 to S - 1 (after what the cache holds).
            document_ids: (B, S) integers; given, attention and MTP targets stay within a document. None: plain causal.
            valid_tokens: (B, S) bool; False (padding) enters neither expert counts nor the balance loss.
            loss_denominator: what the summed cross-entropies are divided by [tokens]; default: the valid labels here.
            cache: of the tokens before these, extended in place; without labels and document_ids only.
            logits_to_keep: without labels, how many of the last positions to give logits for; 0 is all S.
        Returns:
            Without labels: logits (B, S, V). With: loss () = CE / denominator + lambda / D * sum over depths of
            CE_k / denominator + balance loss; detached cross_entropy_sum (), sequence_cross_entropy_sum (B,) and
            mtp_cross_entropy_sum (D,) [nats],
            label_count () and mtp_label_count (D,), balance_loss () with alpha, mean over sequences, sum over layers.
            In evaluation mode with MTP also mtp_accepted_count (): for how many of its mtp_label_count[0] predictions
            the first depth's best token is the one that the main model, a position later, finds best, too. So often
            speculative decoding at temperature 0 would accept its draft (V3 sec. 5.4.3).
        Raises:
            ValueError: a cache together with labels or document_ids, or a sequence too short for the MTP depth.
        Source: DeepSeek-V3 (arXiv 2412.19437), eq. 17, 24 and 25.
        """
        if cache is not None and (labels is not None or document_ids is not None):
            raise ValueError("a cache is for decoding: it takes neither labels nor document_ids")
        if position_ids is None:
            start = 0 if cache is None else cache.length
            position_ids = torch.arange(start, start + input_ids.shape[1], device=input_ids.device).unsqueeze(0)
        embedded = self.model.embed_tokens(input_ids)  # (B, S, H)
        cos, sin = rotary_tables(self.config, position_ids, embedded.dtype)
        if cache is not None:
            mask = cache.mask(input_ids.shape[1])
        else:
            mask = None if document_ids is None else document_mask(document_ids)
        keep = 0 if cache is None else logits_to_keep
        hidden, statistics = self.model(embedded, cos, sin, mask, valid_tokens, cache, keep)
        if labels is None:
            if cache is not None:
                cache.length += input_ids.shape[1]
            return {"logits": self.lm_head(hidden[:, -logits_to_keep:])}
        rows, targets = [hidden], [labels]
        for depth, layer in enumerate(self.model.layers[self.model.num_main_layers :], start=1):
            hidden, layer_statistics = self._predict_further(
                layer, depth, hidden, embedded, cos, sin, mask, valid_tokens
            )
            rows.append(hidden)
            targets.append(shifted_labels(labels, document_ids, depth))
            statistics.append(layer_statistics)
        balance_loss = self._collect_statistics(statistics, hidden)
        return self._losses(rows, targets, loss_denominator, balance_loss)

    def _predict_further(
        self,
        layer: nn.Module,
        depth: int,
        hidden: Tensor,
        embedded: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None,
        valid_tokens: Tensor | None,
    ) -> tuple[Tensor, RoutingStatistics | None]:
        """Run one MTP depth on the positions that still have a target: cut, not padded."""
        assert isinstance(layer, MultiTokenPredictionLayer)
        kept = embedded.shape[1] - depth
        if kept < 1:
            raise ValueError(f"a sequence of {embedded.shape[1]} tokens is too short for MTP depth {depth}")
        valid = None if valid_tokens is None else valid_tokens[:, :kept] & valid_tokens[:, depth:]
        mask = None if mask is None else mask[..., :kept, :kept]
        return layer.predict(hidden[:, :kept], embedded[:, depth:], cos[:, :kept], sin[:, :kept], mask, valid)

    def _collect_statistics(self, statistics: list[RoutingStatistics | None], hidden: Tensor) -> Tensor:
        """Add the counts to each router's, in training; return the balance loss () summed over the layers."""
        balance_loss = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        for layer, layer_statistics in zip(self.model.layers, statistics, strict=True):
            if layer_statistics is None:
                continue
            assert isinstance(layer, DecoderLayer) and layer.router is not None
            if self.training:
                layer.router.collect(layer_statistics)
            balance_loss = balance_loss + layer_statistics.balance_loss
        return balance_loss

    def _losses(
        self, rows: list[Tensor], targets: list[Tensor], loss_denominator: float | Tensor | None, balance_loss: Tensor
    ) -> ModelOutput:
        """The head runs once, on the rows of all depths, so that its weight is gathered and its gradient made once."""
        depths, (batch, length) = len(rows) - 1, targets[0].shape
        # the main prediction by sequence, then each depth as a whole
        weights = [1.0] * batch + [self.mtp_loss_weight / depths for _ in range(depths)]
        parts = [length] * batch + [part.numel() for part in targets[1:]]
        flat_rows = torch.cat([part.flatten(0, 1) for part in rows])  # (B, S, H) each -> (R, H)
        flat_targets = torch.cat([part.flatten() for part in targets])
        more = {}
        if depths and not self.training:  # training does without: the search costs another pass over the logits
            total, sums, best = self.lm_head(flat_rows, flat_targets, parts, weights, predicts=True)
            main = best[: batch * length].view(batch, length)
            draft = best[batch * length :][: batch * (length - 1)].view(batch, length - 1)
            more["mtp_accepted_count"] = ((draft == main[:, 1:]) & (targets[1] != IGNORE_INDEX)).sum()
        else:
            total, sums = self.lm_head(flat_rows, flat_targets, parts, weights)
        counts = torch.stack([(part != IGNORE_INDEX).sum() for part in targets])
        denominator = counts[0].clamp(min=1) if loss_denominator is None else loss_denominator
        return {
            "loss": total / denominator + balance_loss,
            "cross_entropy_sum": sums[:batch].sum(),
            "sequence_cross_entropy_sum": sums[:batch],
            "mtp_cross_entropy_sum": sums[batch:],
            "label_count": counts[0],
            "mtp_label_count": counts[1:],
            "balance_loss": balance_loss.detach(),
            **more,
        }

    def set_gradient_checkpointing(
        self, policy: CheckpointPolicy, checkpoint_function: CheckpointFunction | None = None
    ) -> None:
        """Choose what the backward pass recomputes in every layer; see DecoderLayer.set_gradient_checkpointing.

        Args:
            checkpoint_function: (function, *tensors) -> result, e.g. DeepSpeed's; default torch's without reentry.
        Raises:
            ValueError: an unknown policy.
        """
        for layer in self.model.layers:
            assert isinstance(layer, DecoderLayer)
            layer.set_gradient_checkpointing(policy, checkpoint_function or torch_checkpoint)

    def init_parameter_(self, name: str, tensor: Tensor, seed: int, rows: range | None = None) -> None:
        """Fill one parameter, or some of its rows, by its name and in place; see `initialize_parameter_`."""
        initialize_parameter_(name, tensor, std=self.config.initializer_range, seed=seed, rows=rows)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Fill every parameter as a function of the seed and its name; zero the routers' biases and counts."""
        for name, parameter in self.named_parameters():
            self.init_parameter_(name, parameter, seed)
        for _, router in iter_routers(self):
            router.tokens_per_expert.zero_()
            if router.e_score_correction_bias is not None:
                router.e_score_correction_bias.zero_()
