"""Preparing: the same documents from any format, in any order of files, by any number of processes."""

import csv
import gzip
import json
import os
import struct
import sys
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipes.config.errors import UserError
from recipes.data import cutting, encode, preparation, sources
from recipes.data.corpus import Manifest, PreparedCorpus
from recipes.data.prepare import made_from, prepare, prepare_all
from recipes.data.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer

TEXTS = [f"def f{number}(x):\n    return x * {number}, 'a \"quoted\" naïve, 漢字 {number}'\n" for number in range(60)]


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer") / "t"
    save_tokenizer(train_tokenizer(TEXTS, 300), folder)
    return str(folder)


@pytest.fixture
def small_pieces(monkeypatch):
    """Pieces of a few documents, so that small inputs have many."""
    for module in (sources, cutting):
        monkeypatch.setattr(module, "PIECE_BYTES", 500)


def run(inputs, output, tokenizer_folder, **options):
    options = {"num_proc": 1, "show_progress": False, "report": lambda message: None, **options}
    return prepare([str(name) for name in inputs], output, tokenizer=tokenizer_folder, **options)


def texts_of(folder, split):
    corpus = PreparedCorpus.open(folder, split)
    tokenizer = load_tokenizer(corpus.tokenizer_folder)
    starts = [0, *corpus.document_ends.tolist()]
    documents = [corpus.tokens[a:b].tolist() for a, b in zip(starts[:-1], starts[1:], strict=True)]
    assert all(document[-1] == tokenizer.eos_token_id for document in documents)
    texts = [tokenizer.decode(document[:-1]) for document in documents]
    assert corpus.num_bytes == sum(len(text.encode()) for text in texts)
    assert corpus.num_documents == len(texts) and corpus.num_tokens == sum(map(len, documents))
    return texts


def all_texts(folder):
    return texts_of(folder, "train") + texts_of(folder, "heldout")


def lines(key="text"):
    return "".join(json.dumps({"id": number, key: text}) + "\n" for number, text in enumerate(TEXTS)).encode()


def write_jsonl(path):
    path.with_suffix(".jsonl").write_bytes(lines())
    return path.with_suffix(".jsonl")


def write_gz(path):
    path.with_suffix(".jsonl.gz").write_bytes(gzip.compress(lines()))
    return path.with_suffix(".jsonl.gz")


def write_zst(path):
    """Two frames, as parallel compressors write them."""
    content = lines()
    frames = [pa.compress(part, "zstd", asbytes=True) for part in (content[:1000], content[1000:])]
    path.with_suffix(".jsonl.zst").write_bytes(b"".join(frames))
    return path.with_suffix(".jsonl.zst")


def write_table(path, suffix=".csv", delimiter=","):
    with open(path.with_suffix(suffix), "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerows([["id", "text"], *([number, text] for number, text in enumerate(TEXTS))])
    return path.with_suffix(suffix)


def write_tsv(path):
    return write_table(path, ".tsv", "\t")


def write_parquet(path):
    pq.write_table(pa.table({"text": TEXTS, "id": range(len(TEXTS))}), path.with_suffix(".parquet"), row_group_size=7)
    return path.with_suffix(".parquet")


def write_code_folder(path):
    for number, text in enumerate(TEXTS):
        file = path / f"package{number // 10}" / f"module{number:02d}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    (path / ".git").mkdir()
    (path / ".git" / "config").write_text("hidden")
    (path / "image.png").write_bytes(b"\x89PNG\0\0")
    return path


def write_data_folder(path):
    path.mkdir()
    half = len(lines().splitlines(keepends=True)) // 2
    (path / "b.jsonl").write_bytes(b"".join(lines().splitlines(keepends=True)[half:]))
    (path / "a.jsonl.gz").write_bytes(gzip.compress(b"".join(lines().splitlines(keepends=True)[:half])))
    (path / "README.md").write_text("not data")
    return path


def write_dataset(path):
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(str(path))
    return path


def write_dataset_dict(path):
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": TEXTS})}).save_to_disk(str(path))
    return path


def write_megatron(path, tokenizer_folder=None, dtype=np.int32, code=4, end=True):
    """The format by its description: magic, version, dtype code, counts, lengths, byte offsets, document boundaries."""
    tokenizer = load_tokenizer(tokenizer_folder)
    documents = [tokenizer(text, add_special_tokens=False)["input_ids"] + [1] * end for text in TEXTS]
    lengths = np.array([len(document) for document in documents], dtype=np.int32)
    path.with_suffix(".bin").write_bytes(np.concatenate(documents).astype(dtype).tobytes())
    offsets = (np.cumsum(lengths) - lengths).astype(np.int64) * np.dtype(dtype).itemsize
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(documents), len(documents) + 1)
    boundaries = np.arange(len(documents) + 1, dtype=np.int64)
    path.with_suffix(".idx").write_bytes(header + lengths.tobytes() + offsets.tobytes() + boundaries.tobytes())
    return path.with_suffix(".bin")


