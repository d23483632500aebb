"""metrics.jsonl across a resume: what will be done again goes, the rest stays as it was written."""

import json

import pytest

from recipes.training.metrics import MetricsWriter

STEPS = [{"step": step, "loss": 5.0 - step, "note": "x" * 50} for step in range(1, 9)]
WRITTEN = [*STEPS[:4], {"event": "evaluation", "step": 4, "eval_loss": 1.5}, *STEPS[4:]]


@pytest.mark.parametrize(("step", "kept"), [(4, WRITTEN[:5]), (3, WRITTEN[:3]), (8, WRITTEN), (100, WRITTEN), (0, [])])
@pytest.mark.parametrize("cut_off", ["", '{"step": 9, "lo', '{"step": 3}'])
def test_a_resume_keeps_the_lines_up_to_its_step(tmp_path, step, kept, cut_off):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in WRITTEN) + cut_off)
    MetricsWriter(tmp_path, None, step).close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == kept + ([{"event": "resume", "step": step}] if step else [])


def test_only_the_end_of_a_long_file_is_read(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, 5001)))
    read = []
    monkeypatch.setattr(json, "loads", lambda line, loads=json.loads: read.append(line) or loads(line))
    writer = MetricsWriter(tmp_path, None, 4990)
    writer.rewind(4980)
    writer.close()
    assert len(read) < 40
    assert path.read_text().splitlines()[4979:] == ['{"step": 4980}', '{"event": "resume", "step": 4980}']


def test_an_empty_file_stays_one(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    MetricsWriter(tmp_path, None, 0).close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""
