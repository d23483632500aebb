"""The command prepare_data, on the default corpus: what it prints, what it leaves, and what the packings make of it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from recipes.config.errors import UserError, run_command
from recipes.data.corpus import PreparedCorpus
from recipes.data.fim import PlainDocuments
from recipes.data.packing import BestFitPacking
from recipes.data.sources import expand_inputs
from recipes.prepare_data import main

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def default_corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared") / "stdlib"
    started = time.monotonic()
    assert main(["--input", "stdlib", "--train_tokenizer", "4096", "--output", str(folder)]) == 0
    return folder, time.monotonic() - started


def test_default_corpus(default_corpus):
    folder, seconds = default_corpus
    assert seconds < 60  # about 10 on two quiet cores
    train, heldout = PreparedCorpus.open(folder), PreparedCorpus.open(folder, "heldout")
    texts = {Path(file.path).read_bytes() for file in expand_inputs(["stdlib"]).files} - {b""}
    assert train.num_documents + heldout.num_documents == len(texts)
    assert train.num_bytes + heldout.num_bytes == sum(map(len, texts))
    assert 0.05 < heldout.num_documents / len(texts) < 0.15  # binomial with 730 documents: 0.1 +- 0.011
    assert train.manifest.vocab_size == 4096
    assert 3.5 < train.num_bytes / train.num_tokens < 4.5  # bytes per token, what this vocabulary gives on Python
    tokenizer = AutoTokenizer.from_pretrained(str(train.tokenizer_folder))
    for corpus in (train, heldout):
        start = 0
        for end in corpus.document_ends.tolist():
            ids = corpus.tokens[start:end].tolist()
            assert ids[-1] == tokenizer.eos_token_id and tokenizer.decode(ids[:-1]).encode() in texts
            start = end


@pytest.mark.parametrize("seq_length", [256, 1024, 4096])
def test_best_fit_pads_little(default_corpus, seq_length):
    corpus = PreparedCorpus.open(default_corpus[0])
    packing = BestFitPacking(PlainDocuments(corpus), seq_length, corpus.manifest.pad_token_id)
    assert packing.num_padding / (packing.num_sequences * (seq_length + 1)) < 0.02


def test_again_from_another_folder_as_json(default_corpus, tmp_path):
    folder, _ = default_corpus
    before = (folder / "manifest.json").stat().st_mtime_ns
    command = [sys.executable, str(REPOSITORY / "recipes" / "prepare_data.py"), "--input", "stdlib", "--json"]
    command += ["--train_tokenizer", "4096", "--output", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=os.environ)
    assert result.returncode == 0, result.stderr
    shown = json.loads(result.stdout)
    assert shown["padded_vocab_size"] == shown["vocab_size"] == 4096 and shown["folder"] == str(folder)
    assert shown["heldout"]["num_tokens"] == PreparedCorpus.open(folder, "heldout").num_tokens
    assert (folder / "manifest.json").stat().st_mtime_ns == before


def test_what_is_printed(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("one two three " * 20)
    arguments = ["--input", str(tmp_path / "a.txt"), "--output", str(tmp_path / "out"), "--holdout", "0"]
    assert main([*arguments, "--train_tokenizer", "270", "--vocab_multiple", "64"]) == 0
    printed = capsys.readouterr()
    assert "train: 1 documents, " in printed.out and " 280 bytes of text" in printed.out
    assert "vocab_size for a model: 320 (a multiple of 64)" in printed.out
    assert f"--data {tmp_path / 'out'}" in printed.out
    assert "1 documents; 0.0 MB" in printed.err and " documents/s, " in printed.err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["--input", "absent.jsonl", "--train_tokenizer", "300"],
            "error: --input absent.jsonl: no such file or folder",
        ),
        (["--input", "stdlib", "--tokenizer", "./absent"], "error: --tokenizer ./absent: no tokenizer can be loaded"),
        (["--input", "stdlib", "--train_tokenizer", "100"], "error: --train_tokenizer 100: 256 bytes and 6 special"),
        (["--input", "stdlib", "--train_tokenizer", "300", "--vocab_size", "300"], "error: --vocab_size: goes with"),
        (
            ["--input", "stdlib", "--train_tokenizer", "300", "--num_proc", "0"],
            "error: --num_proc 0: must be at least 1",
        ),
    ],
)
def test_mistakes(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_command(lambda: main([*arguments, "--output", str(tmp_path / "out")])) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert not list(tmp_path.iterdir())


def test_unknown_flags_and_missing_ones(capsys):
    for arguments in (["--inputs", "x"], ["--input", "x", "--output", "y"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
    assert "one of the arguments --tokenizer --train_tokenizer is required" in capsys.readouterr().err


def test_fim_flag_adds_tokens(tmp_path):
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("a")
    arguments = ["--input", str(tmp_path / "a.txt"), "--tokenizer", str(tmp_path / "tokenizer.json"), "--holdout", "0"]
    assert main([*arguments, "--output", str(tmp_path / "without")]) == 0
    assert main([*arguments, "--output", str(tmp_path / "with"), "--fim"]) == 0
    without, with_fim = (PreparedCorpus.open(tmp_path / name).manifest for name in ("without", "with"))
    assert without.fim_tokens is None and with_fim.fim_tokens == (2, 3, 4)
    assert (without.vocab_size, with_fim.vocab_size) == (2, 5)
    with pytest.raises(UserError, match="vocab_size 1"):
        PreparedCorpus.open(tmp_path / "with").check_vocab_size(1)
