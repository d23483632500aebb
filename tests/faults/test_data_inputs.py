"""Bad input: each with its file and line or row, exit by UserError, and nothing left behind."""

import gzip
import json
import struct

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipes.config.errors import UserError
from recipes.data import cutting, sources
from recipes.data.corpus import Manifest, PreparedCorpus
from recipes.data.prepare import prepare
from recipes.data.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer

GOOD = "".join(json.dumps({"text": f"line {number}"}) + "\n" for number in range(30)).encode()


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer") / "t"
    save_tokenizer(train_tokenizer(["line"] * 9, 262), folder)
    return str(folder)


def run(path, output, tokenizer_folder, **options):
    options = {"num_proc": 1, "show_progress": False, "report": lambda message: None, **options}
    return prepare([str(path)], output, tokenizer=tokenizer_folder, **options)


def save_parquet(path, column):
    pq.write_table(pa.table({"text": column}), path, row_group_size=2)


def truncated_parquet(path):
    save_parquet(path, [f"line {number}" for number in range(50)])
    path.write_bytes(path.read_bytes()[:-20])


def damaged_parquet(path):
    pq.write_table(pa.table({"text": [f"line {number}" * 50 for number in range(500)]}), path, compression="gzip")
    content = bytearray(path.read_bytes())
    content[100:140] = b"\xff" * 40
    path.write_bytes(content)


