"""A run's report: one self-contained HTML page with charts, made from what the run wrote into its folder.

What is read (nothing but the run's folder; only metrics.jsonl must be there):

- `run.json` and `ds_config.json`: shown as they are, key by key.
- `metrics.jsonl`: one JSON object a line, each with `step`. Three kinds:
    - training: the numbers of one logged step (`loss`, `learning_rate`, `grad_norm`, ...). A number whose name the
      report does not know gets a small chart of its own; a dict of numbers is taken apart as `name/key`.
      `skipped_steps` counts from the start of the run. `expert_load` is {layer name: [share of each expert]},
      written at logging steps; token counts instead of shares, or a list of [layer name, shares], read the same.
    - evaluation: `eval_loss`, `eval_bits_per_byte` and other `eval_*` numbers, without `loss`.
    - event: `event` is "resume", "spike" or any other word; its further keys are shown as the event's details and are
      never plotted. A resume carries the step of the checkpoint that it starts from.

A number that is null, NaN or infinite leaves a gap and is counted. When a run goes back to an older checkpoint, the
lines that it writes from there on replace the ones of the abandoned attempt.
"""

import os
from contextlib import suppress
from pathlib import Path

from recipes.config.errors import UserError
from recipes.training.report.page import build_page
from recipes.training.report.run_folder import RunRecord, read_run, read_runs
from recipes.training.report.summary import RunSummary, summarise

__all__ = ["RunRecord", "RunSummary", "read_run", "read_runs", "save_page", "summarise", "write_report"]


def write_report(run_folders: list[Path], output: Path) -> Path:
    """Write one HTML report of one run, or of several runs side by side.

    Args:
        run_folders: folders of runs, each with a metrics.jsonl; their order is the order of the columns and colours.
        output: the HTML file; its folder is made if it is missing, an older file is replaced in one move.
    Returns:
        `output`.
    Raises:
        UserError: a folder or its metrics are missing or empty (all such folders at once), or `output` is a folder.
    """
    return save_page(read_runs(run_folders), output)


def save_page(runs: list[RunRecord], output: Path) -> Path:
    """Build the page of runs that were read already, and put it at `output`."""
    if output.is_dir():
        raise UserError(f"--output {output}: is a folder; name a file, for example {output / 'report.html'}")
    partial = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(build_page(runs), encoding="utf-8")
        os.replace(partial, output)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise UserError(f"--output {output}: cannot be written ({error.strerror}); name another file") from error
    return output
