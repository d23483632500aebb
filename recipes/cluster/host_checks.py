"""What the hosts' facts mean for a job on all of them: one finding for each check and host."""

from collections.abc import Iterator, Mapping
from typing import Any

from recipes.cluster.preflight import (
    FAILED,
    GIB,
    OK,
    WARNING,
    Finding,
    lock_finding,
    port_finding,
    shared_memory_finding,
)

Facts = Mapping[str, Any]

# Oldest Linux driver for each major version of CUDA (NVIDIA, "CUDA Compatibility": minor version compatibility).
_LEAST_DRIVER = {"11": (450, 80, 2), "12": (525, 60, 13), "13": (580, 65, 6)}
# Op-build locks count as stale after a minute, by this host's clock against the file system's.
_WORST_SKEW_SECONDS = 30.0
_GOOD_SKEW_SECONDS = 2.0
_LEAST_DISK_BYTES, _GOOD_DISK_BYTES = 1 * GIB, 20 * GIB
_GOOD_MEMORY_BYTES = 2 * GIB
_GOOD_GPU_FREE = 0.8


def check_hosts(
    facts: Mapping[str, Facts], slots: Mapping[str, int] | None, *, dtype: str | None, port: int
) -> list[Finding]:
    """Judge all hosts.

    Args:
        facts: of each host, as host_facts.gather gives them; the first is the master.
        slots: of each host by the hostfile; None without one.
        dtype: that the ds_config asks for.
        port: the master port.
    """
    findings = [*_same_everywhere(facts), *_different_machines(facts)]
    for number, (host, own) in enumerate(facts.items()):
        findings += _gpu_findings(host, own, slots[host] if slots else None, dtype)
        findings += _interface(host, own, several=len(facts) > 1)
        findings.append(_compiler(host, own))
        findings.append(lock_finding(host, own["stale_locks"]))
        findings += _room(host, own)
        if number == 0:
            findings.append(port_finding(host, port, own["port_free"]))
    return findings


def clock_finding(host: str, skew: float, uncertainty: float) -> Finding:
    """skew: a host's clock minus this one's, known to +- uncertainty [s]."""
    text = f"{skew:+.2f} s (+- {uncertainty:.2f} s) from this host's"
    sure = max(0.0, abs(skew) - uncertainty)
    state = FAILED if sure > _WORST_SKEW_SECONDS else WARNING if sure > _GOOD_SKEW_SECONDS else OK
    return Finding(host, "clock", state, text, "set it by NTP (chronyc makestep)" if state != OK else "")


def _same_everywhere(facts: Mapping[str, Facts]) -> Iterator[Finding]:
    """Compare each host with the master: Python, packages, repository, data, kind of device."""
    master, reference = next(iter(facts.items()))
    for host, own in facts.items():
        versions = {"python": own["python"], "NCCL": own["nccl"] or "none", **own["packages"]}
        expected = {"python": reference["python"], "NCCL": reference["nccl"] or "none", **reference["packages"]}
        wrong = [
            f"{name} {versions[name]}, {expected[name]} on {master}"
            for name in expected
            if versions[name] != expected[name]
        ]
        absent = [name for name, version in versions.items() if version is None]
        remedy = "install requirements.txt with the same Python on every host"
        if wrong or absent:
            text = "; ".join([*wrong, *(f"{name} is not installed" for name in absent)])
            yield Finding(host, "packages", FAILED, text, remedy)
        else:
            yield Finding(host, "packages", OK, f"Python {own['python']}, torch {own['packages']['torch']}")
        if own["source_hash"] == reference["source_hash"]:
            yield Finding(host, "repository", OK, f"{own['repository']} {own['source_hash']}")
        else:
            text = f"{own['repository']} differs from {master}'s"
            yield Finding(host, "repository", FAILED, text, "bring all hosts to one commit, or share the folder")
        yield from _data(host, own, master, reference)
        if own["device_type"] != reference["device_type"]:
            text = f"trains on {own['device_type']}, {master} on {reference['device_type']}"
            yield Finding(host, "device", FAILED, text, "see this host's GPU line, or leave it out of the hostfile")


def _data(host: str, own: Facts, master: str, reference: Facts) -> Iterator[Finding]:
    for folder, found in own["data"].items():
        if found is None:
            yield Finding(host, "data", FAILED, f"{folder} is no prepared folder here", "share it, or copy it there")
        elif found != reference["data"][folder]:
            text = f"{folder} differs from {master}'s"
            yield Finding(host, "data", FAILED, text, "prepare it once and copy it, or share the folder")
        else:
            yield Finding(host, "data", OK, f"{folder} {found}")


