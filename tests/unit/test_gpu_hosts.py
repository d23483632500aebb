"""What only a host with GPUs would show, tried where the decision is made."""

import dataclasses
import sys
from types import SimpleNamespace

import pytest
import torch
from deepspeed.moe.ep_experts import GroupedExperts

from model.config import load_model_config
from model.transformer import DeepseekForCausalLM
from recipes.cluster.launch import gpu_names
from recipes.training import heldout_loss, sample, summary, trained_model
from recipes.training.diagnosis import _watched
from recipes.training.profile_verdict import top_operators


def test_gpus_are_named_as_the_launcher_counts_them(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_names([0, 3]) == ["0", "3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 6,7")
    assert gpu_names([0, 2]) == ["4", "7"]
    assert gpu_names([0, 3]) == ["0", "3"]  # one GPU bound to each task names too few
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5ebe9f43,GPU-ac33420d")
    assert gpu_names([1]) == ["1"]


@pytest.mark.parametrize(
    ("device", "ranks", "here", "visible", "expected"),
    [
        ("cpu", 1, 1, "", "deepspeed recipes/pretrain.py"),
        ("cpu", 2, 2, "", "deepspeed --num_gpus 2 recipes/pretrain.py"),
        ("cuda", 1, 1, "", "deepspeed --include localhost:0 recipes/pretrain.py"),
        ("cuda", 2, 2, "5,6,7", "deepspeed --include localhost:5,6 recipes/pretrain.py"),
        ("cuda", 16, 8, "0,1,2,3,4,5,6,7", "deepspeed --hostfile hostfile recipes/pretrain.py"),
    ],
)
def test_a_run_goes_on_where_it_was(monkeypatch, device, ranks, here, visible, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(sys, "argv", ["recipes/pretrain.py"])
    plan = SimpleNamespace(launch=SimpleNamespace(world_size=ranks, local_world_size=here), device_type=device)
    assert summary.resume_command(plan).endswith(expected)


@pytest.mark.parametrize(("ranks", "stops"), [(1, [2]), (8, [])])
def test_no_rank_stops_sampling_before_the_others(monkeypatch, ranks, stops):
    given = {}
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)
    monkeypatch.setattr(sample, "generate_tokens", lambda *_, **words: given.update(words) or [5, 2, 7])
    config = SimpleNamespace(uses_latent_attention=True, max_position_embeddings=99)
    engine = SimpleNamespace(module=SimpleNamespace(config=config), device="cpu", eval=lambda: None, train=lambda: None)
    assert sample.sample_tokens(engine, [1], 2, temperature=0.0) == [5, 2]
    assert given["stop_ids"] == stops


def test_a_fault_is_not_blamed_on_rows_that_nobody_reads_nor_asked_of_frozen_weights():
    class Unwritten(GroupedExperts):
        def forward(self, hidden):
            return torch.full_like(hidden, float("nan"))

    experts = Unwritten(4, 4, 1, use_grouped_mm=False)
    frozen, last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    frozen.requires_grad_(False)
    found = []
    with _watched(torch.nn.ModuleList([frozen, experts, last]), found):
        hidden = frozen(torch.ones(2, 4))
        experts(hidden)
        last(hidden).sum().backward()
    assert found == []
    with _watched(torch.nn.ModuleList([frozen, last]), found):
        last(frozen(torch.full((2, 4), float("inf")))).sum().backward()
    assert found[0] == "the output of 0 (Linear)"


def test_a_kernel_is_listed_once():
    def average(key, kind, time):
        return SimpleNamespace(key=key, device_type=SimpleNamespace(name=kind), self_device_time_total=time, count=1)

    table = top_operators([average("aten::mm", "CPU", 3e3), average("gemm_kernel", "CUDA", 3e3)], on_gpu=True)
    assert [line.split() for line in table[1:]] == [["aten::mm", "1", "3.0", "100.0%"]]


@pytest.mark.parametrize("tied", [False, True])
def test_a_trained_model_is_never_on_the_device_in_another_dtype(monkeypatch, tied):
    config, made = dataclasses.replace(load_model_config("tiny"), tie_word_embeddings=tied), []

    class Watched(DeepseekForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            made.extend(self.parameters())

    monkeypatch.setattr(trained_model, "DeepseekForCausalLM", Watched)
    source = DeepseekForCausalLM(config)
    source.init_weights(0)
    weights = trained_model.TrainedWeights(
        config, lambda wanted: trained_model.parts_of_state(source.state_dict(), wanted), None
    )
    model = trained_model.load_trained_model(weights, device="cpu", dtype=torch.bfloat16)
    assert made and all(parameter.is_meta for parameter in made)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    for name, theirs in source.state_dict().items():
        assert torch.equal(theirs.to(model.state_dict()[name].dtype), model.state_dict()[name]), name
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    for (name, theirs), ours in zip(source.named_buffers(), model.buffers(), strict=True):
        assert theirs.dtype == ours.dtype and torch.equal(theirs, ours), name


def test_ranks_on_gpus_add_up_a_cpus_losses_where_nccl_can_carry_them(monkeypatch):
    class Totals:
        def cuda(self):
            return "on the GPU"

    summed = []
    monkeypatch.setattr(heldout_loss, "evaluation_batches", lambda *_, **__: [])
    monkeypatch.setattr(heldout_loss, "sum_losses", lambda *_: Totals())
    monkeypatch.setattr(heldout_loss, "as_evaluation", lambda totals, num_bytes: 1 / 0)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "nccl")
    monkeypatch.setattr(torch.distributed, "all_reduce", summed.append)
    words = {"source": "", "seq_length": 8, "batch_size": 1, "device": "cpu", "rank": 0, "world_size": 2}
    with pytest.raises(ZeroDivisionError):
        heldout_loss.heldout_loss(None, SimpleNamespace(num_bytes=1), document_mask=False, **words)
    assert summed == ["on the GPU"]
