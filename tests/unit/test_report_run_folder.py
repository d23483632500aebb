"""Reading a run's folder: whatever a run, a crash or a resume leaves in metrics.jsonl."""

import json
import math

import pytest

from recipes.config.errors import UserError
from recipes.training.report import read_run, read_runs


def write_run(folder, *lines, run=None, ds_config=None):
    """Lines are dicts, or texts that are written as they are."""
    folder.mkdir(parents=True)
    texts = [line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines]
    (folder / "metrics.jsonl").write_text("".join(texts))
    (folder / "run.json").write_text(json.dumps({} if run is None else run))
    (folder / "ds_config.json").write_text(json.dumps({} if ds_config is None else ds_config))
    return folder


def values(record, key):
    return dict(zip(*(array.tolist() for array in record.series(key)), strict=True))


def test_a_cut_off_last_line_is_left_out_and_told(tmp_path):
    record = read_run(write_run(tmp_path / "a", {"step": 1, "loss": 2.0}, '{"step": 2, "lo'))
    assert values(record, "loss") == {1: 2.0}
    assert record.notes == ["metrics.jsonl: the last line is cut off, the run was stopped while writing it."]


def test_garbage_between_lines_is_counted(tmp_path):
    lines = ({"step": 1, "loss": 2.0}, '{"step": 2, "lo', '{"step": 2, "loss": 3}\n', "\x00\x00\n", "[1]\n", "\n")
    record = read_run(write_run(tmp_path / "a", *lines, {"step": 3, "loss": 1.0}))
    assert values(record, "loss") == {1: 2.0, 3: 1.0}
    assert record.notes == ["metrics.jsonl: 2 line(s) are not JSON and were left out."]


def test_null_nan_and_infinity_are_gaps(tmp_path):
    text = '{"step": 1, "loss": null}\n{"step": 2, "loss": NaN}\n{"step": 3, "loss": -Infinity}\n'
    record = read_run(write_run(tmp_path / "a", text, {"step": 4, "loss": 10**400}, {"step": 5, "loss": 1.5}))
    found = values(record, "loss")
    assert list(found) == [1, 2, 3, 4, 5]
    assert not any(math.isfinite(found[step]) for step in (1, 2, 3, 4))
    assert found[5] == 1.5


def test_the_later_line_of_a_step_wins_and_the_abandoned_attempt_is_forgotten(tmp_path):
    first = [{"step": step, "loss": 10.0 + step, "expert_load": {"a": [1, 1]}} for step in range(1, 7)]
    first.insert(4, {"step": 4, "eval_loss": 9.0})
    second = [{"event": "resume", "step": 2}, *({"step": step, "loss": 20.0 + step} for step in (3, 4))]
    record = read_run(write_run(tmp_path / "a", *first, *second))
    assert values(record, "loss") == {1: 11.0, 2: 12.0, 3: 23.0, 4: 24.0}
    assert values(record, "eval_loss") == {}
    assert [step for step, _ in record.expert_load] == [1, 2]
    assert [(event.kind, event.step) for event in record.events] == [("resume", 2)]


def test_going_back_without_a_resume_line_forgets_as_well(tmp_path):
    lines = [{"step": step, "loss": 1.0} for step in (1, 2, 3, 4)] + [{"step": 2, "loss": 5.0}]
    record = read_run(write_run(tmp_path / "a", *lines))
    assert values(record, "loss") == {1: 1.0, 2: 5.0}


def test_an_evaluation_after_its_step_keeps_the_training_line(tmp_path):
    lines = ({"step": 2, "loss": 3.0}, {"step": 2, "eval_loss": 2.5}, {"step": 2, "eval_loss": 2.4})
    record = read_run(write_run(tmp_path / "a", *lines, {"step": 3, "loss": 2.9}))
    assert values(record, "loss") == {2: 3.0, 3: 2.9}
    assert values(record, "eval_loss") == {2: 2.4}


def test_an_evaluation_that_comes_late_takes_nothing_back(tmp_path):
    lines = [{"step": step, "loss": 1.0} for step in (1, 2, 3)]
    record = read_run(write_run(tmp_path / "a", *lines, {"step": 2, "eval_loss": 2.0}))
    assert values(record, "loss") == {1: 1.0, 2: 1.0, 3: 1.0}


