"""Overflow, NaN and spikes, planted into whole runs on two ranks."""

import json
import math
import re

import pytest
import torch
from launching import metrics, repeatable, run_ranks

BATCH = 8  # sequences; rank 0 has the first four of each batch, in micro-batches of two: 0 1, 4 5; rank 1: 2 3, 6 7
STEPS = 16


def planted_at(step):
    """The sequences of one step's batch."""
    return list(range((step - 1) * BATCH, step * BATCH))


def of_rank_1(step):
    return [sequence for sequence in planted_at(step) if sequence % 4 >= 2]


def spoiled(sequences, module, factor=math.inf, gradient=False):
    return {"spoiled": {"sequences": sequences, "module": module, "factor": factor, "gradient": gradient}}


def garbage(*steps):
    """Batches whose logits are a thousand times too large, and so is their loss."""
    return spoiled([sequence for step in steps for sequence in planted_at(step)], "model.norm", factor=1000.0)


RUNS = {
    "fp16_overflow": (
        ["fp16.enabled=true", "fp16.initial_scale_power=16", "fp16.hysteresis=1", "zero_optimization.stage=2"],
        spoiled(of_rank_1(11), "model.layers.1.mlp", gradient=True),
        [],
    ),
    "fp16_small_scale": (["fp16.enabled=true", "fp16.initial_scale_power=10"], {}, []),
    "fp16_floor": (
        ["fp16.enabled=true", "fp16.initial_scale_power=32", "fp16.min_loss_scale=1073741824", "fp16.hysteresis=1",
         "zero_optimization.stage=3"],
        {},
        [],
    ),
    "bf16_nan": (
        ["bf16.enabled=true", "zero_optimization.stage=2"],
        spoiled([s for step in (4, 8, 9, 10) for s in of_rank_1(step)], "model.layers.2.self_attn"),
        ["--max_nonfinite_steps", "3"],
    ),
    "fp32_nan_0": (
        ["zero_optimization.stage=0"],
        spoiled(planted_at(7)[:1], "model.layers.1.mlp.experts"),
        ["--save_steps", "3"],
    ),
    "fp32_nan_3": (["zero_optimization.stage=3"], spoiled(planted_at(3)[2:3], "model.norm"), []),
    "spike_warn": (["zero_optimization.stage=1"], garbage(12), []),
    "spike_skip": (["zero_optimization.stage=3"], garbage(12), ["--on_spike", "skip"]),
    "spike_rewind": (["zero_optimization.stage=2"], garbage(12), ["--on_spike", "rewind", "--save_steps", "5"]),
    "spikes_0": (
        ["zero_optimization.stage=0"], garbage(*range(12, 17)), ["--on_spike", "rewind", "--save_steps", "8"],
    ),
    "spikes_3": (
        ["zero_optimization.stage=3", "fp16.enabled=true", "fp16.initial_scale_power=10", "fp16.loss_scale_window=3"],
        garbage(*range(12, 17)),
        ["--on_spike", "rewind", "--save_steps", "8"],
    ),
    "clean": (["zero_optimization.stage=2"], {}, ["--spike_window", "0"]),
    "clean_again": (["zero_optimization.stage=2"], {}, ["--spike_window", "0", "--deterministic"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory, small_corpus, small_model):
    """The folder of all runs, and what was printed; one process group in all."""
    folder = tmp_path_factory.mktemp("runs")
    common = (
        f"--model {small_model} --data {small_corpus} --max_steps {STEPS} --seq_length 32 --global_batch_size {BATCH} "
        "--deepspeed_config ds_configs/cpu.json --spike_window 20 --save_total_limit 0"
    )
    listed = []
    for name, (settings, planted, flags) in RUNS.items():
        settings = ["train_micro_batch_size_per_gpu=2", "tensorboard.enabled=false", *settings]
        arguments = [*common.split(), *flags, "--set", *settings, "--output_dir", str(folder / name)]
        listed.append({"arguments": arguments, **planted})
        if name == "spike_rewind":
            # as if it had been killed after the rewind: all that is left is the checkpoint from before the spike
            again = [*arguments[:-1], str(folder / "spike_resumed")]
            listed.append(
                {"arguments": again, **planted, "copy": [str(folder / name), str(folder / "spike_resumed"), 10]}
            )
    listing = folder / "runs.json"
    listing.write_text(json.dumps(listed))
    first, second = run_ranks(["tests/distributed/train_planted.py", str(listing)], ranks=2)
    printed = dict(re.findall(r"^run .*/(\w+)\n((?:(?!run /).*\n)*)", first.stdout, flags=re.MULTILINE))
    return folder, printed


def outcome(runs, name, rank=0):
    return json.loads((runs[0] / f"{name}.outcome.{rank}.json").read_text())


def ids_of(trained):
    return [taken["ids"] for taken in trained]


def faults(runs, name):
    """The fault of each rank."""
    found = [outcome(runs, name, rank)["fault"] for rank in (0, 1)]
    assert found[0] == found[1], "the ranks end for different reasons"
    return found[0]


def same_checkpoints(one, other):
    def flat(value):
        if isinstance(value, torch.Tensor):
            return [value.flatten().view(torch.uint8).tolist()]
        if isinstance(value, dict):
            return [item for key in sorted(value, key=str) if key != "ds_config" for item in flat(value[key])]
        return [item for part in value for item in flat(part)] if isinstance(value, list | tuple) else []

    names = sorted(path.name for path in one.glob("*.pt") if not path.name.startswith("rng"))
    assert len(names) >= 3
    return all(
        flat(torch.load(one / name, weights_only=False)) == flat(torch.load(other / name, weights_only=False))
        for name in names
    )


def test_overflow_on_one_rank_is_left_out_on_both(runs):
    lines = metrics(runs[0] / "fp16_overflow")
    assert [line["skipped_steps"] for line in lines] == [0] * 10 + [1] * 6
    assert [line["loss_scale"] for line in lines] == [65536.0] * 10 + [32768.0] * 6
    assert lines[10]["grad_norm"] is None and lines[9]["grad_norm"] > 0
    assert lines[11]["learning_rate"] == lines[10]["learning_rate"] != lines[9]["learning_rate"]
    assert "warning: step 11: a gradient is not finite" in runs[1]["fp16_overflow"]
    for rank in (0, 1):
        trained = outcome(runs, "fp16_overflow", rank)["trained"]
        assert [taken["step"] for taken in trained if not taken["applied"]] == [11]
        assert ids_of(trained) == ids_of(outcome(runs, "clean", rank)["trained"])
    bias = torch.load(runs[0] / "fp16_overflow/checkpoints/step_00000016/buffers.pt")
    steps = bias["model.layers.1.mlp.gate.e_score_correction_bias"] / 0.001
    # each of the 15 updates moved each expert's bias by one step of 0.001 up or down, or left it; float32 adds them up
    assert torch.allclose(steps, steps.round(), atol=1e-2) and steps.round().abs().max() <= 15


def test_a_small_loss_scale_trains_too(runs):
    lines = metrics(runs[0] / "fp16_small_scale")
    assert {line["loss_scale"] for line in lines} == {1024.0}
    assert lines[-1]["skipped_steps"] == 0 and lines[-1]["loss"] < lines[0]["loss"] - 0.05


def test_the_floor_of_the_loss_scale_ends_the_run(runs):
    fault = faults(runs, "fp16_floor")
    assert re.match(r"step 3: a gradient is not finite at the smallest loss scale, 1.07374e\+09; the first was", fault)
    assert "the gradient of " in fault and "no checkpoint had been saved" in fault
    assert len(metrics(runs[0] / "fp16_floor")) == 3


def test_nonfinite_steps_are_counted_and_in_a_row_end_the_run(runs):
    fault, printed = faults(runs, "bf16_nan"), runs[1]["bf16_nan"]
    assert fault.startswith(
        "step 10: 3 steps in a row were not finite in bf16 (loss nan); the first was the output of "
    )
    assert "model.layers.2.self_attn " in fault and "in micro-batch 0 of rank 1" in fault
    assert [int(n) for n in re.findall(r"warning: step (\d+): the loss is not finite", printed)] == [4, 8, 9, 10]
    lines = metrics(runs[0] / "bf16_nan")
    assert [line["skipped_steps"] for line in lines] == [0, 0, 0, 1, 1, 1, 1, 2, 3, 4]
    assert all(math.isfinite(line["loss"]) for line in lines[4:7]), "the NaN came into the weights"


def test_fp32_ends_at_the_first_nan_and_saves_none(runs):
    folder = runs[0] / "fp32_nan_0"
    fault = faults(runs, "fp32_nan_0")
    assert fault.startswith("step 7: the loss is not finite in fp32 (loss nan); the first was the output of ")
    assert "model.layers.1.mlp.experts (RoutedExperts), in micro-batch 0 of rank 0" in fault
    newest = folder / "checkpoints" / "step_00000006"
    assert fault.endswith(f"the newest good checkpoint is {newest}")
    state = torch.load(newest / "mp_rank_00_model_states.pt", weights_only=False)["module"]
    assert all(value.isfinite().all() for value in state.values())
    assert sorted(path.name for path in newest.parent.glob("step_*"))[-1] == newest.name

    fault = faults(runs, "fp32_nan_3")
    assert "output of model.norm (RMSNorm), in micro-batch 0 of rank 1" in fault


def spikes(run):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line.get("event") == "spike"]


@pytest.mark.parametrize("answer", ("warn", "skip", "rewind"))
def test_a_planted_batch_is_flagged(runs, answer):
    (event,) = spikes(runs[0] / f"spike_{answer}")
    assert event["step"] == 12 and event["answer"] == answer
    assert event["loss"] > event["median"] + 6 * event["deviation"]
    assert f"warning: step 12: the loss {event['loss']:.4f} is" in runs[1][f"spike_{answer}"]
    assert spikes(runs[0] / "clean") == []


def test_skip_leaves_the_spike_out(runs):
    warned, skipped = (metrics(runs[0] / f"spike_{answer}") for answer in ("warn", "skip"))
    assert warned[-1]["skipped_steps"] == 0 and skipped[-1]["skipped_steps"] == 1
    assert skipped[11]["loss"] == pytest.approx(warned[11]["loss"], rel=1e-4)  # stages sum in another order
    assert skipped[12]["learning_rate"] == skipped[11]["learning_rate"]
    assert abs(warned[12]["loss"] - skipped[12]["loss"]) > 0.002, "the garbage taught nothing, so nothing was tested"


def test_rewind_passes_over_the_batch_for_good(runs):
    folder = runs[0] / "spike_rewind"
    lines, clean = metrics(folder), metrics(runs[0] / "clean")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["loss"] for line in lines[:11]] == [line["loss"] for line in clean[:11]]
    for rank in (0, 1):
        trained = outcome(runs, "spike_rewind", rank)["trained"]
        assert [taken["step"] for taken in trained] == [*range(1, 13), *range(11, 17)]
        by_clean = ids_of(outcome(runs, "clean", rank)["trained"])
        # steps 1 to 11, the batch of step 12, again step 11, and then from the batch of step 13 on
        kept = ids_of(trained)
        assert kept[:12] == by_clean[:12] and kept[12] == by_clean[10] and kept[13:16] == by_clean[12:15]
    state = json.loads((folder / "checkpoints/step_00000015/state.json").read_text())
    assert state["passed_over"] == [[88, 8, 10]] and state["samples"] == 15 * BATCH + 8
    # the resumed run had only the checkpoint from before the spike, and comes to the same by itself
    last = "checkpoints/step_00000016"
    assert same_checkpoints(folder / last, runs[0] / "spike_resumed" / last)


