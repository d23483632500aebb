"""Planning by arithmetic: memory, communication and the scaling law against numbers worked by hand."""

from types import SimpleNamespace

import pytest

from model.config import load_model_config
from recipes.cluster.communication import all_to_all_bytes, bytes_sent_per_step
from recipes.cluster.memory import model_state_bytes
from recipes.cluster.planning import scaling_law

P = 1_000_000
GROUPS = [[(f"p{i}", 1000) for i in range(P // 1000)]]
DENSE = SimpleNamespace(num_hidden_layers=0, num_nextn_predict_layers=0)


def config(stage, dtype="bf16", accumulation=4, **zero):
    parts = {"zero_optimization": {"stage": stage, **zero}, "gradient_accumulation_steps": accumulation}
    return parts | {dtype: {"enabled": True}, "optimizer": {"type": "AdamW", "params": {}}}


@pytest.mark.parametrize(
    "stage, world, weights, gradients, optimizer",
    [
        # bf16: 2 bytes of weights and of gradients, 12 of float32 weights and two moments, for each parameter
        (0, 1, 2, 2, 12),
        (0, 8, 2, 2, 12),
        (1, 8, 2, 2, 12 / 8),
        (2, 8, 2, 2 / 8, 12 / 8),
        (3, 8, 2 / 8, 2 / 8, 12 / 8),
    ],
)
def test_bytes_a_parameter(stage, world, weights, gradients, optimizer):
    zero = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    state = model_state_bytes(GROUPS, config(stage, **zero), world)
    # the border between two ranks' parts falls into one parameter of 1,000
    assert state.weights / P == pytest.approx(weights, rel=1e-3)
    assert state.gradients / P == pytest.approx(gradients, rel=1e-2)
    assert state.optimizer / P == pytest.approx(optimizer, rel=1e-3)


def test_small_parameters_stay_whole_at_stage_3():
    state = model_state_bytes(GROUPS, config(3, stage3_param_persistence_threshold=1000), 8)
    assert state.weights / P == 2 / 8 + 2


def test_offloaded_state_is_in_the_hosts_memory():
    state = model_state_bytes(GROUPS, config(2, offload_optimizer={"device": "cpu"}), 2)
    assert state.optimizer == 0 and state.host / P == pytest.approx((12 + 4 + 2) / 2, rel=1e-2)


def test_an_optimizer_on_nvme_passes_through_buffers_of_one_sub_group():
    # by hand, one rank: three tensors of 1,000,000 elements, sub-groups of two and of one; and one of 1,000, which
    # DeepSpeed keeps in memory, as it is below 1 MiB
    groups = [[("a", 1_000_000), ("b", 1_000_000), ("c", 1_000_000)], [("norm", 1000)]]
    zero = {"device": "nvme", "nvme_path": "/n"}
    state = model_state_bytes(groups, config(3, offload_optimizer=zero, sub_group_size=1_500_000), 1)
    assert state.disk == 3_000_000 * (12 + 4)  # weights, two moments, a gradient
    kept = 1000 * (12 + 4) + 3_001_000 * 2  # and all gradients in bf16, as they come
    assert state.host == kept + 4 * 2_000_000 * 4 + 1_000_000 * 2
    zero = {"offload_optimizer": zero, "offload_param": zero | {"max_in_cpu": 0, "buffer_size": 1_000_000}}
    both = model_state_bytes(groups, config(3, **zero, sub_group_size=1_500_000), 1)
    assert both.weights == 0 and both.disk - state.disk == 3_001_000 * 2
    assert both.host - state.host == 5 * 1_000_000 * 2


def test_experts_are_shared_by_fewer_ranks():
    # half of the elements are experts: 8 ranks hold a quarter each of them and split it two ways
    groups = [[("model.layers.0.mlp.experts.down_proj", P), ("model.norm.weight", P)]]
    parallel = config(2) | {"expert_parallel": {"enabled": True, "autoep_size": 4}}
    state = model_state_bytes(groups, parallel, 8)
    assert state.weights == 2 * (P // 4 + P)
    assert state.optimizer == 12 * (P // 4 // 2 + P // 8)


def test_other_optimizers_keep_other_states():
    def optimizer(name, **params):
        return model_state_bytes(GROUPS, config(1) | {"optimizer": {"type": name, "params": params}}, 1).optimizer / P

    assert optimizer("Lion") == 8 and optimizer("SGD") == 4 and optimizer("SGD", momentum=0.9) == 8


def sent(settings, world=4):
    return bytes_sent_per_step(GROUPS, DENSE, settings, world_size=world, tokens_per_micro_batch=100) / P


def test_bytes_sent():
    share = 3 / 4  # of a ring over 4 ranks
    assert sent(config(0)) == pytest.approx(2 * 2 * share)  # one all-reduce a step
    assert sent(config(1)) == pytest.approx((2 * 2 + 2) * share)  # and the updated weights
    assert sent(config(2)) == pytest.approx((4 * 2 * 2 + 2) * share)  # an all-reduce each micro-batch
    assert sent(config(2, use_multi_rank_bucket_allreduce=False)) == pytest.approx((4 * 2 + 2) * share)
    whole = {"stage3_param_persistence_threshold": 0}
    assert sent(config(3, **whole)) == pytest.approx(4 * (2 + 2) * share)  # weights and gradients each micro-batch
    far = whole | {"stage3_max_reuse_distance": P // 2}
    assert sent(config(3, **far)) == pytest.approx(4 * (2 + 2 * 3 / 4 + 2) * share)  # again, but for the last quarter
    assert sent(config(3)) == pytest.approx((2 + 4 * 2) * share)  # 1,000 elements stay whole: gathered once updated
    assert sent(config(3), world=1) == 0


def test_tokens_sent_to_experts():
    model = load_model_config("v2_lite")  # 26 MoE layers, 6 experts a token, hidden 2048
    groups = [[("model.norm.weight", 1)]]
    parallel = config(1) | {"expert_parallel": {"enabled": True, "autoep_size": 4}}
    bytes_sent = bytes_sent_per_step(groups, model, parallel, world_size=4, tokens_per_micro_batch=100)
    # there and back, forward and backward, 4 micro-batches, bf16; 3 of 4 experts are on other ranks
    assert bytes_sent == pytest.approx(4 * 4 * 26 * 100 * 6 * 2048 * 2 * 3 / 4, rel=1e-6)
    # experts that are recomputed are sent their tokens again: 6 times instead of 4
    again = all_to_all_bytes(model, parallel, tokens_per_micro_batch=100, policy="selective")
    assert again == pytest.approx(bytes_sent * 6 / 4, rel=1e-6)


def test_the_scaling_law_gives_deepseek_llms_own_7b():
    # 30 layers of width 4096 at 4,096 tokens: M = 72 n d^2 + 12 n d l = 3.624e10 + 6.040e9 = 4.228e10; on 2T tokens
    model = SimpleNamespace(num_hidden_layers=30, hidden_size=4096)
    law = scaling_law(model, 4096, 2e12)
    assert law["flops_per_token"] == pytest.approx(4.228e10, rel=1e-3)
    assert law["compute"] == pytest.approx(8.456e22, rel=1e-3)
    # 0.3118 * (8.456e22)^-0.125: log10 is 22.9272, times -0.125 is -2.8659, so 1.3618e-3 * 0.3118
    assert law["learning_rate"] == pytest.approx(4.246e-4, rel=1e-3)
    # 0.2920 * (8.456e22)^0.3271: 7.4995, so 3.1586e7 * 0.2920
    assert law["batch_tokens"] == pytest.approx(9.223e6, rel=2e-3)
