"""A model dispatched by accelerate computes what the whole one does, wherever its layers lie."""

import pytest
import torch
from chat_facts import conversations, write_untrained

from recipes.training.dispatched_model import LossFromLogits, dispatch_trained_model
from recipes.training.evaluation import sum_losses
from recipes.training.trained_model import load_trained_model, open_weights


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    train, _ = conversations()
    return open_weights(write_untrained(tmp_path_factory.mktemp("weights") / "hf", train))


@pytest.fixture
def batches():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 512, (3, 2, 17), generator=generator)
    documents = (torch.arange(16) // 7).expand(2, 16)
    labels = ids[..., 1:].clone()
    labels[:, 0, :5] = -100
    return [
        {"input_ids": ids[k, :, :-1], "labels": labels[k], "document_ids": documents, "valid_tokens": documents >= 0}
        for k in range(3)
    ]


def test_on_one_device_the_sums_are_the_whole_models(weights, batches):
    whole = load_trained_model(weights, device="cpu", dtype=torch.float32)
    spread = dispatch_trained_model(weights, dtype=torch.float32)
    assert not any(tensor.is_meta for tensor in spread.state_dict().values())
    expected = sum_losses(whole, batches, "cpu")
    assert expected[1] == 3 * 32 - 3 * 5
    # the same float32 logits; one takes their cross-entropy in pieces
    torch.testing.assert_close(sum_losses(LossFromLogits(spread), batches, "cpu"), expected, rtol=1e-6, atol=0)


@pytest.mark.gpu
def test_layers_on_a_gpu_and_in_the_cpus_memory(weights, batches):
    whole = load_trained_model(weights, device="cuda", dtype=torch.float32)
    spread = dispatch_trained_model(weights, dtype=torch.float32, max_memory={0: 400_000, "cpu": "4GB"})
    assert len(set(spread.hf_device_map.values())) == 2, spread.hf_device_map
    expected = sum_losses(whole, batches, "cuda")
    # float32 matrix products of another shape and device
    torch.testing.assert_close(sum_losses(LossFromLogits(spread), batches, "cuda"), expected, rtol=1e-4, atol=0)