WRITERS = [
    write_jsonl,
    write_gz,
    write_zst,
    write_table,
    write_tsv,
    write_parquet,
    write_code_folder,
    write_data_folder,
    write_dataset,
    write_dataset_dict,
]


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__.removeprefix("write_"))
def test_every_format_gives_the_same_documents(tmp_path, tokenizer_folder, small_pieces, write):
    folder = run([write(tmp_path / "data")], tmp_path / "out", tokenizer_folder)
    heldout = texts_of(folder, "heldout")
    assert texts_of(folder, "train") == [text for text in TEXTS if text not in heldout]
    assert heldout == [text for text in TEXTS if text in heldout] and 0 < len(heldout) < 20
    manifest = Manifest.read(folder)
    assert (manifest.dtype, manifest.vocab_size, manifest.counts["documents"]) == ("uint16", 300, 60)


@pytest.mark.parametrize("dtype, code, end", [(np.int32, 4, True), (np.uint16, 8, False), (np.int64, 5, True)])
def test_megatron_pairs_as_they_are(tmp_path, tokenizer_folder, small_pieces, dtype, code, end):
    pair = write_megatron(tmp_path / "data", tokenizer_folder, dtype, code, end)
    folder = run([pair], tmp_path / "out", tokenizer_folder)
    assert sorted(all_texts(folder)) == sorted(TEXTS)
    as_text = run([write_jsonl(tmp_path / "data")], tmp_path / "text", tokenizer_folder)
    assert Manifest.read(folder).content_hash == Manifest.read(as_text).content_hash


def test_hub_data_sets_are_streamed(tmp_path, tokenizer_folder, small_pieces, monkeypatch):
    asked = []

    def load_dataset(*arguments, **options):
        asked.append((arguments, options))
        return datasets.Dataset.from_dict({"text": TEXTS}).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    folder = run(["owner/name:small"], tmp_path / "out", tokenizer_folder)
    assert sorted(all_texts(folder)) == sorted(TEXTS)
    assert asked == [(("owner/name", "small"), {"split": "train", "streaming": True})]


def test_a_hub_that_fails_is_gone_on_with(tmp_path, tokenizer_folder, small_pieces, monkeypatch):
    def rows(fail_at):
        for number, text in enumerate(TEXTS):
            if number == fail_at:
                raise ConnectionError("the network is gone")
            yield {"text": text}

    monkeypatch.setattr(datasets, "load_dataset", lambda *arguments, **options: rows(fail_at=40))
    with pytest.raises(UserError, match="owner/name: .*: the network is gone"):
        run(["owner/name"], tmp_path / "out", tokenizer_folder)
    monkeypatch.setattr(datasets, "load_dataset", lambda *arguments, **options: rows(fail_at=None))
    messages = []
    folder = run(["owner/name"], tmp_path / "out", tokenizer_folder, report=messages.append)
    assert "going on after" in messages[0] and sorted(all_texts(folder)) == sorted(TEXTS)


