"""Weights to and from Hugging Face's files: transformers loads ours, we load theirs and DeepSeek's own layout."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from model_cases import CASES, MOE_16B, V3, build_model, random_ids, relative_difference
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config
from transformers import DeepseekV3ForCausalLM as TheirV3

from model.config import ModelConfig
from model.hf_weights import (
    INDEX,
    SINGLE,
    WeightsError,
    dequantize,
    load_hf_weights,
    parts_of_folder,
    parts_of_state,
    save_hf_weights,
)
from model.transformer import DeepseekForCausalLM

MTP = V3 | {"num_nextn_predict_layers": 2}


def save(model, folder, dtype=torch.float32, config=None, **kwargs):
    config = config or model.config
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    save_hf_weights(parts_of_state(model.state_dict(), config), config, folder, dtype=dtype, **kwargs)


def empty_model(values):
    model = DeepseekForCausalLM(ModelConfig.from_dict(values))
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(float("nan"))
    return model.eval()


def tensors_in(folder):
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


@pytest.mark.parametrize("name", ["v3_yarn", "v3_not_normalised_no_shared", "v3_without_q_lora_tied", "v2", "v2_lite"])
@pytest.mark.parametrize("shard_bytes", [1 << 30, 40_000])
def test_transformers_loads_ours(name, shard_bytes, tmp_path):
    """No key missing or unexpected; the same weights to the bit; and back in ours, the same logits to the bit."""
    model = build_model(CASES[name]).eval()
    save(model, tmp_path, max_shard_bytes=shard_bytes)
    assert (tmp_path / INDEX).exists() == (shard_bytes < 1 << 30)
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    state = theirs.state_dict()
    for key, tensor in model.state_dict().items():
        assert torch.equal(state[key], tensor), key
    ids = random_ids(2, 16)
    back = empty_model(CASES[name])
    load_hf_weights(back, tmp_path, back.config)
    with torch.no_grad():
        assert relative_difference(model(ids)["logits"], theirs(ids).logits) <= 1e-5  # float32, as in the parity test
        assert torch.equal(back(ids)["logits"], model(ids)["logits"])


@pytest.mark.parametrize("family", ["v3", "v2"])
def test_we_load_what_transformers_saves(family, tmp_path):
    config_class, model_class = {
        "v3": (DeepseekV3Config, TheirV3),
        "v2": (DeepseekV2Config, DeepseekV2ForCausalLM),
    }[family]
    source = build_model(CASES[family])
    theirs = model_class(config_class(**source.config.to_dict())).eval()
    theirs.load_state_dict(source.state_dict())
    theirs.save_pretrained(tmp_path, max_shard_size="50KB")
    config = ModelConfig.from_file(tmp_path / "config.json")
    ours = DeepseekForCausalLM(config).eval()
    load_hf_weights(ours, tmp_path, config)
    for key, tensor in source.state_dict().items():
        assert torch.equal(ours.state_dict()[key], tensor), key


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_dtype_asked_for_and_what_stays_float32(dtype, tmp_path):
    model = build_model(V3)
    save(model, tmp_path, dtype)
    for name, tensor in tensors_in(tmp_path).items():
        routes = name.endswith(("mlp.gate.weight", "e_score_correction_bias"))
        assert tensor.dtype == (torch.float32 if routes else dtype), name
    back = empty_model(V3)
    load_hf_weights(back, tmp_path, back.config)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(back.state_dict()[bias], model.state_dict()[bias])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert theirs.model.layers[1].mlp.gate.e_score_correction_bias.dtype == torch.float32


def test_mtp_layers_lie_behind_the_main_ones_or_are_left_out(tmp_path):
    model = build_model(MTP)
    save(model, tmp_path / "keep")
    names = tensors_in(tmp_path / "keep").keys()
    for layer in (3, 4):
        for part in ("enorm", "hnorm", "eh_proj", "shared_head.norm", "mlp.experts.7.up_proj", "self_attn.o_proj"):
            assert f"model.layers.{layer}.{part}.weight" in names
    back = empty_model(MTP)
    load_hf_weights(back, tmp_path / "keep", back.config)
    assert all(torch.equal(back.state_dict()[k], v) for k, v in model.state_dict().items())

    without = ModelConfig.from_dict(MTP | {"num_nextn_predict_layers": 0})
    save(model, tmp_path / "drop", config=without)
    assert not any(name.startswith(("model.layers.3", "model.layers.4")) for name in tensors_in(tmp_path / "drop"))
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "drop", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    # A model without MTP reads files that have it; one with MTP does not take files that lack it.
    load_hf_weights(empty_model(V3), tmp_path / "keep", without)
    with pytest.raises(WeightsError, match="model.layers.3.enorm.weight is missing"):
        load_hf_weights(back, tmp_path / "drop", back.config)


def test_the_16b_layout_round_trips(tmp_path):
    model = build_model(MOE_16B)
    save(model, tmp_path)
    assert "model.layers.1.self_attn.k_proj.weight" in tensors_in(tmp_path)
    back = empty_model(MOE_16B)
    load_hf_weights(back, tmp_path, back.config)
    assert all(torch.equal(back.state_dict()[k], v) for k, v in model.state_dict().items())


def quantize(weight):
    """Block-scaled FP8 by loops: what a published checkpoint holds."""
    quantized = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = (slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1)))
            scales[i, j] = weight[block].abs().max() / 448  # the largest float8_e4m3fn
            quantized[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
    return quantized, scales


def test_deepseeks_own_layout_with_fp8_blocks(tmp_path):
    """Copies of embedding and head in the MTP layer, FP8 linears whose sizes are no multiples of 128, two shards."""
    values = MTP | {"hidden_size": 160, "intermediate_size": 300, "num_nextn_predict_layers": 1}
    model = build_model(values)
    save(model, tmp_path)
    tensors = tensors_in(tmp_path)
    (tmp_path / SINGLE).unlink()
    published = {
        "model.layers.3.embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        "model.layers.3.shared_head.head.weight": tensors["lm_head.weight"].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
    }
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight") and "eh_proj" not in name:
            published[name], published[name + "_scale_inv"] = quantize(tensor)
        else:
            published[name] = tensor if "gate" in name else tensor.bfloat16()
    files = {name: f"model-{1 + (i % 2)}.safetensors" for i, name in enumerate(sorted(published))}
    for file in set(files.values()):
        save_file({n: t for n, t in published.items() if files[n] == file}, tmp_path / file)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": files}))

    back = empty_model(values)
    load_hf_weights(back, tmp_path, back.config)
    for name, tensor in model.state_dict().items():
        # float8_e4m3fn has three bits after the point: half of 2^-3 of each element's size; bfloat16 seven.
        bound = 2**-4 * tensor.abs() + tensor.abs().amax() * 2**-9
        assert ((back.state_dict()[name] - tensor).abs() <= bound).all(), name
    gate = "model.layers.1.mlp.gate.weight"
    assert torch.equal(back.state_dict()[gate], model.state_dict()[gate])

    # The same folder as the source of another one: dequantized, in the dtype asked for.
    out = tmp_path / "out"
    out.mkdir()
    save_hf_weights(parts_of_folder(tmp_path, back.config), back.config, out, dtype=torch.float32)
    again = empty_model(values)
    load_hf_weights(again, out, again.config)
    assert all(torch.equal(again.state_dict()[k], v) for k, v in back.state_dict().items())


def test_dequantize_by_hand():
    weight = torch.ones(130, 257).to(torch.float8_e4m3fn)
    out = dequantize(weight, torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    assert out[127, 127] == 1 and out[127, 128] == 2 and out[129, 255] == 5 and out[128, 256] == 6


def test_faults_are_named_and_leave_the_model_alone(tmp_path):
    model = build_model(V3)
    save(model, tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    good = dict(tensors)
    tensors["model.extra.weight"] = torch.zeros(2)
    tensors["model.norm.weight"] = torch.zeros(5)
    del tensors["lm_head.weight"], tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / SINGLE)
    target = build_model(V3, seed=5)
    before = {k: v.clone() for k, v in target.state_dict().items()}
    with pytest.raises(WeightsError) as error:
        load_hf_weights(target, tmp_path, target.config)
    text = "\n".join(error.value.faults)
    assert len(error.value.faults) == 5
    for part in ("lm_head.weight is missing", "experts.3.up_proj.weight is missing", "model.extra.weight is no part"):
        assert part in text
    assert "model.norm.weight has shape (5,), the config makes it (32,)" in text
    assert f"{name} is F8_E4M3, and {name}_scale_inv is missing" in text
    assert all(torch.equal(target.state_dict()[k], v) for k, v in before.items())

    good[name], good[name + "_scale_inv"] = good[name].to(torch.float8_e4m3fn), torch.ones(2, 1)
    save_file(good, tmp_path / SINGLE)
    with pytest.raises(WeightsError, match=r"has shape \(2, 1\), the blocks of \(48, 32\) need \(1, 1\)"):
        load_hf_weights(target, tmp_path, target.config)


def test_files_that_are_not_there_or_not_readable(tmp_path):
    config = ModelConfig.from_dict(V3)
    model = build_model(V3)
    with pytest.raises(WeightsError, match="holds neither"):
        load_hf_weights(model, tmp_path, config)
    save(model, tmp_path, max_shard_bytes=40_000)
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) // 2])
    with pytest.raises(WeightsError, match=f"{shard.name}: cannot be read as safetensors"):
        load_hf_weights(model, tmp_path, config)
    shard.unlink()
    with pytest.raises(WeightsError, match=f"{shard.name}: missing, though"):
        load_hf_weights(model, tmp_path, config)
    (tmp_path / INDEX).write_text("[]")
    with pytest.raises(WeightsError, match="not an index"):
        load_hf_weights(model, tmp_path, config)


def test_weights_to_write_are_checked(tmp_path):
    model = build_model(V3)
    state = dict(model.state_dict())
    del state["model.norm.weight"]
    with pytest.raises(WeightsError, match="model.norm.weight: missing"):
        parts_of_state(state, model.config)
    state["model.norm.weight"] = torch.zeros(3)
    with pytest.raises(WeightsError, match=r"model.norm.weight: shape \(3,\)"):
        save_hf_weights(parts_of_state(state, model.config), model.config, tmp_path, dtype=torch.float32)


_STREAM_SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
import torch
from model.config import ModelConfig
from model.hf_weights import parts_of_state, read_hf_weights, save_hf_weights
from model.hf_layout import file_parts
from model.transformer import DeepseekForCausalLM

folder = Path({folder!r})
config = ModelConfig.from_dict({values!r})
with torch.device("meta"):
    shapes = {{name: tensor.shape for name, tensor in DeepseekForCausalLM(config).state_dict().items()}}

class Lazy(dict):
    def __getitem__(self, name):
        return torch.full(shapes[name], 0.5)

def peak():  # not ru_maxrss: a process inherits its parent's
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024

before = peak()
save_hf_weights(parts_of_state(Lazy(shapes), config), config, folder, dtype=torch.float32, max_shard_bytes=32 << 20)
written = peak()
total = sum(tensor.numel() * 8 * (tensor.mean().item() == 0.5) // 2 for _, tensor in read_hf_weights(folder, config))
print(total, written - before, peak() - before)
"""


def test_both_directions_stream(tmp_path):
    """A model of 450 MB in shards of 32 MB: writing and reading never hold more than a few of them."""
    values = V3 | {"hidden_size": 1024, "moe_intermediate_size": 512, "n_routed_experts": 32, "num_hidden_layers": 3}
    script = _STREAM_SCRIPT.format(root=str(Path(__file__).resolve().parents[2]), folder=str(tmp_path), values=values)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    total, writing, reading = map(int, done.stdout.split())
    print(f"{total / 1e6:.0f} MB in all; peak above the start: {writing / 1e6:.0f} MB, both {reading / 1e6:.0f} MB")
    assert total > 400e6
    # One shard, one fused tensor (134 MB), and what the allocator and the mapped files hold beside them.
    assert writing < 134e6 + 3 * 34e6 and reading < 134e6 + 4 * 34e6


def test_no_python_pickle_is_written(tmp_path):
    save(build_model(V3), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", SINGLE]
    with safe_open(tmp_path / SINGLE, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
