"""Training is the same training where ranks share the matrices (AutoTP) or every sequence (Ulysses): losses, gradient
norms, tokens to each expert and balancing biases, against one rank."""

import json

import pytest
import torch
from launching import metrics, repeatable, run_ranks

from recipes.training.trained_model import load_trained_model, open_weights

CLIP = "gradient_clipping=0.3"  # below every norm of this run, so that the clip acts in each step
MICRO = "train_micro_batch_size_per_gpu=4"


def tensor(stage, *more):
    return [CLIP, MICRO, "tensor_parallel.autotp_size=2", f"zero_optimization.stage={stage}", *more]


def sequence(stage, *more):
    return [CLIP, MICRO, "sequence_parallel_size=2", f"zero_optimization.stage={stage}", *more]


BF16, FP16 = "bf16.enabled=true", "fp16.enabled=true"
CASES = {
    1: {
        "off": [CLIP, MICRO],
        "off, documents": [CLIP, MICRO, "documents"],
        "off, bf16": [CLIP, MICRO, BF16],
        "off, fp16": [CLIP, MICRO, FP16],
    },
    2: {
        "TP 2, ZeRO 2, full": tensor(2, "full"),
        "TP 2, bf16": tensor(1, BF16),
        "TP 2, fp16": tensor(2, FP16),
        "SP 2, ZeRO 2, full": sequence(2, "full"),
        "SP 2, documents": sequence(1, "documents"),
        "SP 2, ZeRO 3, full": sequence(3, "full"),
        "SP 2, bf16": sequence(1, BF16),
        "SP 2, ZeRO 3, bf16": sequence(3, BF16, "data_types.grad_accum_dtype=fp32"),
        "SP 2, fp16": sequence(2, FP16),
    },
    # and two groups, each with sequences of its own
    4: {"TP 2": tensor(1), "SP 2": sequence(1), "SP 2, ZeRO 3": sequence(3)},
}
HALF = [name for name in CASES[2] if "16" in name]
SHARED = [(ranks, name) for ranks in (2, 4) for name in CASES[ranks] if name not in HALF]


@pytest.fixture(scope="module")
def steps(tmp_path_factory, small_model):
    """{(ranks, case): [what each step gave]}"""
    folder = tmp_path_factory.mktemp("shared_sequences")
    # weights and a balance loss large enough for the experts and the loss to matter in the norm of the gradient
    model = json.loads(small_model.read_text()) | {"initializer_range": 0.15, "balance_loss_alpha": 0.05}
    (folder / "model.json").write_text(json.dumps(model))
    found = {}
    for ranks, cases in CASES.items():
        (folder / str(ranks)).mkdir()
        words = [str(folder / "model.json"), str(folder / str(ranks)), json.dumps(cases)]
        run_ranks(["tests/distributed/train_expert_parallel.py", *words], ranks=ranks, PYTHONPATH=".")
        report = json.loads((folder / str(ranks) / "steps.json").read_text())
        found |= {(ranks, name): one for name, one in report.items()}
    return found


@pytest.mark.parametrize("ranks, name", SHARED)
def test_it_is_the_same_training(steps, ranks, name):
    truth = steps[1, "off, documents" if "documents" in name else "off"]
    assert truth[-1]["loss"] < truth[0]["loss"] - 0.2, "nothing was learned, so nothing was compared"
    assert all(step["grad_norm"] > 0.3 for step in truth), "the clip did not act, so it was not compared"
    for step, (ours, theirs) in enumerate(zip(steps[ranks, name], truth, strict=True)):
        # sums over ranks, heads and rows are added in another order
        for key in ("loss", "mtp_loss", "balance_loss", "grad_norm"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5), f"step {step}: {key}"
        for router, entropy in theirs["router_entropy"].items():
            assert ours["router_entropy"][router] == pytest.approx(entropy, rel=1e-5), f"step {step}"
        assert ours["label_tokens"] == theirs["label_tokens"], f"step {step}"
        assert ours["expert_load"] == theirs["expert_load"], f"step {step}"
        assert ours["biases"] == theirs["biases"], f"step {step}"


