"""Sequence parallelism by DeepSpeed's Ulysses: the ranks of a group share every sequence's tokens out.

Each rank runs all layers on its part of a sequence. Attention alone sees the whole of it, for a part of the heads: two
exchanges around it, which are DeepSpeed's, turn the one cut into the other. The batch stays whole on every rank of a
group, because targets, masks and the embeddings that multi-token prediction joins reach beyond the cut.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.sequence.layer import DistributedAttention
from torch import Tensor

from model.attention import LatentCache, MultiheadAttention, MultiheadLatentAttention, attend, document_mask
from model.losses import IGNORE_INDEX
from model.moe import RoutingStatistics, iter_routers
from model.mtp import MultiTokenPredictionLayer, shifted_labels
from model.rope import rotary_tables
from model.transformer import DeepseekForCausalLM, ModelOutput


class SequenceGroups:
    """DeepSpeed's own groups of consecutive ranks that share sequences, as `deepspeed.initialize` takes them.

    Its module calls the ranks of a group tensor-parallel as well, and checkpoints would be looked for in as many parts.
    """

    initialize_sequence_parallel = staticmethod(parallel_state_sp.initialize_sequence_parallel)
    get_sequence_parallel_group = staticmethod(parallel_state_sp.get_sequence_parallel_group)
    get_sequence_parallel_rank = staticmethod(parallel_state_sp.get_sequence_parallel_rank)
    get_sequence_parallel_world_size = staticmethod(parallel_state_sp.get_sequence_parallel_world_size)
    get_sequence_data_parallel_group = staticmethod(parallel_state_sp.get_sequence_data_parallel_group)
    get_sequence_data_parallel_rank = staticmethod(parallel_state_sp.get_sequence_data_parallel_rank)
    get_sequence_data_parallel_world_size = staticmethod(parallel_state_sp.get_sequence_data_parallel_world_size)

    @staticmethod
    def get_tensor_model_parallel_rank() -> int:
        return 0

    @staticmethod
    def get_tensor_model_parallel_world_size() -> int:
        return 1


def sequence_groups(size: int) -> type[SequenceGroups] | None:
    """Groups of `size` ranks; None without sequence parallelism. By the ds_config's keys alone, DeepSpeed would not add
    up the gradients within a group."""
    if size == 1:
        return None
    if parallel_state_sp._SEQUENCE_PARALLEL_GROUP is None:
        parallel_state_sp.initialize_sequence_parallel(size)
    return SequenceGroups


def share_sequences(engine: Any, size: int) -> None:
    """Make the model of an engine work on its rank's part of each training sequence; does nothing without.

    Args:
        engine: as `deepspeed.initialize` leaves it.
        size: ranks that share a sequence.
    """
    if size == 1:
        return
    # DeepSpeed leaves it None here, but counts batches with it.
    engine.dp_world_size = torch.distributed.get_world_size() // size
    model = engine.module
    model.__class__ = SequenceParallelModel
    if engine.zero_optimization_stage() == 3:
        model.loss_factor = size
    for module in model.modules():
        if isinstance(module, MultiheadLatentAttention | MultiheadAttention):
            module.attend = _attend_to_whole_sequences(module)
    for _, router in iter_routers(model):
        router.add_up = add_up_over_sequence


def add_up_over_sequence(tensor: Tensor) -> Tensor:
    """The sum, in place, over the ranks that share a sequence; no gradient goes through it."""
    torch.distributed.all_reduce(tensor, group=parallel_state_sp.get_sequence_parallel_group())
    return tensor


def _attend_to_whole_sequences(attention: torch.nn.Module) -> Callable[..., Tensor]:
    """Stands in for `model.attention.attend` while training: takes and gives a rank's part of the sequence, S / P."""

    def attend_to_some_heads(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None) -> Tensor:
        """(B, S, N / P, D) each -> (B, S, N / P, Dv)."""
        heads = query.shape[2]
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        return attend(query, key, value, scale, mask).unflatten(-1, (heads, -1))

    group = parallel_state_sp.get_sequence_parallel_group()
    exchanged = DistributedAttention(attend_to_some_heads, group, scatter_idx=2, gather_idx=1)

    def attend_to_own_part(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None) -> Tensor:
        """(B, N, S / P, D) each, mask (B, 1, S, S) -> (B, S / P, N * Dv)."""
        if not attention.training:
            return attend(query, key, value, scale, mask)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        return exchanged(query, key, value, 0, None, scale, mask).flatten(2)

    return attend_to_own_part


