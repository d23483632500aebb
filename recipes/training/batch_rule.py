"""How the best learning rate moves with the global batch, against the rule lr ~ sqrt(batch)."""

import math
from pathlib import Path
from typing import Any

import numpy as np


def best_rate(trials: list[tuple[float, float]]) -> float:
    """Where the loss is least, between the tried rates: the vertex of the parabola through the best one and its two
    neighbours, over the rate's logarithm; the best one itself where it is the first or the last.

    Args:
        trials: (learning rate, loss) of each trial that ended.
    """
    ordered = sorted(trials)
    at = min(range(len(ordered)), key=lambda index: ordered[index][1])
    if at in (0, len(ordered) - 1):
        return ordered[at][0]
    logs, losses = zip(*((math.log(rate), loss) for rate, loss in ordered[at - 1 : at + 2]), strict=True)
    curvature, slope, _ = np.polyfit(logs, losses, 2)
    return ordered[at][0] if curvature <= 0 else math.exp(-slope / (2 * curvature))


def compare_with_square_root(best_rates: dict[int, float]) -> dict[str, Any]:
    """Fit lr = c * batch ** exponent through the best rates of three batches or more.

    Args:
        best_rates: global batch [sequences] -> best learning rate, found without any scaling.
    Returns:
        exponent (0.5 is the square-root rule, 1 the linear one, 0 none) and, for each batch, the rate that the
        square-root rule says from the smallest batch's.
    """
    batches = sorted(best_rates)
    logs = np.log([best_rates[batch] for batch in batches])
    exponent = float(np.polyfit(np.log(batches), logs, 1)[0])
    smallest = batches[0]
    return {
        "exponent": exponent,
        "best_learning_rate": {str(batch): best_rates[batch] for batch in batches},
        "square_root_rule": {str(batch): best_rates[smallest] * math.sqrt(batch / smallest) for batch in batches},
    }


def plot_against_batch(trials: dict[int, list[tuple[float, float]]], comparison: dict[str, Any], path: Path) -> None:
    """Loss against learning rate for each batch, and the best rate against the batch with the rule's line.

    Args:
        trials: global batch -> (learning rate, loss) of each trial that ended.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import NullFormatter

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    for batch, points in sorted(trials.items()):
        rates, losses = zip(*sorted(points), strict=True)
        left.plot(rates, losses, "o-", label=f"{batch} sequences")
    left.set(xscale="log", xlabel="learning rate", ylabel="loss [nats per token]", title="Trials that ended")
    left.xaxis.set_minor_formatter(NullFormatter())  # within a decade its labels run into each other
    left.legend(title="global batch")
    batches = sorted(trials)
    right.plot(batches, [comparison["best_learning_rate"][str(b)] for b in batches], "o", label="best found")
    right.plot(batches, [comparison["square_root_rule"][str(b)] for b in batches], "--", label="square-root rule")
    right.set(xscale="log", yscale="log", xlabel="global batch [sequences]", ylabel="best learning rate")
    right.set_xticks(batches, [str(batch) for batch in batches])
    right.minorticks_off()
    right.set_yticks([comparison["best_learning_rate"][str(b)] for b in batches])
    right.yaxis.set_major_formatter("{x:.1e}")
    right.set_title(f"best rate ~ batch ** {comparison['exponent']:.2f}")
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
