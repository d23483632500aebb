"""Initial values are a function of the seed and the parameter's name."""

import dataclasses

import torch

from model.config import load_model_config
from model.initialization import initialize_parameter_
from model.moe import iter_routers
from model.transformer import DeepseekForCausalLM


def test_every_parameter_gets_its_distribution():
    model = DeepseekForCausalLM(dataclasses.replace(load_model_config("tiny"), num_nextn_predict_layers=1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    model.init_weights(7)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            # The estimate of a deviation from n draws is off by 1 / sqrt(2 n) of it; five of these are never reached.
            bound = 5 / (2 * parameter.numel()) ** 0.5
            assert abs(parameter.std().item() / 0.02 - 1) < bound, name
            assert abs(parameter.mean().item()) < 5 * 0.02 / parameter.numel() ** 0.5, name
    assert all(router.e_score_correction_bias.abs().sum() == 0 for _, router in iter_routers(model))


def test_norms_are_the_one_dimensional_parameters():
    """The rule by name finds all of them and nothing else, in every attention and MTP part."""
    for preset in ("tiny", "v3", "deepseek_moe_16b"):
        with torch.device("meta"):
            model = DeepseekForCausalLM(load_model_config(preset))
        for name, parameter in model.named_parameters():
            assert (parameter.dim() == 1) == name.endswith("norm.weight"), name


def test_order_dtype_and_device_do_not_matter():
    whole = DeepseekForCausalLM(dataclasses.replace(load_model_config("tiny"), num_nextn_predict_layers=1))
    whole.init_weights(3)
    one = torch.empty(8, 384, 256)
    name = "model.layers.2.mlp.experts.gate_up_proj"
    whole.init_parameter_(name, one, 3)
    assert torch.equal(one, whole.get_parameter(name))
    narrow = torch.empty(8, 384, 256, dtype=torch.bfloat16)
    initialize_parameter_(name, narrow, std=0.02, seed=3)
    assert torch.equal(narrow, one.bfloat16())


def test_names_and_seeds_differ():
    values = []
    for name, seed in (("a.weight", 0), ("b.weight", 0), ("a.weight", 1)):
        values.append(torch.empty(64))
        initialize_parameter_(name, values[-1], std=1.0, seed=seed)
    assert not torch.equal(values[0], values[1]) and not torch.equal(values[0], values[2])


def test_a_large_parameter_is_drawn_in_pieces_none_of_which_repeats_another(monkeypatch):
    import model.initialization as initialization

    whole, pieces = torch.empty(5000), torch.empty(5000)
    initialize_parameter_("a.weight", whole, std=1.0, seed=0)
    monkeypatch.setattr(initialization, "_CHUNK_ELEMENTS", 1024)
    initialize_parameter_("a.weight", pieces, std=1.0, seed=0)
    assert torch.equal(pieces[:1024], whole[:1024])
    assert len(set(pieces.tolist())) > 4990  # no piece repeats another


def test_some_rows_get_the_values_of_the_whole_and_the_others_are_not_touched(monkeypatch):
    import model.initialization as initialization

    monkeypatch.setattr(initialization, "_CHUNK_ELEMENTS", 100)  # rows begin and end within pieces
    whole, part = torch.empty(8, 6, 7), torch.full((8, 6, 7), float("nan"))
    initialize_parameter_("a.weight", whole, std=0.02, seed=3)
    initialize_parameter_("a.weight", part, std=0.02, seed=3, rows=range(3, 6))
    assert torch.equal(part[3:6], whole[3:6])
    assert part[:3].isnan().all() and part[6:].isnan().all()


def test_only_the_chunks_that_are_kept_are_drawn_and_threads_do_not_change_them(monkeypatch):
    import model.initialization as initialization

    monkeypatch.setattr(initialization, "_CHUNK_ELEMENTS", 10)
    drawn, generator = [], initialization._generator
    monkeypatch.setattr(initialization, "_generator", lambda *key: drawn.append(key[2]) or generator(*key))
    whole, part, threaded = (torch.full((8, 10), float("nan")) for _ in range(3))
    initialize_parameter_("a.weight", whole, std=0.02, seed=3)
    assert drawn == list(range(8))
    drawn.clear()
    initialize_parameter_("a.weight", part, std=0.02, seed=3, rows=range(3, 5))
    assert drawn == [3, 4]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    initialize_parameter_("a.weight", threaded, std=0.02, seed=3)
    assert torch.equal(threaded, whole) and torch.equal(part[3:5], whole[3:5])
