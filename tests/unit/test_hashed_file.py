"""Checkpoint files: to the byte what was written, whatever the file system takes, with their size and SHA-256."""

import errno
import fcntl
import hashlib
import io
import os

import numpy
import pytest
import torch

from recipes.training import hashed_file
from recipes.training.hashed_file import HashedFile, write_hashed

SYSTEM_WRITE = os.write


@pytest.fixture(autouse=True)
def two_pages_a_block(monkeypatch):
    monkeypatch.setattr(hashed_file, "BLOCK_BYTES", 8192)


def is_direct(file: int) -> bool:
    return bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)


def refuses_direct(file, block):
    if is_direct(file):
        raise OSError(errno.EINVAL, "Invalid argument")
    return SYSTEM_WRITE(file, block)


def takes_a_part(file, block):
    if is_direct(file) and len(block) % 4096:  # as the disk does with what a short write leaves
        raise OSError(errno.EINVAL, "Invalid argument")
    return SYSTEM_WRITE(file, block[:5000])


@pytest.mark.parametrize("system", [None, refuses_direct, takes_a_part])
@pytest.mark.parametrize("sizes", [(), (1,), (4096,), (8192,), (8193,), (5, 8187, 1), (3, 50_000, 0, 16384), (40_960,)])
def test_every_byte_arrives_in_order(tmp_path, monkeypatch, system, sizes):
    if system:
        monkeypatch.setattr(os, "write", system)
    content = numpy.random.default_rng(0).integers(0, 256, sum(sizes), dtype=numpy.uint8).tobytes()
    with HashedFile(tmp_path / "file") as file:
        begin = 0
        for size in sizes:
            buffer = bytearray(content[begin : begin + size])
            assert file.write(buffer) == size
            buffer[:] = bytes(size)  # it is the caller's again
            begin += size
        entry = file.finish()
    assert (tmp_path / "file").read_bytes() == content
    assert entry == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_a_saved_object_is_what_torch_saves(tmp_path):
    content = {"weights": torch.arange(30_000.0), "few": torch.ones(3, dtype=torch.bfloat16), "step": 7}
    entry = write_hashed(tmp_path / "new" / "file.pt", content)
    stored = (tmp_path / "new" / "file.pt").read_bytes()
    assert entry == {"bytes": len(stored), "sha256": hashlib.sha256(stored).hexdigest()}
    memory = io.BytesIO()
    torch.save(content, memory)
    assert len(stored) == len(memory.getvalue())  # the same archive but for its checksums
    read = torch.load(tmp_path / "new" / "file.pt")
    assert read["step"] == 7
    assert all(torch.equal(read[name], content[name]) for name in ("weights", "few"))


def test_blocks_pass_the_cache_by_where_the_file_system_can(tmp_path, monkeypatch):
    try:
        os.close(os.open(tmp_path / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system has no direct writes")
    seen = []
    monkeypatch.setattr(os, "write", lambda file, block: (seen.append(is_direct(file)), SYSTEM_WRITE(file, block))[1])
    write_hashed(tmp_path / "file", torch.ones(10_000))
    assert len(seen) > 4
    assert all(seen)


@pytest.mark.parametrize("blocks_before", [0, 2])
def test_a_full_disk_is_raised_and_the_file_let_go_of(tmp_path, monkeypatch, blocks_before):
    taken = []

    def full(file, block):
        if len(taken) == blocks_before:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken.append(file)
        return SYSTEM_WRITE(file, block)

    monkeypatch.setattr(os, "write", full)
    opened = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No space left"):
        write_hashed(tmp_path / "file", torch.ones(10_000))
    assert set(os.listdir("/proc/self/fd")) <= opened
