"""The quick checks of this host, which pretrain runs before it starts anything; they cost well under a second."""

import os
import resource
import shutil
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from recipes.cluster.host_facts import SHARED_MEMORY, existing
from recipes.cluster.launch import Launch
from recipes.cluster.network import port_is_free, route_to
from recipes.cluster.op_builds import extensions_folder, needed_ops, stale_locks
from recipes.config.errors import UserError

OK, WARNING, FAILED = "ok", "warning", "failed"
_GPU = "GPU"
GIB = 1 << 30
_LEAST_SHARED_MEMORY_BYTES = 64 << 20  # what docker gives by default, and where NCCL and loaders begin to fail
_GOOD_SHARED_MEMORY_BYTES = 1 * GIB
_GOOD_GPU_FREE = 0.8  # share of a GPU's memory that nobody else holds
_LEAST_OPEN_FILES = 1024
_CONNECTIONS_OF_A_RANK = 4  # to rank 0: its guardian, torch's rendezvous, its stall watch, and one to spare
# bytes a parameter of a checkpoint at most: bf16 weights, fp32 master weights, two fp32 moments
CHECKPOINT_BYTES = 14


@dataclass(frozen=True)
class Finding:
    """One check's outcome on one host.

    Args:
        state: OK, WARNING or FAILED.
        text: what was seen.
        remedy: what to do about it.
    """

    host: str
    check: str
    state: str
    text: str
    remedy: str = ""

    def line(self) -> str:
        return f"{self.host}: {self.check}: {self.text}" + (f"; {self.remedy}" if self.remedy else "")


@dataclass(frozen=True)
class RunNeeds:
    """What a run will ask of its hosts.

    Args:
        folder: the run's.
        parameters: of the model.
        rank_parameters: those that a rank on a GPU has in main memory before it hands them to DeepSpeed.
        checkpoints: kept at a time, the one being written included.
        loader_processes: a rank.
    """

    folder: Path
    ds_config: dict[str, Any]
    device_type: str
    parameters: int
    rank_parameters: int
    checkpoints: int
    loader_processes: int


def run_preflight(launch: Launch, needs: RunNeeds) -> None:
    """Check this host; its first rank prints a line for each doubt, the others for one about their own GPU.

    Raises:
        UserError: what would make the run fail.
    """
    host = socket.gethostname()
    findings = [*_local(host, launch, needs), *(_main_only(host, launch, needs) if launch.is_main else [])]
    failed = [finding for finding in findings if finding.state == FAILED]
    if failed:
        raise UserError(*(f"{finding.line()} (--skip_preflight leaves this check out)" for finding in failed))
    for finding in findings:
        if finding.state == WARNING and (launch.local_rank == 0 or finding.check == _GPU):
            print(f"warning: {finding.line()}", file=sys.stderr, flush=True)


def _main_only(host: str, launch: Launch, needs: RunNeeds) -> list[Finding]:
    """What rank 0's host alone has to offer: the run's folder and the master port."""
    size = needs.parameters * CHECKPOINT_BYTES
    findings = [disk_finding(host, needs.folder, least=size, good=size * needs.checkpoints)]
    # torchrun and accelerate keep the port themselves, and let their ranks use it
    ours = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    port = os.environ.get("MASTER_PORT", "")
    if launch.world_size > 1 and ours and port.isdigit():
        findings.append(port_finding(host, int(port), port_is_free(int(port))))
    return findings


def _local(host: str, launch: Launch, needs: RunNeeds) -> list[Finding]:
    findings = [_locks(host, needs.ds_config), _open_files(host, launch), _memory(host, launch, needs)]
    shares = launch.local_world_size > 1 and needs.device_type == "cuda"
    if SHARED_MEMORY.is_dir() and (shares or needs.loader_processes):
        shm = shutil.disk_usage(SHARED_MEMORY)
        findings.append(shared_memory_finding(host, shm.free, shm.total, gpus=shares))
    master = os.environ.get("MASTER_ADDR")
    if launch.world_size > 1 and master and route_to(master) is None:
        remedy = "give deepspeed --master_addr an address that every host knows"
        findings.append(Finding(host, "master", FAILED, f"MASTER_ADDR {master} cannot be found", remedy))
    if needs.device_type == "cuda":
        findings.append(_gpu(host, launch))
    return findings


def disk_finding(host: str, folder: Path, *, least: int, good: int) -> Finding:
    """Whether a folder to be made can be, with room for what goes in. least, good: [bytes]."""
    parent = existing(folder)
    free = shutil.disk_usage(parent).free
    if not os.access(parent, os.W_OK | os.X_OK):
        return Finding(host, "disk", FAILED, f"{parent} cannot be written to", "give another --output_dir")
    return _room(host, "disk", f"in {parent}", free, least, good, "free some, or give another --output_dir")