@pytest.mark.parametrize("name", ("spikes_0", "spikes_3"))
def test_rewinds_repeat_exactly_and_come_to_an_end(runs, name):
    fault = faults(runs, name)
    assert "step 12: the loss spiked again after 3 rewinds" in fault and "step_00000008" in fault
    trained = outcome(runs, name)["trained"]
    assert [taken["step"] for taken in trained] == [*range(1, 13), *range(9, 13), *range(9, 13), *range(9, 13)]
    replays = [[taken["loss"] for taken in trained[start : start + 3]] for start in (8, 12, 16, 20)]
    assert replays[0] == replays[1] == replays[2] == replays[3], "weights, moments or the loss scale came back changed"
    assert len({str(taken["ids"]) for taken in trained if taken["step"] == 12}) == 4, "a batch was met again"


def test_one_seed_gives_one_run_to_the_bit(runs):
    assert repeatable(metrics(runs[0] / "clean")) == repeatable(metrics(runs[0] / "clean_again"))
    last = "checkpoints/step_00000016"
    assert same_checkpoints(runs[0] / "clean" / last, runs[0] / "clean_again" / last)
    assert not same_checkpoints(runs[0] / "clean" / last, runs[0] / "spike_rewind" / last)
    assert "deterministic: equal bits need" in runs[1]["clean_again"]
