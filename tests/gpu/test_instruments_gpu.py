"""What only a GPU can show: allocator metrics, the snapshot, the emptied cache, the profile of kernels."""

import json
import pickle

import pytest
from launching import PRETRAIN, metrics, run_deepspeed

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def run(tmp_path_factory, small_corpus):
    folder = tmp_path_factory.mktemp("gpu") / "run"
    words = (
        f"--data {small_corpus} --deepspeed_config ds_configs/1gpu_bf16.json --max_steps 12 --global_batch_size 8 "
        f"--output_dir {folder} --profile 6:8 --memory_snapshot --empty_cache_steps 5"
    )
    result = run_deepspeed([PRETRAIN, *words.split()], ranks=1)
    assert result.code == 0, result.output
    return folder


def test_allocated_is_at_most_reserved_and_the_cache_is_emptied(run):
    lines = metrics(run)
    for line in lines:
        assert 0 < line["memory_allocated_bytes"] <= line["memory_reserved_bytes"]
        assert line["memory_allocated_bytes"] <= line["memory_bytes"]
        assert 0 <= line["communication_seconds"] < line["step_seconds"]


def test_the_snapshot_opens_and_has_the_allocations(run):
    snapshot = pickle.loads((run / "memory_snapshot" / "rank_00000.pickle").read_bytes())
    assert snapshot["segments"] and any(snapshot["device_traces"])


def test_the_profile_sees_kernels(run):
    (path,) = (run / "profile").glob("*.pt.trace.json")
    assert any(event.get("cat") == "kernel" for event in json.loads(path.read_text())["traceEvents"])
    verdict = (run / "profile" / "verdict.txt").read_text()
    for part in ("attention", "experts", "head and loss", "optimizer"):
        (line,) = [line for line in verdict.splitlines() if line.startswith(part) and "%" in line and ":" not in line]
        assert float(line.split("%")[0].rsplit(maxsplit=1)[1]) > 0