def _room(host: str, check: str, where: str, free: int, least: int, good: int, remedy: str) -> Finding:
    text = f"{free / GIB:,.1f} GiB free {where}"
    if free < least:
        return Finding(host, check, FAILED, f"{text}, at least {least / GIB:,.1f} GiB are needed", remedy)
    if free < good:
        return Finding(host, check, WARNING, f"{text}, {good / GIB:,.1f} GiB would be safe", remedy)
    return Finding(host, check, OK, text)


def shared_memory_finding(host: str, free: int, total: int, *, gpus: bool) -> Finding:
    """NCCL's ranks of one host, and loading processes, exchange data through /dev/shm."""
    remedy = "give the container more (docker run --shm-size=16g), or remove what is left in /dev/shm"
    text = f"{free / GIB:,.2f} of {total / GIB:,.2f} GiB free in /dev/shm"
    if gpus and free < _LEAST_SHARED_MEMORY_BYTES:
        return Finding(host, "shared memory", FAILED, text, remedy)
    if free < _GOOD_SHARED_MEMORY_BYTES:
        return Finding(host, "shared memory", WARNING, text, remedy)
    return Finding(host, "shared memory", OK, text)


def port_finding(host: str, port: int, is_free: bool) -> Finding:
    """The port at which the ranks meet, on the master."""
    if is_free:
        return Finding(host, "port", OK, f"{port} is free")
    remedy = "another job may run here; end it, or give deepspeed --master_port another"
    return Finding(host, "port", FAILED, f"{port} is in use", remedy)


def lock_finding(host: str, locks: dict[str, float]) -> Finding:
    """Locks that killed builds of DeepSpeed's ops left. locks: path -> age [s]."""
    if not locks:
        return Finding(host, "op locks", OK, "none is stale")
    named = ", ".join(f"{path} ({age:.0f} s old)" for path, age in locks.items())
    remedy = "run recipes/doctor.py --remove_locks, or delete the file"
    return Finding(host, "op locks", FAILED, f"left by a build that was killed: {named}", remedy)


def _locks(host: str, ds_config: dict[str, Any]) -> Finding:
    needed = needed_ops(ds_config)
    stale = stale_locks(extensions_folder()) if needed else {}
    return lock_finding(host, {str(lock): age for lock, age in stale.items() if lock.parent.name in needed})


def _open_files(host: str, launch: Launch) -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)  # raised to what the system allows already
    needed = 512 + _CONNECTIONS_OF_A_RANK * launch.world_size if launch.is_main else 0
    if soft == resource.RLIM_INFINITY or soft >= max(needed, _LEAST_OPEN_FILES):
        return Finding(host, "open files", OK, f"at most {soft}")
    if soft < needed:
        text = f"at most {soft}, and rank 0 needs {needed} for the connections of {launch.world_size} ranks"
        return Finding(host, "open files", FAILED, text, "raise the hard limit: nofile in /etc/security/limits.conf")
    return Finding(host, "open files", WARNING, f"at most {soft}", "raise it: ulimit -n 65536")


def _memory(host: str, launch: Launch, needs: RunNeeds) -> Finding:
    """Main memory for what lives there: on CPU ranks all of the model's state, on GPUs the weights that a run begins
    with, in float32, a copy for each rank of this host."""
    if needs.device_type == "cpu":
        # weights, gradients and Adam's moments once over all ranks of this host, whatever ZeRO shares between hosts
        wanted = needs.parameters * 16 // (launch.world_size // launch.local_world_size or 1)
        remedy = "end other programs, take a smaller --model or more hosts"
    else:
        wanted = needs.rank_parameters * 4 * launch.local_world_size
        remedy = "each rank here begins with the weights in float32; ZeRO stage 3 shares them from the start"
    available = psutil.virtual_memory().available
    return _room(host, "memory", "in main memory", available, least=0, good=wanted, remedy=remedy)


def _gpu(host: str, launch: Launch) -> Finding:
    # every rank counts for all of its host: of a mistake only the host's first rank speaks
    if launch.local_world_size > (count := torch.cuda.device_count()):
        remedy = "set the hostfile's slots, or --num_gpus, to the GPUs that are there"
        return Finding(host, _GPU, FAILED, f"{launch.local_world_size} ranks, but torch sees {count}", remedy)
    free, total = torch.cuda.mem_get_info(launch.local_rank)
    state = OK if free >= _GOOD_GPU_FREE * total else WARNING
    remedy = "another process holds the rest; see nvidia-smi" if state != OK else ""
    text = f"{free / GIB:,.1f} of {total / GIB:,.1f} GiB free on GPU {launch.local_rank}"
    return Finding(host, _GPU, state, text, remedy)
