"""The charts of a report, from the columns of its runs."""

from dataclasses import replace

import numpy as np

from recipes.training.report.chart_kinds import CHART_KINDS, NOT_CHARTED, ChartKind
from recipes.training.report.line_chart import Chart, Mark, Series, running_median, thin_out
from recipes.training.report.number_text import byte_unit, short_number
from recipes.training.report.run_folder import RunRecord
from recipes.training.report.summary import skipped_at

MEDIAN_FROM_POINTS = 60  # shorter curves are drawn as they are
POINTS_OF_PAGE = 900  # points of one curve, shared among the runs that lie in one chart
MAX_OTHER_CHARTS = 30
COLOURS, DASHES = 6, 4  # in the style sheet; a pair of both is a run's own up to twelve runs


def run_classes(index: int) -> str:
    """The style of a run's lines, by its place on the command line."""
    return Series("", np.empty(0), np.empty(0), index % COLOURS, dash=index % DASHES).classes


def main_charts(runs: list[RunRecord]) -> list[Chart]:
    """The charts of the well-known names, as far as some run has them."""
    charts = []
    for kind in CHART_KINDS:
        if kind.key == "eval_loss" and len(runs) == 1 and runs[0].has("loss"):
            continue  # drawn into the loss chart
        if not any(run.has(kind.key) for run in runs):
            continue
        charts.append(_memory_chart(kind, runs) if kind.key == "memory_bytes" else _chart(kind, runs))
        if kind.key == "loss" and len(runs) > 1 and any(run.has("tokens") for run in runs):
            charts.append(_loss_over_tokens(kind, runs))
    if sum(not chart.wide for chart in charts) % 2:  # two in a row: the last one would leave a hole
        charts[-1] = replace(charts[-1], fills_row=True)
    return charts


def missing_names(runs: list[RunRecord]) -> list[str]:
    """Names that would have a chart, and that no run has written."""
    return [kind.key for kind in CHART_KINDS if not any(run.has(kind.key) for run in runs)]


def other_charts(runs: list[RunRecord]) -> tuple[list[Chart], int]:
    """Charts of the numbers that have no chart of their own, by name, and how many more there were."""
    known = {kind.key for kind in CHART_KINDS} | NOT_CHARTED
    names = {key for run in runs for key in run.columns if run.has(key)} - known
    names -= {key for key in names if "_by_layer/" in key}
    names -= {key for key in names if _is_memory(key)} if len(runs) == 1 and runs[0].has("memory_bytes") else set()
    ordered = sorted(names)
    charts = [
        _chart(ChartKind(key, key, "as in metrics.jsonl", "", median=True, clip=True), runs)
        for key in ordered[:MAX_OTHER_CHARTS]
    ]
    return charts, len(ordered) - len(charts)


