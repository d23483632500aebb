"""What the launcher told this process, and the process group made from it."""

import os
import resource
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from model.wide_products import multiplies_bf16_fast
from recipes.cluster.host_memory import keep_freed_memory
from recipes.cluster.op_builds import prepare_op_builds
from recipes.cluster.slurm import srun_environment
from recipes.cluster.stall_watch import StallWatch, set_default_timeout

_stall_watches: list[StallWatch] = []
_MOST_OPEN_FILES = 1 << 16  # as many as rank 0's host needs for 16,000 ranks


@dataclass(frozen=True)
class Launch:
    """This process's place in the job."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes for all."""
        return self.rank == 0


def read_launch() -> Launch:
    """Read the variables that `deepspeed`, `torchrun` and `accelerate launch` set; none set means one process.

    A task of Slurm's `srun` is given them first.
    """
    os.environ.update(srun_environment(os.environ))
    variable = os.environ.get
    world_size = int(variable("WORLD_SIZE", "1"))
    return Launch(
        rank=int(variable("RANK", "0")),
        local_rank=int(variable("LOCAL_RANK", "0")),
        world_size=world_size,
        local_world_size=int(variable("LOCAL_WORLD_SIZE", variable("LOCAL_SIZE", str(world_size)))),
    )


def device_type() -> str:
    """`cuda` where torch sees a GPU, else `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def gpu_names(indices: Iterable[int]) -> list[str]:
    """What DeepSpeed's launcher calls the GPUs that torch counts from 0 here.

    With --include or --num_gpus it drops CUDA_VISIBLE_DEVICES, and counts all of the host's.
    """
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    places = list(indices)
    if max(places) >= len(visible) or not all(name.isdigit() for name in visible):
        return [str(place) for place in places]  # not set, or by the GPUs' UUIDs, which the launcher does not take
    return [visible[place] for place in places]


def device_dtypes() -> frozenset[str]:
    """The training dtypes that this device computes in."""
    if device_type() == "cuda":
        has_bf16 = torch.cuda.get_device_capability()[0] >= 8  # before Ampere it is only emulated
        return frozenset({"fp32", "fp16", "bf16"} if has_bf16 else {"fp32", "fp16"})
    return frozenset({"fp32", "bf16", "fp16"} if _cpu_has_fp16() else {"fp32", "bf16"})


def _cpu_has_fp16() -> bool:
    """Whether DeepSpeed takes fp16 on this CPU; it asks the same, of the units for it."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    except (AttributeError, RuntimeError):  # a torch without oneDNN
        return False


def prefers_bf16() -> bool:
    """Whether bf16 is the precision of choice: on GPUs wherever they have it, on CPUs where it is the faster one."""
    if device_type() == "cuda":
        return "bf16" in device_dtypes()
    return multiplies_bf16_fast(torch.cpu.get_capabilities())


def raise_open_files() -> None:
    """Let this process, and those that it starts, open as many files as the system allows a user.

    Rank 0's host holds several connections of every rank: the usual soft limit of 1024 ends a job of 340 ranks.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def quiet_deepspeed() -> None:
    """Keep DeepSpeed's log to warnings, and tell it that a machine without a GPU is meant to have none.

    Must run before anything imports deepspeed; both are the user's to overrule by the environment.
    """
    if device_type() == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed.utils

    deepspeed.utils.logger.setLevel(os.environ.get("DEEPSPEED_LOG_LEVEL", "WARNING").upper())


def set_cpu_threads(launch: Launch) -> None:
    """Share this host's cores among its ranks, unless the user chose OMP_NUM_THREADS."""
    if device_type() == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // launch.local_world_size))


def _complete_environment(launch: Launch) -> None:
    """Give a plain `python recipes/pretrain.py` the variables of a job of one."""
    for name, value in (("RANK", launch.rank), ("LOCAL_RANK", launch.local_rank), ("WORLD_SIZE", launch.world_size)):
        os.environ.setdefault(name, str(value))
    os.environ.setdefault("LOCAL_SIZE", str(launch.local_world_size))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if "MASTER_PORT" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(probe.getsockname()[1])


def start_process_group(
    launch: Launch, ds_config: dict[str, Any], timeout: timedelta = timedelta(minutes=30)
) -> torch.device:
    """Join the process group, unless this process is in one, and return this rank's device.

    Raises:
        UserError: a lock of a killed op build is in the way (found in bounded time and named).
    """
    device = torch.device("cuda", launch.local_rank) if device_type() == "cuda" else torch.device("cpu")
    if torch.distributed.is_initialized():
        return device
    _complete_environment(launch)
    prepare_op_builds(ds_config, device.type)
    import deepspeed

    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    set_default_timeout(timeout)
    deepspeed.init_distributed(timeout=timeout, verbose=False)
    if launch.world_size > 1:
        _stall_watches.append(StallWatch(timeout.total_seconds()))
        _stall_watches[-1].start()
    return device


def stop_process_group() -> None:
    """Leave the process group, so that no rank outlives the others waiting."""
    while _stall_watches:
        _stall_watches.pop().stop()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
