"""A run that was killed goes on as if it had not been: equal to the bit, and so is all that its checkpoint holds."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy
import pytest
import torch
from launching import PRETRAIN, REPOSITORY, environment, metrics, repeatable, run_python, run_ranks

STEPS = 20


def flags(model, corpus, folder, *more):
    return [
        *f"--model {model} --data {corpus} --max_steps {STEPS} --seq_length 32 --global_batch_size 8".split(),
        *f"--deepspeed_config ds_configs/cpu.json --output_dir {folder}".split(),
        *"--save_steps 5 --save_total_limit 0 --eval_steps 10".split(),
        *more,
    ]


def differences(first, second, path=""):
    """Where two checkpoint trees differ, to the bit."""
    if isinstance(first, torch.Tensor):
        same = first.dtype == second.dtype and torch.equal(first.view(-1), second.view(-1))
        return [] if same else [path]
    if isinstance(first, dict):
        if first.keys() != second.keys():
            return [f"{path}: keys {first.keys() ^ second.keys()}"]
        return [found for key in first for found in differences(first[key], second[key], f"{path}.{key}")]
    if isinstance(first, list | tuple):
        if len(first) != len(second):
            return [f"{path}: lengths"]
        return [
            found
            for i, pair in enumerate(zip(first, second, strict=True))
            for found in differences(*pair, f"{path}[{i}]")
        ]
    if hasattr(first, "__dict__"):  # DeepSpeed pickles its loss scaler whole
        return differences(vars(first), vars(second), path)
    return [] if numpy.array_equal(first, second) else [path]


def differing_files(one, other):
    """The tensors and values by which two checkpoints differ."""
    found = []
    for path in sorted(one.rglob("*.pt")):
        pair = [torch.load(folder / path.name, weights_only=False) for folder in (one, other)]
        for content in pair:
            content.pop("ds_config", None)  # names the run's folder
        found += differences(*pair, path.name)
    return found


def kill_at_step(words, step, run_folder, **extra):
    """Start a run and kill its whole process group without warning once a step is logged."""
    process = subprocess.Popen(
        words, cwd=REPOSITORY, env=environment(**extra), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    log = run_folder / "metrics.jsonl"
    while not (log.exists() and log.read_text().count('"loss"') >= step):
        assert process.poll() is None, "the run ended before it was killed"
        assert time.monotonic() < deadline, "the run never came to the step"
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_killed_run_resumes_to_the_bit(tmp_path, small_corpus, small_model):
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    whole = run_python([PRETRAIN, *flags(small_model, small_corpus, unbroken)])
    assert whole.code == 0, whole.output

    words = [sys.executable, PRETRAIN, *flags(small_model, small_corpus, broken)]
    kill_at_step(words, 12, broken)
    assert not list((broken / "checkpoints").glob("step_00000020")), "the run was killed too late to test anything"
    # What a save that was killed leaves, and must be cleared.
    (broken / "checkpoints" / "step_00000015.partial").mkdir(exist_ok=True)
    resumed = run_python(words[1:])
    assert resumed.code == 0, resumed.output
    assert "resumed at step 1" in resumed.stdout
    assert not list((broken / "checkpoints").glob("*.partial"))

    assert repeatable(metrics(broken)) == repeatable(metrics(unbroken))
    assert metrics(broken, evaluation=True) == metrics(unbroken, evaluation=True)
    last = "checkpoints/step_00000020"
    assert differing_files(unbroken / last, broken / last) == []

    again = run_python(words[1:])
    assert again.code == 0 and "this run is finished" in again.stdout, again.output
    assert metrics(broken)[-1]["step"] == STEPS


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_stage_and_precision_resumes_to_the_bit(tmp_path, small_corpus, small_model, ranks):
    kinds = {
        "fp32_stage0": ["zero_optimization.stage=0"],
        "fp32_stage3": ["zero_optimization.stage=3"],
        "bf16_stage2": ["bf16.enabled=true", "zero_optimization.stage=2"],
        "fp16_stage1": ["fp16.enabled=true", "fp16.initial_scale_power=18", "fp16.loss_scale_window=6"],
    }
    whole, halves = [], []
    for kind, settings in kinds.items():
        whole.append(flags(small_model, small_corpus, tmp_path / kind, "--set", *settings))
        halves.append(flags(small_model, small_corpus, tmp_path / f"{kind}_resumed", "--set", *settings))
    listing = tmp_path / "runs.json"
    listing.write_text(json.dumps(whole))
    run_ranks(["tests/distributed/train_runs.py", str(listing)], ranks=ranks)
    for kind in kinds:
        shutil.copytree(tmp_path / kind, tmp_path / f"{kind}_resumed")
        saved = sorted((tmp_path / f"{kind}_resumed" / "checkpoints").glob("step_*"))
        # In fp16 a save waits while the loss scale moves, so which steps are saved hangs on the text.
        later = [folder for folder in saved if folder.name > "step_00000010"]
        assert later and len(later) < len(saved), f"{kind}: nothing to resume from, or nothing left to do: {saved}"
        for folder in later:
            shutil.rmtree(folder)
    listing.write_text(json.dumps(halves))
    run_ranks(["tests/distributed/train_runs.py", str(listing)], ranks=ranks)
    for kind in kinds:
        before, after = tmp_path / kind, tmp_path / f"{kind}_resumed"
        assert repeatable(metrics(after)) == repeatable(metrics(before)), kind
        last = "checkpoints/step_00000020"
        assert differing_files(before / last, after / last) == [], kind
    if "fp16_stage1" in kinds:
        scales = [line["loss_scale"] for line in metrics(tmp_path / "fp16_stage1")]
        assert len(set(scales)) > 1, "the loss scale never moved, so its resume was not tested"
