"""Bandwidth between hosts: all-reduce, all-gather and reduce-scatter, timed by torch.distributed.

As a module it is all ranks of one host, each a process of its own; `run_probe` starts it on every host.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from recipes.cluster.launch import device_type, read_launch
from recipes.cluster.nccl_presets import choose_preset, count_nodes, read_fabric
from recipes.cluster.remote import Ended, module_command, on_all, run_on
from recipes.config.errors import EXIT_SUCCESS, run_command

CPU_BYTES, GPU_BYTES = 16 << 20, 256 << 20
_REPEATS = 3
_POLL_SECONDS = 0.1


def run_probe(
    hosts: Sequence[tuple[str | None, int]], *, master: str, port: int, timeout: float
) -> tuple[dict[str, Any] | None, list[Ended]]:
    """Run the probe on all hosts.

    Args:
        hosts: (host, ranks on it); the host None is this one.
        timeout: for all of it [s].
    Returns:
        rank 0's measurements, or None; and the hosts that failed, those first that did not merely wait for another.
    """
    world = sum(ranks for _, ranks in hosts)
    common = {"WORLD_SIZE": str(world), "CROSS_SIZE": str(len(hosts)), "MASTER_ADDR": master, "MASTER_PORT": str(port)}
    work, first = [], 0
    for host, ranks in hosts:
        own = {"FIRST_RANK": str(first), "LOCAL_SIZE": str(ranks)}
        command = module_command("recipes.cluster.probe", [str(int(timeout * 0.8))], **common, **own)
        work.append(lambda host=host, command=command: run_on(host, command, timeout))
        first += ranks
    ended = on_all(work, at_once=len(work))  # each waits for all others
    failed = sorted((one for one in ended if one.code), key=lambda one: one.end)
    return (None if failed else json.loads(ended[0].stdout.splitlines()[-1])), failed


def measure(device: torch.device) -> dict[str, Any]:
    """Time the collectives; all ranks of the default group call it.

    Returns:
        for each collective: seconds, and bus_gbytes_per_second, which compares over numbers of ranks as nccl-tests'
        busbw does: data that each link carries a second, as if all went round a ring.
    """
    ranks = dist.get_world_size()
    numel = (GPU_BYTES if device.type == "cuda" else CPU_BYTES) // 4 // ranks * ranks
    whole, share = torch.ones(numel, device=device), torch.ones(numel // ranks, device=device)
    ring = (ranks - 1) / ranks
    collectives: dict[str, tuple[Callable[[], object], float]] = {
        "all_reduce": (lambda: dist.all_reduce(whole), 2 * ring),
        "all_gather": (lambda: dist.all_gather_single(whole, share), ring),
        "reduce_scatter": (lambda: dist.reduce_scatter_single(share, whole), ring),
    }
    found = {}
    for name, (collective, per_link) in collectives.items():
        times = []
        for _ in range(1 + _REPEATS):
            whole.fill_(1.0)
            dist.barrier()
            begin = time.perf_counter()
            collective()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        seconds = min(times[1:])  # the first one connects
        moved = numel * 4 * per_link
        found[name] = {"seconds": seconds, "bus_gbytes_per_second": moved / seconds / 1e9}
    return {"ranks": ranks, "backend": dist.get_backend(), "bytes": numel * 4, "collectives": found}


def main() -> int:
    """This host's ranks, or, started by those, one of them."""
    first = os.environ.pop("FIRST_RANK", None)
    return _one_rank() if first is None else _ranks_of_this_host(int(first), int(os.environ["LOCAL_SIZE"]))


def _ranks_of_this_host(first: int, ranks: int) -> int:
    """Start them; once one has failed the others wait in vain, and are ended."""
    words = [sys.executable, "-m", "recipes.cluster.probe", *sys.argv[1:]]
    processes = [
        subprocess.Popen(words, env=os.environ | {"RANK": str(first + local), "LOCAL_RANK": str(local)})
        for local in range(ranks)
    ]
    while any(process.poll() is None for process in processes) and not any(process.poll() for process in processes):
        time.sleep(_POLL_SECONDS)
    code = next((process.returncode for process in processes if process.returncode), EXIT_SUCCESS)
    for process in processes:
        process.kill()
    return code


def _one_rank() -> int:
    launch, kind = read_launch(), device_type()
    fabric = read_fabric(count_nodes(launch.world_size, launch.local_world_size), kind)
    choose_preset("auto", fabric, zero_stage=0).apply()
    device = torch.device("cuda", launch.local_rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        timeout=timedelta(seconds=int(sys.argv[1])),
        device_id=device if kind == "cuda" else None,
    )
    result = measure(device)
    dist.barrier()
    if launch.is_main:
        print(json.dumps(result), flush=True)
    os._exit(EXIT_SUCCESS)  # leaving the group would wait for whoever is slower


if __name__ == "__main__":
    sys.exit(run_command(main))
