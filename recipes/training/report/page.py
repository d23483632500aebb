"""The HTML page: summary, charts, events and configuration, with the style and the script inside."""

import json
from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path
from typing import Any

from recipes.training.report.chart_list import main_charts, missing_names, other_charts, run_classes
from recipes.training.report.expert_map import LOAD_EXPLANATION, MAX_CELLS, render_expert_maps
from recipes.training.report.line_chart import line_key, mark_legend, render_chart
from recipes.training.report.number_text import short_number, whole_number
from recipes.training.report.run_folder import RunRecord
from recipes.training.report.summary import SUMMARY_ROWS, RunSummary, skipped_at, summarise

MAX_EVENTS_SHOWN = 200
MAX_VALUE_LENGTH = 300  # of a configuration value, in characters
_HERE = Path(__file__).parent


def build_page(runs: list[RunRecord]) -> str:
    """The whole page of one or several runs, as text of HTML that needs no other file."""
    title = f"Training report: {', '.join(run.name for run in runs)}"
    missing = missing_names(runs)
    absent = f'<p class="quiet">Not in metrics.jsonl: {escape(", ".join(missing))}.</p>' if missing else ""
    curves = "".join(map(render_chart, main_charts(runs)))
    body = [
        _header(runs),
        f"<section><h2>Summary</h2>{_summary_table([summarise(run) for run in runs])}{_notes(runs)}</section>",
        f'<section><h2>Curves</h2>{_event_legend(runs)}<div class="charts">{curves}</div>{absent}</section>',
        _expert_section(runs),
        _events_section(runs),
        _other_section(runs),
        _configuration(runs),
    ]
    style, script = ((_HERE / name).read_text(encoding="utf-8") for name in ("page.css", "hover.js"))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style></head>\n<body><main>\n"
        + "\n".join(part for part in body if part)
        + f'\n</main><div id="tip" hidden></div>\n<script>\n{script}</script></body></html>\n'
    )


def _header(runs: list[RunRecord]) -> str:
    if len(runs) == 1:
        return f"<header><p>Training report</p><h1>{escape(runs[0].name)}</h1></header>"
    names = "".join(f"<li>{line_key(run_classes(index))}{escape(run.name)}</li>" for index, run in enumerate(runs))
    return f'<header><p>Training report</p><h1>{len(runs)} runs compared</h1><ul class="legend">{names}</ul></header>'


def _summary_table(summaries: list[RunSummary]) -> str:
    """One row for each number that some run has, one column for each run; the best of a row is marked."""
    rows = []
    for row in SUMMARY_ROWS:
        texts = [row.text(summary) for summary in summaries]
        if not any(texts):
            continue
        values = [None if row.value is None else row.value(summary) for summary in summaries]
        known = [value for value in values if value is not None]
        best = row.better(known) if len(set(known)) > 1 else None
        cells = "".join(
            f"<td>{escape(text or '–')}{'<b>best</b>' if best is not None and value == best else ''}</td>"
            for text, value in zip(texts, values, strict=True)
        )
        rows.append(f'<tr><th scope="row">{row.label}</th>{cells}</tr>')
    head = ""
    if len(summaries) > 1:
        names = "".join(
            f'<th scope="col">{line_key(run_classes(i))}{escape(s.name)}</th>' for i, s in enumerate(summaries)
        )
        head = f"<thead><tr><td></td>{names}</tr></thead>"
    kind = "single" if len(summaries) == 1 else "several"
    return f'<div class="scroll"><table class="summary {kind}">{head}<tbody>{"".join(rows)}</tbody></table></div>'


def _notes(runs: list[RunRecord]) -> str:
    notes = [(f"{run.name}: " if len(runs) > 1 else "") + note for run in runs for note in run.notes]
    return f'<ul class="notes">{"".join(f"<li>{escape(note)}</li>" for note in notes)}</ul>' if notes else ""


def _event_legend(runs: list[RunRecord]) -> str:
    kinds = [kind for kind in ("resume", "spike") if any(run.events_of(kind) for run in runs)]
    return f'<ul class="legend">{mark_legend(kinds)}</ul>' if kinds else ""


def _other_section(runs: list[RunRecord]) -> str:
    """Charts of the numbers that the report does not know, folded away."""
    charts, left_out = other_charts(runs)
    if not charts:
        return ""
    names = ", ".join(chart.title for chart in charts[:8]) + (", ..." if len(charts) > 8 else "")
    more = f"<p>{left_out} more are in metrics.jsonl.</p>" if left_out else ""
    content = f'<div class="charts">{"".join(map(render_chart, charts))}</div>{more}'
    return f"<section><h2>Other numbers</h2>{_folded_part(f'{len(charts)} charts', content, names)}</section>"


