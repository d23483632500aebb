"""Line charts: an SVG that stretches with the page, with its labels as HTML, so that they stay readable on a phone."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from html import escape

import numpy as np

from recipes.training.report.number_text import linear_ticks, log_ticks, power_labels, short_number, tick_labels

WIDTH, HEIGHT = 1000, 400  # of the SVG's own coordinates; the page stretches them to the plot's size
MARKS_PER_CHART = 160  # more would only paint over one another


@dataclass(frozen=True)
class Series:
    """One line: x and y (N,), non-finite y is a gap; style: line, dotted (with points), faint (under a median)."""

    label: str
    x: np.ndarray
    y: np.ndarray
    colour: int
    style: str = "line"
    dash: int = 0

    @property
    def classes(self) -> str:
        """Colour and dashes as the style sheet calls them; dashes for those who cannot tell the colours apart."""
        return f"c{self.colour} d{self.dash}"


@dataclass(frozen=True)
class Mark:
    """Something at one x: kind "resume", "spike" (a vertical line), "skip" or "nan" (a sign at height y, or on top)."""

    kind: str
    x: float
    text: str
    y: float | None = None


@dataclass(frozen=True)
class Chart:
    """What is drawn, and how it is explained; `scale` is "auto" (log if the values ask for it), "linear" or "log2"."""

    key: str
    title: str
    unit: str
    explanation: str
    series: list[Series]
    marks: list[Mark] = field(default_factory=list)
    scale: str = "auto"
    clip: bool = False  # let single values run out of the picture, where they would flatten all the others
    wide: bool = False  # a row of its own, and taller
    fills_row: bool = False
    x_label: str = "step"


def thin_out(x: np.ndarray, y: np.ndarray, points: int) -> tuple[np.ndarray, np.ndarray]:
    """At most about `points` of the values: the lowest and highest of each stretch, so that no peak is lost."""
    if len(x) <= points:
        return x, y
    edges = np.linspace(0, len(x), points // 2 + 1).astype(np.int64)
    keep = {0, len(x) - 1}
    for start, stop in zip(edges[:-1], edges[1:], strict=True):
        part = y[start:stop]
        if np.isfinite(part).any():
            keep.update((start + int(np.nanargmin(_no_inf(part))), start + int(np.nanargmax(_no_inf(part)))))
        else:
            keep.add(int(start))
    index = np.array(sorted(keep))
    return x[index], y[index]


def running_median(x: np.ndarray, y: np.ndarray, window: int, points: int) -> tuple[np.ndarray, np.ndarray]:
    """Medians of the `window` values around (fewer at the ends) at most `points` evenly spread places; NaN if none.

    A median, because the mean would turn a single peak into a plateau as wide as the window.
    """
    centres = np.unique(np.linspace(0, len(x) - 1, min(points, len(x))).round().astype(np.int64))
    medians = np.full(len(centres), np.nan)
    for index, centre in enumerate(centres):
        around = y[max(0, centre - window // 2) : centre + (window + 1) // 2]
        around = around[np.isfinite(around)]
        if len(around):
            medians[index] = np.median(around)
    return x[centres], medians


def render_chart(chart: Chart) -> str:
    """A <figure> with the plot, its axes, legend, explanation, and the values that hovering shows."""
    x_low, x_high = _x_range(chart)
    axis = _Axis.fit(chart)
    span = x_high - x_low
    paths, hover = [], []
    for series in chart.series:
        at_x = (series.x - x_low) / span
        at_y = axis.place(series.y)
        paths.append(f'<path class="s {series.style} {series.classes}" d="{_line_path(at_x, at_y)}"/>')
        if series.style == "dotted":
            paths.append(f'<path class="s dots c{series.colour}" d="{_dots_path(at_x, at_y)}"/>')
        hover.append(_hover_values(series))
    grid = "".join(f"M0 {HEIGHT * (1 - axis.at(tick)):.1f}H{WIDTH}" for tick in axis.ticks)
    x_ticks = linear_ticks(x_low, x_high, 5)
    lines, signs = _marks(chart, x_low, span, axis)
    data = {"x": [x_low, x_high], "label": chart.x_label, "series": hover}
    log = "" if axis.scale == "linear" else ", logarithmic"
    explanation = f'<p class="explain">{escape(chart.explanation)}</p>' if chart.explanation else ""
    shape = " wide" if chart.wide else " row" if chart.fills_row else ""
    return (
        f'<figure class="chart{shape}" id="chart-{escape(chart.key)}">'
        f'<figcaption><h3>{escape(chart.title)} <span class="unit">[{escape(chart.unit)}{log}]</span></h3>'
        f"{_legend(chart, axis)}</figcaption>"
        f'<div class="frame"><div class="y">{_y_labels(axis)}</div>'
        f'<div class="plot" tabindex="0" role="img" aria-label="{escape(_spoken(chart))}">'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" aria-hidden="true">'
        f'<path class="grid" d="{grid}"/>{lines}{"".join(paths)}</svg>{signs}'
        f"{hover_script(data)}</div>"
        f'<div class="x">{_x_labels(x_ticks, x_low, span)}</div><div class="xlabel">{escape(chart.x_label)}</div></div>'
        f"{explanation}</figure>"
    )


def line_key(classes: str, style: str = "line") -> str:
    """A short piece of a line, for a legend."""
    dot = '<path class="dots" d="M12 6h0"/>' if style == "dotted" else ""
    svg = f'<svg viewBox="0 0 24 12" class="key s {style} {classes}" aria-hidden="true">'
    return f'{svg}<path d="M1 6H23"/>{dot}</svg>'


def hover_script(data: Mapping[str, object]) -> str:
    """The values that the page's script shows on hovering; no text in them can end the element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
    return f'<script type="application/json">{text}</script>'