# name of the file, what to write (bytes, or a function of the path), what the message says after the path
CASES = {
    "broken json": ("a.jsonl", GOOD + b'{"text": "x"\n', ":31: not JSON: Expecting ',' delimiter"),
    "a line of no object": ("a.jsonl", GOOD + b'["x"]\n', ":31: no key 'text' (it has: none)"),
    "wrong text key": (
        "a.jsonl",
        b'{"id": 1, "content": "x"}\n',
        ":1: no key 'text' (it has: id, content); name the text's",
    ),
    "text that is no string": ("a.jsonl", GOOD + b'{"text": 5}\n', ":31: the text is int, not a string"),
    "null text": ("a.jsonl", GOOD + b'{"text": null}\n', ":31: the text is NoneType, not a string"),
    "json not UTF-8": ("a.jsonl", GOOD + b'{"text": "\xff"}\n', ":31: byte 10 (0xff) is not UTF-8; --on_error replace"),
    "half a surrogate": ("a.jsonl", b'{"text": "\\ud800"}\n', ":1: half of a surrogate pair has no UTF-8; --on_error"),
    "text not UTF-8": ("a.py", b"x = '\xe9'\n", ": byte 5 (0xe9) is not UTF-8; --on_error replace or skip"),
    "truncated gz": ("a.jsonl.gz", gzip.compress(GOOD)[:-9], ":1: the file is damaged after this line"),
    "no gz": ("a.jsonl.gz", GOOD, ":1: the file is damaged after this line: Not a gzipped file"),
    "no zst": ("a.jsonl.zst", GOOD, ":1: the file is damaged after this line"),
    "truncated zst": (
        "a.jsonl.zst",
        pa.compress(GOOD * 50, "zstd", asbytes=True)[:-9],
        ":1: the file is damaged after this line",
    ),
    "csv without the column": ("a.csv", b"id,content\n1,x\n", ":1: no column 'text' (it has: id, content)"),
    "csv with a short row": ("a.csv", b"id,text\n1,x\n2\n", ":3: the text is NoneType, not a string"),
    "csv with an open quote": ("a.csv", b'text\nfine\n"open\n', ":3: the table is damaged: unexpected end of data"),
    "csv not UTF-8": ("a.csv", b"text\nfine\n\xff\n", ":3: byte 0 (0xff) is not UTF-8"),
    "parquet that is none": ("a.parquet", GOOD, ": not a readable parquet file"),
    "truncated parquet": ("a.parquet", truncated_parquet, ": not a readable parquet file"),
    "damaged parquet": ("a.parquet", damaged_parquet, ": row group 0: "),
    "parquet without the column": (
        "a.parquet",
        lambda p: pq.write_table(pa.table({"x": ["y"]}), p),
        ": no column 'text'",
    ),
    "parquet with a null": (
        "a.parquet",
        lambda p: save_parquet(p, ["x", "y", "z", None]),
        ": row 3: the text is NoneType",
    ),
    "parquet of numbers": ("a.parquet", lambda p: save_parquet(p, [1]), ": row 0: the text is int, not a string"),
    "parquet not UTF-8": (
        "a.parquet",
        lambda p: save_parquet(p, pa.array([b"x", b"\xff"]).view(pa.string())),
        ": row 1: byte 0 (0xff) is not",
    ),
    "binary": ("a.exe", b"MZ\0\0", ": a binary file of no known format; jsonl, csv"),
    "empty file": ("a.jsonl", b"", ": the corpus is empty: no document is left to train on (nothing was read)"),
    "only empty texts": (
        "a.jsonl",
        b'{"text": ""}\n' * 3,
        ": the corpus is empty: no document is left to train on (3 empty)",
    ),
    "a folder of another format": ("state.json", b"{}", ": not a readable folder of `datasets`"),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_names_its_place(tmp_path, tokenizer_folder, name):
    file_name, content, message = CASES[name]
    folder = tmp_path / "in"
    folder.mkdir()
    path = folder / file_name
    if callable(content):
        content(path)
    else:
        path.write_bytes(content)
    given = folder if file_name == "state.json" else path
    with pytest.raises(UserError) as caught:
        run(given, tmp_path / "out", tokenizer_folder)
    (fault,) = caught.value.faults
    assert fault.removeprefix("--input ").startswith(f"{given}{message}"), fault
    assert "\n" not in fault and {path.name for path in tmp_path.iterdir()} == {"in"}


def test_no_such_input(tmp_path, tokenizer_folder):
    with pytest.raises(UserError, match="--input .*absent.jsonl: no such file or folder"):
        run(tmp_path / "absent.jsonl", tmp_path / "out", tokenizer_folder)
    with pytest.raises(UserError, match="neither a file or folder here nor a data set that the hub gives"):
        run("nobody/no-such-data-set", tmp_path / "out", tokenizer_folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty: there is no file to read in it"):
        run(tmp_path / "empty", tmp_path / "out", tokenizer_folder)
    with pytest.raises(UserError) as caught:
        prepare([str(tmp_path / "x.csv"), str(tmp_path / "y.csv")], tmp_path / "out", tokenizer=tokenizer_folder)
    assert len(caught.value.faults) == 2, "all at once"


def test_several_bad_lines_come_at_once_and_lines_are_counted_across_pieces(tmp_path, tokenizer_folder, monkeypatch):
    for module in (sources, cutting):
        monkeypatch.setattr(module, "PIECE_BYTES", 200)
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD + b"{\n" * 25 + GOOD)
    with pytest.raises(UserError) as caught:
        run(path, tmp_path / "out", tokenizer_folder)
    assert caught.value.faults[0].startswith(f"{path}:31: not JSON") and len(caught.value.faults) == 11
    assert caught.value.faults[1].startswith(f"{path}:32: not JSON") and "more" in caught.value.faults[-1]


@pytest.mark.parametrize("num_proc", [1, 2])
def test_faults_from_tokenizing_processes(tmp_path, tokenizer_folder, num_proc):
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD + b"{\n")
    with pytest.raises(UserError, match=":31: not JSON"):
        run(path, tmp_path / "out", tokenizer_folder, num_proc=num_proc)


def test_on_error_skips_or_replaces_and_counts(tmp_path, tokenizer_folder):
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD + b'{"text": "caf\xe9"}\n{\n{"no": 1}\n{"text": null}\n{"text": "\\ud800!"}\n')
    skipped = run(path, tmp_path / "skip", tokenizer_folder, on_error="skip")
    assert {k: v for k, v in Manifest.read(skipped).counts.items() if v} == {"documents": 30, "skipped": 5}
    path.write_bytes(GOOD + b'{"text": "caf\xe9"}\n{"text": "\\ud800!"}\n')
    replaced = run(path, tmp_path / "replace", tokenizer_folder, on_error="replace", holdout=0.0)
    assert {k: v for k, v in Manifest.read(replaced).counts.items() if v} == {"documents": 32, "replaced": 2}
    corpus = PreparedCorpus.open(replaced)
    text = load_tokenizer(tokenizer_folder).decode(corpus.tokens[0 : corpus.num_tokens].tolist())
    assert "caf\ufffd" in text and "?!" in text
    text = tmp_path / "a.py"
    text.write_bytes(b"x = 'caf\xe9'\n")
    replaced = run(text, tmp_path / "text", tokenizer_folder, on_error="replace", holdout=0.0)
    assert Manifest.read(replaced).counts["replaced"] == 1
    path.write_bytes(GOOD + b"{\n")
    with pytest.raises(UserError, match="not JSON"):  # there is nothing to put in its place
        run(path, tmp_path / "no", tokenizer_folder, on_error="replace")