def _expert_section(runs: list[RunRecord]) -> str:
    parts = []
    for run in runs:
        maps = render_expert_maps(run, MAX_CELLS // len(runs))
        if maps:
            parts.append((f"<h3>{escape(run.name)}</h3>" if len(runs) > 1 else "") + maps)
    if not parts:
        return ""
    return f'<section id="expert-load"><h2>Load of the experts</h2>{LOAD_EXPLANATION}{"".join(parts)}</section>'


def _events_section(runs: list[RunRecord]) -> str:
    events = [(step, run.name, kind, details) for run in runs for step, kind, details in _events(run)]
    if not events:
        return ""
    events.sort(key=lambda event: event[0])
    shown = events[:MAX_EVENTS_SHOWN]
    name_head = '<th scope="col">Run</th>' if len(runs) > 1 else ""
    rows = "".join(
        f'<tr><td class="number">{whole_number(step)}</td>{f"<td>{escape(name)}</td>" if name_head else ""}'
        f"<td>{escape(kind)}</td><td>{escape(details)}</td></tr>"
        for step, name, kind, details in shown
    )
    more = f"<p>{len(events) - len(shown)} more are in metrics.jsonl.</p>" if len(events) > len(shown) else ""
    return (
        f'<section id="events"><h2>Events</h2><div class="scroll"><table class="events"><thead><tr>'
        f'<th scope="col">Step</th>{name_head}<th scope="col">Event</th><th scope="col">Details</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{more}</section>"
    )


def _events(run: RunRecord) -> Iterable[tuple[int, str, str]]:
    for event in run.events:
        yield event.step, event.kind, ", ".join(f"{key} {_value_text(value)}" for key, value in event.details.items())
    for step, count in skipped_at(run):
        yield step, "skipped", f"{count} step{'s' if count > 1 else ''} left out, the gradients were not finite"


def _configuration(runs: list[RunRecord]) -> str:
    """Every key of run.json and ds_config.json; of several runs first the keys in which they differ."""
    parts = []
    files: tuple[tuple[str, Callable[[RunRecord], dict[str, Any]]], ...] = (
        ("run.json", lambda run: run.run),
        ("ds_config.json", lambda run: run.ds_config),
    )
    for name, read in files:
        columns = [dict(_flatten(read(run))) for run in runs]
        keys = list(dict.fromkeys(key for column in columns for key in column))
        differing = [key for key in keys if len({column.get(key) for column in columns}) > 1]
        if differing:
            parts.append(f"<h3>{name}: where the runs differ</h3>{_key_table(runs, differing, columns)}")
        parts.append(_folded_part(name, _key_table(runs, keys, columns) if keys else "", f"{len(keys)} keys"))
    return f'<section id="configuration"><h2>Configuration</h2>{"".join(parts)}</section>' if any(parts) else ""


def _key_table(runs: list[RunRecord], keys: list[str], columns: list[dict[str, str]]) -> str:
    names = "".join(f'<th scope="col">{escape(run.name)}</th>' for run in runs)
    head = f"<thead><tr><td></td>{names}</tr></thead>" if len(runs) > 1 else ""
    rows = "".join(
        f'<tr><th scope="row">{escape(key)}</th>'
        + "".join(f"<td>{escape(column.get(key, '–'))}</td>" for column in columns)
        + "</tr>"
        for key in keys
    )
    return f'<div class="scroll"><table class="keys">{head}<tbody>{rows}</tbody></table></div>'


def _flatten(value: Any, path: str = "") -> Iterable[tuple[str, str]]:
    """Nested dicts as (dotted key, text of the value); a list stays one value."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flatten(inner, f"{path}.{key}" if path else str(key))
    elif path:
        text = _value_text(value)
        yield path, text if len(text) <= MAX_VALUE_LENGTH else f"{text[:MAX_VALUE_LENGTH]} ..."


def _value_text(value: Any) -> str:
    if isinstance(value, float):
        return short_number(value, 5)
    if isinstance(value, str):
        return value
    return ", ".join(map(_value_text, value)) if isinstance(value, list) else json.dumps(value)


def _folded_part(title: str, content: str, count: str) -> str:
    quiet = f' <span class="unit">{escape(count)}</span>' if count else ""
    return f"<details><summary>{escape(title)}{quiet}</summary>{content}</details>" if content else ""
