"""Bytes that one micro-batch's forward pass leaves for its backward pass, by arithmetic on the architecture.

What each module keeps is read off the modules of model/: a change there that keeps more or less shows in the test that
compares with the storages that autograd really holds.
"""

from dataclasses import dataclass

from model.config import ModelConfig
from model.losses import _CHUNK_BYTES as LOGITS_CHUNK_BYTES

_WIDE = 4  # bytes of float32, in which norms, router and losses compute
_INDEX = 8  # bytes of int64


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch on one device.

    Args:
        kept: from the forward pass to the backward pass, besides the head's.
        layer: what the largest layer's backward pass has besides: its recomputed activations, where they were not
            kept, and what it works on.
        logits: of the head: a chunk of logits, and the gradients that it computes in the same pass; they are gone
            before the first layer's backward pass begins.
    """

    kept: int
    layer: int
    logits: int

    @property
    def peak(self) -> int:
        return self.kept + max(self.layer, self.logits)


def activation_bytes(
    config: ModelConfig, *, micro_batch_size: int, seq_length: int, element_bytes: int, checkpointing: str
) -> Activations:
    """What a micro-batch takes.

    Args:
        micro_batch_size: [sequences]. seq_length: [tokens].
        element_bytes: of the compute dtype.
        checkpointing: "none", "full" or "selective", as DecoderLayer.set_gradient_checkpointing.
    """
    tokens = micro_batch_size * seq_length
    hidden = config.hidden_size
    layer_of = {moe: _layer(config, moe, element_bytes) for moe in (False, True)}
    main = [config.is_moe_layer(index) for index in range(config.num_hidden_layers)]
    depths = [config.is_moe_layer(config.num_hidden_layers + k) for k in range(config.num_nextn_predict_layers)]
    kept = recomputed = working = 0
    for is_moe in main + depths:
        attention, feed_forward, while_running = layer_of[is_moe]
        if checkpointing == "none":
            kept += attention + feed_forward
        elif checkpointing == "full":
            kept += hidden * element_bytes
            recomputed = max(recomputed, attention + feed_forward)
        else:
            kept += attention + hidden * element_bytes
            recomputed = max(recomputed, feed_forward)
        working = max(working, while_running)
    # an MTP depth joins two normed vectors and norms its result, outside the recomputed part
    kept += len(depths) * (3 * _norm(hidden, element_bytes) + 2 * hidden * element_bytes)
    kept += _norm(hidden, element_bytes)  # the final norm
    # cos and sin of every position, for all layers; the token ids, which the embedding keeps
    once = seq_length * config.rotary_dim * _WIDE + tokens * _INDEX
    # the router's weight in float32, once for each layer whose activations are kept
    router = (config.n_routed_experts or 0) * hidden * (_WIDE if element_bytes < _WIDE else 0)
    routers = sum(main + depths) if checkpointing == "none" else 1
    return Activations(
        kept=kept * tokens + once + router * routers,
        layer=(recomputed + working) * tokens,
        logits=_head(config, tokens * (1 + len(depths)), element_bytes),
    )


def _norm(size: int, element_bytes: int) -> int:
    """RMSNorm: its input in float32, the normed vector before its weight, and the root."""
    return size * (_WIDE + element_bytes) + _WIDE


def _layer(config: ModelConfig, is_moe: bool, element_bytes: int) -> tuple[int, int, int]:
    """Bytes a token of a layer's attention half and feed-forward half, and those that only its run needs."""
    normed = _norm(config.hidden_size, element_bytes) + config.hidden_size * element_bytes
    attention = normed + (_latent_attention if config.uses_latent_attention else _attention)(config, element_bytes)
    if not is_moe:
        # gate and up, the silu of one and the product of both; the backward pass holds the gradients of two of them
        inner = config.intermediate_size * element_bytes
        return attention, normed + 4 * inner, 2 * inner
    experts, working = _experts(config, element_bytes)
    return attention, normed + experts, working


def _latent_attention(config: ModelConfig, element_bytes: int) -> int:
    heads = config.num_attention_heads
    query_rank, latent = config.q_lora_rank or 0, config.kv_lora_rank or 0
    bytes_kept = _norm(latent, element_bytes) + latent * element_bytes
    if element_bytes == _WIDE:
        bytes_kept += config.rotary_dim * _WIDE  # the latent is a view of the whole compressed vector
    if query_rank:
        bytes_kept += _norm(query_rank, element_bytes) + query_rank * element_bytes
    if config.value_head_dim == config.qk_head_dim:
        nope = config.qk_head_dim - config.rotary_dim
        expanded = heads * (nope + config.value_head_dim)  # the values are a view of the expanded latents
        attended = heads * config.value_head_dim
        return bytes_kept + _attend(heads, 2 * heads * config.qk_head_dim + expanded + attended, element_bytes)
    # padded to one head size: query, key, value and result; and the result cut back for o_proj
    width = max(config.qk_head_dim, config.value_head_dim)
    return bytes_kept + _attend(heads, 4 * heads * width + heads * config.value_head_dim, element_bytes)


def _attention(config: ModelConfig, element_bytes: int) -> int:
    return _attend(config.num_attention_heads, 4 * config.hidden_size, element_bytes)


def _attend(heads: int, elements: int, element_bytes: int) -> int:
    """The operands and the result of attention, and the logarithm of each head's sum of exponentials."""
    return elements * element_bytes + heads * _WIDE


def _experts(config: ModelConfig, element_bytes: int) -> tuple[int, int]:
    experts, chosen = config.n_routed_experts or 0, config.num_experts_per_tok or 0
    inner, hidden = config.moe_intermediate_size or 0, config.hidden_size
    router = experts * _WIDE * 2 + chosen * (_INDEX * 2 + _WIDE * 2)
    if element_bytes < _WIDE:
        router += hidden * _WIDE
    routed = chosen * (2 * inner * element_bytes + _WIDE + 2 * _INDEX)
    shared = 4 * config.n_shared_experts * inner * element_bytes
    # one row a chosen expert: gathered inputs, outputs by expert, outputs by token; and gate, up and their product
    working = chosen * (3 * hidden + 3 * inner) * element_bytes
    return router + routed + shared, working


def _head(config: ModelConfig, rows: int, element_bytes: int) -> int:
    """The head's rows and their gradients, a chunk of logits, and the gradient of the vocabulary's table in float32.

    Args:
        rows: predictions of the micro-batch, those of the MTP depths included.
    """
    table = config.vocab_size * config.hidden_size
    chunk = min(LOGITS_CHUNK_BYTES, rows * config.vocab_size * _WIDE)
    half = element_bytes < _WIDE
    # in half precision a chunk's gradient and its product with the rows are made in it, and then added in float32
    return (
        2 * rows * config.hidden_size * element_bytes
        + table * _WIDE
        + chunk
        + ((chunk + table * _WIDE) * element_bytes // _WIDE if half else 0)
    )
