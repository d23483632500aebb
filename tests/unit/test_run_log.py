"""The log: a file for each rank that rotates, rank 0 on the console, one line an event."""

import logging

import pytest

from recipes.training import run_log
from recipes.training.run_log import PRINTED, faults_logged, logger, start_run_log, stop_run_log


@pytest.fixture(autouse=True)
def stopped():
    yield
    stop_run_log()
    assert not logger.handlers


def log(folder, rank=0, name=""):
    return (folder / "logs" / f"rank_{rank:05d}.log{name}").read_text().splitlines()


def test_rank_0_is_on_the_console_and_every_rank_in_its_file(tmp_path, capsys):
    for rank in (0, 1):
        start_run_log(tmp_path, rank, "info")
        logger.warning("rank %d speaks", rank)
        logger.info("printed by rank %d", rank, extra=PRINTED)
        logger.debug("not at this level")
    console = capsys.readouterr().err
    assert "WARNING rank 0 speaks" in console and "rank 1 speaks" not in console and "printed" not in console
    for rank in (0, 1):
        lines = log(tmp_path, rank)
        assert [line.split(" ", 3)[3] for line in lines[1:]] == [
            f"{rank} WARNING rank {rank} speaks",
            f"{rank} INFO printed by rank {rank}",
        ]


@pytest.mark.parametrize(("level", "expected"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_levels(tmp_path, capsys, level, expected):
    start_run_log(tmp_path, 0, level)
    for name in ("debug", "info", "warning", "error"):
        getattr(logger, name)("at %s", name)
    assert len([line for line in log(tmp_path) if " at " in line]) == expected
    assert capsys.readouterr().err.count(" at ") == expected


def test_logs_rotate_and_the_oldest_goes(tmp_path, monkeypatch):
    monkeypatch.setattr(run_log, "MAX_LOG_BYTES", 1000)
    start_run_log(tmp_path, 3, "info")
    for step in range(200):
        logger.info("step %d %s", step, "x" * 50)
    files = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert files == ["rank_00003.log", *(f"rank_00003.log.{n}" for n in range(1, run_log.KEPT_LOGS + 1))]
    assert all(path.stat().st_size <= 1000 for path in (tmp_path / "logs").iterdir())
    assert "step 199" in log(tmp_path, 3)[-1]


def test_a_fault_is_one_line_with_its_traceback(tmp_path, capsys):
    start_run_log(tmp_path, 0, "info")
    with pytest.raises(ZeroDivisionError), faults_logged():
        1 / 0  # noqa: B018
    (line,) = [line for line in log(tmp_path) if "ERROR" in line]
    assert "the run ends: division by zero | Traceback" in line and "test_run_log.py" in line
    assert "ERROR" not in capsys.readouterr().err  # the command says it itself


def test_deepspeeds_warnings_are_kept_with_the_ranks(tmp_path):
    start_run_log(tmp_path, 0, "info")
    logging.getLogger("DeepSpeed").warning("from DeepSpeed")
    assert "from DeepSpeed" in log(tmp_path)[-1]
