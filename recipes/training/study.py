"""A search by Optuna: its study in SQLite, its trials real runs, what it found as JSON and plots.

Importing this needs the package `optuna`.
"""

import json
import math
import queue
import shlex
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.trial import FrozenTrial, TrialState

from recipes.training.search_space import Searched, as_flags
from recipes.training.trial import TrialFailed, run_trial

FINISHED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
REASON = "reason"


@dataclass(frozen=True)
class StudySettings:
    """A search. words: flags of pretrain.py that all trials share. devices: for each place, its GPUs (None: any).

    num_trials: of each study, finished ones of an earlier call included. folder: of everything that is written.
    on_a_grid: try evenly spaced values of a single searched number, so that several studies can be compared.
    """

    searched: list[Searched]
    words: list[str]
    folder: Path
    num_trials: int
    ranks: int
    places: list[list[int] | None]
    seed: int
    say: Callable[[str], None]
    on_a_grid: bool = False


def run_study(settings: StudySettings, name: str) -> optuna.Study:
    """Run the trials that are still to run; a study of the same name and folder goes on."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    settings.folder.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        study_name=name,
        storage=f"sqlite:///{settings.folder / 'study.db'}",
        load_if_exists=True,
        sampler=_sampler(settings),
        pruner=_pruner(settings),
    )
    for trial in study.get_trials(states=(TrialState.RUNNING,)):  # an earlier call was ended in their midst
        study.tell(trial.number, state=TrialState.FAIL)
    places: queue.Queue[list[int] | None] = queue.Queue()
    for place in settings.places:
        places.put(place)
    left = settings.num_trials - len(study.get_trials(states=FINISHED))
    if left > 0:
        study.optimize(
            lambda trial: _objective(settings, name, trial, places),
            n_trials=left,
            n_jobs=len(settings.places),
            catch=(TrialFailed,),
        )
    return study


def _pruner(settings: StudySettings) -> optuna.pruners.BasePruner:
    if settings.on_a_grid:  # which rate is best shows at the end alone, and the best one's neighbours count as well
        return optuna.pruners.NopPruner()
    return optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=1)


def _sampler(settings: StudySettings) -> optuna.samplers.BaseSampler:
    if not settings.on_a_grid:
        return optuna.samplers.TPESampler(seed=settings.seed)
    [one] = settings.searched
    spaced = np.geomspace if one.form == "log" else np.linspace
    values = spaced(one.low, one.high, settings.num_trials)
    values[[0, -1]] = one.low, one.high  # without rounding, as values outside are refused
    return optuna.samplers.GridSampler({one.key: values.tolist()}, seed=settings.seed)


def _objective(settings: StudySettings, name: str, trial: optuna.Trial, places: queue.Queue) -> float:
    words = as_flags(settings.searched, {one.key: one.suggest(trial) for one in settings.searched})
    folder = settings.folder / name / f"trial_{trial.number:04d}"
    trial.set_user_attr("folder", str(folder))
    trial.set_user_attr("flags", shlex.join(words))

    def keep_going(step: int, loss: float) -> bool:
        trial.report(loss if math.isfinite(loss) else math.inf, step)
        return not trial.should_prune()

    place = places.get()
    try:
        result = run_trial(
            [*settings.words, *words], folder, ranks=settings.ranks, devices=place, keep_going=keep_going
        )
    except TrialFailed as failure:
        trial.set_user_attr(REASON, str(failure))
        settings.say(f"{name} trial {trial.number}: failed: {failure}")
        raise
    finally:
        places.put(place)
    settings.say(
        f"{name} trial {trial.number}: loss {result.loss:.4f} after {result.steps} steps"
        f"{', pruned' if result.pruned else ''}; {shlex.join(words)}"
    )
    if result.pruned:
        raise optuna.TrialPruned
    return result.loss


def describe(study: optuna.Study, words: list[str]) -> dict[str, Any]:
    """The study as JSON: the best trial with the command that repeats it, and every trial with what became of it."""
    trials = study.get_trials()
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    best = min(complete, key=lambda trial: trial.values[0]) if complete else None
    return {
        "study": study.study_name,
        "best": None if best is None else _described(best, words),
        "counts": {state.name.lower(): sum(trial.state == state for trial in trials) for state in FINISHED},
        "trials": [_described(trial, words) for trial in trials],
    }


def _described(trial: FrozenTrial, words: list[str]) -> dict[str, Any]:
    steps = [value for value in trial.intermediate_values.values() if math.isfinite(value)]
    return {
        "number": trial.number,
        "state": trial.state.name.lower(),
        "loss": trial.values[0] if trial.state == TrialState.COMPLETE else (steps[-1] if steps else None),
        "params": trial.params,
        "command": f"recipes/pretrain.py {shlex.join(words)} {trial.user_attrs.get('flags', '')}".rstrip(),
        "folder": trial.user_attrs.get("folder"),
        "reason": trial.user_attrs.get(REASON, "the search was ended in its midst")
        if trial.state == TrialState.FAIL
        else None,
    }


def plot_study(study: optuna.Study, folder: Path) -> list[Path]:
    """history.png and, where two trials or more can be compared, importance.png; returns what was written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from optuna import visualization

    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # Optuna calls its plots experimental

    complete = study.get_trials(states=(TrialState.COMPLETE,))
    if not complete:
        return []
    written = [folder / f"history_{study.study_name}.png"]
    _save(visualization.matplotlib.plot_optimization_history(study), written[0])
    if len(complete) > 2 and len({trial.values[0] for trial in complete}) > 1:
        written.append(folder / f"importance_{study.study_name}.png")
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        _save(visualization.matplotlib.plot_param_importances(study, evaluator=evaluator), written[1])
    pyplot.close("all")
    return written


def _save(axes: Any, path: Path) -> None:
    axes.figure.tight_layout()
    axes.figure.savefig(path, dpi=120)


def write_json(path: Path, content: Any) -> None:
    """Human-readable."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
