"""recipes/checkpoint.py on a real run: what it says, what it finds wrong, what it converts and what it deletes."""

import json
import shutil

import pytest
import torch
from launching import run_python

from recipes.checkpoint import main
from recipes.config.errors import UserError
from recipes.training.trained_model import load_trained_model, open_weights


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory, small_corpus, small_model):
    """A run of 6 steps with four checkpoints, written in the background, and another like it that was not."""
    folder = tmp_path_factory.mktemp("runs")
    runs = []
    for name, flags in (("run", ["--async_save"]), ("direct", [])):
        runs.append(
            f"--model {small_model} --data {small_corpus} --max_steps 6 --seq_length 16 --global_batch_size 4 "
            f"--deepspeed_config ds_configs/cpu.json --save_steps 2 --save_total_limit 0 --eval_steps 2 "
            f"--output_dir {folder / name}".split()
            + flags
        )
    (folder / "runs.json").write_text(json.dumps(runs))
    done = run_python(["tests/distributed/train_runs.py", str(folder / "runs.json")])
    assert done.code == 0, done.output
    return folder / "run"


def answer(capsys, *words):
    code = main([*map(str, words), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_background_saves_hold_what_direct_ones_hold(run_folder):
    for name in ("step_00000002", "step_00000004", "step_00000006"):
        pair = [folder / "checkpoints" / name for folder in (run_folder, run_folder.with_name("direct"))]
        for file in ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "buffers.pt"):
            one, other = (torch.load(folder / file, weights_only=False) for folder in pair)
            one, other = ([value for value in tensors(content)] for content in (one, other))
            assert len(one) == len(other) > 0
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), f"{name}/{file}"


def tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from tensors(entry)


def test_inspect(run_folder, capsys):
    code, found = answer(capsys, "inspect", run_folder)
    newest = found["checkpoints"][0]
    assert code == 0 and [one["step"] for one in found["checkpoints"]] == [6, 4, 2]
    assert newest["latest"] and newest["whole"] and newest["world_size"] == 1 and newest["dtype"] == "fp32"
    assert newest["samples"] == 24 and newest["bytes"] == sum(newest["bytes_by_kind"].values())
    on_disk = [p for p in (run_folder / "checkpoints" / "step_00000006").rglob("*") if p.is_file()]
    assert newest["bytes"] == sum(path.stat().st_size for path in on_disk if path.name != "manifest.json")
    assert [one["best"] for one in found["checkpoints"]].count(True) == 1
    assert main(["inspect", str(run_folder)]) == 0
    assert "whole, latest" in capsys.readouterr().out
    assert main(["inspect", str(run_folder / "checkpoints" / "step_00000004")]) == 0
    text = capsys.readouterr().out
    assert "4; 256 tokens, 16 sequences" in text
    assert "global batch size: 4" in text


def test_verify_names_what_is_wrong(run_folder, tmp_path, capsys):
    code, found = answer(capsys, "verify", run_folder)
    assert code == 0 and not any(found["checkpoints"].values())
    copy = tmp_path / "step_00000006"
    shutil.copytree(run_folder / "checkpoints" / "step_00000006", copy)
    buffers = copy / "buffers.pt"
    content = bytearray(buffers.read_bytes())
    content[-100] ^= 1
    buffers.write_bytes(content)
    code, found = answer(capsys, "verify", copy)
    assert code == 1 and "buffers.pt" in found["checkpoints"][str(copy)][0]
    buffers.unlink()
    code, found = answer(capsys, "inspect", copy)
    assert code == 1 and "buffers.pt: missing" in found["checkpoints"][0]["faults"][0]


def test_convert_reuses_a_finished_conversion_and_redoes_an_unfinished_one(run_folder, capsys):
    checkpoint = run_folder / "checkpoints" / "step_00000006"
    universal = checkpoint.with_name("step_00000006.universal")
    partial = checkpoint.with_name("step_00000006.universal.partial")
    partial.mkdir()
    (partial / "half_a_file").touch()
    code, made = answer(capsys, "convert", run_folder)
    assert code == 0 and not made["reused"] and not partial.exists()
    assert answer(capsys, "convert", checkpoint)[1]["reused"]
    embedding = universal / "zero" / "model.embed_tokens.weight" / "exp_avg.pt"
    saved = torch.load(checkpoint / "zero_pp_rank_0_mp_rank_00_optim_states.pt", weights_only=False)
    flat = torch.cat(
        [state["exp_avg"] for state in saved["optimizer_state_dict"]["base_optimizer_state"]["state"].values()]
    )
    moment = torch.load(embedding)["param"]
    assert moment.shape == (384, 32) and torch.isin(moment, flat).all() and moment.abs().sum() > 0
    embedding.write_bytes(embedding.read_bytes()[:-1])
    assert not answer(capsys, "convert", run_folder)[1]["reused"]


def test_prune_keeps_the_best(run_folder, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(run_folder, copy)
    (copy / "checkpoints" / "best").write_text("step_00000002")
    would = answer(capsys, "prune", copy, "--keep", 1, "--dry_run")[1]
    assert [path[-13:] for path in would["deleted"]] == ["step_00000004"]
    assert len(list((copy / "checkpoints").glob("step_*"))) >= 3
    assert answer(capsys, "prune", copy, "--keep", 1)[1]["deleted"] == would["deleted"]
    left = sorted(path.name for path in (copy / "checkpoints").glob("step_*") if path.suffix != ".universal")
    assert left == ["step_00000002", "step_00000006"]


def test_average_is_the_mean_of_the_newest_checkpoints(run_folder, tmp_path, capsys):
    code, made = answer(capsys, "average", run_folder, tmp_path / "mean", "--last", 2)
    assert code == 0 and made["output"] == str(tmp_path / "mean")
    found = open_weights(tmp_path / "mean")
    mean = load_trained_model(found, device="cpu", dtype=torch.float32).state_dict()
    parts = [load_trained_model(open_weights(run_folder / "checkpoints" / name), device="cpu", dtype=torch.float32)
             for name in ("step_00000004", "step_00000006")]  # fmt: skip
    four, six = (model.state_dict() for model in parts)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert not torch.equal(four[name], six[name])
    # the mean of two float32 numbers is rounded once
    torch.testing.assert_close(mean[name], ((four[name].double() + six[name].double()) / 2).float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["inspect", "/nowhere"], "no such folder"),
        (["verify", "."], "holds no complete checkpoint"),
        (["prune", ".", "--keep", "0"], "--keep 0: must be at least 1"),
        (["convert", ".", "--workers", "0"], "--workers 0: must be at least 1"),
        (["average", ".", "nowhere", "--last", "1"], "at least 2 checkpoints make an average"),
    ],
)
def test_mistakes(words, fault):
    with pytest.raises(UserError, match=fault):
        main(words)