def test_ids_at_or_above_the_vocabulary(tmp_path, tokenizer_folder):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "' + bytes([33]) + b'"}\n{"text": "\\u0100"}\n')
    with pytest.raises(UserError) as caught:
        run(path, tmp_path / "out", tokenizer_folder, vocab_size=150)
    assert f"{path}:2: token id" in caught.value.faults[0]
    assert caught.value.faults[0].endswith("is outside the vocabulary of 150 ids")
    folder = run(path, tmp_path / "out", tokenizer_folder, holdout=0.0)
    corpus = PreparedCorpus.open(folder)
    largest = max(corpus.tokens[0 : corpus.num_tokens].tolist())
    corpus.check_vocab_size(largest + 1)
    with pytest.raises(UserError) as caught:
        corpus.check_vocab_size(largest)
    assert f"{folder}/train-00000.bin: token id {largest} is not below the model's vocab_size {largest}" in str(
        caught.value
    )


def write_pair(prefix, header, lengths=(2,), tokens=(1, 2), dtype=np.int32):
    lengths = np.array(lengths, dtype=np.int32)
    offsets = (np.cumsum(lengths) - lengths).astype(np.int64) * np.dtype(dtype).itemsize
    boundaries = np.arange(len(lengths) + 1, dtype=np.int64)
    prefix.with_suffix(".idx").write_bytes(header + lengths.tobytes() + offsets.tobytes() + boundaries.tobytes())
    prefix.with_suffix(".bin").write_bytes(np.array(tokens, dtype=dtype).tobytes())


HEADER = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 1, 2)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"header": b"NOTINDEX\x00" + HEADER[9:]}, "m.idx: not an index of Megatron's"),
        ({"header": HEADER[:9] + struct.pack("<QBQQ", 2, 4, 1, 2)}, "m.idx: version 2, dtype code 4"),
        ({"header": HEADER[:9] + struct.pack("<QBQQ", 1, 7, 1, 2)}, "m.idx: version 1, dtype code 7"),
        ({"header": HEADER[:9] + struct.pack("<QBQQ", 1, 4, 900, 901)}, "too few for 900 sequences: the file is cut"),
        ({"header": HEADER, "tokens": (1,)}, r"m.bin: shorter than its index says \(8 bytes\)"),
        (
            {"header": HEADER, "tokens": (70, 262)},
            "m.bin: document 0: token id 262 is outside the vocabulary of 262 ids",
        ),
        ({"header": HEADER, "tokens": (70, -5)}, "m.bin: document 0: token id -5 is outside"),
    ],
)
def test_bad_megatron_pairs(tmp_path, tokenizer_folder, options, message):
    write_pair(tmp_path / "m", **options)
    with pytest.raises(UserError, match=message):
        run(tmp_path / "m.bin", tmp_path / "out", tokenizer_folder)


def test_megatron_needs_its_tokenizer(tmp_path):
    write_pair(tmp_path / "m", HEADER)
    with pytest.raises(UserError, match="--tokenizer: Megatron's .bin/.idx holds token ids; name the tokenizer"):
        prepare([str(tmp_path / "m")], tmp_path / "out", show_progress=False)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"holdout": 1.0}, "--holdout 1.0: must be at least 0 and below 1"),
        ({"text_key": ""}, "--text_key '': must name the key"),
        ({"on_error": "ignore"}, "--on_error ignore: must be one of stop, replace, skip"),
        ({"vocab_size": 0}, "--vocab_size 0: must be at least 1"),
    ],
)
def test_bad_settings(tmp_path, tokenizer_folder, options, message):
    with pytest.raises(UserError, match=message):
        run("stdlib", tmp_path / "out", tokenizer_folder, **options)
    assert not list(tmp_path.iterdir())


def test_a_split_that_stays_empty_is_warned_about(tmp_path, tokenizer_folder):
    path = tmp_path / "a.txt"
    path.write_text("one document")
    messages = []
    run(path, tmp_path / "out", tokenizer_folder, holdout=1e-9, report=messages.append)
    assert any("none of its 1 documents fell into the part to hold out" in message for message in messages)
