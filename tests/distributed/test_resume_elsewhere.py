"""A run goes on under any other world size, ZeRO stage and precision, with all that it had, and so do its losses."""

import json
import math

import pytest
from launching import metrics, run_ranks

SAVED_AT, STEPS = 4, 14  # the ten losses after the change are compared
PRECISION = {"fp32": [], "bf16": ["bf16.enabled=true"], "fp16": ["fp16.enabled=true", "fp16.initial_scale_power=12"]}
# fp32: sums over ranks are taken in another order. bf16, fp16: rounding of gradients to 8 and 11 bits differs with it.
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-3, "fp16": 1e-3}
SOURCES = [(0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (1, "bf16"), (3, "fp16"), (2, "fp16")]
# (world size, target stage, target precision, source): every ordered pair of stages at least once
TARGETS = {
    2: [
        *((stage, "fp32", (source, "fp32")) for source in range(4) for stage in range(4) if stage != source),
        (2, "bf16", (1, "bf16")),
        (1, "fp16", (3, "fp16")),
        (2, "bf16", (2, "fp16")),
    ],
    1: [
        *((stage, "fp32", (stage, "fp32")) for stage in range(4)),
        (3, "bf16", (1, "bf16")),
        (1, "fp16", (2, "fp16")),
        (1, "fp16", (1, "bf16")),
    ],
    4: [*((stage, "fp32", (stage, "fp32")) for stage in range(4)), (2, "fp16", (3, "fp16")), (1, "bf16", (1, "bf16"))],
}


def arguments(model, corpus, folder, stage, precision, *more):
    return [
        *f"--model {model} --data {corpus} --max_steps {STEPS} --seq_length 16 --global_batch_size 8".split(),
        *f"--deepspeed_config ds_configs/cpu.json --output_dir {folder} --save_total_limit 0".split(),
        *f"--save_steps {SAVED_AT} --set zero_optimization.stage={stage}".split(),
        *PRECISION[precision],
        *more,
    ]


@pytest.fixture(scope="module")
def sources(tmp_path_factory, small_corpus, small_model):
    """Unbroken runs on two ranks, and the state of each at the step that the others resume from."""
    folder = tmp_path_factory.mktemp("sources")
    jobs = []
    for stage, precision in SOURCES:
        run = folder / f"{precision}_{stage}"
        jobs.append({"arguments": arguments(small_model, small_corpus, run, stage, precision), "then": "train"})
        resumed = ["--resume", str(run / "checkpoints" / f"step_{SAVED_AT:08d}")]
        again = arguments(small_model, small_corpus, folder / "opened", stage, precision, *resumed)
        jobs.append({"arguments": again, "then": "dump", "truth": str(folder / f"{precision}_{stage}.pt")})
    listing = folder / "jobs.json"
    listing.write_text(json.dumps(jobs))
    run_ranks(["tests/distributed/resume_matrix.py", str(listing)], ranks=2)
    return folder


@pytest.mark.parametrize("ranks", TARGETS)
def test_resume_elsewhere(tmp_path, sources, small_corpus, small_model, ranks):
    jobs = []
    for stage, precision, (source_stage, source_precision) in TARGETS[ranks]:
        name = f"{source_precision}_{source_stage}"
        checkpoint = sources / name / "checkpoints" / f"step_{SAVED_AT:08d}"
        folder = tmp_path / f"{name}_to_{precision}_{stage}"
        more = ["--resume", str(checkpoint)]
        jobs.append(
            {
                "arguments": arguments(small_model, small_corpus, folder, stage, precision, *more),
                "then": "compare",
                "truth": str(sources / f"{name}.pt"),
            }
        )
    listing = tmp_path / "jobs.json"
    listing.write_text(json.dumps(jobs))
    first, *_ = run_ranks(["tests/distributed/resume_matrix.py", str(listing)], ranks=ranks)
    assert first.stdout.count("(converted: ") == len(jobs)
    new_scales = sum((precision == "fp16") != (source == "fp16") for _, precision, (_, source) in TARGETS[ranks])
    assert first.stdout.count("the loss scale begins anew") == new_scales
    largest = {}
    for stage, precision, (source_stage, source_precision) in TARGETS[ranks]:
        name = f"{source_precision}_{source_stage}"
        before, after = metrics(sources / name), metrics(tmp_path / f"{name}_to_{precision}_{stage}")
        assert [line["step"] for line in after] == list(range(SAVED_AT + 1, STEPS + 1))
        pairs = list(zip([line for line in before if line["step"] > SAVED_AT], after, strict=True))
        difference = max(abs(a["loss"] - b["loss"]) / a["loss"] for a, b in pairs)
        largest[f"{name} -> {precision} stage {stage}"] = difference
        allowed = max(TOLERANCE[precision], TOLERANCE[source_precision])
        assert difference <= allowed, f"{name} -> {precision} stage {stage}: {difference:.1e}"
        for key in ("learning_rate", "tokens", "epoch", "skipped_steps"):
            assert [a[key] for a, _ in pairs] == [b[key] for _, b in pairs], (name, stage, key)
    assert all(math.isfinite(value) for value in largest.values())
    print("\n".join(f"{ranks} ranks: {pair}: {value:.1e}" for pair, value in largest.items()))
