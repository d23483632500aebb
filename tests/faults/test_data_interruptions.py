"""Interruptions and damage: nothing half-written is taken for whole, and what was done is not done again."""

import json
import os
import resource
import shutil
import signal
import time

import pytest

from recipes.config.errors import UserError
from recipes.data import cutting, lock, preparation, sources
from recipes.data.corpus import Manifest, PreparedCorpus, is_prepared
from recipes.data.prepare import prepare
from recipes.data.tokenizer import save_tokenizer, train_tokenizer
from recipes.data.writer import CorpusWriter

TEXTS = [f"document {number} " * (3 + number % 7) for number in range(300)]
TEXTS += TEXTS[:30]  # duplicates, which a resumed run must know too


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    for module in (sources, cutting):
        monkeypatch.setattr(module, "PIECE_BYTES", 1000)
    monkeypatch.setattr(preparation, "JOURNAL_SECONDS", 0.0)
    monkeypatch.setattr(lock, "POLL_SECONDS", 0.02)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(an input, a tokenizer's folder, the content hash of an undisturbed preparation)."""
    folder = tmp_path_factory.mktemp("made")
    save_tokenizer(train_tokenizer(TEXTS, 280), folder / "t")
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    run(folder, folder / "whole")
    return folder, Manifest.read(folder / "whole").content_hash


def run(folder, output, messages=None, **options):
    report = (lambda message: None) if messages is None else messages.append
    options = {"num_proc": 1, "show_progress": False, "report": report, "tokenizer": str(folder / "t"), **options}
    return prepare([str(folder / "data.jsonl")], output, **options)


def in_child(action):
    """Run `action` in a forked process; (its wait status, what it returned or raised as text)."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, str(action()).encode())
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    return os.waitpid(pid, 0)[1], text


def kill_after(number, monkeypatch):
    append = CorpusWriter.append

    def append_then_die(self, piece):
        append(self, piece)
        if self.pieces_done == number:
            for file in self.files.values():
                file.flush()  # more on disk than the journal says
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(CorpusWriter, "append", append_then_die)


@pytest.mark.parametrize("pieces", [1, 7])
def test_killed_and_resumed(tmp_path, made, pieces):
    folder, content_hash = made
    with pytest.MonkeyPatch.context() as patched:
        kill_after(pieces, patched)
        status, _ = in_child(lambda: run(folder, tmp_path / "out"))
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert not is_prepared(tmp_path / "out") and (tmp_path / "out.lock").exists()
    messages = []
    assert Manifest.read(run(folder, tmp_path / "out", messages)).content_hash == content_hash
    assert "is gone; taking the lock over" in messages[0]
    assert ("going on after" in messages[1]) == (pieces > 1)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in (folder / "whole").iterdir()}


def test_killed_while_it_finishes(tmp_path, made):
    folder, content_hash = made
    for name in ("finish", "describe_shard"):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(CorpusWriter, name, lambda *arguments: os.kill(os.getpid(), signal.SIGKILL))
            in_child(lambda: run(folder, tmp_path / "out"))
        assert not is_prepared(tmp_path / "out")
    messages = []
    assert Manifest.read(run(folder, tmp_path / "out", messages)).content_hash == content_hash
    assert "going on after 300 documents" in messages[1]


def test_a_journal_that_promises_more_than_is_there_is_not_believed(tmp_path, made):
    folder, content_hash = made
    with pytest.MonkeyPatch.context() as patched:
        kill_after(9, patched)
        in_child(lambda: run(folder, tmp_path / "out"))
    os.truncate(tmp_path / "out.partial" / "train-00000.bin", 100)
    messages = []
    assert Manifest.read(run(folder, tmp_path / "out", messages)).content_hash == content_hash
    assert not any("going on after" in message for message in messages)


def test_other_inputs_do_not_go_on_with_a_partial_folder(tmp_path, made):
    folder, _ = made
    with pytest.MonkeyPatch.context() as patched:
        kill_after(9, patched)
        in_child(lambda: run(folder, tmp_path / "out"))
    messages = []
    run(folder, tmp_path / "out", messages, holdout=0.3)
    assert not any("going on after" in message for message in messages)
    undisturbed = run(folder, tmp_path / "other", holdout=0.3)
    assert Manifest.read(undisturbed).content_hash == Manifest.read(tmp_path / "out").content_hash


def test_full_disk(tmp_path, made):
    """A file may not grow past 6,000 bytes: what a full disk does, for one process alone."""
    folder, content_hash = made

    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, resource.RLIM_INFINITY))
        return run(folder, tmp_path / "out")

    # The tokenizer is larger than the limit: it is there from an earlier try.
    with pytest.MonkeyPatch.context() as patched:
        kill_after(1, patched)
        in_child(lambda: run(folder, tmp_path / "out"))
    _, text = in_child(limited)
    assert text.startswith(
        f"UserError: {tmp_path / 'out'}: cannot be written: File too large; free space and run again"
    )
    assert not is_prepared(tmp_path / "out")
    messages = []
    assert Manifest.read(run(folder, tmp_path / "out", messages)).content_hash == content_hash
    assert any("going on after" in message for message in messages)


def test_several_processes_at_once(tmp_path, made):
    folder, content_hash = made
    prepared = preparation.Preparation.run

    def slowly(self, num_proc):
        time.sleep(0.5)
        prepared(self, num_proc)

    pids, logs = [], [tmp_path / f"log{number}" for number in range(4)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(preparation.Preparation, "run", slowly)
        for log in logs:
            if (pid := os.fork()) == 0:
                messages = []
                run(folder, tmp_path / "out", messages)
                log.write_text("\n".join(messages))
                os._exit(0)
            pids.append(pid)
        assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 4
    texts = [log.read_text() for log in logs]
    workers = [number for number, text in enumerate(texts) if text.startswith("prepared ")]
    assert len(workers) == 1, texts
    for number, text in enumerate(texts):
        if number not in workers and text:  # one that came after the end finds the folder and says nothing
            assert text.startswith(f"waiting for process {pids[workers[0]]} on ") and "to prepare " in text
    assert sum(bool(text) for text in texts) >= 2
    assert Manifest.read(tmp_path / "out").content_hash == content_hash


@pytest.fixture
def copy(tmp_path, made):
    shutil.copytree(made[0] / "whole", tmp_path / "copy")
    return tmp_path / "copy"


def overwrite_byte(path):
    content = bytearray(path.read_bytes())
    content[11] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("file", ["train-00000.bin", "train.ends", "tokenizer/tokenizer.json"])
@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda path: path.unlink(), "missing; restore it, or prepare the data again"),
        (lambda path: os.truncate(path, 40), "40 bytes, but the manifest says "),
        (overwrite_byte, "altered: its SHA-256 is not the manifest's"),
    ],
)
def test_damage_is_found_at_the_start(copy, made, file, damage, message):
    PreparedCorpus.open(copy)
    damage(copy / file)
    with pytest.raises(UserError) as caught:
        PreparedCorpus.open(copy)
    assert caught.value.faults[0].startswith(f"{copy / file}: {message}")
    with pytest.raises(UserError, match=file):
        run(made[0], copy)  # a second preparation does not keep it either


def test_all_damage_at_once_and_large_splits_by_request(copy, monkeypatch):
    overwrite_byte(copy / "train-00000.bin")
    (copy / "train.ends").unlink()
    with pytest.raises(UserError) as caught:
        PreparedCorpus.open(copy)
    assert len(caught.value.faults) == 2
    PreparedCorpus.open(copy, "heldout")
    overwrite_byte(copy / "heldout-00000.bin")
    monkeypatch.setattr("recipes.data.corpus.QUICK_HASH_BYTES", 1000)
    PreparedCorpus.open(copy, "heldout")  # too large for the quick verification
    with pytest.raises(UserError, match="heldout-00000.bin: altered"):
        PreparedCorpus.open(copy, "heldout", verify="full")


def test_folders_that_are_something_else(tmp_path, made):
    folder, _ = made
    with pytest.raises(UserError, match="no prepared corpus .manifest.json is missing."):
        PreparedCorpus.open(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format": "web-app"}')
    with pytest.raises(UserError, match="not a manifest of a prepared corpus"):
        PreparedCorpus.open(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(UserError, match="--output .*mine: exists and is not a prepared corpus"):
        run(folder, tmp_path / "mine")
    (tmp_path / "empty").mkdir()
    assert is_prepared(run(folder, tmp_path / "empty"))


def test_other_settings_need_overwrite(copy, made):
    folder, content_hash = made
    with pytest.raises(
        UserError, match="was prepared with other holdout, on_error; name another folder, or replace it"
    ):
        run(folder, copy, holdout=0.5, on_error="skip")
    assert Manifest.read(copy).content_hash == content_hash
    run(folder, copy, holdout=0.5, overwrite=True)
    assert Manifest.read(copy).settings["holdout"] == 0.5 and [p.name for p in copy.parent.iterdir()] == ["copy"]
