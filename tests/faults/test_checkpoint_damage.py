"""A checkpoint that is not what was saved is found and named, and the one before it is used."""

import hashlib
import json

import pytest

from recipes.config.errors import UserError
from recipes.training import checkpoint_files
from recipes.training.checkpoint_files import (
    CheckpointError,
    checkpoint_name,
    clear_partial,
    commit,
    list_checkpoints,
    prune,
    verify_checksums,
    verify_sizes,
)
from recipes.training.resume import find_candidates, newest_verified


def alone(text):
    """What all ranks say, where there is one."""
    return [text]


@pytest.fixture
def run_folder(tmp_path):
    """A run with two complete checkpoints, steps 10 and 20."""
    folder = tmp_path / "run" / "checkpoints"
    for step in (10, 20):
        aside = folder / (checkpoint_name(step) + ".partial")
        (aside / "tokenizer").mkdir(parents=True)
        (aside / "weights.pt").write_bytes(bytes(range(256)) * step)
        (aside / "tokenizer" / "tokenizer.json").write_text("{}")
        commit(aside, folder / checkpoint_name(step), {})
    return tmp_path / "run"


def newest(run_folder):
    return run_folder / "checkpoints" / checkpoint_name(20)


def test_whole_checkpoints_verify_newest_first(run_folder):
    assert [path.name for path in find_candidates(run_folder, "auto")] == [checkpoint_name(20), checkpoint_name(10)]
    assert (run_folder / "checkpoints" / "latest").read_text() == checkpoint_name(20)
    assert newest_verified(find_candidates(run_folder, "auto"), False, 0, 1, alone) == newest(run_folder)


def test_manifest_holds_size_and_hash_of_every_file(run_folder):
    files = json.loads((newest(run_folder) / "manifest.json").read_text())["files"]
    assert files.keys() == {"weights.pt", "tokenizer/tokenizer.json"}
    content = bytes(range(256)) * 20
    assert files["weights.pt"] == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


@pytest.mark.parametrize("damage", ["truncated", "empty", "missing", "flipped", "no manifest", "broken manifest"])
def test_damage_is_named_and_the_one_before_is_used(run_folder, capsys, damage):
    weights = newest(run_folder) / "weights.pt"
    content = weights.read_bytes()
    manifest = newest(run_folder) / "manifest.json"
    {
        "truncated": lambda: weights.write_bytes(content[:-1]),
        "empty": lambda: weights.write_bytes(b""),
        "missing": weights.unlink,
        "flipped": lambda: weights.write_bytes(bytes([content[0] ^ 1]) + content[1:]),
        "no manifest": manifest.unlink,
        "broken manifest": lambda: manifest.write_text("{"),
    }[damage]()
    candidates = find_candidates(run_folder, "auto")
    chosen = newest_verified(candidates, False, 0, 1, alone)
    assert chosen is not None and chosen.name == checkpoint_name(10)
    if damage != "no manifest":  # without it the folder never was a checkpoint
        assert str(manifest if damage == "broken manifest" else weights) in capsys.readouterr().out
    with pytest.raises(UserError, match=checkpoint_name(20)):
        newest_verified(find_candidates(run_folder, str(newest(run_folder))), True, 0, 1, alone)


def test_latest_may_be_gone_or_point_nowhere(run_folder):
    """The folders decide, so a pointer that is missing, empty or dangling loses nothing."""
    pointer = run_folder / "checkpoints" / "latest"
    for text in ("", "step_99999999", None):
        pointer.unlink() if text is None else pointer.write_text(text)
        assert find_candidates(run_folder, "auto")[0] == newest(run_folder)


def test_nothing_complete_is_not_a_fresh_start(run_folder):
    for folder in list_checkpoints(run_folder / "checkpoints"):
        (folder / "manifest.json").unlink()
    with pytest.raises(UserError, match="none of them complete"):
        find_candidates(run_folder, "auto")
    assert find_candidates(run_folder.parent / "no_run_here", "auto") == []


def test_a_kill_during_the_first_save_loses_nothing_and_is_a_fresh_start(run_folder):
    folder = run_folder / "checkpoints"
    for checkpoint in list_checkpoints(folder):
        checkpoint.rename(checkpoint.with_name(checkpoint.name + ".partial"))
    assert find_candidates(run_folder, "auto") == []
    clear_partial(folder)
    assert not list(folder.glob("step_*"))


def test_a_kill_while_a_checkpoint_is_deleted_leaves_none_that_counts(run_folder, monkeypatch):
    folder = run_folder / "checkpoints"

    def killed(path, ignore_errors=False):
        if not ignore_errors:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(checkpoint_files.shutil, "rmtree", killed)
        prune(folder, total_limit=1)
    assert [path.name for path in find_candidates(run_folder, "auto")] == [checkpoint_name(20)]
    clear_partial(folder)
    assert [path.name for path in folder.glob("step_*")] == [checkpoint_name(20)]


def test_ranks_share_the_checksums_and_all_hear_of_a_fault(run_folder):
    weights = newest(run_folder) / "weights.pt"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + b"x")
    verify_sizes(newest(run_folder))
    names = ["tokenizer/tokenizer.json", "weights.pt"]  # sorted, as the ranks take them in turn
    verify_checksums(newest(run_folder), names.index("tokenizer/tokenizer.json"), 2)
    with pytest.raises(CheckpointError, match="weights.pt"):
        verify_checksums(newest(run_folder), names.index("weights.pt"), 2)
    # the other rank reads the altered file: this one hears of it and passes the checkpoint over, too
    others = iter([f"{weights}: differs", ""])
    chosen = newest_verified(find_candidates(run_folder, "auto"), False, 0, 2, lambda mine: [mine, next(others)])
    assert chosen is not None and chosen.name == checkpoint_name(10)


def test_partial_folders_go_and_the_best_stays(run_folder):
    folder = run_folder / "checkpoints"
    (folder / "step_00000030.partial").mkdir()
    (folder / "latest.partial").write_text("half a na")
    clear_partial(folder)
    assert [p.name for p in list_checkpoints(folder)] == [checkpoint_name(20), checkpoint_name(10)]
    assert not list(folder.glob("*.partial"))
    (folder / "best").write_text(checkpoint_name(10))
    prune(folder, total_limit=1)
    assert {p.name for p in list_checkpoints(folder)} == {checkpoint_name(10), checkpoint_name(20)}
    (folder / "best").write_text(checkpoint_name(20))
    prune(folder, total_limit=0)
    assert len(list_checkpoints(folder)) == 2
