"""What a process arranges for itself: its precision, its open files, how many commands and ranks it starts."""

import resource
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.cluster import launch, probe, remote


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"cpu_name": "Intel Xeon", "avx512_bf16": True, "amx_bf16": True}, True),
        ({"cpu_name": "Intel Xeon", "avx512_bf16": True, "amx_bf16": False}, False),  # slower than fp32 there
        ({"cpu_name": "AMD EPYC", "avx512_bf16": True, "amx_bf16": False}, True),
        ({"avx512_bf16": True}, True),
        ({"cpu_name": "AMD EPYC", "avx512_f": True}, False),
        ({}, False),  # another architecture
    ],
)
def test_bf16_is_chosen_on_a_cpu_where_it_is_the_faster_dtype(
    monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, Any], expected: bool
) -> None:
    monkeypatch.setattr(launch, "device_type", lambda: "cpu")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert launch.prefers_bf16() is expected


def test_the_limit_of_open_files_is_raised_to_what_the_system_allows() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
        launch.raise_open_files()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert soft == min(hard, 65536) and hard == before[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        launch.raise_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)  # never lowered
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_hosts_ranks_of_the_probe_end_once_one_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$RANK-$LOCAL_RANK" = 5-1 ] && exit 3\nexec sleep 60\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    begin = time.monotonic()
    assert probe._ranks_of_this_host(first=4, ranks=3) == 3
    assert time.monotonic() - begin < 30


def test_no_more_commands_run_at_once_than_a_host_can_start() -> None:
    running, most = [], []

    def work() -> None:
        running.append(1)
        most.append(len(running))
        time.sleep(0.005)
        running.pop()

    remote.on_all([work] * 200)
    assert len(most) == 200 and 1 < max(most) <= remote.AT_ONCE
