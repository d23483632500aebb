"""Heat maps of the experts' load: steps from left to right, layers or experts from top to bottom."""

import re
from html import escape

import numpy as np

from recipes.training.report.line_chart import hover_script
from recipes.training.report.number_text import whole_number
from recipes.training.report.run_folder import RunRecord

# Load as a multiple of the mean load. The edges are even in ratio around 1, so that twice and half look equally far.
EDGES = (0.1, 0.5, 0.8, 1.25, 2.0, 4.0)
LEVEL_NAMES = ("idle, < 0.1", "0.1 to 0.5", "0.5 to 0.8", "even, 0.8 to 1.25", "1.25 to 2", "2 to 4", "> 4")
MAX_STEPS_SHOWN = 100
MAX_CELLS = 40_000  # of all maps of a page together; they are the heaviest part of the file
LAYERS_IN_DETAIL = 12


def render_expert_maps(record: RunRecord, cell_budget: int = MAX_CELLS) -> str:
    """All maps of a run, or "" if its metrics carry no usable `expert_load`.

    First the busiest expert of each layer, then expert by expert the layers whose load was the least even at the end.
    """
    layers = sorted({name for _, loads in record.expert_load for name in loads}, key=_natural)
    if not layers:
        return ""
    steps, ratios = _load_ratios(record, layers)
    worst = {name: float(np.nan_to_num(ratio[:, -1]).max()) for name, ratio in ratios.items()}
    detailed = sorted(sorted(layers, key=lambda name: -worst[name])[:LAYERS_IN_DETAIL], key=layers.index)
    rows = sum(len(ratios[name]) for name in detailed) + len(layers)
    columns = max(12, min(MAX_STEPS_SHOWN, cell_budget // rows))
    parts = []
    if len(layers) > 1:
        busiest = np.stack([_busiest(ratios[name]) for name in layers])
        names = [short_layer_name(name) for name in layers]
        parts.append(_map("busiest expert", "layer", names, *_pick_steps(steps, busiest, columns)))
    for name in detailed:
        numbers = [str(expert) for expert in range(len(ratios[name]))]
        parts.append(_map(short_layer_name(name), "expert", numbers, *_pick_steps(steps, ratios[name], columns)))
    left_out = len(layers) - len(detailed)
    more = f"Shown expert by expert: the {len(detailed)} least even layers of {len(layers)}." if left_out else ""
    return f'<div class="maps">{"".join(parts)}</div><p class="explain">{more}</p>'


def short_layer_name(name: str) -> str:
    """model.layers.3.mlp.gate -> layer 3; any other name stays."""
    match = re.search(r"layers\.(\d+)\b", name)
    return f"layer {match.group(1)}" if match else name


def _load_ratios(record: RunRecord, layers: list[str]) -> tuple[list[int], dict[str, np.ndarray]]:
    """Steps (T,), and for each layer (E, T) load over mean load, NaN where a step has no numbers of that layer."""
    steps = [step for step, _ in record.expert_load]
    ratios = {}
    for name in layers:
        experts = max(len(loads[name]) for _, loads in record.expert_load if name in loads)
        ratio = np.full((experts, len(steps)), np.nan)
        for column, (_, loads) in enumerate(record.expert_load):
            shares = loads.get(name, [])
            ratio[: len(shares), column] = np.array(shares) * len(shares)
        ratios[name] = ratio
    return steps, ratios


def _busiest(ratio: np.ndarray) -> np.ndarray:
    """(E, T) -> (T,) the largest load of each step, NaN where there is none."""
    return np.where(np.isfinite(ratio).any(axis=0), np.nan_to_num(ratio).max(axis=0), np.nan)


def _pick_steps(steps: list[int], values: np.ndarray, columns: int) -> tuple[list[int], np.ndarray]:
    if len(steps) <= columns:
        return steps, values
    picked = np.linspace(0, len(steps) - 1, columns).round().astype(np.int64)
    return [steps[index] for index in picked], values[:, picked]


def _map(title: str, row_kind: str, names: list[str], steps: list[int], values: np.ndarray) -> str:
    """One map of values (rows, columns): runs of one level in a row become one stroke of that level's path."""
    rows, columns = values.shape
    levels = np.digitize(values, EDGES)
    strokes: dict[int, list[str]] = {}
    for row in range(rows):
        start = 0
        for column in range(1, columns + 1):
            if column < columns and levels[row, column] == levels[row, start]:
                continue
            if np.isfinite(values[row, start]):
                strokes.setdefault(int(levels[row, start]), []).append(f"M{start} {row}.5h{column - start}")
            start = column
    paths = "".join(f'<path class="h{level}" d="{"".join(parts)}"/>' for level, parts in sorted(strokes.items()))
    percent = np.where(np.isfinite(values), np.round(values * 100), -1).astype(np.int64).tolist()
    data = {"steps": steps, "rows": names, "kind": row_kind, "percent": percent}
    height = max(64, rows * max(1, min(14, 260 // rows)))  # whole pixels for a row, or the rows would blur
    ends = f"<span>{escape(names[0])}</span><span>{escape(names[-1])}</span>" if rows > 1 else ""
    label = f"{title}: load of {rows} {row_kind}s over steps {steps[0]:,} to {steps[-1]:,}"
    return (
        f'<figure class="map"><figcaption><h4>{escape(title)} <span class="unit">[{row_kind} over step]</span></h4>'
        f'</figcaption><div class="frame"><div class="rows">{ends}</div>'
        f'<div class="cells" tabindex="0" role="img" aria-label="{escape(label)}" style="height:{height}px">'
        f'<svg viewBox="0 0 {columns} {rows}" preserveAspectRatio="none" aria-hidden="true">{paths}</svg>'
        f"{hover_script(data)}</div>"
        f'<div class="steps"><span>{whole_number(steps[0])}</span>'
        f"<span>{whole_number(steps[-1]) if columns > 1 else ''}</span></div></div></figure>"
    )


def _natural(name: str) -> list[tuple[int, str]]:
    """layers.10 comes after layers.9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _level_legend() -> str:
    entries = "".join(
        f'<li><svg viewBox="0 0 16 12" class="swatch" aria-hidden="true"><path class="h{level}" d="M0 6H16"/></svg>'
        f"{escape(name)}</li>"
        for level, name in enumerate(LEVEL_NAMES)
    )
    return f'<ul class="legend levels" aria-label="load over mean load">{entries}</ul>'


LOAD_EXPLANATION = (
    '<p class="explain">Load of an expert as a multiple of the mean load of its layer, step by step. It may be patchy '
    "at first and should turn even as the routing bias does its work. A row that stays blue is an expert that hardly "
    "learns, one that stays orange takes the tokens of the others.</p>" + _level_legend()
)
