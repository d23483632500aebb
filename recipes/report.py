"""Write one self-contained HTML report of a run, or of several runs side by side.

python recipes/report.py RUN [RUN...] [--output FILE] [--json]
"""

import argparse
import json
import sys
from pathlib import Path

if not __package__:  # run as a script: the repository's root, not recipes/, must be importable
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from recipes.config.errors import run_command
from recipes.training.report import read_runs, save_page, summarise


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="report.py",
        description="Write one HTML page with the curves, events and configuration of a training run. The page needs "
        "no network and no other file, so it can be mailed. Several runs are drawn into the same charts.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder: pretrain's --output_dir")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="the page to write; default: report.html in the run's folder, or in the current folder for several runs",
    )
    parser.add_argument("--json", action="store_true", help="print the summary of each run as JSON")
    return parser


def main(argv: list[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    runs = read_runs(arguments.runs)
    default = arguments.runs[0] / "report.html" if len(runs) == 1 else Path("report.html")
    output = save_page(runs, arguments.output or default)
    if arguments.json:
        print(json.dumps({"report": str(output), "runs": [summarise(run).as_dict() for run in runs]}, indent=2))
        return 0
    for summary in map(summarise, runs):
        loss = "no finite loss" if summary.loss is None else f"loss {summary.loss:.4f}"
        print(f"{summary.name}: {summary.steps:,} steps, {loss}")
    print(f"report: {output} ({output.stat().st_size / 1024:,.0f} KiB)")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
