"""Small architectures that together cover every published variation, and random weights that hide nothing."""

import torch

from model.config import ModelConfig
from model.moe import iter_routers
from model.transformer import DeepseekForCausalLM

YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
}
V3 = {
    "model_type": "deepseek_v3",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 163840,
    "num_nextn_predict_layers": 0,
    "balance_loss_alpha": 0.0,
}
V2 = V3 | {
    "model_type": "deepseek_v2",
    "topk_method": "group_limited_greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 16.0,
    "n_shared_experts": 2,
}
V2_LITE = V2 | {
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": None,
    "routed_scaling_factor": 1.0,
}
# Of 16 rotated elements' 8 pairs, YaRN leaves 3 as they are, mixes 3 and interpolates 2.
_YARN_V3 = {"qk_rope_head_dim": 16, "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}
_YARN_V2 = {"qk_rope_head_dim": 16, "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}}

# Every value of every variation occurs with both families where both have it.
CASES: dict[str, dict] = {
    "v3": V3,
    "v3_yarn": V3 | _YARN_V3,
    "v3_yarn_unequal_mscales": V3 | {"rope_scaling": YARN | {"mscale": 1.3, "mscale_all_dim": 0.6}},
    "v3_without_q_lora_tied": V3 | {"q_lora_rank": None, "tie_word_embeddings": True},
    "v3_not_normalised_no_shared": V3 | {"norm_topk_prob": False, "n_shared_experts": 0},
    "v3_no_groups_all_moe": V3 | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "n_shared_experts": 2},
    "v3_half_split_rope": V3 | {"rope_interleave": False},
    "v3_equal_head_dims": V3 | _YARN_V3 | {"v_head_dim": 26},
    "v2": V2,
    "v2_yarn_tied": V2 | _YARN_V2 | {"tie_word_embeddings": True},
    "v2_no_shared_all_moe": V2 | {"n_shared_experts": 0, "first_k_dense_replace": 0},
    "v2_lite": V2_LITE,
    "v2_lite_yarn_one_shared": V2_LITE | _YARN_V2 | {"n_shared_experts": 1},
}
MLA_KEYS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
MOE_16B = {k: v for k, v in V2_LITE.items() if k not in MLA_KEYS} | {"model_type": "deepseek", "rope_interleave": False}


def build_model(values: dict, dtype: torch.dtype = torch.float32, seed: int = 0) -> DeepseekForCausalLM:
    """A model with weights of about the size that keeps activations near 1, norms off 1, and biases that matter."""
    config = ModelConfig.from_dict(values)
    model = DeepseekForCausalLM(config)
    model.init_weights(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.2 * noise)
            elif "embed_tokens" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
        for _, router in iter_routers(model):
            if router.e_score_correction_bias is not None:
                router.e_score_correction_bias.copy_(0.2 * torch.randn(router.experts, generator=generator))
    return model.to(dtype)


def random_ids(batch: int, length: int, vocab_size: int = 61, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def relative_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference of any element, relative to the largest element."""
    return ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30)).item()
