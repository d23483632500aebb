"""Read a run's folder into columns: one pair of arrays (steps, values) for each name in metrics.jsonl."""

import json
import math
import os
from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from recipes.config.errors import UserError

MAX_COLUMNS = 400  # a run that writes ever new names must not fill the memory
MAX_LOAD_SAMPLES = 240  # expert loads kept while reading; the heat map has fewer columns than that
LARGEST_STEP = 2**53


@dataclass
class Column:
    """The values of one name, by strictly rising step."""

    steps: array = field(default_factory=lambda: array("q"))
    values: array = field(default_factory=lambda: array("d"))

    def put(self, step: int, value: float) -> None:
        """Append; what was known of this step and of later ones belongs to an abandoned attempt and goes."""
        if self.steps and self.steps[-1] >= step:
            self.cut(bisect_left(self.steps, step))
        self.steps.append(step)
        self.values.append(value)

    def cut(self, length: int) -> None:
        del self.steps[length:]
        del self.values[length:]

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """(N,) int64 steps and (N,) float64 values, non-finite values included."""
        return np.array(self.steps, dtype=np.int64), np.array(self.values, dtype=np.float64)


@dataclass(frozen=True)
class Event:
    """Something that happened once: kind ("resume", "spike", ...), the step, and the line's other keys."""

    kind: str
    step: int
    details: dict[str, Any]


