"""Planned activations: the bytes kept are those that autograd holds, the peak is that of a whole micro-step."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from model import attention, experts, wide_products
from model.config import ModelConfig
from model.transformer import DeepseekForCausalLM
from recipes.cluster.activations import activation_bytes

LENGTH = 544  # tokens

BASE = dict(
    model_type="deepseek_v3", vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=3,
    num_attention_heads=4, num_nextn_predict_layers=1, q_lora_rank=None, kv_lora_rank=32, qk_nope_head_dim=16,
    qk_rope_head_dim=16, v_head_dim=32, n_routed_experts=8, n_shared_experts=1, moe_intermediate_size=96,
    num_experts_per_tok=2, first_k_dense_replace=1, max_position_embeddings=1024, initializer_range=0.02,
)  # fmt: skip
MODELS = {
    "experts": dict(num_experts_per_tok=4, q_lora_rank=48),
    "padded values": dict(qk_nope_head_dim=48, qk_rope_head_dim=32, v_head_dim=48, num_experts_per_tok=1),
    "dense": dict(n_routed_experts=None, n_shared_experts=0, moe_intermediate_size=None, num_experts_per_tok=None,
                  first_k_dense_replace=0, num_nextn_predict_layers=0, intermediate_size=1024),
    "large vocabulary": dict(vocab_size=8192, num_nextn_predict_layers=0),
    "plain attention": dict(kv_lora_rank=None, qk_nope_head_dim=None, qk_rope_head_dim=None, v_head_dim=None),
}  # fmt: skip


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations make, as long as they live; those of `known` tensors do not count."""

    def __init__(self, known):
        super().__init__()
        self.sizes = {tensor.untyped_storage()._cdata: 0 for tensor in known}
        self.now = self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage):
        address = storage._cdata
        if address in self.sizes:
            return
        self.sizes[address] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, address)

    def _free(self, address):
        self.now -= self.sizes.pop(address)


def measure(config, dtype, policy):
    """Bytes held after the forward pass, and at most by the end of the backward pass, beside the gradients in place."""
    model = DeepseekForCausalLM(config)
    model.init_weights(0)
    model.to(dtype).train()
    model.set_gradient_checkpointing(policy)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    known = [*model.parameters(), *(p.grad for p in model.parameters()), *model.buffers()]
    ids = torch.arange(LENGTH).remainder(config.vocab_size).unsqueeze(0)
    live = LiveBytes(known)
    with live:
        output = model(ids, labels=ids)
        kept = live.now
        output["loss"].backward()
    return kept, live.peak


@pytest.mark.parametrize("policy", ["none", "full", "selective"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_planned_is_measured(monkeypatch, name, dtype, policy):
    monkeypatch.setattr(experts, "_CPU_HALF_PRECISION_ROWS", 1)  # the plan is for GPUs, which fill up no rows
    monkeypatch.setattr(attention, "beats_fused", lambda *_: False)  # and take torch's fused attention
    monkeypatch.setattr(wide_products, "_BF16_IS_SLOW", False)  # in the model's own dtype
    config = ModelConfig.from_dict(BASE | MODELS[name])
    kept, peak = measure(config, dtype, policy)
    planned = activation_bytes(
        config,
        micro_batch_size=1,
        seq_length=LENGTH,
        element_bytes=dtype.itemsize,
        checkpointing=policy,
        device_type="cpu",
    )
    # after the forward pass the head's gradients are there: of its rows, and of the table (one block of logits here)
    rows = LENGTH * (1 + config.num_nextn_predict_layers)
    head = (rows + config.vocab_size) * config.hidden_size * dtype.itemsize
    # what is kept is counted tensor by tensor; 5% for the indices and scalars of a step
    assert planned.kept + head == pytest.approx(kept, rel=0.05)
    # the peak adds the largest gradient of a layer's weights on its way to its place, which the plan counts apart
    with torch.device("meta"):
        shapes = DeepseekForCausalLM(config)
    arriving = max(p.numel() for n, p in shapes.named_parameters() if ".layers." in n) * dtype.itemsize
    planned_peak = planned.kept + max(planned.layer + arriving, planned.logits)
    # 15% is what the plan promises
    assert planned_peak == pytest.approx(peak, rel=0.15)