@dataclass(frozen=True)
class _Axis:
    """The y axis: `scale` "linear", "log" or "log2"; low and high in values; `clipped` the largest value cut off."""

    scale: str
    low: float
    high: float
    ticks: list[float]
    clipped: float | None

    @classmethod
    def fit(cls, chart: Chart) -> "_Axis":
        values = np.concatenate([series.y[np.isfinite(series.y)] for series in chart.series])
        low, high = float(values.min()), float(values.max())
        middle = float(np.median(values))
        if chart.scale == "log2" and low > 0:
            bottom, top = math.floor(math.log2(low)), math.ceil(math.log2(high))
            around = 1.3 if bottom == top else 0.3  # room for three ticks around a scale that never moves
            low, high = 2.0 ** (bottom - around), 2.0 ** (top + around)
            return cls("log2", low, high, log_ticks(low, high, 2, 6), None)
        if chart.scale == "auto" and low > 0 and high > 30 * middle:
            low, high = low / 1.15, high * 1.15
            return cls("log", low, high, log_ticks(low, high, 10, 6), None)
        clipped = None
        if chart.clip and len(values) >= 300:
            usual = float(np.quantile(values, 0.99))
            if high > max(3 * usual, usual + 2 * (usual - low)) and usual > low:
                clipped, high = high, usual + 0.25 * (usual - low)
        if high - low <= 1e-9 * max(abs(high), abs(low)):  # a flat line runs through the middle
            low, high = (low - abs(low) * 0.5, high + abs(high) * 0.5) if low else (-1.0, 1.0)
        pad = 0.06 * (high - low)
        low = 0.0 if 0 <= low < 0.15 * high else low - pad
        high += 0.0 if clipped else pad
        return cls("linear", low, high, linear_ticks(low, high, 5), clipped)

    def place(self, values: np.ndarray) -> np.ndarray:
        """(N,) heights in [0, 1] of the plot; above 1 where the value is cut off, NaN where it is not finite."""
        finite = np.where(np.isfinite(values), values, np.nan)
        if self.scale == "linear":
            return (finite - self.low) / (self.high - self.low)
        positive = np.where(finite > 0, finite, np.nan)
        return np.log(positive / self.low) / math.log(self.high / self.low)

    def at(self, value: float) -> float:
        return float(self.place(np.array([value]))[0])


def _x_range(chart: Chart) -> tuple[float, float]:
    """The ends of the x axis: a little more than the data, so that the first and last points are whole."""
    low = min(float(series.x.min()) for series in chart.series)
    high = max(float(series.x.max()) for series in chart.series)
    pad = 0.01 * (high - low) or 0.5
    return low - pad, high + pad


def _line_path(at_x: np.ndarray, at_y: np.ndarray) -> str:
    """SVG path data of a line; a gap breaks it; a point between gaps becomes a dot (no length, round ends)."""
    parts = []
    drawing = False
    points = _points(at_x, at_y)
    for index, (x, y) in enumerate(points):
        if math.isnan(y):
            drawing = False
            continue
        alone = not drawing and (index + 1 == len(points) or math.isnan(points[index + 1][1]))
        parts.append(f"{'L' if drawing else 'M'}{x:.1f} {y:.1f}{'h0' if alone else ''}")
        drawing = True
    return "".join(parts)


