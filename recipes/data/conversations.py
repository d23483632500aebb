"""Conversations from the records of chat and instruction files.

A record is one of these, whatever else it holds:
    {"messages": [{"role": "system" | "user" | "assistant", "content": TEXT}, ...]}
    {"instruction": TEXT, "input": TEXT (may be missing or empty), "output" | "response" | "completion": TEXT}
    {"prompt": TEXT or messages, "response" | "completion" | "output": TEXT or messages}
The last two may have "system", a text that comes first.
"""

import json
from collections.abc import Iterator
from typing import Any

from recipes.config.errors import UserError
from recipes.data.reading import BROKEN_FILE, first_line, load_dataset_folder
from recipes.data.sources import SourceFile, open_binary

ROLES = ("system", "user", "assistant")
ANSWER_KEYS = ("output", "response", "completion")
Message = dict[str, str]


class BadRecord(ValueError):
    """A record that is no conversation; the message says why, without the place."""


def messages_of(record: Any) -> list[Message]:
    """The messages of one record, up to its last assistant turn: nothing after that has a loss.

    Raises:
        BadRecord: no known keys, an unknown role, an empty or missing text, no assistant turn.
    """
    if not isinstance(record, dict):
        raise BadRecord(f"the record is {type(record).__name__}, not a mapping")
    if record.get("messages") is not None:
        messages = _checked(record["messages"], "messages")
    else:
        messages = _from_instruction(record)
    for number, message in enumerate(messages):
        if message["role"] not in ROLES:
            raise BadRecord(f"message {number}: unknown role {message['role']!r}; write one of {', '.join(ROLES)}")
        if not message["content"].strip():
            raise BadRecord(f"message {number} ({message['role']}): its content is empty")
        try:
            message["content"].encode("utf-8")
        except UnicodeEncodeError:  # JSON may escape half of a surrogate pair
            raise BadRecord(f"message {number} ({message['role']}): half of a surrogate pair has no UTF-8") from None
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise BadRecord("no assistant turn, so there is nothing to learn from it")
    return messages[: turns[-1] + 1]


def _checked(messages: Any, key: str) -> list[Message]:
    if not isinstance(messages, list):
        raise BadRecord(f"{key} is {type(messages).__name__}, not a list")
    if not messages:
        raise BadRecord(f"{key} is empty")
    checked = []
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRecord(f"message {number}: needs a role; write one of {', '.join(ROLES)}")
        if not isinstance(message.get("content"), str):
            kind = type(message.get("content")).__name__
            raise BadRecord(f"message {number} ({message['role']}): its content is {kind}, not a string")
        checked.append({"role": message["role"], "content": message["content"]})
    return checked


def _from_instruction(record: dict[str, Any]) -> list[Message]:
    question = next((key for key in ("instruction", "prompt") if record.get(key) is not None), None)
    answer = next((key for key in ANSWER_KEYS if record.get(key) is not None), None)
    if question is None or answer is None:
        has = ", ".join(map(str, record)) or "none"
        raise BadRecord(
            f"no 'messages', and no 'instruction' or 'prompt' with one of {', '.join(ANSWER_KEYS)} (its keys: {has})"
        )
    messages = _turn(record, "system", "system") if record.get("system") else []
    asked = _turn(record, question, "user")
    if question == "instruction" and record.get("input"):
        asked[0]["content"] += "\n\n" + _turn(record, "input", "user")[0]["content"]
    return messages + asked + _turn(record, answer, "assistant")


def _turn(record: dict[str, Any], key: str, role: str) -> list[Message]:
    if isinstance(record[key], str):
        return [{"role": role, "content": record[key]}]
    if key == "instruction" or not isinstance(record[key], list):
        raise BadRecord(f"{key} is {type(record[key]).__name__}, not a string")
    return _checked(record[key], key)


# --- Files -----------------------------------------------------------------------------------------------------------


def iter_records(files: list[SourceFile]) -> Iterator[tuple[Any, str]]:
    """(record, its file and line or row) of every file; a line that is no JSON comes as a BadRecord.

    Raises:
        UserError: a file of another kind, or one that cannot be read.
    """
    for file in files:
        if file.kind not in READERS:
            raise UserError(
                f"--data {file.path}: a conversation file is jsonl (.gz, .zst), a .json list, parquet, a folder saved "
                "by `datasets`, or a hub id"
            )
        yield from READERS[file.kind](file)


def read_lines(file: SourceFile) -> Iterator[tuple[Any, str]]:
    line_number = 0
    try:
        with open_binary(file.path) as stream:
            for line_number, line in enumerate(stream, 1):
                if line_number == 1 and line.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
                    yield from read_list(line + stream.read(), file.path)
                    return
                if line.strip():
                    yield parse_json(line), f"{file.path}:{line_number}"
    except BROKEN_FILE as error:
        place = f"{file.path}:{line_number + 1}"
        raise UserError(f"{place}: the file is damaged or cannot be read: {first_line(error)}") from error


def parse_json(text: bytes) -> Any:
    try:
        return json.loads(text.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return BadRecord(f"byte {error.start} (0x{error.object[error.start]:02x}) is not UTF-8")
    except ValueError as error:
        return BadRecord(f"not JSON: {error}")


def read_list(text: bytes, path: str) -> Iterator[tuple[Any, str]]:
    """A file that is one JSON list of records, as instruction files often are."""
    records = parse_json(text)
    if isinstance(records, BadRecord):
        raise UserError(f"{path}: {records}")
    for number, record in enumerate(records):
        yield record, f"{path}: record {number}"


def read_parquet(file: SourceFile) -> Iterator[tuple[Any, str]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    row_number = 0
    try:
        for batch in pq.ParquetFile(file.path).iter_batches(batch_size=1024):
            for record in batch.to_pylist():
                yield record, f"{file.path}: row {row_number}"
                row_number += 1
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UserError(f"{file.path}: row {row_number}: cannot be read: {first_line(error)}") from error


def read_dataset(file: SourceFile) -> Iterator[tuple[Any, str]]:
    for row_number, record in enumerate(load_dataset_folder(file.path)):
        yield record, f"{file.path}: row {row_number}"


def read_hub(file: SourceFile) -> Iterator[tuple[Any, str]]:
    from datasets import load_dataset

    name, _, configuration = file.path.partition(":")
    try:
        rows = load_dataset(name, configuration or None, split="train", streaming=True)
        for row_number, record in enumerate(rows):
            yield record, f"{file.path}: row {row_number}"
    except (OSError, ValueError) as error:  # no network, no such repository, several configurations to choose from
        raise UserError(
            f"--data {file.path}: neither a file or folder here nor a data set that the hub gives: {first_line(error)}"
        ) from error


READERS = {"jsonl": read_lines, "parquet": read_parquet, "dataset": read_dataset, "hub": read_hub}
