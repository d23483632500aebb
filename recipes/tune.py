"""Search the best flags of pretrain.py, or keys of its ds_config, by real short runs.

python recipes/tune.py --search "optimizer.params.lr=log:1e-3:1e-1" --n_trials 12 -- --model tiny --max_steps 100
python recipes/tune.py --search "optimizer.params.lr=log:1e-3:1e-1" --batch_sizes 4 8 16 -- --train_tokens 100000

What follows `--` goes to pretrain.py in every trial.
"""

import argparse
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: the repository's root, not recipes/, must be importable
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from recipes.config.errors import UserError, run_command
from recipes.config.run_config import REPOSITORY, parse_pretrain_config


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tune.py",
        usage="tune.py --search KEY=FORM:... [options] -- PRETRAIN_FLAGS",
        description="Each trial is a short training run of its own, ended early where its loss is above the median of "
        "the others'. The study is kept in SQLite: the same command goes on where it was stopped.",
    )
    add = parser.add_argument
    add(
        "--search",
        nargs="+",
        action="extend",
        default=[],
        help="what to vary: a flag or a ds_config key, as KEY=log:LOW:HIGH, uniform:LOW:HIGH, int:LOW:HIGH or "
        "choice:A,B,...",
    )
    add("--n_trials", type=int, default=20, help="trials in all, those of an earlier call included (default: 20)")
    add("--batch_sizes", type=int, nargs="+", help="try --n_trials rates at each of these global batches")
    add("--output_dir", type=Path, default=REPOSITORY / "runs" / "tune", help="default: runs/tune")
    add("--num_gpus", type=int, default=1, help="ranks of each trial (default: 1)")
    add("--n_jobs", type=int, help="trials at once; default: as the GPUs allow, 1 on CPU")
    add("--seed", type=int, default=0, help="of the search (default: 0)")
    add("--json", action="store_true", help="print the result as JSON")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Search, and write what was found."""
    words = list(sys.argv[1:] if argv is None else argv)
    own, rest = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    arguments = build_parser().parse_args(own)
    if find_spec("optuna") is None:
        raise UserError("tune.py needs the package optuna; run `pip install optuna`")
    from recipes.training.search_space import parse_search

    searched = parse_search(arguments.search)
    _check(arguments, searched, rest)
    folder = arguments.output_dir.expanduser().resolve()
    _report(arguments, _search(arguments, searched, rest, folder), folder)
    return 0


def _search(arguments: argparse.Namespace, searched: list[Any], rest: list[str], folder: Path) -> dict[str, Any]:
    """Run the study, or one for each batch; write best.json and the plots."""
    from recipes.training.study import StudySettings, describe, plot_study, run_study, write_json

    studies = {"search": rest}
    if arguments.batch_sizes:
        unscaled = [*rest, "--lr_scaling", "none"]
        studies = {f"batch_{size}": [*unscaled, "--global_batch_size", str(size)] for size in arguments.batch_sizes}
    places = _places(arguments.num_gpus, arguments.n_jobs)
    results = []
    for name, shared in studies.items():
        settings = StudySettings(
            searched=searched,
            words=shared,
            folder=folder,
            num_trials=arguments.n_trials,
            ranks=arguments.num_gpus,
            places=places,
            seed=arguments.seed,
            on_a_grid=bool(arguments.batch_sizes),
            say=lambda text: print(text, file=sys.stderr, flush=True),
        )
        study = run_study(settings, name)
        results.append(describe(study, shared))
        plot_study(study, folder)
    found: dict[str, Any] = {"studies": results}
    if arguments.batch_sizes:
        found["batch_rule"] = _batch_rule(arguments.batch_sizes, results, folder)
    write_json(folder / "best.json", found)
    return found


def _check(arguments: argparse.Namespace, searched: list[Any], rest: list[str]) -> None:
    """Resolve one whole command line as pretrain.py would, before the first trial starts.

    Raises:
        UserError: a wrong flag or key, or flags that tune.py itself sets.
    """
    from recipes.cluster.launch import Launch, quiet_deepspeed
    from recipes.training.plan_run import plan_run
    from recipes.training.search_space import LEARNING_RATE, as_flags

    faults = [] if searched else ["--search: give at least one KEY=FORM:..."]
    for name in ("n_trials", "num_gpus", "n_jobs"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            faults.append(f"--{name} {value}: must be at least 1")
    ours = {"--output_dir": "each trial has its own", "--resume": "each trial starts afresh"}
    if arguments.batch_sizes:
        ours |= {"--global_batch_size": "--batch_sizes sets it", "--lr_scaling": "--batch_sizes compares without it"}
        if [one.key for one in searched] != [LEARNING_RATE]:
            faults.append(f"--batch_sizes: searches the learning rate alone; give one --search {LEARNING_RATE}=log:...")
        elif searched[0].form == "choice":
            faults.append(f"--batch_sizes: needs a range of rates; write --search {LEARNING_RATE}=log:LOW:HIGH")
        if len(set(arguments.batch_sizes)) < 3 or min(arguments.batch_sizes) < 1:
            faults.append("--batch_sizes: three different ones at least, to tell a rule from chance")
        if "--train_tokens" not in {word.split("=")[0] for word in rest}:
            faults.append("--batch_sizes: give --train_tokens after --, so that every batch sees as much text")
    given = {word.split("=")[0] for word in rest}
    faults += [f"{flag}: {why}; leave it out" for flag, why in ours.items() if flag in given]
    if faults:
        raise UserError(*faults)
    words = [*rest, *as_flags(searched, {one.key: one.first for one in searched})]
    quiet_deepspeed()
    size = arguments.num_gpus
    folder = str(arguments.output_dir.expanduser().resolve() / "check")
    for batch in arguments.batch_sizes or [None]:
        extra = [] if batch is None else ["--lr_scaling", "none", "--global_batch_size", str(batch)]
        config = parse_pretrain_config([*words, *extra, "--output_dir", folder])
        plan_run(config, Launch(rank=0, local_rank=0, world_size=size, local_world_size=size))


def _places(ranks: int, n_jobs: int | None) -> list[list[int] | None]:
    """What each of the trials that run at once may use."""
    import torch

    gpus = torch.cuda.device_count()
    if not gpus:
        return [None] * (n_jobs or 1)
    places = [list(range(first, first + ranks)) for first in range(0, gpus - ranks + 1, ranks)]
    if not places or (n_jobs or 1) > len(places):
        raise UserError(f"--num_gpus {ranks} x --n_jobs {n_jobs or 1}: this machine has {gpus} GPUs")
    return list(places[:n_jobs])


def _batch_rule(sizes: list[int], results: list[dict[str, Any]], folder: Path) -> dict[str, Any] | None:
    from recipes.training.batch_rule import best_rate, compare_with_square_root, plot_against_batch
    from recipes.training.search_space import LEARNING_RATE

    if any(result["best"] is None for result in results):
        return None
    ended = {
        size: [(t["params"][LEARNING_RATE], t["loss"]) for t in result["trials"] if t["state"] == "complete"]
        for size, result in zip(sizes, results, strict=True)
    }
    comparison = compare_with_square_root({size: best_rate(trials) for size, trials in ended.items()})
    plot_against_batch(ended, comparison, folder / "lr_against_batch.png")
    return comparison


def _report(arguments: argparse.Namespace, found: dict[str, Any], folder: Path) -> None:
    if arguments.json:
        print(json.dumps(found))
        return
    for result in found["studies"]:
        counts = ", ".join(f"{number} {state}" for state, number in result["counts"].items())
        print(f"{result['study']}: {counts}")
        for trial in result["trials"]:
            if trial["reason"]:
                print(f"  trial {trial['number']} failed: {trial['reason']}")
        if result["best"]:
            print(f"  best loss {result['best']['loss']:.4f} with {result['best']['params']}")
            print(f"  {result['best']['command']}")
    if found.get("batch_rule"):
        rule = found["batch_rule"]
        print(f"best learning rate ~ batch ** {rule['exponent']:.2f}; the square-root rule says 0.50")
    print(f"written: {folder / 'best.json'} and the plots beside it; study: {folder / 'study.db'}")


if __name__ == "__main__":
    sys.exit(run_command(main))