def _dots_path(at_x: np.ndarray, at_y: np.ndarray) -> str:
    return "".join(f"M{x:.1f} {y:.1f}h0" for x, y in _points(at_x, at_y) if not math.isnan(y))


def _points(at_x: np.ndarray, at_y: np.ndarray) -> list[tuple[float, float]]:
    """Shares of the plot as the SVG's coordinates; far outside is as good as just outside."""
    heights = HEIGHT * (1 - np.clip(at_y, -0.1, 1.3))
    return list(zip((WIDTH * at_x).tolist(), heights.tolist(), strict=True))


def _hover_values(series: Series) -> dict[str, object]:
    x = [int(value) for value in series.x.tolist()]
    y = [float(f"{value:.5g}") if math.isfinite(value) else None for value in series.y.tolist()]
    return {"name": series.label, "x": x, "y": y}


def _marks(chart: Chart, x_low: float, span: float, axis: _Axis) -> tuple[str, str]:
    """(SVG lines of the events, HTML signs); of marks that fall on one another, the first is drawn."""
    lines: dict[str, list[str]] = {}
    signs: list[str] = []
    seen: set[tuple[str, int]] = set()
    for mark in chart.marks:
        at = (mark.x - x_low) / span
        place = (mark.kind, round(at * MARKS_PER_CHART))
        if not 0 <= at <= 1 or place in seen:
            continue
        seen.add(place)
        top = 0.0 if mark.y is None else 100 * (1 - min(max(axis.at(mark.y), 0.0), 1.0))
        if mark.kind in ("resume", "spike"):
            lines.setdefault(mark.kind, []).append(f"M{WIDTH * at:.1f} 0V{HEIGHT}")
        style = f"left:{100 * at:.2f}%;top:{top:.1f}%"
        signs.append(f'<i class="sign {mark.kind}" style="{style}" title="{escape(mark.text)}"></i>')
    drawn = "".join(f'<path class="event {kind}" d="{"".join(parts)}"/>' for kind, parts in lines.items())
    return drawn, "".join(signs)


_MARK_NAMES = {"resume": "resume", "spike": "spike in the loss", "skip": "step skipped", "nan": "loss not finite"}


def mark_legend(kinds: Iterable[str]) -> str:
    """List items that explain the signs."""
    return "".join(f'<li><i class="sign {kind}" aria-hidden="true"></i>{_MARK_NAMES[kind]}</li>' for kind in kinds)


def _legend(chart: Chart, axis: _Axis) -> str:
    """The lines, where there are several, and the signs that only this chart has; the page explains the events once."""
    entries = []
    if len(chart.series) > 1:
        for series in chart.series:
            entries.append(f"<li>{line_key(series.classes, series.style)}{escape(series.label)}</li>")
    own = [kind for kind in ("skip", "nan") if any(mark.kind == kind for mark in chart.marks)]
    entries.append(mark_legend(own))
    if axis.clipped is not None:
        entries.append(f"<li>highest value {short_number(axis.clipped)}, above the picture</li>")
    return f'<ul class="legend">{"".join(entries)}</ul>' if any(entries) else ""


def _y_labels(axis: _Axis) -> str:
    labels = power_labels(axis.ticks) if axis.scale == "log2" else tick_labels(axis.ticks)
    places = zip(axis.ticks, labels, strict=True)
    return "".join(f'<span style="top:{100 * (1 - axis.at(tick)):.1f}%">{label}</span>' for tick, label in places)


def _x_labels(ticks: list[float], x_low: float, span: float) -> str:
    labels = zip(ticks, tick_labels(ticks), strict=True)
    return "".join(f'<span style="left:{100 * (tick - x_low) / span:.1f}%">{label}</span>' for tick, label in labels)


def _spoken(chart: Chart) -> str:
    """The chart in words, for those who hear the page."""
    sentences = [f"{chart.title} in {chart.unit} over the {chart.x_label}."]
    for series in (s for s in chart.series if s.style != "faint"):
        finite = np.flatnonzero(np.isfinite(series.y))
        if len(finite):
            ends = [f"{short_number(series.y[i])} at {series.x[i]:,.0f}" for i in (finite[0], finite[-1])]
            sentences.append(f"{series.label}: from {ends[0]} to {ends[1]}.")
    return " ".join(sentences)


def _no_inf(values: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(values), values, np.nan)
