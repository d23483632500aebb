"""Bytes that one micro-batch's forward pass leaves for its backward pass, by arithmetic on the architecture.

What each module keeps is read off the modules of model/. A test compares with the storages that autograd really holds,
so a module that comes to keep more or less shows there.
"""

from dataclasses import dataclass

import torch

from model.config import ModelConfig

# the head decides by itself how many rows' logits it holds; this is the one place that knows
from model.losses import rows_at_a_time as rows_of_logits

_WIDE = 4  # bytes of float32, in which scales, router and losses compute
_INDEX = 8  # bytes of int64


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch on one device.

    Args:
        kept: from the forward pass to the backward pass, besides the head's.
        layer: what the largest layer's backward pass has besides: its recomputed activations, where they were not
            kept, and what it works on.
        logits: of the head: a block of logits, and the gradients that it computes in the same pass; they are gone
            before the first layer's backward pass begins.
    """

    kept: int
    layer: int
    logits: int

    @property
    def peak(self) -> int:
        return self.kept + max(self.layer, self.logits)


def activation_bytes(
    config: ModelConfig,
    *,
    micro_batch_size: int,
    seq_length: int,
    element_bytes: int,
    checkpointing: str,
    device_type: str = "cuda",
) -> Activations:
    """What a micro-batch takes, with attention through torch's fused kernels.

    Args:
        micro_batch_size: [sequences]. seq_length: [tokens].
        element_bytes: of the compute dtype.
        checkpointing: "none", "full" or "selective", as DecoderLayer.set_gradient_checkpointing.
        device_type: "cuda" or "cpu", by which the head chooses its block of logits, and experts how they gather rows.
    """
    tokens = micro_batch_size * seq_length
    hidden = config.hidden_size * element_bytes
    halves = {moe: _layer(config, moe, element_bytes, device_type) for moe in (False, True)}
    layers = [config.is_moe_layer(i) for i in range(config.num_hidden_layers + config.num_nextn_predict_layers)]
    kept = recomputed = working = 0
    for is_moe in layers:
        attention, feed_forward, works_on = halves[is_moe]
        if checkpointing == "none":
            kept += attention + feed_forward
        elif checkpointing == "full":
            kept += hidden
            recomputed = max(recomputed, attention + feed_forward)
        else:
            kept += attention + hidden
            recomputed = max(recomputed, feed_forward)
        working = max(working, works_on)
    # an MTP depth joins two normed vectors and norms its result, outside the recomputed part; the embeddings that it
    # norms are the first layer's input, too. And the final norm.
    depths = config.num_nextn_predict_layers
    kept += depths * (3 * _norm(hidden) + hidden) + _norm(hidden)
    # cos and sin of every position, shared by all layers; the token ids, which the embedding keeps
    once = seq_length * config.rotary_dim * _WIDE + tokens * _INDEX
    return Activations(
        kept=kept * tokens + once,
        layer=(recomputed + working) * tokens,
        logits=_head(config, tokens * (1 + depths), element_bytes, device_type),
    )


def _norm(vector_bytes: int) -> int:
    """RMSNorm keeps its input and one scale; its result counts with the module that takes it."""
    return vector_bytes + _WIDE


def _layer(config: ModelConfig, is_moe: bool, element_bytes: int, device_type: str) -> tuple[int, int, int]:
    """Bytes a token of a layer's attention half and feed-forward half, and of what the larger one works on."""
    hidden = config.hidden_size * element_bytes
    normed = _norm(hidden) + hidden
    # query, key, value, the result, and the result with a token's heads side by side, which some kernels give at once
    attention = _latent_attention(config, element_bytes) if config.uses_latent_attention else 5 * hidden
    attention += normed + config.num_attention_heads * _WIDE  # each head's logarithm of its sum of exponentials
    # the norm's backward pass computes in float32, on three vectors at a time; its half's activations are gone by then
    norm_works_on = 3 * config.hidden_size * _WIDE + hidden
    if not is_moe:
        # gate and up, the silu of one and the product of both; these are freed while their gradients come, so that
        # little more than one of them adds to the peak
        inner = config.intermediate_size * element_bytes
        kept, works_on = normed + 4 * inner, 3 * inner // 2
    else:
        experts, works_on = _experts(config, element_bytes, device_type)
        kept = normed + experts
    return attention, kept, max(norm_works_on - kept, works_on)


def _latent_attention(config: ModelConfig, element_bytes: int) -> int:
    heads, latent, rope = config.num_attention_heads, config.kv_lora_rank or 0, config.rotary_dim
    elements = latent + rope + latent  # the compressed vector, and the latent's norm
    kept = _WIDE
    if config.q_lora_rank:
        elements += 2 * config.q_lora_rank
        kept += _WIDE
    if config.value_head_dim == config.qk_head_dim:
        # the values are a view of the expanded latents
        expanded = config.qk_head_dim - rope + config.value_head_dim
        elements += heads * (2 * config.qk_head_dim + expanded + 2 * config.value_head_dim)
    else:
        # padded to one head size, apart from the result as o_proj takes it
        width = max(config.qk_head_dim, config.value_head_dim)
        elements += heads * (4 * width + config.value_head_dim)
    return kept + elements * element_bytes


def _experts(config: ModelConfig, element_bytes: int, device_type: str) -> tuple[int, int]:
    experts, chosen = config.n_routed_experts or 0, config.num_experts_per_tok or 0
    inner, hidden = (config.moe_intermediate_size or 0) * element_bytes, config.hidden_size * element_bytes
    # scores, their shares in the balance loss, and of each choice two indices and two weights
    router = experts * _WIDE * 2 + chosen * 2 * (_INDEX + _WIDE)
    routed = chosen * (2 * inner + element_bytes + 2 * _INDEX)
    shared = 4 * config.n_shared_experts * inner
    # a row for each chosen expert: of the tokens' gradients, gathered at once except on a CPU, with four of the inner
    # size; five of the inner size; or the result with two of them
    gathered = 0 if device_type == "cpu" else hidden
    most = max(gathered + 4 * inner, 5 * inner, hidden + 2 * inner)
    return router + routed + shared, chosen * most + 2 * hidden


def _head(config: ModelConfig, rows: int, element_bytes: int, device_type: str) -> int:
    """The rows and their gradients, a block of logits, and the gradient of the vocabulary's table.

    Args:
        rows: predictions of the micro-batch, those of the MTP depths included.
    """
    table = config.vocab_size * config.hidden_size
    shape = torch.Size([config.vocab_size, config.hidden_size])
    block, chunk = rows_of_logits(device_type, shape, rows, element_bytes)
    wide = config.vocab_size * chunk * _WIDE if element_bytes < _WIDE else 0
    product = table * element_bytes
    # one block's gradient comes after its wide logits; over several, the table's is added up in float32 meanwhile
    gradient = max(wide, product) if block == rows else max(wide, product) + table * _WIDE
    return 2 * rows * config.hidden_size * element_bytes + config.vocab_size * block * element_bytes + gradient
