"""Hosts' facts, faked, and what the doctor and the preflight make of them."""

import copy
import os
import socket
import time

import pytest

from recipes.cluster import preflight
from recipes.cluster.host_checks import check_hosts, clock_finding
from recipes.cluster.host_facts import PACKAGES, gather
from recipes.cluster.launch import Launch
from recipes.cluster.preflight import FAILED, GIB, OK, WARNING, RunNeeds, run_preflight, shared_memory_finding
from recipes.config.errors import UserError

NODE = {
    "hostname": "node",
    "machine": "boot net:1",
    "python": "3.11.2",
    "packages": dict.fromkeys(PACKAGES, "1.0"),
    "repository": "/work",
    "source_hash": "aaaa",
    "data": {"/data": "dddd"},
    "infiniband": ["mlx5_0:1"],
    "route": {"interface": "eth0", "loopback": False},
    "port_free": None,
    "compiler": True,
    "stale_locks": {},
    "disk": {"folder": "/work", "free": 500 * GIB},
    "writable": True,
    "shm": {"total": 64 * GIB, "free": 64 * GIB},
    "ram": {"total": 512 * GIB, "available": 500 * GIB},
    "dtypes": ["bf16", "fp16", "fp32"],
    "device_type": "cuda",
    "driver": "580.95.05",
    "driver_gpus": 8,
    "torch_gpus": 8,
    "capabilities": [[9, 0]] * 8,
    "gpu_names": ["NVIDIA H100"] * 8,
    "gpu_free": [[79 * GIB, 80 * GIB]] * 8,
    "torch_cuda": "13.0",
    "nccl": "2.27.5",
    "removed_locks": [],
}


def judged(slots=8, dtype="bf16", **changed):
    """The findings that are not well, of two nodes of which the second differs."""
    first = copy.deepcopy(NODE) | {"port_free": changed.pop("port_free", True)}
    second = copy.deepcopy(NODE) | {"machine": "boot net:2"} | changed
    found = check_hosts({"n1": first, "n2": second}, {"n1": 8, "n2": slots}, dtype=dtype, port=29500)
    return [finding for finding in found if finding.state != OK]


def test_two_equal_nodes_are_well():
    assert judged() == []


