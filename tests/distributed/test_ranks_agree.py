"""The same global batch gives the same training on one rank and on two, at every ZeRO stage."""

import json

import pytest
from launching import metrics, run_ranks

STEPS = 20
STAGES = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def losses(tmp_path_factory, small_corpus, small_model):
    """{(ranks, stage): [loss of each step]}; two processes groups in all, four runs in each."""
    folder = tmp_path_factory.mktemp("runs")
    found = {}
    for ranks in (1, 2):
        runs = []
        for stage in STAGES:
            runs.append(
                f"--deepspeed_config ds_configs/cpu.json --model {small_model} --data {small_corpus} "
                f"--max_steps {STEPS} --seq_length 32 "
                f"--global_batch_size 16 --output_dir {folder}/{ranks}_{stage} --resume never "
                f"--set zero_optimization.stage={stage} train_micro_batch_size_per_gpu=4".split()
            )
        listing = folder / f"{ranks}.json"
        listing.write_text(json.dumps(runs))
        run_ranks(["tests/distributed/train_runs.py", str(listing)], ranks=ranks)
        for stage in STAGES:
            lines = metrics(folder / f"{ranks}_{stage}")
            found[ranks, stage] = [(line["loss"], line["mtp_loss"], line["balance_loss"]) for line in lines]
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_equal_one(losses, stage):
    one, two = losses[1, stage], losses[2, stage]
    assert len(one) == len(two) == STEPS
    # Sums over ranks add the same float32 gradients in another order; 1e-4 is what the README promises.
    for step, (a, b) in enumerate(zip(one, two, strict=True), start=1):
        assert a == pytest.approx(b, rel=1e-4), f"step {step}"
    assert one[-1][0] < one[0][0] - 0.05, "nothing was learned, so nothing was compared"


@pytest.mark.parametrize("stage", STAGES[1:])
def test_stages_equal_stage_0(losses, stage):
    for a, b in zip(losses[1, 0], losses[1, stage], strict=True):
        assert a == pytest.approx(b, rel=1e-4)
