"""The tiny model on one GPU: the same commands, the files that fit one GPU, and no waiting for the host in the step."""

import json

import pytest
import torch
from launching import PRETRAIN, metrics, run_deepspeed, run_python

from model.config import load_model_config
from model.transformer import DeepseekForCausalLM
from recipes.training.grouped_products import choose_grouped_products

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["1gpu_bf16", "1gpu_fp16"])
def test_tiny_learns_with_the_file_for_one_gpu(tmp_path, small_corpus, name):
    words = f"--data {small_corpus} --deepspeed_config ds_configs/{name}.json --max_steps 30 --global_batch_size 8"
    result = run_deepspeed([PRETRAIN, *words.split(), "--output_dir", str(tmp_path / "run")], ranks=1)
    assert result.code == 0, result.output
    losses = [line["loss"] for line in metrics(tmp_path / "run")]
    assert losses[-1] < losses[0] - 0.5


def test_the_fitting_file_is_chosen(small_corpus):
    result = run_python([PRETRAIN, "--data", str(small_corpus), "--dry_run", "--json"])
    plan = json.loads(result.stdout.splitlines()[-1])
    assert "1gpu_" in plan["ds_config_source"] and "1 x cuda" in result.stdout


def test_forward_and_backward_do_not_wait_for_the_host():
    """A synchronisation in the step leaves the GPU idle while the host catches up."""
    model = DeepseekForCausalLM(load_model_config("tiny")).cuda().to(torch.bfloat16)
    model.init_weights(0)
    choose_grouped_products("cuda")
    tokens = torch.randint(0, 4096, (4, 257), device="cuda")
    model(tokens[:, :-1], tokens[:, 1:])["loss"].backward()  # caches and kernels are made here
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(tokens[:, :-1], tokens[:, 1:])["loss"].backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradients_of_the_gpu_are_the_cpus(dtype):
    """Through the kernels of this GPU: attention, experts, norms, head."""
    choose_grouped_products("cuda")
    tokens = torch.randint(0, 4096, (2, 65), generator=torch.Generator().manual_seed(0))
    gradients = []
    for device, used in (("cpu", torch.float32), ("cuda", dtype)):
        model = DeepseekForCausalLM(load_model_config("tiny"))
        model.init_weights(0)
        model.to(device, used)
        model(tokens[:, :-1].to(device), tokens[:, 1:].to(device))["loss"].backward()
        gradients.append({name: p.grad.float().cpu() for name, p in model.named_parameters()})
    expected, got = gradients
    for name, gradient in got.items():
        # 8 bits of each number, over the depth of the model; a CPU's are within 2%
        assert (gradient - expected[name]).norm() < 0.1 * expected[name].norm(), name


def test_gpu_gives_the_losses_of_the_cpu():
    config = load_model_config("tiny")
    tokens = torch.randint(0, 4096, (2, 65), generator=torch.Generator().manual_seed(0))
    losses = []
    for device in ("cpu", "cuda"):
        model = DeepseekForCausalLM(config).to(device)
        model.init_weights(0)
        losses.append(float(model(tokens[:, :-1].to(device), tokens[:, 1:].to(device))["loss"]))
    # float32 sums in another order; TF32 is off by default for matrix products
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
