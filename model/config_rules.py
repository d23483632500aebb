"""What makes an architecture possible: each rule names the field, the value, the rule, and what to write instead."""

from typing import Any

TOPK_METHODS = ("noaux_tc", "group_limited_greedy", "greedy")
SCORING_FUNCTIONS = ("sigmoid", "softmax")
_YARN_KEYS = frozenset("type factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim".split())
_POSITIVE = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads max_position_embeddings".split()
)
_LATENT = "kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim".split()
_EXPERTS = "n_routed_experts moe_intermediate_size num_experts_per_tok n_group topk_group".split()


def architecture_faults(values: dict[str, Any]) -> list[str]:
    """Every fault of an architecture, one line each, beginning with the field.

    Args:
        values: the fields of ModelConfig by name.
    """
    faults = [_positive_fault(name, values[name]) for name in _POSITIVE]
    faults += [_natural_fault(name, values[name]) for name in ("num_nextn_predict_layers", "first_k_dense_replace")]
    if values["model_type"] not in ("deepseek_v3", "deepseek_v2", "deepseek"):
        faults.append(f"model_type: {values['model_type']!r}; write deepseek_v3, deepseek_v2 or deepseek")
    if values["hidden_act"] != "silu":
        faults.append(f"hidden_act: {values['hidden_act']!r} is not supported; write silu")
    for name in ("rms_norm_eps", "rope_theta", "initializer_range", "routed_scaling_factor"):
        if not _is_number(values[name]) or values[name] <= 0:
            faults.append(f"{name}: must be a number above 0, got {values[name]!r}")
    for name in ("bias_update_speed", "balance_loss_alpha", "mtp_loss_weight"):
        if not _is_number(values[name]) or values[name] < 0:
            faults.append(f"{name}: must be a number of at least 0, got {values[name]!r}")
    for name in ("norm_topk_prob", "tie_word_embeddings", "rope_interleave"):
        if not isinstance(values[name], bool):
            faults.append(f"{name}: must be true or false, got {values[name]!r}")
    faults += _attention_faults(values)
    faults += _rope_faults(values["rope_scaling"])
    if values["n_routed_experts"] is not None:
        faults += _expert_faults(values)
    return [fault for fault in faults if fault]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _positive_fault(name: str, value: Any) -> str:
    return "" if _is_integer(value) and value > 0 else f"{name}: must be an integer above 0, got {value!r}"


def _natural_fault(name: str, value: Any) -> str:
    return "" if _is_integer(value) and value >= 0 else f"{name}: must be an integer of at least 0, got {value!r}"


def _attention_faults(values: dict[str, Any]) -> list[str]:
    heads, hidden = values["num_attention_heads"], values["hidden_size"]
    faults = []
    if values["num_key_value_heads"] not in (None, heads):
        faults.append(
            f"num_key_value_heads: {values['num_key_value_heads']!r} differs from num_attention_heads ({heads!r}); "
            "grouped-query attention is no part of these models, write the same number"
        )
    if values["kv_lora_rank"] is None:
        given = [name for name in (*_LATENT[1:], "q_lora_rank") if values[name] is not None]
        if given:
            faults.append(f"kv_lora_rank: missing although {', '.join(given)} is given; latent attention needs it")
        elif not any(_positive_fault("", n) for n in (heads, hidden)) and (hidden % heads or hidden // heads % 2):
            faults.append(f"hidden_size: {hidden} must be num_attention_heads ({heads}) times an even head size")
        return faults
    faults += [_positive_fault(name, values[name]) for name in _LATENT]
    if values["q_lora_rank"] is not None:
        faults.append(_positive_fault("q_lora_rank", values["q_lora_rank"]))
    if _is_integer(values["qk_rope_head_dim"]) and values["qk_rope_head_dim"] % 2:
        faults.append(
            f"qk_rope_head_dim: {values['qk_rope_head_dim']} is odd; rotation needs pairs, write an even number"
        )
    return faults


def _rope_faults(scaling: Any) -> list[str]:
    if scaling is None:
        return []
    if not isinstance(scaling, dict):
        return [f"rope_scaling: must be an object or null, got {scaling!r}"]
    if scaling.get("type") != "yarn":
        return [f"rope_scaling.type: {scaling.get('type')!r} is not supported; write yarn, or null for plain rotation"]
    faults = [f"rope_scaling.{key}: unknown field" for key in scaling if key not in _YARN_KEYS]
    for name in sorted(_YARN_KEYS - {"type"}):
        value = scaling.get(name)
        needed = name in ("factor", "original_max_position_embeddings")
        least = 1 if needed else 0
        if (value is None and needed) or (value is not None and (not _is_number(value) or value < least)):
            faults.append(f"rope_scaling.{name}: must be a number of at least {least}, got {value!r}")
    return faults


def _expert_faults(values: dict[str, Any]) -> list[str]:
    faults = [fault for name in _EXPERTS if (fault := _positive_fault(name, values[name]))]
    faults.append(_natural_fault("n_shared_experts", values["n_shared_experts"]))
    if values["scoring_func"] not in SCORING_FUNCTIONS:
        faults.append(f"scoring_func: {values['scoring_func']!r} is unknown; write {' or '.join(SCORING_FUNCTIONS)}")
    if values["topk_method"] not in TOPK_METHODS:
        faults.append(f"topk_method: {values['topk_method']!r} is unknown; write {', '.join(TOPK_METHODS)}")
    if any(_positive_fault("", values[name]) for name in _EXPERTS):
        return faults
    experts, groups, kept, top_k = (
        values[name] for name in ("n_routed_experts", "n_group", "topk_group", "num_experts_per_tok")
    )
    if values["topk_method"] == "greedy" and groups != kept:
        faults.append(f"topk_method: greedy ignores groups, yet topk_group is {kept} of n_group {groups}; name another")
    if experts % groups:
        faults.append(f"n_group: {groups} does not divide n_routed_experts ({experts})")
    elif values["topk_method"] == "noaux_tc" and groups > 1 and experts // groups < 2:
        faults.append(f"n_group: {groups} leaves one expert a group; noaux_tc scores a group by its two best experts")
    if kept > groups:
        faults.append(f"topk_group: {kept} is more than n_group ({groups})")
    held = min(kept, groups) * (experts // groups)
    if top_k > held:
        faults.append(
            f"num_experts_per_tok: {top_k} is more than the {held} experts that topk_group ({kept}) groups hold"
        )
    return faults