@pytest.mark.parametrize("name", HALF)
def test_it_is_the_same_training_in_half_precision(steps, name):
    kind = name.split()[-1]
    for step, (ours, theirs) in enumerate(zip(steps[2, name], steps[1, f"off, {kind}"], strict=True)):
        # Other sums round otherwise, by 1/256 in bf16, and a token near a draw then takes another expert; two ranks
        # with sequences of their own differ by as much.
        for key in ("loss", "mtp_loss"):
            assert ours[key] == pytest.approx(theirs[key], rel=5e-3), f"step {step}: {key}"
        assert ours["label_tokens"] == theirs["label_tokens"], f"step {step}"


LAST = 10
TP, SP, NEITHER = "tensor_parallel.autotp_size=2", "sequence_parallel_size=2", "sequence_parallel_size=1"
SP3 = f"{SP} zero_optimization.stage=3"
LAUNCHES = [  # (ranks, {run: its setting, and what it goes on from}); in one process each
    (2, {"tp": (TP, None), "tp_again": (TP, "tp"), "sp": (SP, None), "sp_again": (SP, "sp")}),
    (2, {"sp3": (SP3, None), "sp3_again": (SP3, "sp3"), "sp3_of_tp": (SP3, "tp")}),
    (1, {"tp_alone": (NEITHER, "tp"), "sp_alone": (NEITHER, "sp"), "sp3_alone": (NEITHER, "sp3")}),
    (2, {"dp": (NEITHER, None), "tp_of_dp": (TP, "dp"), "sp_of_dp": (SP, "dp"), "sp_of_tp": (SP, "tp")}),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, small_model, small_corpus):
    folder = tmp_path_factory.mktemp("runs")

    def flags(name, setting, source):
        words = f"--model {small_model} --data {small_corpus} --max_steps {LAST} --seq_length 32 --global_batch_size 8"
        words += " --save_steps 5 --save_total_limit 0 --document_mask --deepspeed_config ds_configs/cpu.json"
        words += f" --resume {folder / source}/checkpoints/step_00000005" if source else ""
        return [*words.split(), "--output_dir", str(folder / name), "--set", MICRO, *setting.split()]

    for number, (ranks, names) in enumerate(LAUNCHES):
        listing = folder / f"{number}.json"
        listing.write_text(json.dumps([flags(name, *how) for name, how in names.items()]))
        run_ranks(["tests/distributed/train_runs.py", str(listing)], ranks=ranks)
    return folder


@pytest.mark.parametrize("kind", ["tp", "sp", "sp3"])
def test_a_resumed_run_is_the_unbroken_one(runs, kind):
    unbroken, again = (repeatable(metrics(runs / name)) for name in (kind, f"{kind}_again"))
    assert again == unbroken[5:]


@pytest.mark.parametrize(
    "kind, other",
    [
        ("tp", "tp_alone"),
        ("sp", "sp_alone"),
        ("sp3", "sp3_alone"),
        ("dp", "tp_of_dp"),
        ("dp", "sp_of_dp"),
        ("tp", "sp_of_tp"),
        ("tp", "sp3_of_tp"),
    ],
)
def test_another_layout_goes_on(runs, kind, other):
    for ours, theirs in zip(metrics(runs / other), metrics(runs / kind)[5:], strict=True):
        # moments that were lost, or another step of Adam's, would show in the third digit
        for key in ("loss", "mtp_loss", "balance_loss", "grad_norm"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5), (ours["step"], key)
        assert ours["expert_load"] == theirs["expert_load"], ours["step"]
    [ours], [theirs] = (metrics(runs / name, evaluation=True) for name in (other, kind))
    assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], rel=1e-5)
    assert ours["eval_bits_per_byte"] == pytest.approx(theirs["eval_bits_per_byte"], rel=1e-5)


def test_what_tensor_parallel_ranks_saved_is_exported_whole(runs):
    found, truth = (
        load_trained_model(open_weights(runs / name), device="cpu", dtype=torch.float32).state_dict()
        for name in ("tp", "tp_alone")
    )
    assert found.keys() == truth.keys()
    for key, weight in truth.items():
        torch.testing.assert_close(found[key], weight, rtol=0, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")
