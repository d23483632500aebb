"""The same global batch gives the same training on one rank and on two, at every ZeRO stage, also while it grows."""

import json

import pytest
from launching import metrics, run_ranks

STEPS = 20
STAGES = (0, 1, 2, 3)
# Over the first 16 steps' tokens the batch grows from 8 to 16 sequences, so the accumulation changes on the way.
RAMP = ("--batch_ramp", f"8:{16 * 8 * 32}:8")
KINDS = {f"stage{stage}": (stage, ()) for stage in STAGES} | {f"ramp{stage}": (stage, RAMP) for stage in (0, 2, 3)}


@pytest.fixture(scope="module")
def losses(tmp_path_factory, small_corpus, small_model):
    """{(ranks, kind): [losses of each step]}; two process groups in all, all kinds in each."""
    folder = tmp_path_factory.mktemp("runs")
    found = {}
    for ranks in (1, 2):
        runs = []
        for kind, (stage, more) in KINDS.items():
            words = (
                f"--deepspeed_config ds_configs/cpu.json --model {small_model} --data {small_corpus} "
                f"--max_steps {STEPS} --seq_length 32 --global_batch_size 16 --output_dir {folder}/{ranks}_{kind} "
                f"--set zero_optimization.stage={stage} train_micro_batch_size_per_gpu=4"
            )
            runs.append([*words.split(), *more])
        listing = folder / f"{ranks}.json"
        listing.write_text(json.dumps(runs))
        run_ranks(["tests/distributed/train_runs.py", str(listing)], ranks=ranks)
        for kind in KINDS:
            found[ranks, kind] = metrics(folder / f"{ranks}_{kind}")
    return found


def compare(one, two):
    """Sums over ranks add the same float32 gradients in another order; 1e-4 is what the README promises."""
    assert len(one) == len(two) == STEPS
    for a, b in zip(one, two, strict=True):
        assert a["tokens"] == b["tokens"]
        # a norm of gradients feels a weight's rounding more than the loss does
        for key, relative in (("loss", 1e-4), ("mtp_loss", 1e-4), ("balance_loss", 1e-4), ("grad_norm", 1e-3)):
            assert a[key] == pytest.approx(b[key], rel=relative), f"step {a['step']}: {key}"
    assert one[-1]["loss"] < one[0]["loss"] - 0.05, "nothing was learned, so nothing was compared"


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_equal_one(losses, kind):
    compare(losses[1, kind], losses[2, kind])


@pytest.mark.parametrize("stage", STAGES[1:])
def test_stages_equal_stage_0(losses, stage):
    compare(losses[1, "stage0"], losses[1, f"stage{stage}"])


@pytest.mark.parametrize("stage", (2, 3))
def test_a_growing_batch_is_averaged_the_same_at_every_stage(losses, stage):
    compare(losses[1, "ramp0"], losses[1, f"ramp{stage}"])
    tokens = [line["tokens"] for line in losses[1, "ramp0"]]
    taken = [after - before for before, after in zip([0, *tokens], tokens, strict=False)]
    assert taken == [8 * 32] * 16 + [16 * 32] * 4  # by hand
