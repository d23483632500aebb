"""An update is applied, clipped or left out exactly, at every ZeRO stage and precision, on two ranks."""

import json
import math

import pytest
from launching import run_ranks

KINDS = [f"fp32 {stage}" for stage in range(4)]
KINDS += ["bf16 1", "bf16 1 fp32 gradients", "fp16 2", "fp16 3"]
SCALED_RATE = 1e8


@pytest.fixture(scope="module")
def report(tmp_path_factory, small_model):
    output = tmp_path_factory.mktemp("updates") / "report.json"
    run_ranks(["tests/distributed/train_updates.py", str(small_model), str(output)], ranks=2, PYTHONPATH=".")
    first, second = (json.loads(output.with_name(f"report.json.{rank}").read_text()) for rank in (0, 1))
    assert first == second, "the ranks disagree"
    return first


@pytest.mark.parametrize("kind", KINDS)
def test_a_left_out_update_leaves_no_trace(report, kind):
    found = report["left_out"][kind]
    assert not found["applied"] and found["finite"]
    assert found["with after"] == found["with before"] == found["without before"]
    assert found["with next"] == found["without next"]
    assert found["with next"][0] != found["with before"], "the next step moved nothing, so nothing was tested"


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_that_is_not_finite_on_one_rank_is_named_on_all(report, kind):
    found = report["left_out"][kind]
    assert found["healthy"] is None and found["poisoned"] == "model.layers.1.mlp.experts.down_proj"


@pytest.mark.parametrize("stage, clip", [(2, 0.0), (2, 1.0), (3, 0.0)])
def test_the_loss_scales_growth_bends_no_update(report, stage, clip):
    found = report["growth"][f"{stage} clip {clip}"]
    assert found["scales"][0] == 1024 and found["scales"][-1] >= 4096, "the scale never grew"
    # half precision has 11 bits, so its gradients are off by some thousandths; a halved update would be off by 0.5
    assert max(found["errors"]) < 0.02, found


@pytest.mark.parametrize("stage", range(4))
def test_clipping_clips_and_logs_the_norm_before(report, stage):
    found = report["clipping"][str(stage)]
    # DeepSpeed divides by norm + 1e-6, so the update stays just under the bound; float32 weights round it
    assert found["update"] == pytest.approx(SCALED_RATE * 1e-9, rel=1e-3)
    assert found["update"] <= SCALED_RATE * 1e-9 * (1 + 1e-6)
    # the gradient itself is the update of an unclipped step at rate 1, rounded to the weights' float32
    assert found["logged"] == pytest.approx(found["gradient"], rel=1e-4) and found["logged"] > 0.1


@pytest.mark.parametrize("stage", range(4))
def test_norms_by_kind_make_up_the_norm(report, stage):
    found = report["clipping"][str(stage)]
    whole = math.sqrt(sum(norm**2 for norm in found["by_kind"].values()))
    assert whole == pytest.approx(found["logged"], rel=1e-5)  # float32 sums in another order
    kinds = {"attention", "dense_mlp", "embedding", "experts", "head", "norm", "other", "router", "shared_experts"}
    assert set(found["by_kind"]) == kinds  # "other" is the projection of multi-token prediction
    assert found["by_kind"] == pytest.approx(report["clipping"]["0"]["by_kind"], rel=1e-4)