def _chart(kind: ChartKind, runs: list[RunRecord]) -> Chart:
    series: list[Series] = []
    marks: list[Mark] = []
    several = len(runs) > 1
    for index, run in enumerate(runs):
        if not run.has(kind.key):
            continue
        steps, values = run.series(kind.key)
        label = run.name if several else ("training" if kind.key == "loss" else kind.title)
        series += _curve(label, steps, values * kind.factor, index, kind, len(runs))
        if kind.key == "loss" and not several and run.has("eval_loss"):
            x, y = thin_out(*run.series("eval_loss"), POINTS_OF_PAGE // 3)
            series.append(Series("evaluation", x, y, 1, "dotted"))
        marks += _event_marks(run, several)
        if kind.key == "loss_scale":
            marks += _skip_marks(run)
        bad = steps[~np.isfinite(values)] if kind.key == "loss" else []
        marks += [Mark("nan", float(step), f"step {step}: the loss is not finite") for step in bad]
    return Chart(
        kind.key,
        kind.title,
        kind.unit,
        kind.explanation,
        series,
        marks,
        kind.scale,
        kind.clip,
        wide=kind.key == "loss",
    )


def _curve(label: str, x: np.ndarray, y: np.ndarray, index: int, kind: ChartKind, runs: int) -> list[Series]:
    """The raw values, and over them their running median where there are many; it alone beside other runs."""
    colour, dash = index % COLOURS, index % DASHES
    points = max(120, POINTS_OF_PAGE // runs)
    if not kind.median or len(x) < MEDIAN_FROM_POINTS:
        thin_x, thin_y = thin_out(x, y, points)
        return [Series(label, thin_x, thin_y, colour, "dotted" if kind.key.startswith("eval_") else "line", dash)]
    window = max(5, len(x) // 50)
    median_x, median_y = running_median(x, y, window, points // 3)
    median = Series(label if runs > 1 else f"median of {window}", median_x, median_y, colour, dash=dash)
    if runs > 2:
        return [median]
    raw_x, raw_y = thin_out(x, y, points)
    return [Series(f"{label}, each step" if runs > 1 else "each logged step", raw_x, raw_y, colour, "faint"), median]


def _loss_over_tokens(kind: ChartKind, runs: list[RunRecord]) -> Chart:
    """Runs with different batch sizes compare over the tokens that they saw, not over their steps."""
    series = []
    for index, run in enumerate(runs):
        token_steps, tokens = run.series("tokens")
        steps, loss = run.series("loss")
        shared, at_tokens, at_loss = np.intersect1d(token_steps, steps, assume_unique=True, return_indices=True)
        seen, loss = tokens[at_tokens], loss[at_loss]
        keep = np.isfinite(seen)
        if np.isfinite(loss[keep]).any():
            series += _curve(run.name, seen[keep], loss[keep], index, kind, len(runs) + 2)
    return Chart(
        "loss_over_tokens",
        "Loss over tokens",
        kind.unit,
        "The training loss over the tokens seen, which is fair between batch sizes: lower is better.",
        series,
        clip=True,
        wide=True,
        x_label="tokens",
    )


def _memory_chart(kind: ChartKind, runs: list[RunRecord]) -> Chart:
    """One run: all its memory names in one chart. Several: only `memory_bytes`, one curve for each run."""
    keys = [key for key in runs[0].columns if _is_memory(key) and runs[0].has(key)] if len(runs) == 1 else [kind.key]
    largest = max(float(np.nanmax(run.series(key)[1])) for run in runs for key in keys if run.has(key))
    factor, unit = byte_unit(largest)
    series = []
    for index, run in enumerate(runs):
        for number, key in enumerate(keys):
            if run.has(key):
                x, y = thin_out(*run.series(key), max(120, POINTS_OF_PAGE // len(runs) // len(keys)))
                label = run.name if len(runs) > 1 else key.removesuffix("_bytes").replace("_", " ")
                series.append(Series(label, x, y / factor, (index + number) % COLOURS, dash=index % DASHES))
    marks = [mark for run in runs for mark in _event_marks(run, len(runs) > 1)]
    return Chart(kind.key, kind.title, unit, kind.explanation, series, marks, kind.scale)


def _is_memory(key: str) -> bool:
    return key.endswith("_bytes") and ("memory" in key or "rss" in key)


def _event_marks(run: RunRecord, several: bool) -> list[Mark]:
    owner = f"{run.name}: " if several else ""
    return [
        Mark(event.kind, float(event.step), f"{owner}{event.kind} at step {event.step}")
        for event in run.events
        if event.kind in ("resume", "spike")
    ]


def _skip_marks(run: RunRecord) -> list[Mark]:
    steps, scales = run.series("loss_scale")
    scale_at = dict(zip(steps.tolist(), scales.tolist(), strict=True))
    return [
        Mark("skip", float(step), f"step {step}: {count} skipped, scale {short_number(scale_at[step])}", scale_at[step])
        for step, count in skipped_at(run)
        if np.isfinite(scale_at.get(step, np.nan))
    ]