@dataclass
class RunRecord:
    """All that the report knows of one run."""

    folder: Path
    name: str
    run: dict[str, Any] = field(default_factory=dict)
    ds_config: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, Column] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    expert_load: list[tuple[int, dict[str, list[float]]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """(N,) steps and (N,) values of a name; both empty if the run has none."""
        return self.columns.get(key, Column()).arrays()

    def has(self, key: str) -> bool:
        """Whether the run has at least one finite value of this name."""
        return key in self.columns and any(map(math.isfinite, self.columns[key].values))

    def events_of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]


def read_runs(folders: list[Path]) -> list[RunRecord]:
    """Read several runs; names that two of them share are lengthened until they differ.

    Raises:
        UserError: one line for each folder that cannot be read.
    """
    runs: list[RunRecord] = []
    faults: list[str] = []
    for folder in folders:
        try:
            runs.append(read_run(folder))
        except UserError as error:
            faults.extend(error.faults)
    if faults:
        raise UserError(*faults)
    _tell_names_apart(runs)
    return runs


def read_run(folder: Path) -> RunRecord:
    """Read one run's folder.

    Raises:
        UserError: there is no such folder, no metrics.jsonl in it, or no line with a step in that.
    """
    path = folder / "metrics.jsonl"
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; name a run's folder, the one that holds metrics.jsonl")
    if not path.is_file():
        raise UserError(f"{folder}: not a run's folder, it has no metrics.jsonl; name pretrain's --output_dir")
    record = RunRecord(folder=folder, name=folder.resolve().name)
    record.run = _read_json(folder / "run.json", record.notes)
    record.ds_config = _read_json(folder / "ds_config.json", record.notes)
    _MetricsReader(record).read(path)
    if not any(column.steps for column in record.columns.values()):
        raise UserError(f"{path}: holds no line with a step and a number; the run has not logged its first step yet")
    return record


class _MetricsReader:
    """Goes through metrics.jsonl once, in the order in which it was written."""

    def __init__(self, record: RunRecord) -> None:
        self.record = record
        self.last_step = -1  # of the newest training line
        self.load_stride = 1  # keep every n-th expert load
        self.loads_seen = 0
        self.events: dict[tuple[str, int, int], Event] = {}

    def read(self, path: Path) -> None:
        unreadable = 0
        cut_off = False
        with path.open("rb") as file:
            for raw in file:
                if not raw.strip():
                    continue
                try:
                    line = json.loads(raw)
                except (ValueError, RecursionError):
                    unreadable += 1
                    cut_off = not raw.endswith(b"\n")
                    continue
                if isinstance(line, dict):
                    self._take(line)
        self.record.events = list(self.events.values())
        if cut_off:
            unreadable -= 1
            self.record.notes.append("metrics.jsonl: the last line is cut off, the run was stopped while writing it.")
        if unreadable:
            self.record.notes.append(f"metrics.jsonl: {unreadable} line(s) are not JSON and were left out.")

    def _take(self, line: dict[str, Any]) -> None:
        step = line.pop("step", None)
        known_step = isinstance(step, int) and not isinstance(step, bool) and 0 <= step < LARGEST_STEP
        kind = line.pop("event", None)
        if kind is not None:
            self._take_event(str(kind), step if known_step else max(self.last_step, 0), line)
            return
        if not known_step:
            return
        is_evaluation = "loss" not in line and any(key.startswith("eval_") for key in line)
        if not is_evaluation:
            self._go_back_to(step)
            self.last_step = step
            self._take_expert_load(step, line.pop("expert_load", None))
        for key, value in _numbers(line):
            column = self.record.columns.get(key)
            if column is None:
                if len(self.record.columns) >= MAX_COLUMNS:
                    continue
                column = self.record.columns[key] = Column()
            column.put(step, value)

    def _take_event(self, kind: str, step: int, details: dict[str, Any]) -> None:
        key = (kind, step, 0)  # after a resume, the same step may meet the same event again: the later one stands
        if kind == "resume":
            self._go_back_to(step)
            self.last_step = step
            key = (kind, step, len(self.events))
        self.events.pop(key, None)
        self.events[key] = Event(kind, step, details)

    def _go_back_to(self, step: int) -> None:
        """Forget what an abandoned attempt wrote of the steps after `step`."""
        if step >= self.last_step:
            return
        for column in self.record.columns.values():
            column.cut(bisect_right(column.steps, step))
        self.record.expert_load = [sample for sample in self.record.expert_load if sample[0] <= step]

    def _take_expert_load(self, step: int, value: Any) -> None:
        shares = _expert_shares(value)
        if not shares:
            return
        samples = self.record.expert_load
        if samples and samples[-1][0] == step:
            samples.pop()
        self.loads_seen += 1
        if self.loads_seen % self.load_stride:
            return
        samples.append((step, shares))
        if len(samples) >= 2 * MAX_LOAD_SAMPLES:  # thin out as we go: a long run has millions of shares
            self.record.expert_load = samples[1::2]
            self.load_stride *= 2


def _numbers(line: dict[str, Any]) -> list[tuple[str, float]]:
    """The numbers of a line; null is a number that was not finite; a dict of numbers becomes `name/key`."""
    found = []
    for key, value in line.items():
        if isinstance(value, dict):
            found += [(f"{key}/{sub}", _to_float(v)) for sub, v in value.items() if _is_number(v)]
        elif _is_number(value):
            found.append((key, _to_float(value)))
    return found


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _to_float(value: int | float | None) -> float:
    """A float that can be squared and divided without overflow; null is NaN."""
    try:
        number = math.nan if value is None else float(value)
    except OverflowError:  # an int that no float holds
        return math.inf
    if abs(number) > 1e150:
        return math.inf
    return 0.0 if abs(number) < 1e-150 else number


def _expert_shares(value: Any) -> dict[str, list[float]]:
    """Shares that sum to 1 by layer, from shares or counts; {} where the value is not of the documented shape."""
    if isinstance(value, list):
        value = {str(item[0]): item[1] for item in value if isinstance(item, list) and len(item) == 2}
    if not isinstance(value, dict):
        return {}
    result = {}
    for layer, loads in value.items():
        if not isinstance(loads, list) or not loads or not all(_is_number(load) for load in loads):
            continue
        numbers = [max(_to_float(load), 0.0) for load in loads]
        total = sum(numbers)
        if math.isfinite(total) and total > 0:
            result[str(layer)] = [number / total for number in numbers]
    return result


def _read_json(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        notes.append(f"{path.name}: not in the run's folder.")
        return {}
    except (OSError, ValueError, RecursionError):
        notes.append(f"{path.name}: cannot be read as JSON.")
        return {}
    if not isinstance(value, dict):
        notes.append(f"{path.name}: is not a JSON object.")
        return {}
    return value


def _tell_names_apart(runs: list[RunRecord]) -> None:
    """a/tiny and b/tiny are both called `tiny`: show as much of the path as tells them apart."""
    paths = [Path(os.path.abspath(run.folder)) for run in runs]
    for index, run in enumerate(runs):
        depth = 1
        rivals = [path for path in paths if path != paths[index]]
        while any(path.parts[-depth:] == paths[index].parts[-depth:] for path in rivals):
            depth += 1
        run.name = "/".join(paths[index].parts[-depth:])
