"""What a search varies, how its values reach pretrain.py, and the fit against the square-root rule."""

import json

import pytest

from recipes.config.errors import UserError
from recipes.config.run_config import parse_pretrain_config
from recipes.training.batch_rule import best_rate, compare_with_square_root
from recipes.training.search_space import Searched, as_flags, parse_search
from recipes.training.trial import _progress, _reason


def test_flags_and_ds_config_keys_of_every_form():
    searched = parse_search(
        ["optimizer.params.lr=log:1e-5:1e-1", "fim_rate=uniform:0:0.5", "seq_length=int:32:64", "packing=choice:a,b"]
    )
    assert searched == [
        Searched("optimizer.params.lr", "log", 1e-5, 1e-1),
        Searched("fim_rate", "uniform", 0.0, 0.5),
        Searched("seq_length", "int", 32.0, 64.0),
        Searched("packing", "choice", choices=("a", "b")),
    ]
    values = {"optimizer.params.lr": 0.0125, "fim_rate": 0.25, "seq_length": 48}
    words = as_flags(searched, values)
    assert words == ["--set", "optimizer.params.lr=0.0125", "--fim_rate", "0.25", "--seq_length", "48"]
    config = parse_pretrain_config(words)
    assert (config.fim_rate, config.seq_length, config.set) == (0.25, 48, ["optimizer.params.lr=0.0125"])


class Recorder:
    """Answers as an Optuna trial does, and keeps what it was asked."""

    def __init__(self):
        self.asked = []

    def __getattr__(self, name):
        return lambda *arguments, **keywords: self.asked.append((name, *arguments, keywords)) or 1


def test_suggestions_ask_for_what_the_form_says():
    trial = Recorder()
    for one in parse_search(["a=log:1:2", "b=uniform:1:2", "c=int:1:2", "d=choice:x,y"]):
        one.suggest(trial)
    assert trial.asked == [
        ("suggest_float", "a", 1.0, 2.0, {"log": True}),
        ("suggest_float", "b", 1.0, 2.0, {"log": False}),
        ("suggest_int", "c", 1, 2, {}),
        ("suggest_categorical", "d", ["x", "y"], {}),
    ]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("lr", "write KEY=log"),
        ("lr=normal:0:1", "write KEY=log"),
        ("lr=log:0:1", "above 0 for log"),
        ("lr=log:2:1", "LOW must be below HIGH"),
        ("lr=log:1", "needs two numbers"),
        ("lr=int:1.5:3", "both whole for int"),
        ("lr=choice:a", "needs two choices"),
    ],
)
def test_what_cannot_be_searched_is_named(text, fault):
    with pytest.raises(UserError, match=f"--search {text}: .*{fault}"):
        parse_search([text])


def test_a_key_twice_is_refused():
    with pytest.raises(UserError, match="--search lr: stands there twice"):
        parse_search(["lr=log:1:2", "lr=log:1:3"])


def test_the_exponent_of_rates_made_by_the_rule_is_a_half():
    rule = compare_with_square_root({4: 0.01, 16: 0.02, 64: 0.04})  # by hand: twice the rate for four times the batch
    assert rule["exponent"] == pytest.approx(0.5)
    assert rule["square_root_rule"] == pytest.approx({"4": 0.01, "16": 0.02, "64": 0.04})
    assert compare_with_square_root({4: 0.01, 8: 0.02, 16: 0.04})["exponent"] == pytest.approx(1.0)


def test_the_best_rate_lies_between_the_tried_ones():
    # by hand: a parabola over log10 of the rate with its least at 10 ** -2.25
    trials = [(10.0**power, (power + 2.25) ** 2) for power in (-1, -4, -2, -3)]
    assert best_rate(trials) == pytest.approx(10**-2.25)
    assert best_rate([(0.1, 1.0), (0.2, 2.0), (0.4, 3.0)]) == 0.1, "at the edge there is nothing to go by"


def test_a_trial_goes_by_its_newest_evaluation_or_the_mean_of_its_last_steps():
    steps = [{"step": step, "loss": float(step)} for step in range(1, 21)]
    assert _progress([]) == (0, None)
    assert _progress(steps) == (20, sum(range(11, 21)) / 10)
    assert _progress([*steps, {"step": 20, "eval_loss": 3.5}]) == (20, 3.5)


def test_the_reason_is_the_runs_own_last_word(tmp_path):
    log = tmp_path / "log.txt"
    log.write_text("model tiny\nerror: ds.json: key: wrong\n[launcher] killing\n")
    assert _reason(log, 2) == "error: ds.json: key: wrong"
    log.write_text("Segmentation fault\n")
    assert _reason(log, -11) == "exit code -11: Segmentation fault"
    assert json.dumps(_reason(log, -11))
