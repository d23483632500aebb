"""`recipes/tune.py`: real trials pruned and failed, a study that goes on, and users' mistakes."""

import json
from importlib.util import find_spec

import pytest

from recipes.config.errors import run_command
from recipes.training.trial import TrialFailed, run_trial

LR = "optimizer.params.lr=log:1e-3:1e-1"


@pytest.fixture
def words(small_model, small_corpus):
    shape = f"--model {small_model} --data {small_corpus} --seq_length 32 --global_batch_size 4"
    return [*shape.split(), "--deepspeed_config", "ds_configs/cpu.json"]


def test_a_trial_is_stopped_on_the_way_and_a_failing_one_gives_its_reason(words, tmp_path):
    seen = []

    def keep_going(step, loss):
        seen.append((step, loss))
        return False

    result = run_trial([*words, "--max_steps", "100000"], tmp_path / "long", keep_going=keep_going)
    assert result.pruned and len(seen) == 1 and result.steps >= seen[0][0] and 0 < result.loss < 7
    with pytest.raises(TrialFailed, match="error: .*zero_optimization.*stage"):
        run_trial([*words, "--max_steps", "2", "--set", "zero_optimization.stage=7"], tmp_path / "wrong")


@pytest.mark.skipif(find_spec("optuna") is None, reason="needs optuna, which is optional: pip install optuna")
def test_a_study_keeps_what_failed_and_goes_on(words, tmp_path, capsys):
    from recipes.tune import main

    search = ["--search", "zero_optimization.stage=choice:1,7", "--output_dir", str(tmp_path), "--json"]
    shared = ["--", *words, "--max_steps", "3"]
    assert run_command(lambda: main([*search, "--n_trials", "4", *shared])) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    [study] = found["studies"]
    assert sum(study["counts"].values()) == 4 and study["counts"]["fail"] and study["counts"]["complete"]
    for trial in study["trials"]:
        if trial["params"]["zero_optimization.stage"] == "7":
            assert trial["state"] == "fail" and trial["reason"].startswith("error: ") and "stage" in trial["reason"]
        else:
            assert trial["state"] == "complete" and trial["loss"] >= study["best"]["loss"]
    assert "--set zero_optimization.stage=1" in study["best"]["command"]
    assert json.loads((tmp_path / "best.json").read_text()) == found
    assert (tmp_path / "history_search.png").stat().st_size > 1000
    assert run_command(lambda: main([*search, "--n_trials", "4", *shared])) == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again == found, "a finished study runs nothing more"


def mistake(capsys, monkeypatch, words):
    import recipes.tune

    monkeypatch.setattr(recipes.tune, "find_spec", lambda name: object())
    monkeypatch.setattr("recipes.tune._search", lambda *arguments: pytest.fail("a trial was started"))
    code = run_command(lambda: recipes.tune.main(words))
    captured = capsys.readouterr()
    assert code == 2, captured
    return captured.err


@pytest.mark.parametrize(
    ("own", "rest", "expected"),
    [
        ([], [], "--search: give at least one"),
        (["--search", "optimiser.params.lr=log:1e-3:1e-1"], [], "optimiser"),
        (["--search", LR], ["--output_dir", "x"], "--output_dir: each trial has its own"),
        (["--search", LR, "--n_trials", "0"], [], "--n_trials 0: must be at least 1"),
        (["--search", LR, "--batch_sizes", "4", "8"], ["--train_tokens", "100"], "--batch_sizes: three"),
        (["--search", LR, "--batch_sizes", "4", "8", "16"], [], "--batch_sizes: give --train_tokens"),
        (["--search", "seed=int:1:4", "--batch_sizes", "4", "8", "16"], [], "searches the learning rate alone"),
        (["--search", LR], ["--max_step", "3"], "did you mean --max_steps?"),
    ],
)
def test_mistakes_are_named_before_a_trial_starts(capsys, monkeypatch, tmp_path, own, rest, expected):
    assert expected in mistake(capsys, monkeypatch, ["--output_dir", str(tmp_path / "out"), *own, "--", *rest])
    assert not (tmp_path / "out").exists()


def test_without_optuna_it_says_what_to_install(capsys, monkeypatch):
    import recipes.tune

    monkeypatch.setattr(recipes.tune, "find_spec", lambda name: None)
    assert run_command(lambda: recipes.tune.main(["--search", LR])) == 2
    assert "pip install optuna" in capsys.readouterr().err
