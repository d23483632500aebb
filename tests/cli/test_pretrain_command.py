"""`recipes/pretrain.py` at the command line: every way to launch it, the dry run, and users' mistakes."""

import json
import sys
from pathlib import Path

import pytest
from launching import PRETRAIN, REPOSITORY, metrics, run, run_deepspeed, run_python

from recipes.config.errors import run_command
from recipes.config.run_config import parse_pretrain_config


@pytest.fixture
def flags(small_model, small_corpus, tmp_path):
    return [
        *f"--model {small_model} --data {small_corpus} --max_steps 2 --seq_length 32".split(),
        *f"--global_batch_size 4 --output_dir {tmp_path / 'run'}".split(),
    ]


def finished(result, folder, steps=2):
    """The run came to its end, and its folder holds what the README says."""
    assert result.code == 0, result.output
    assert f"finished {steps} steps" in result.stdout
    for name in (
        "run.json",
        "ds_config.json",
        "metrics.jsonl",
        "report.html",
        f"checkpoints/step_{steps:08d}",
        "tensorboard",
    ):
        assert (folder / name).exists(), name
    assert [line["step"] for line in metrics(folder)] == list(range(1, steps + 1))
    return True


def test_deepspeed_with_an_absolute_path_from_another_folder(flags, tmp_path):
    result = run_deepspeed([str(REPOSITORY / PRETRAIN), *flags, "--json"], cwd=tmp_path)
    assert finished(result, tmp_path / "run")
    # The end of the run, as a user reads it.
    for word in (
        "held-out loss",
        "bits per byte",
        "generated",
        "checkpoint",
        "metrics",
        "tensorboard",
        "report",
        "to go on",
    ):
        assert word in result.stdout, word
    last = json.loads([line for line in result.stdout.splitlines() if line.startswith("{")][-1])
    assert last["steps"] == 2 and last["eval_loss"] == metrics(tmp_path / "run", evaluation=True)[-1]["eval_loss"]
    assert "training:" in result.stderr, "no progress bar"
    line = metrics(tmp_path / "run")[-1]
    promised = (
        "step tokens loss mtp_loss balance_loss learning_rate grad_norm loss_scale skipped_steps step_seconds "
        "tokens_per_second mfu memory_bytes expert_load_violation epoch"
    )
    assert set(promised.split()) <= line.keys()


def test_deepspeed_on_two_ranks_and_the_printed_command_goes_on(flags, tmp_path):
    result = run_deepspeed([PRETRAIN, *flags], ranks=2)
    assert finished(result, tmp_path / "run")
    assert result.stdout.count("finished 2 steps") == 1, "more than one rank speaks"
    command = next(line for line in result.stdout.splitlines() if line.startswith("to go on")).split(maxsplit=3)[3]
    words = command.split()
    assert words[0].endswith("deepspeed") and "--num_gpus 2" in command
    goes_on = run_deepspeed(words[words.index(PRETRAIN) :], ranks=2)
    assert "resumed at step 2" in goes_on.stdout
    assert finished(goes_on, tmp_path / "run", steps=4)