@pytest.mark.parametrize(
    ("changed", "check", "state", "words"),
    [
        ({"python": "3.10.1"}, "packages", FAILED, "python 3.10.1, 3.11.2 on n1"),
        ({"packages": NODE["packages"] | {"torch": "2.1"}}, "packages", FAILED, "torch 2.1, 1.0 on n1"),
        ({"nccl": "2.21.5"}, "packages", FAILED, "NCCL 2.21.5, 2.27.5 on n1"),
        ({"source_hash": "bbbb"}, "repository", FAILED, "differs from n1's"),
        ({"data": {"/data": "eeee"}}, "data", FAILED, "/data differs"),
        ({"data": {"/data": None}}, "data", FAILED, "no prepared folder"),
        ({"machine": "boot net:1"}, "host", FAILED, "same machine as n1"),
        ({"slots": 9}, "slots", FAILED, "9 slots, 8 GPUs; write slots=8"),
        ({"torch_cuda": None, "torch_gpus": 0, "capabilities": [], "gpu_free": []}, "GPU", FAILED, "without CUDA"),
        ({"torch_gpus": 0, "driver": "550.54.15", "capabilities": []}, "GPU", FAILED, "update the driver to 580.65.6"),
        ({"torch_gpus": 7}, "GPU", FAILED, "CUDA_VISIBLE_DEVICES"),
        ({"dtypes": ["fp16", "fp32"], "capabilities": [[7, 0]]}, "dtype", FAILED, "capability 7.0"),
        ({"gpu_free": [[10 * GIB, 80 * GIB]] * 8}, "GPU memory", WARNING, "GPU 0, 1"),
        ({"route": None}, "interface", FAILED, "no route"),
        ({"route": {"interface": "lo", "loopback": True}}, "interface", FAILED, "own loopback"),
        ({"compiler": False}, "compiler", FAILED, "install g++"),
        ({"stale_locks": {"/x/fused_adam/lock": 99.0}}, "op locks", FAILED, "/x/fused_adam/lock (99 s old)"),
        ({"disk": {"folder": "/work", "free": GIB // 2}}, "disk", FAILED, "0.5 GiB free"),
        ({"disk": {"folder": "/work", "free": 10 * GIB}}, "disk", WARNING, "10.0 GiB free"),
        ({"writable": False}, "disk", FAILED, "cannot be written"),
        ({"shm": {"total": 64 << 20, "free": 63 << 20}}, "shared memory", FAILED, "--shm-size"),
        ({"ram": {"total": 8 * GIB, "available": GIB}}, "memory", WARNING, "1.0 of 8.0 GiB"),
        ({"port_free": False}, "port", FAILED, "29500 is in use"),
        ({"device_type": "cpu"}, "device", FAILED, "trains on cpu"),
    ],
)
def test_each_fault_is_one_line_with_what_to_do(changed, check, state, words):
    found = [finding for finding in judged(**changed) if finding.check == check]
    assert len(found) == 1 and found[0].state == state, judged(**changed)
    assert words in found[0].line() and found[0].remedy
    assert found[0].host == ("n1" if check == "port" else "n2")


@pytest.mark.parametrize(
    ("skew", "uncertainty", "state"),
    [(0.5, 0.1, OK), (-5.0, 0.1, WARNING), (5.0, 4.0, OK), (40.0, 1.0, FAILED), (-40.0, 1.0, FAILED)],
)
def test_clocks(skew, uncertainty, state):
    assert clock_finding("n2", skew, uncertainty).state == state


def test_the_real_facts_are_complete(tmp_path):
    """What is judged above is what a host really says."""
    facts = gather(output_dir=tmp_path / "runs", data=[], master="127.0.0.1", port=None)
    assert set(NODE) - {"removed_locks"} <= set(facts)
    assert facts["disk"]["folder"] == str(tmp_path)


def needs(folder, **changed):
    values = {
        "folder": folder,
        "ds_config": {"optimizer": {"type": "AdamW", "params": {}}},
        "device_type": "cpu",
        "parameters": 1000,
        "rank_parameters": 1000,
        "checkpoints": 3,
        "loader_processes": 0,
    }
    return RunNeeds(**(values | changed))


@pytest.fixture
def ops(tmp_path, monkeypatch):
    """An empty folder of op builds."""
    folder = tmp_path / "ops"
    folder.mkdir()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(folder))
    return folder


ONE, TWO = Launch(0, 0, 1, 1), Launch(0, 0, 2, 2)


def test_a_preflight_without_a_fault_is_silent(tmp_path, ops, capsys):
    run_preflight(ONE, needs(tmp_path / "run"))
    assert capsys.readouterr().err == "" and not (tmp_path / "run").exists()


def test_a_disk_that_is_too_small(tmp_path, ops, capsys, monkeypatch):
    usage = preflight.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda folder: usage)  # other tests fill and free it meanwhile
    too_many = usage.free // preflight.CHECKPOINT_BYTES + 1
    monkeypatch.setattr(preflight.psutil, "virtual_memory", lambda: type("", (), {"available": 1 << 60}))
    with pytest.raises(UserError, match=rf"disk: .* free in {tmp_path}, at least .*--output_dir"):
        run_preflight(ONE, needs(tmp_path / "run", parameters=too_many))
    run_preflight(ONE, needs(tmp_path / "run", parameters=too_many // 2))  # one fits, three do not
    assert "warning:" in capsys.readouterr().err


def test_each_gpu_rank_of_a_host_begins_with_weights_in_main_memory(tmp_path, ops, capsys, monkeypatch):
    """V2-Lite, 15.7 B parameters in float32, on eight GPUs of one host with 256 GiB: 502 GB at ZeRO 2, none at 3."""
    monkeypatch.setattr(preflight.psutil, "virtual_memory", lambda: type("", (), {"available": 256 * GIB}))
    monkeypatch.setattr(preflight.torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(preflight.torch.cuda, "mem_get_info", lambda rank: (80 * GIB, 80 * GIB))
    for rank_parameters, warned in ((15_706_484_224, True), (15_706_484_224 // 8, False), (0, False)):
        run_preflight(Launch(0, 0, 8, 8), needs(tmp_path, device_type="cuda", rank_parameters=rank_parameters))
        assert ("memory: 256.0 GiB free in main memory, 468.1 GiB would be safe" in capsys.readouterr().err) is warned


def test_a_port_in_use_counts_on_the_master_alone(tmp_path, ops, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen(1)
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with pytest.raises(UserError, match=f"port: {taken.getsockname()[1]} is in use"):
            run_preflight(TWO, needs(tmp_path))
        run_preflight(Launch(1, 1, 2, 2), needs(tmp_path))
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # torchrun's own
        run_preflight(TWO, needs(tmp_path))


def test_a_stale_lock_of_an_op_that_the_run_needs(tmp_path, ops):
    for op in ("fused_adam", "async_io"):
        lock = ops / op / "lock"
        lock.parent.mkdir()
        lock.touch()
        os.utime(lock, (time.time() - 3600, time.time() - 3600))
    with pytest.raises(UserError, match=r"fused_adam/lock \(36") as error:
        run_preflight(ONE, needs(tmp_path))
    assert "async_io" not in str(error.value)
    run_preflight(ONE, needs(tmp_path, ds_config={}))


def test_gpus_and_their_memory(tmp_path, ops, monkeypatch, capsys):
    monkeypatch.setattr(preflight.torch.cuda, "device_count", lambda: 2)
    memory = {0: (79 * GIB, 80 * GIB), 1: (10 * GIB, 80 * GIB)}
    monkeypatch.setattr(preflight.torch.cuda, "mem_get_info", memory.get)
    on_gpus = needs(tmp_path, device_type="cuda")
    with pytest.raises(UserError, match="GPU: 3 ranks, but torch sees 2"):
        run_preflight(Launch(0, 0, 3, 3), on_gpus)
    run_preflight(Launch(0, 0, 1, 1), on_gpus)
    assert capsys.readouterr().err == ""
    run_preflight(Launch(1, 1, 2, 2), on_gpus)
    assert "10.0 of 80.0 GiB free on GPU 1" in capsys.readouterr().err


def test_a_master_that_nobody_knows(tmp_path, ops, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    with pytest.raises(UserError, match="no-such-host.invalid cannot be found"):
        run_preflight(Launch(1, 1, 2, 2), needs(tmp_path))


def test_little_shared_memory_is_a_doubt_for_loaders_and_a_fault_for_nccl():
    docker = 64 << 20
    assert shared_memory_finding("n", docker - 1, docker, gpus=False).state == WARNING
    assert shared_memory_finding("n", docker - 1, docker, gpus=True).state == FAILED
    assert shared_memory_finding("n", GIB, GIB, gpus=True).state == OK


def test_rank_0_needs_an_open_file_for_every_connection(tmp_path, ops, monkeypatch, capsys):
    monkeypatch.setattr(preflight.resource, "getrlimit", lambda what: (4096, 4096))
    run_preflight(Launch(0, 0, 800, 8), needs(tmp_path, parameters=0))
    assert "open files" not in capsys.readouterr().err
    with pytest.raises(UserError, match=r"open files: at most 4096, and rank 0 needs 4512.*limits.conf"):
        run_preflight(Launch(0, 0, 1000, 8), needs(tmp_path, parameters=0))
    run_preflight(Launch(8, 0, 1000, 8), needs(tmp_path, parameters=0))  # the others hold their own few
    monkeypatch.setattr(preflight.resource, "getrlimit", lambda what: (512, 512))
    run_preflight(Launch(8, 0, 1000, 8), needs(tmp_path, parameters=0))
    assert "open files: at most 512" in capsys.readouterr().err
