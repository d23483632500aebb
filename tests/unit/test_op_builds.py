"""Locks that killed op builds leave are found in bounded time and named."""

import os
import subprocess
import sys
import time

import pytest

from recipes.cluster.op_builds import has_libaio, needed_ops, wait_for_build_lock
from recipes.config.errors import UserError


@pytest.fixture
def lock(tmp_path):
    folder = tmp_path / "some_op"
    folder.mkdir()
    path = folder / "lock"
    path.touch()
    return path


def make_old(path):
    an_hour_ago = time.time() - 3600
    os.utime(path, (an_hour_ago, an_hour_ago))


def test_stale_lock_is_named_at_once(lock):
    make_old(lock)
    begin = time.monotonic()
    with pytest.raises(UserError, match=f"{lock}.*killed.*delete this file"):
        wait_for_build_lock(lock)
    assert time.monotonic() - begin < 5


def test_lock_of_a_live_build_is_waited_for_and_the_wait_is_bounded(lock):
    make_old(lock)
    builder = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], cwd=lock.parent)
    try:
        with pytest.raises(UserError, match=f"{lock}.*still builds"):
            wait_for_build_lock(lock, wait=1.0)
    finally:
        builder.kill()
        builder.wait()


def test_released_lock_lets_the_run_go_on(lock):
    remover = subprocess.Popen(
        [sys.executable, "-c", f"import os, time; time.sleep(1); os.remove({str(lock)!r})"], cwd=lock.parent
    )
    wait_for_build_lock(lock, wait=30)
    assert not lock.exists()
    remover.wait()


def test_no_lock_no_wait(tmp_path):
    wait_for_build_lock(tmp_path / "lock")


def test_the_ops_of_offload():
    def needed(**zero):
        return needed_ops({"optimizer": {"type": "AdamW", "params": {}}, "zero_optimization": zero})

    assert needed() == ["fused_adam"]
    assert needed(offload_optimizer={"device": "cpu"}) == ["cpu_adam"]
    assert needed(offload_optimizer={"device": "nvme"}) == ["cpu_adam", "pin_memory", "async_io"]


def test_libaio_is_what_the_compiler_finds(monkeypatch, tmp_path):
    compiler = tmp_path / "compiler"
    monkeypatch.setenv("CXX", str(compiler))
    for code, expected in ((0, True), (1, False)):
        compiler.write_text(f"#!/bin/sh\nexit {code}\n")
        compiler.chmod(0o755)
        assert has_libaio() is expected
    compiler.unlink()
    assert not has_libaio()