def test_order_of_files_and_processes_do_not_matter(tmp_path, tokenizer_folder, small_pieces):
    names = []
    for part in range(6):
        names.append(tmp_path / f"{part}.jsonl")
        names[-1].write_bytes(b"".join(lines().splitlines(keepends=True)[part * 10 : part * 10 + 10]))
    forwards = run(names, tmp_path / "forwards", tokenizer_folder)
    backwards = run(names[::-1], tmp_path / "backwards", tokenizer_folder)
    assert sorted(texts_of(forwards, "heldout")) == sorted(texts_of(backwards, "heldout"))
    in_two = run(names, tmp_path / "in_two", tokenizer_folder, num_proc=2)
    assert Manifest.read(in_two).content_hash == Manifest.read(forwards).content_hash


def test_held_out_part_grows_with_its_share(tmp_path, tokenizer_folder):
    file = write_jsonl(tmp_path / "data")
    held = [
        set(texts_of(run([file], tmp_path / str(s), tokenizer_folder, holdout=s), "heldout")) for s in (0.0, 0.2, 0.6)
    ]
    assert not held[0] and held[1] < held[2] and 3 <= len(held[1]) <= 24 and 24 <= len(held[2]) <= 48


def test_duplicates_are_dropped_and_counted(tmp_path, tokenizer_folder, small_pieces):
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    one.write_bytes(lines() + lines())
    two.write_bytes(lines())
    folder = run([one, two], tmp_path / "out", tokenizer_folder)
    assert sorted(all_texts(folder)) == sorted(TEXTS)
    assert Manifest.read(folder).counts["duplicates"] == 120


def test_text_key_and_blank_lines(tmp_path, tokenizer_folder):
    file = tmp_path / "data.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + lines("content").replace(b"\n", b"\n\n") + b'{"content": ""}\n')
    folder = run([file], tmp_path / "out", tokenizer_folder, text_key="content")
    assert sorted(all_texts(folder)) == sorted(TEXTS)
    assert Manifest.read(folder).counts["empty"] == 1


def test_a_long_txt_is_a_collection_of_documents(tmp_path, tokenizer_folder, monkeypatch):
    monkeypatch.setattr(cutting, "LONG_TEXT_BYTES", 1000)
    monkeypatch.setattr(cutting, "LONG_TEXT_DOCUMENT_BYTES", 300)
    text = "".join(f"paragraph {number}\n" * 6 + "\n" for number in range(60)) + "one long line " * 60
    (tmp_path / "book.txt").write_text(text)
    folder = run([tmp_path / "book.txt"], tmp_path / "out", tokenizer_folder, holdout=0.0)
    documents = texts_of(folder, "train")
    assert "".join(documents) == text and len(documents) == 15
    assert all(document.endswith("\n\n") and 300 <= len(document) < 600 for document in documents[:-1])
    with_holdout = run([tmp_path / "book.txt"], tmp_path / "out2", tokenizer_folder, holdout=0.3)
    assert texts_of(with_holdout, "heldout")


def test_a_document_of_many_contexts_stays_whole(tmp_path, tokenizer_folder, monkeypatch):
    monkeypatch.setattr(encode, "LONGEST_ENCODED_TEXT", 1000)
    text = "".join(f"x{number} = {number}\n" for number in range(3000))
    (tmp_path / "long.py").write_text(text)
    folder = run([tmp_path / "long.py"], tmp_path / "out", tokenizer_folder, holdout=0.0)
    assert texts_of(folder, "train") == [text]


def test_many_ids_need_32_bits(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {f"w{number}": number for number in range(70_000)} | {"</s>": 70_000}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "data.txt").write_text("w1 w69999")
    folder = run([tmp_path / "data.txt"], tmp_path / "out", str(tmp_path / "tokenizer.json"), holdout=0.0)
    corpus = PreparedCorpus.open(folder)
    assert corpus.tokens.dtype == np.uint32 and corpus.tokens[0:3].tolist() == [1, 69999, 70000]