def test_torchrun(flags, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    assert finished(run([*torchrun, PRETRAIN, *flags]), tmp_path / "run")


def test_dry_run_resolves_everything_and_starts_nothing(flags, tmp_path):
    result = run_python([str(REPOSITORY / PRETRAIN), *flags, "--dry_run", "--json"], cwd=tmp_path)
    assert result.code == 0, result.output
    for word in ("model", "ds_config", "batch", "learning rate", "begins from"):
        assert word in result.stdout
    plan = json.loads(result.stdout.splitlines()[-1])
    assert plan["global_batch_size"] == 4 and plan["max_steps"] == 2 and plan["world_size"] == 1
    plan["ds_config"].pop("recipe")  # remembers what the file left open
    assert Path(plan["ds_config_source"]).name in ("cpu.json", "cpu_bf16.json") and "auto" not in json.dumps(
        plan["ds_config"]
    )
    # by hand: the file's rate times sqrt(4 / 256)
    written = json.loads((REPOSITORY / "ds_configs/cpu.json").read_text())["optimizer"]["params"]["lr"]
    assert plan["peak_learning_rate"] == pytest.approx(written / 8)
    assert not (tmp_path / "run").exists()


def mistake(capsys, words):
    """The fault that a wrong command line is answered with."""
    from recipes.pretrain import main

    code = run_command(lambda: main(words))
    captured = capsys.readouterr()
    assert code == 2, captured
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), captured.err
    return lines[0]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (["--max_step", "3"], "unknown flag --max_step; did you mean --max_steps?"),
        (["--seq_length", "many"], "--seq_length: invalid int value: 'many'"),
        (["--seq_length", "65"], "max_position_embeddings"),
        (["--model", "tinny"], "tinny"),
        (["--model", "/nowhere/config.json"], "/nowhere/config.json"),
        (["--data", "/nowhere/text.jsonl"], "/nowhere/text.jsonl"),
        (["--deepspeed_config", "/nowhere/ds.json"], "/nowhere/ds.json"),
        (["--config", "/nowhere/run.yaml"], "/nowhere/run.yaml"),
        (["--resume", "/nowhere/step_1"], "/nowhere/step_1"),
        (["--lr_scaling", "cubic"], "--lr_scaling"),
        (["--max_steps", "0"], "--max_steps 0: must be at least 1"),
        (["--train_tokens", "100"], "--max_steps and --train_tokens"),
        (["stray"], "stray"),
        (["--profile", "1:3"], "--profile 1:3: steps 1 to 3, but this run takes steps 1 to 2"),
        (["--log_level", "loud"], "--log_level"),
        (["--empty_cache_steps", "-1"], "--empty_cache_steps -1: must be at least 0"),
    ],
)
def test_mistakes_are_answered_in_one_line_and_nothing_is_written(capsys, flags, tmp_path, changed, expected):
    assert expected in mistake(capsys, [*flags, *changed])
    assert not (tmp_path / "run").exists()


def test_unreadable_json_names_the_place(capsys, flags, tmp_path):
    broken = tmp_path / "broken.json"
    broken.write_text('{\n  "train_batch_size": 8,\n  "fp16": {,}\n}')
    fault = mistake(capsys, [*flags, "--deepspeed_config", str(broken)])
    assert str(broken) in fault and "3" in fault


def test_world_size_that_does_not_divide_the_batch(capsys, flags, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    assert "4" in mistake(capsys, flags) and not (tmp_path / "run").exists()


def test_folder_of_another_model(capsys, flags, tmp_path, small_model):
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    other = json.loads(small_model.read_text()) | {"hidden_size": 64}
    (run_folder / "model_config.json").write_text(json.dumps(other))
    before = sorted(run_folder.rglob("*"))
    fault = mistake(capsys, flags)
    assert "another model" in fault and "hidden_size 64 there" in fault
    assert sorted(run_folder.rglob("*")) == before


def test_real_process_exits_2_without_a_traceback(flags):
    result = run_deepspeed([PRETRAIN, *flags, "--bogus", "1"], ranks=2)
    assert result.code == 2, result.output
    assert "error: unknown flag --bogus" in result.stderr and "Traceback" not in result.output
    assert result.stderr.count("error: unknown flag") == 1


def test_preset_file_is_checked_and_flags_win(tmp_path):
    preset = tmp_path / "run.yaml"
    preset.write_text("model: tiny\nmax_steps: 7\nseed: 5\n")
    config = parse_pretrain_config(["--config", str(preset), "--seed", "6"])
    assert (config.max_steps, config.seed) == (7, 6)
    preset.write_text("max_stepz: 7\n")
    with pytest.raises(Exception, match=f"{preset}.*max_stepz.*max_steps"):
        parse_pretrain_config(["--config", str(preset)])
    preset.write_text("max_steps: soon\n")
    with pytest.raises(Exception, match=f"{preset}.*max_steps.*soon"):
        parse_pretrain_config(["--config", str(preset)])


def test_never_and_overwrite(tmp_path):
    from recipes.config.errors import UserError
    from recipes.training.resume import check_fresh_folder, prepare_run_folder

    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "precious.txt").write_text("not a run's")
    with pytest.raises(UserError, match="holds a run"):
        check_fresh_folder(folder, "never", overwrite=False)
    with pytest.raises(UserError, match="no run.json"):
        check_fresh_folder(folder, "never", overwrite=True)
    assert (folder / "precious.txt").exists()
    (folder / "run.json").write_text("{}")
    check_fresh_folder(folder, "never", overwrite=True)
    prepare_run_folder(folder, "never")
    assert not folder.exists()