def _different_machines(facts: Mapping[str, Facts]) -> Iterator[Finding]:
    first: dict[str, str] = {}
    for host, own in facts.items():
        other = first.setdefault(own["machine"], host)
        if other != host:
            yield Finding(
                host, "host", FAILED, f"is the same machine as {other}", "leave one of them out of the hostfile"
            )


def _gpu_findings(host: str, own: Facts, slots: int | None, dtype: str | None) -> Iterator[Finding]:
    driver, seen = own["driver_gpus"], own["torch_gpus"]
    if driver and not own["torch_cuda"]:
        text = f"the driver has {driver} GPUs, but this torch is built without CUDA"
        yield Finding(host, "GPU", FAILED, text, "install torch's CUDA build (pytorch.org names the index)")
    elif driver > seen:
        least = _LEAST_DRIVER.get(str(own["torch_cuda"]).split(".")[0], ())
        old = tuple(int(part) for part in own["driver"].split(".")) < least
        text = f"driver {own['driver']} has {driver} GPUs, torch for CUDA {own['torch_cuda']} sees {seen}"
        needed = f"update the driver to {'.'.join(map(str, least))} or newer, or install torch for an older CUDA"
        yield Finding(
            host, "GPU", FAILED, text, needed if old else "see CUDA_VISIBLE_DEVICES, and nvidia-smi for errors"
        )
    elif seen:
        kinds = ", ".join(sorted(set(own["gpu_names"])))
        yield Finding(host, "GPU", OK, f"{seen} x {kinds}, driver {own['driver']}, NCCL {own['nccl']}")
    else:
        yield Finding(host, "GPU", OK, "none; ranks train on CPU")
    if slots is not None and seen:
        remedy = f"write slots={seen}, or see why GPUs are missing" if slots > seen else ""
        yield Finding(host, "slots", FAILED if slots > seen else OK, f"{slots} slots, {seen} GPUs", remedy)
    if dtype is not None:
        lacks = dtype not in own["dtypes"]
        capability = max(map(tuple, own["capabilities"]), default=())
        text = f"{dtype} is asked for" + (
            f", compute capability {'.'.join(map(str, capability))}" if capability else ""
        )
        remedy = f"take a ds_config of {' or '.join(own['dtypes'])}" if lacks else ""
        yield Finding(host, "dtype", FAILED if lacks else OK, text, remedy)
    busy = [gpu for gpu, (free, total) in enumerate(own["gpu_free"]) if free < _GOOD_GPU_FREE * total]
    if busy:
        text = f"GPU {', '.join(map(str, busy))} is partly taken"
        yield Finding(host, "GPU memory", WARNING, text, "another process holds it; see nvidia-smi")


def _interface(host: str, own: Facts, *, several: bool) -> Iterator[Finding]:
    if not several:
        return
    route = own["route"]
    if route is None:
        yield Finding(
            host, "interface", FAILED, "has no route to the master", "give --master_addr an address it can reach"
        )
    elif route["loopback"] or route["interface"] is None:
        text = "knows the master's address as its own loopback"
        yield Finding(host, "interface", FAILED, text, "give --master_addr the address of an interface; see /etc/hosts")
    else:
        ports = f", InfiniBand or RoCE {', '.join(own['infiniband'])}" if own["infiniband"] else ""
        yield Finding(host, "interface", OK, f"{route['interface']} leads to the master{ports}")


def _compiler(host: str, own: Facts) -> Finding:
    if own["compiler"]:
        return Finding(host, "compiler", OK, "a C++ compiler and ninja are there")
    return Finding(
        host, "compiler", FAILED, "no C++ compiler, or no ninja", "install g++, and ninja by requirements.txt"
    )


def _room(host: str, own: Facts) -> Iterator[Finding]:
    folder, free = own["disk"]["folder"], own["disk"]["free"]
    state = FAILED if free < _LEAST_DISK_BYTES else WARNING if free < _GOOD_DISK_BYTES else OK
    text = f"{free / GIB:,.1f} GiB free in {folder}"
    if not own["writable"]:
        state, text = FAILED, f"{folder} cannot be written to"
    yield Finding(host, "disk", state, text, "free some, or give another --output_dir" if state != OK else "")
    if own["shm"]:
        gpus = own["torch_gpus"] > 1
        yield shared_memory_finding(host, own["shm"]["free"], own["shm"]["total"], gpus=gpus)
    available = own["ram"]["available"]
    state = WARNING if available < _GOOD_MEMORY_BYTES else OK
    text = f"{available / GIB:,.1f} of {own['ram']['total'] / GIB:,.1f} GiB available"
    yield Finding(host, "memory", state, text, "end other programs" if state != OK else "")