def test_second_call_keeps_the_folder(tmp_path, tokenizer_folder, monkeypatch):
    file = write_jsonl(tmp_path / "data")
    folder = run([file], tmp_path / "out", tokenizer_folder)
    monkeypatch.setattr(preparation.Preparation, "run", lambda *arguments: pytest.fail("prepared twice"))
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert run([file], tmp_path / "out", tokenizer_folder) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    assert not list(tmp_path.glob("*.lock")) and not list(tmp_path.glob("*.partial"))


def test_one_tokenizer_for_all_sources(tmp_path):
    (tmp_path / "a.txt").write_text("alpha beta gamma " * 50)
    (tmp_path / "b.txt").write_text("delta epsilon zeta " * 50)
    options = {"vocab_size": 300, "holdout": 0.0, "num_proc": 1, "show_progress": False, "report": lambda message: None}
    specs = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    folders = prepare_all(specs, tmp_path / "cache", **options)
    assert [path.name[:6] for path in folders] == ["a-txt-", "b-txt-"]
    one, two = (Manifest.read(folder) for folder in folders)
    assert one.tokenizer_file.sha256 == two.tokenizer_file.sha256 and one.content_hash != two.content_hash
    words = load_tokenizer(folders[0] / "tokenizer").get_vocab()
    assert any("alpha" in word for word in words) and any("epsilon" in word for word in words)
    assert prepare_all(specs, tmp_path / "cache", **options) == folders
    # A folder that is prepared already lends its tokenizer.
    mixed = prepare_all([str(folders[0]), specs[1]], tmp_path / "other", **options)
    assert mixed[0] == folders[0] and Manifest.read(mixed[1]).content_hash == two.content_hash


def test_a_tokenizer_is_not_trained_on_what_is_held_out(tmp_path):
    words = ["".join(chr(97 + (number * 7 + place * place) % 26) for place in range(12)) for number in range(26)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": f"{word} " * 20}) + "\n" for word in words))
    options = {
        "vocab_size": 2000,
        "holdout": 0.4,
        "num_proc": 1,
        "show_progress": False,
        "report": lambda message: None,
    }
    folder = prepare([str(tmp_path / "data.jsonl")], tmp_path / "out", **options)
    known = {token.lstrip("\u0120") for token in load_tokenizer(folder / "tokenizer").get_vocab()}
    heldout = {text.split()[0] for text in texts_of(folder, "heldout")}
    assert 3 <= len(heldout) <= 20
    assert {word for word in words if word in known} == set(words) - heldout


def test_stdlib_is_without_tests_and_packages():
    root = Path(os.__file__).resolve().parent
    # Debian's sitecustomize.py is a link to /etc.
    files = [path for file in sources.expand_inputs(["stdlib"]).files if (path := Path(file.path)).is_relative_to(root)]
    parts = {part for file in files for part in file.relative_to(root).parts[:-1]}
    assert not parts & {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    names = {str(file.relative_to(root)) for file in files}
    assert {"os.py", "json/decoder.py", "asyncio/events.py"} <= names and all(name.endswith(".py") for name in names)
    assert len(files) > 400 and sum(file.stat().st_size for file in files) > 5e6


def test_tokenizing_processes_import_neither_torch_nor_transformers():
    import subprocess

    code = (
        "import sys, recipes.data.encode; print([m for m in ('torch', 'transformers', 'datasets') if m in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert result.stdout.strip() == "[]"


def test_a_folder_that_is_just_being_written_is_not_done_and_no_mistake(tmp_path):
    assert not made_from(tmp_path / "corpus", "x")
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "train.ends").touch()
    assert not made_from(tmp_path / "corpus", "x")
    (tmp_path / "corpus" / "manifest.json").write_text('{"format"')
    assert not made_from(tmp_path / "corpus", "x")
