"""Every kind of shipped ds_config trains a small model alike, on two ranks; expert parallelism included."""

import json

import pytest
from launching import run_ranks

from recipes.config.ds_config import DS_CONFIGS

# left out: the one that compiles cpu_adam, and those whose settings another file has on more GPUs
KINDS = ("cpu", "1gpu_fp16", "8gpu_zero1_bf16", "8gpu_zero2_bf16", "8gpu_zero3_bf16", "8gpu_zero3_fp16",
         "256gpu_ep32_bf16")  # fmt: skip


@pytest.fixture(scope="module")
def report(tmp_path_factory, small_model):
    output = tmp_path_factory.mktemp("shipped") / "losses.json"
    words = ["tests/distributed/train_shipped.py", str(small_model), str(output), *KINDS]
    run_ranks(words, ranks=2, PYTHONPATH=".", OMP_NUM_THREADS="1")
    return json.loads(output.read_text())


@pytest.mark.parametrize("name", KINDS)
def test_it_trains_as_fp32_does(report, name):
    assert (DS_CONFIGS / f"{name}.json").exists()
    # half precision keeps 3 digits (bf16)
    losses = report[name]["losses"]
    assert losses == pytest.approx(report["cpu"]["losses"], rel=5e-3)
    assert losses[-1] < losses[0] - 0.05, "nothing was learned, so nothing was compared"


def test_a_skipped_step_moves_no_schedule(report):
    rates = report["a scale too large"]["rates"]
    assert 0 < rates[-1][0] < len(rates) - 1, "some steps, not all, have to be skipped"
    for step, (skipped, rate) in enumerate(rates, start=1):
        # 3e-3 at the end of 5 warm-up steps, of which a skipped one is none; then the cosine, still near its top
        assert rate == pytest.approx(3e-3 * (step - skipped) / 5, rel=1e-6) or step - skipped > 5