def test_events_are_never_plotted_and_a_repeated_one_counts_once(tmp_path):
    spike = {"event": "spike", "step": 2, "loss": 99.0, "action": "skip"}
    lines = ({"step": 1, "loss": 3.0}, spike, {"event": "resume", "step": 1}, {"step": 2, "loss": 2.0})
    record = read_run(write_run(tmp_path / "a", *lines, spike, {"event": "resume", "step": 2}, {"event": "save"}))
    assert values(record, "loss") == {1: 3.0, 2: 2.0}
    assert [(event.kind, event.step) for event in record.events] == [
        ("resume", 1), ("spike", 2), ("resume", 2), ("save", 2),
    ]  # fmt: skip
    assert record.events_of("spike")[0].details == {"loss": 99.0, "action": "skip"}


def test_unknown_keys_are_kept_and_what_is_no_number_is_not(tmp_path):
    line = {
        "step": 1,
        "loss": 1.0,
        "new": 7,
        "groups": {"embed": 0.5, "name": "x"},
        "text": "x",
        "flag": True,
        "a": [1],
    }
    record = read_run(write_run(tmp_path / "a", line, {"loss": 1}, {"step": "2", "loss": 1}, {"step": True, "loss": 1}))
    assert set(record.columns) == {"loss", "new", "groups/embed"}
    assert values(record, "loss") == {1: 1.0}


@pytest.mark.parametrize(
    ("load", "shares"),
    [
        ({"a": [0.25, 0.75]}, {"a": [0.25, 0.75]}),
        ({"a": [1, 3]}, {"a": [0.25, 0.75]}),
        ([["a", [1, 3]]], {"a": [0.25, 0.75]}),
        ({"a": [1, 3], "b": "x", "c": [], "d": [0, 0], "e": [1, None]}, {"a": [0.25, 0.75]}),
    ],
)
def test_expert_load_is_read_as_shares(tmp_path, load, shares):
    record = read_run(write_run(tmp_path / "a", {"step": 1, "loss": 1.0, "expert_load": load}))
    assert record.expert_load == [(1, shares)]


@pytest.mark.parametrize("load", [None, 3, "x", [], [1, 2], {"a": 3}])
def test_an_expert_load_of_another_shape_is_left_out(tmp_path, load):
    assert read_run(write_run(tmp_path / "a", {"step": 1, "loss": 1.0, "expert_load": load})).expert_load == []


def test_expert_loads_of_a_long_run_are_thinned_out_evenly(tmp_path):
    lines = [{"step": step, "loss": 1.0, "expert_load": {"a": [1, 1]}} for step in range(1, 2001)]
    steps = [step for step, _ in read_run(write_run(tmp_path / "a", *lines)).expert_load]
    assert 240 <= len(steps) < 480
    assert {after - before for before, after in zip(steps, steps[1:], strict=False)} == {8}


def test_missing_and_broken_configuration_is_noted(tmp_path):
    folder = write_run(tmp_path / "a", {"step": 1, "loss": 1.0})
    (folder / "run.json").unlink()
    (folder / "ds_config.json").write_text("{")
    record = read_run(folder)
    assert record.run == record.ds_config == {}
    assert record.notes == ["run.json: not in the run's folder.", "ds_config.json: cannot be read as JSON."]


def test_all_bad_folders_are_reported_at_once(tmp_path):
    (tmp_path / "bare").mkdir()
    write_run(tmp_path / "empty")
    write_run(tmp_path / "only_events", {"event": "resume", "step": 3})
    with pytest.raises(UserError) as caught:
        read_runs([tmp_path / name for name in ("none", "bare", "empty", "only_events")])
    assert [any(word in fault for word in ("no such folder", "no metrics.jsonl", "holds no line")) for fault in
            caught.value.faults] == [True] * 4  # fmt: skip


def test_runs_of_one_name_are_told_apart(tmp_path):
    folders = [write_run(tmp_path / name, {"step": 1, "loss": 1.0}) for name in ("a/tiny", "b/tiny", "c/other")]
    assert [run.name for run in read_runs(folders)] == ["a/tiny", "b/tiny", "other"]
