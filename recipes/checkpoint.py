"""Look at, verify, convert, prune and average checkpoints.

python recipes/checkpoint.py inspect runs/tiny
python recipes/checkpoint.py verify runs/tiny/checkpoints/step_00000500
python recipes/checkpoint.py convert runs/tiny
python recipes/checkpoint.py prune runs/tiny --keep 1
python recipes/checkpoint.py average runs/tiny averaged/tiny --last 3
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: the repository's root, not recipes/, must be importable
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from recipes.config.errors import EXIT_FAULT, EXIT_SUCCESS, UserError, run_command


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="checkpoint.py", description="Look at, verify, convert and prune checkpoints."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, help_text in (
        ("inspect", "what a run's checkpoints, or one checkpoint, hold, and whether all files are there in full"),
        ("verify", "read every file: checksums, and that no weight is NaN or infinite; exit code 1 if one is wrong"),
        ("convert", "write the universal form, which resumes under any world size and ZeRO stage, ahead of the resume"),
        ("prune", "delete a run's oldest checkpoints, never the best"),
        (
            "average",
            "write the mean of a run's newest checkpoints' weights as a Hugging Face folder (as export.py does)",
        ),
    ):
        command = commands.add_parser(name, help=help_text, description=help_text)
        command.add_argument("path", type=Path, help="a run's folder or a checkpoint's folder")
        command.add_argument("--json", action="store_true", help="print the result as JSON")
        if name == "convert":
            command.add_argument("--workers", type=int, default=None, help="processes (default: one a core)")
        if name == "prune":
            command.add_argument("--keep", type=int, required=True, help="checkpoints to keep, besides the best")
            command.add_argument("--dry_run", action="store_true", help="say what would go, delete nothing")
        if name == "average":
            command.add_argument("output", type=Path, help="the folder to make; it must not exist, or be empty")
            command.add_argument("--last", type=int, required=True, help="how many checkpoints, from the newest back")
            command.add_argument("--decay", type=float, help="weigh each by decay ** (steps before the newest)")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one of the subcommands."""
    arguments = build_parser().parse_args(argv)
    path: Path = arguments.path.expanduser()
    if not path.is_dir():
        raise UserError(f"{arguments.path}: no such folder; give a run's or a checkpoint's folder")
    if arguments.command == "average":
        return _average(arguments)
    run = {"inspect": _inspect, "verify": _verify, "convert": _convert, "prune": _prune}[arguments.command]
    result, lines, code = run(path, arguments)
    print(json.dumps(result) if arguments.json else "\n".join(lines))
    return code


def _average(arguments: argparse.Namespace) -> int:
    """An average is weights alone, so it is an export."""
    from recipes import export

    words = [str(arguments.path), str(arguments.output), "--average_last", str(arguments.last)]
    words += ["--average_decay", str(arguments.decay)] if arguments.decay is not None else []
    return export.main([*words, "--json"] if arguments.json else words)


Outcome = tuple[dict[str, Any], list[str], int]


def _inspect(path: Path, arguments: argparse.Namespace) -> Outcome:
    from recipes.training.checkpoint_report import describe_checkpoint, describe_lines, table_lines

    found = [describe_checkpoint(checkpoint) for checkpoint in _checkpoints(path)]
    lines = describe_lines(found[0]) if len(found) == 1 else table_lines(found)
    return {"checkpoints": found}, lines, EXIT_SUCCESS if all(one["whole"] for one in found) else EXIT_FAULT


def _verify(path: Path, arguments: argparse.Namespace) -> Outcome:
    from recipes.training.checkpoint_report import faults_of

    faults = {str(checkpoint): faults_of(checkpoint) for checkpoint in _checkpoints(path)}
    lines = [f"{name}: {'; '.join(found) if found else 'whole'}" for name, found in faults.items()]
    return {"checkpoints": faults}, lines, EXIT_FAULT if any(faults.values()) else EXIT_SUCCESS


def _convert(path: Path, arguments: argparse.Namespace) -> Outcome:
    from recipes.cluster.launch import quiet_deepspeed
    from recipes.training.checkpoint_weights import find_checkpoint

    if arguments.workers is not None and arguments.workers < 1:
        raise UserError(f"--workers {arguments.workers}: must be at least 1")
    checkpoint = find_checkpoint(path)
    quiet_deepspeed()
    from recipes.training.universal import convert, is_converted, universal_folder

    target = universal_folder(checkpoint, checkpoint.parent)
    reused = is_converted(target, checkpoint)
    convert(checkpoint, target, workers=arguments.workers)
    result = {"checkpoint": str(checkpoint), "universal": str(target), "reused": reused}
    return result, [f"{target}: {'was converted before' if reused else 'converted'}"], EXIT_SUCCESS


def _prune(path: Path, arguments: argparse.Namespace) -> Outcome:
    from recipes.training.checkpoint_files import checkpoints_folder, prune

    if arguments.keep < 1:
        raise UserError(f"--keep {arguments.keep}: must be at least 1; a run without a checkpoint cannot go on")
    folder = checkpoints_folder(path)
    if not folder.is_dir():
        raise UserError(f"{path}: is no run's folder, it has no checkpoints/")
    old = prune(folder, arguments.keep, dry_run=arguments.dry_run)
    lines = [f"{'would delete' if arguments.dry_run else 'deleted'} {checkpoint}" for checkpoint in old]
    result = {"deleted": [str(checkpoint) for checkpoint in old], "dry_run": arguments.dry_run}
    return result, lines or ["nothing to delete"], EXIT_SUCCESS


def _checkpoints(path: Path) -> list[Path]:
    """A run's checkpoints, newest first, or the one that the path is."""
    from recipes.training.checkpoint_files import MANIFEST, checkpoints_folder, list_checkpoints

    if (path / MANIFEST).is_file():
        return [path]
    found = list_checkpoints(checkpoints_folder(path)) or list_checkpoints(path)
    if not found:
        raise UserError(f"{path}: holds no complete checkpoint; give a run's or a checkpoint's folder")
    return found


if __name__ == "__main__":
    sys.exit(run_command(main))