class SequenceParallelModel(DeepseekForCausalLM):
    """The model on a part of each sequence. Evaluation and decoding run on whole ones, as without it."""

    # of the loss: stages 1 and 2 add gradients up over the ranks that share a sequence, stage 3's reduce-scatter takes
    # their mean
    loss_factor = 1

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
        """As DeepseekForCausalLM.forward, of whole sequences (B, S), the same on the ranks that share them.

        Returns:
            As there, over whole sequences, but for `loss`: this rank's part of it, of which DeepSpeed adds up the
            gradients.
        """
        if labels is None or not self.training:
            return super().forward(
                input_ids, labels, position_ids, document_ids, valid_tokens, loss_denominator, cache, logits_to_keep
            )
        assert loss_denominator is not None
        length = input_ids.shape[1]
        rank, ranks = (
            parallel_state_sp.get_sequence_parallel_rank(),
            parallel_state_sp.get_sequence_parallel_world_size(),
        )
        part = length // ranks
        own = slice(rank * part, (rank + 1) * part)
        depths = self.model.layers[self.model.num_main_layers :]
        if position_ids is None:
            position_ids = torch.arange(length, device=input_ids.device).unsqueeze(0)
        mask = None if document_ids is None else document_mask(document_ids)
        # Multi-token prediction joins embeddings from beyond the cut; after the sequence's end come any tokens' ones.
        embedded = self.model.embed_tokens(F.pad(input_ids, (0, len(depths)))[:, own.start : own.stop + len(depths)])
        cos, sin = rotary_tables(self.config, position_ids[:, own], embedded.dtype)
        valid = None if valid_tokens is None else valid_tokens[:, own]
        hidden, statistics = self.model(embedded[:, :part], cos, sin, mask, valid, None)
        rows, targets = [hidden], [labels[:, own]]
        everywhere = torch.ones_like(input_ids, dtype=torch.bool) if valid_tokens is None else valid_tokens
        for depth, layer in enumerate(depths, start=1):
            assert isinstance(layer, MultiTokenPredictionLayer)
            # Padded at the end, not cut: every rank needs as many tokens. No position looks at those after it.
            valid = F.pad(everywhere[:, :-depth] & everywhere[:, depth:], (0, depth))[:, own]
            hidden, layer_statistics = layer.predict(hidden, embedded[:, depth : depth + part], cos, sin, mask, valid)
            rows.append(hidden)
            targets.append(F.pad(shifted_labels(labels, document_ids, depth), (0, depth), value=IGNORE_INDEX)[:, own])
            statistics.append(layer_statistics)
        balance_loss = self._collect_statistics(_counted_over_sequences(statistics), hidden)
        output = _over_whole_sequences(self._losses(rows, targets, loss_denominator, balance_loss))
        output["loss"] = output["loss"] * self.loss_factor
        return output


def _counted_over_sequences(statistics: list[RoutingStatistics | None]) -> list[RoutingStatistics | None]:
    """With the tokens of whole sequences counted, as every rank of a group reports them."""
    some = [one for one in statistics if one is not None]
    if not some:
        return statistics
    counts = iter(add_up_over_sequence(torch.stack([one.tokens_per_expert for one in some])))
    entropies = iter(add_up_over_sequence(torch.stack([one.entropy_sum for one in some])))
    return [
        None if one is None else one._replace(tokens_per_expert=next(counts), entropy_sum=next(entropies))
        for one in statistics
    ]


def _over_whole_sequences(output: ModelOutput) -> ModelOutput:
    """Add up all but the loss over the ranks that share a sequence, in one message."""
    reported = {name: value for name, value in output.items() if name != "loss"}
    message = add_up_over_sequence(torch.cat([value.detach().double().flatten() for value in reported.values()]))
    sums = message.split([value.numel() for value in reported.values()])
    whole = {
        name: part.view_as(value).to(value.dtype) for (name, value), part in zip(reported.items(), sums, strict=True)
    }
    return {"loss": output["loss"], **whole}
