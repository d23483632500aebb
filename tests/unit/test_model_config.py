"""ModelConfig: published files load unchanged, and a config that cannot work names all its faults at once."""

import dataclasses
import json

import pytest
from transformers import DeepseekV2Config, DeepseekV3Config

from model.config import ConfigError, ModelConfig, load_model_config, preset_names

# The published config.json of DeepSeek-V3, with what it says about its loader and its quantization.
PUBLISHED_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def test_the_published_v3_file_is_the_preset():
    """Apart from the initial deviation, which the published file leaves at its library's default."""
    loaded = ModelConfig.from_dict(PUBLISHED_V3)
    preset = load_model_config("v3")
    same = {"initializer_range": 0.006, "bos_token_id": None, "eos_token_id": None}
    assert dataclasses.replace(loaded, **same) == dataclasses.replace(preset, **same)


def test_both_spellings_of_the_rotary_parameters_are_one():
    values = {k: v for k, v in PUBLISHED_V3.items() if k not in ("rope_scaling", "rope_theta")}
    scaling = {k: v for k, v in PUBLISHED_V3["rope_scaling"].items() if k != "type"}
    values["rope_parameters"] = scaling | {"rope_type": "yarn", "rope_theta": 10000}
    assert ModelConfig.from_dict(values) == ModelConfig.from_dict(PUBLISHED_V3)
    plain = ModelConfig.from_dict(values | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}})
    assert plain.rope_scaling is None and plain.rope_theta == 500.0


@pytest.mark.parametrize("name", preset_names())
def test_presets_survive_the_way_out_and_back(name):
    config = load_model_config(name)
    again = ModelConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config


@pytest.mark.parametrize("name", ["tiny", "small", "v2_lite", "v2", "v3"])
def test_transformers_reads_ours_and_we_read_theirs(name, tmp_path):
    config = load_model_config(name)
    config_class = DeepseekV3Config if config.model_type == "deepseek_v3" else DeepseekV2Config
    theirs = config_class(**config.to_dict())
    for field in ("q_lora_rank", "n_group", "topk_group", "num_nextn_predict_layers", "routed_scaling_factor"):
        assert getattr(theirs, field) == getattr(config, field), field
    assert theirs.rope_parameters["rope_type"] == ("yarn" if config.rope_scaling else "default")
    theirs.save_pretrained(tmp_path)
    again = ModelConfig.from_file(tmp_path / "config.json")
    assert dataclasses.replace(again, extras={}) == config


def test_a_family_alone_says_how_it_routes():
    """transformers' own classes have no scoring_func: their files name the family only."""
    base = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    v3, v2 = (ModelConfig.from_dict(base | {"model_type": f"deepseek_v{n}"}) for n in (3, 2))
    assert (v3.scoring_func, v3.topk_method, v3.norm_topk_prob) == ("sigmoid", "noaux_tc", True)
    assert (v2.scoring_func, v2.topk_method, v2.norm_topk_prob) == ("softmax", "greedy", False)
    assert not ModelConfig.from_dict(base | {"model_type": "deepseek"}).rope_interleave


def test_unknown_keys_are_kept_and_misspelt_ones_refused():
    assert ModelConfig.from_dict(PUBLISHED_V3 | {"pruning_note": "x"}).to_dict()["pruning_note"] == "x"
    with pytest.raises(ConfigError, match="num_expert_per_tok: unknown field; did you mean num_experts_per_tok"):
        ModelConfig.from_dict(PUBLISHED_V3 | {"num_expert_per_tok": 4})


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim"),
        ({"n_group": 7}, "n_group"),
        ({"topk_group": 9}, "topk_group"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok"),
        ({"scoring_func": "tanh"}, "scoring_func"),
        ({"topk_method": "best"}, "topk_method"),
        ({"n_group": 256, "topk_group": 8}, "n_group"),
        ({"topk_method": "greedy"}, "topk_method"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"vocab_size": None}, "vocab_size"),
        ({"num_key_value_heads": 8}, "num_key_value_heads"),
        ({"kv_lora_rank": None}, "kv_lora_rank"),
        ({"v_head_dim": None}, "v_head_dim"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size"),
        ({"n_shared_experts": -1}, "n_shared_experts"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"model_type": "llama"}, "model_type"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"mtp_loss_weight": -0.1}, "mtp_loss_weight"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling.type"),
        ({"rope_scaling": {"type": "yarn", "factor": 40}}, "rope_scaling.original_max_position_embeddings"),
        ({"rope_scaling": PUBLISHED_V3["rope_scaling"] | {"beta": 1}}, "rope_scaling.beta"),
        ({"rope_scaling": "yarn"}, "rope_scaling"),
    ],
)
def test_each_fault_names_its_field(change, field):
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_dict(PUBLISHED_V3 | change)
    assert [fault.split(":")[0] for fault in error.value.faults] == [field]


def test_all_faults_at_once():
    change = {
        "qk_rope_head_dim": 63,
        "n_group": 7,
        "topk_group": 9,
        "scoring_func": "tanh",
        "num_expert_per_tok": 4,
        "attention_bias": True,
    }
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_dict(PUBLISHED_V3 | change)
    assert {fault.split(":")[0] for fault in error.value.faults} == set(change)


def test_plain_attention_needs_heads_that_fit():
    base = load_model_config("deepseek_moe_16b")
    with pytest.raises(ConfigError, match="hidden_size: 2048"):
        dataclasses.replace(base, num_attention_heads=17)
    with pytest.raises(ConfigError, match="kv_lora_rank: missing although v_head_dim is given"):
        dataclasses.replace(base, v_head_dim=64)


def test_names_and_files(tmp_path):
    assert preset_names() == ["deepseek_moe_16b", "small", "tiny", "v2", "v2_lite", "v3"]
    with pytest.raises(ConfigError, match=r"nope: neither a preset \(deepseek_moe_16b, small, tiny, v2, v2_lite, v3\)"):
        load_model_config("nope")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(load_model_config("tiny").to_dict()))
    assert load_model_config(file).hidden_size == load_model_config(tmp_path).hidden_size == 256
    file.write_text("{")
    with pytest.raises(ConfigError, match="config.json: not valid JSON"):
        load_model_config(file)
    file.write_text("[]")
    with pytest.raises(ConfigError, match="config.json: must hold a JSON object, not a list"):
        load_model_config(file)
    file.write_text('{"hidden_size": 8}')
    with pytest.raises(ConfigError) as error:
        load_model_config(file)
    assert all(fault.startswith(str(file)) for fault in error.value.faults)
