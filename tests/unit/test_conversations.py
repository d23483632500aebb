"""Chat and instruction records as conversations, prepared, packed and masked; bad records named by file and line."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipes.config.errors import UserError
from recipes.data.conversation_corpus import (
    LEARNED_BIT,
    ConversationSettings,
    open_conversations,
    prepare_conversations,
)
from recipes.data.conversation_data import ConversationData, heldout_conversation_batches
from recipes.data.conversations import BadRecord, iter_records, messages_of
from recipes.data.corpus import PreparedCorpus
from recipes.data.sources import expand_inputs
from recipes.data.tokenizer import save_tokenizer, train_tokenizer


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"messages": [user("a"), assistant("b")], "id": 7}, [user("a"), assistant("b")]),
        ({"messages": [user("a"), assistant("b"), user("thanks")]}, [user("a"), assistant("b")]),
        ({"instruction": "add", "input": "1 2", "output": "3"}, [user("add\n\n1 2"), assistant("3")]),
        ({"instruction": "add", "input": "", "output": "3"}, [user("add"), assistant("3")]),
        ({"prompt": "a", "response": "b"}, [user("a"), assistant("b")]),
        ({"prompt": "a", "completion": "b"}, [user("a"), assistant("b")]),
        ({"prompt": [user("a")], "completion": [assistant("b")]}, [user("a"), assistant("b")]),
        (
            {"system": "short", "prompt": "a", "completion": "b"},
            [{"role": "system", "content": "short"}, user("a"), assistant("b")],
        ),
    ],
)
def test_every_kind_of_record(record, expected):
    assert messages_of(record) == expected


@pytest.mark.parametrize(
    ("record", "fault"),
    [
        ([1], "is list, not a mapping"),
        ({"text": "a"}, "no 'messages'.*its keys: text"),
        ({"messages": []}, "messages is empty"),
        ({"messages": "hi"}, "messages is str, not a list"),
        ({"messages": [user("a")]}, "no assistant turn"),
        ({"messages": [{"role": "robot", "content": "a"}, assistant("b")]}, "message 0: unknown role 'robot'"),
        ({"messages": [{"content": "a"}]}, "message 0: needs a role"),
        ({"messages": [user(" "), assistant("b")]}, r"message 0 \(user\): its content is empty"),
        ({"messages": [user("a"), {"role": "assistant", "content": None}]}, "content is NoneType, not a string"),
        ({"messages": [user("a"), assistant("\ud800")]}, "surrogate"),
        ({"instruction": "a", "output": 3}, "output is int, not a string"),
        ({"instruction": "a"}, "no 'messages'"),
    ],
)
def test_what_is_wrong_with_a_record(record, fault):
    with pytest.raises(BadRecord, match=fault):
        messages_of(record)


def test_records_come_from_jsonl_lists_parquet_and_compressed_files_with_their_places(tmp_path):
    records = [{"messages": [user(f"q{i}"), assistant(f"a{i}")]} for i in range(3)]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "chat.jsonl").write_text("\n" + lines)
    (tmp_path / "list.json").write_text(json.dumps(records, indent=1))
    (tmp_path / "more.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "chat.parquet")
    places = {
        "chat.jsonl": ":{}", "list.json": ": record {}", "more.jsonl.gz": ":{}", "chat.parquet": ": row {}",
    }  # fmt: skip
    first = {"chat.jsonl": 2, "list.json": 0, "more.jsonl.gz": 1, "chat.parquet": 0}
    for name, place in places.items():
        read = list(iter_records(expand_inputs([str(tmp_path / name)]).files))
        assert [record for record, _ in read] == records, name
        assert [origin for _, origin in read] == [
            str(tmp_path / name) + place.format(first[name] + number) for number in range(3)
        ]


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer(["What is it? It is so. User: Assistant:"] * 2, 300), folder)
    return str(folder)


def prepared(tmp_path, tokenizer_folder, records, **settings):
    path = tmp_path / "chat.jsonl"
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    chosen = ConversationSettings(tokenizer_folder, **{"holdout": 0.0, **settings})
    said = []
    folder = prepare_conversations(str(path), tmp_path / "cache", chosen, show_progress=False, report=said.append)
    return folder, said


def test_bad_records_stop_with_file_and_line_or_are_skipped_and_counted(tmp_path, tokenizer_folder):
    good = {"prompt": "What is it?", "response": "It is so."}
    records = [good, "{broken", {"messages": [user("a")]}, {"messages": [{"role": "x", "content": "a"}]}]
    with pytest.raises(UserError) as error:
        prepared(tmp_path, tokenizer_folder, records)
    lines = error.value.faults
    assert len(lines) == 3
    for number, word in ((2, "not JSON"), (3, "no assistant turn"), (4, "unknown role 'x'")):
        assert lines[number - 2].startswith(f"{tmp_path / 'chat.jsonl'}:{number}: ") and word in lines[number - 2]
    assert not list((tmp_path / "cache").glob("*.partial")), "a half was left"
    folder, said = prepared(tmp_path, tokenizer_folder, records, on_error="skip")
    assert "1 conversations" in said[-1] and "3 skipped" in said[-1]
    assert open_conversations(folder, "train").num_documents == 1
    with pytest.raises(UserError, match="holds no conversation .3 skipped"):
        prepared(tmp_path, tokenizer_folder, records[1:], on_error="skip")


def test_conversations_are_no_corpus_of_text(tmp_path, tokenizer_folder):
    folder, _ = prepared(tmp_path, tokenizer_folder, [{"prompt": "a", "response": "b"}])
    with pytest.raises(UserError, match="holds prepared conversations, where text is needed"):
        PreparedCorpus.open(folder)


def conversation(corpus, index):
    """(ids, learned) of one conversation, straight from the disk."""
    start = int(corpus.document_ends[index - 1]) if index else 0
    words = np.asarray(corpus.tokens[start : int(corpus.document_ends[index])])
    return (words & (LEARNED_BIT - 1)).tolist(), (words & LEARNED_BIT != 0).tolist()


@pytest.fixture
def corpus(tmp_path, tokenizer_folder):
    records = [
        {"prompt": "What is it?" * (1 + i % 3), "response": "It is so. " * (1 + i % 4) + str(i)} for i in range(20)
    ]
    folder, _ = prepared(tmp_path, tokenizer_folder, records)
    return open_conversations(folder, "train")


def learned_pairs(batch):
    """Every (conversation's tokens so far, label) with loss, told from the batch alone."""
    for row in range(len(batch["labels"])):
        documents, labels = batch["document_ids"][row].tolist(), batch["labels"][row].tolist()
        ids, positions = batch["input_ids"][row].tolist(), batch["position_ids"][row].tolist()
        for place, label in enumerate(labels):
            if label != -100:
                start = documents.index(documents[place])
                assert positions[place] == place - start, "positions restart with each conversation"
                yield tuple(ids[start : place + 1]), label


def pairs_of(corpus, index, longest=1 << 30):
    """The same of one conversation as it was tokenized, cut to its first `longest` tokens."""
    ids, learned = conversation(corpus, index)
    return [(tuple(ids[:place]), ids[place]) for place in range(1, min(len(ids), longest)) if learned[place]]


def expected_pairs(corpus):
    return [pair for index in range(corpus.num_documents) for pair in pairs_of(corpus, index)]


def test_packed_batches_predict_every_answers_token_once_from_its_own_conversation(corpus):
    data = ConversationData([(corpus, 1.0)], 96, seed=3)
    samples = [data.sample(index) for index in range(data.num_sequences)]
    assert data.num_sequences < corpus.num_documents, "nothing was packed"
    seen = [pair for sample in samples for pair in learned_pairs({k: v[None] for k, v in sample.items() if np.ndim(v)})]
    assert sorted(seen) == sorted(expected_pairs(corpus))
    assert all(sample["valid_tokens"].sum() >= (sample["labels"] != -100).sum() for sample in samples)


@pytest.mark.parametrize("world_size", [1, 3])
def test_held_out_answers_are_predicted_once_on_any_number_of_ranks(corpus, world_size):
    shares = [
        list(heldout_conversation_batches(corpus, seq_length=96, micro_batch_size=2, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    assert len({len(share) for share in shares}) == 1
    seen = [pair for share in shares for batch in share for pair in learned_pairs(batch)]
    assert sorted(seen) == sorted(expected_pairs(corpus))


def test_too_long_conversations_are_cut_or_left_out_and_said_so(tmp_path, tokenizer_folder):
    records = [
        {"prompt": "What", "response": "It"},
        {"prompt": "What", "response": "It is so. " * 30},
        {"prompt": "What is it? " * 30, "response": "It"},
    ]
    corpus = open_conversations(prepared(tmp_path, tokenizer_folder, records)[0], "train")
    data = ConversationData([(corpus, 1.0)], 32, seed=0)
    assert "1 conversations are longer than a sequence and are cut, 1 whose answers" in data.notes()[-1]
    seen = [
        pair
        for index in range(data.num_sequences)
        for pair in learned_pairs({k: v[None] for k, v in data.sample(index).items() if np.ndim(v)})
    ]
    assert sorted(seen) == sorted(pairs_of(corpus, 0) + pairs_of(corpus, 1, longest=33))
