"""Presets of NCCL's environment variables: chosen from the cluster, each with its reason, never over the user's own.

Source of every variable and value: NVIDIA's NCCL user guide, "Environment Variables"; those of torch: the headers of
torch 2.13 (ProcessGroupNCCL.hpp, FlightRecorder.hpp).
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from recipes.cluster.network import Route, infiniband_ports, link_gbits, route_to
from recipes.config.errors import UserError

PRESETS = ("auto", "none", "single_node", "ethernet", "infiniband", "large", "debug")
LARGE_NODES = 8  # with more, an all-reduce round a ring waits for too many hops
_SCOPED_ALGORITHMS = (2, 24)  # NCCL_ALGO by collective, and no silent fall-back to the ring
_GENERIC_100G_GBITS = 100


@dataclass(frozen=True)
class Fabric:
    """What a preset depends on, as one rank sees it.

    Args:
        nodes: hosts of the job.
        device_type: "cuda" or "cpu".
        master: MASTER_ADDR, None in a job of one process.
        route: this host's way to the master.
        infiniband: active ports, `device:port`.
        gbits: link speed of the route's interface [Gbit/s], where known.
        nccl_version: (major, minor, patch), None without CUDA.
    """

    nodes: int
    device_type: str
    master: str | None = None
    route: Route | None = None
    infiniband: tuple[str, ...] = ()
    gbits: float | None = None
    nccl_version: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Setting:
    """One variable of a preset. `kept`: the user's own value, which wins."""

    name: str
    value: str
    reason: str
    kept: str | None = None


@dataclass(frozen=True)
class NcclPreset:
    """A preset as it applies to this rank."""

    name: str
    because: str
    settings: tuple[Setting, ...] = ()
    warnings: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """For the terminal."""
        lines = [f"nccl preset    {self.name}: {self.because}"]
        for one in self.settings:
            if one.kept is None:
                lines.append(f"               {one.name}={one.value}: {one.reason}")
            else:
                lines.append(f"               {one.name}={one.kept} is yours and stays (preset: {one.value})")
        return lines + [f"warning        {text}" for text in self.warnings]

    def result(self) -> dict[str, object]:
        """For `--json`."""
        return {
            "name": self.name,
            "because": self.because,
            "set": {one.name: one.value for one in self.settings if one.kept is None},
            "kept": {one.name: one.kept for one in self.settings if one.kept is not None},
            "warnings": list(self.warnings),
        }

    def apply(self) -> None:
        """Set the variables in this process. Must run before the process group starts."""
        for one in self.settings:
            if one.kept is None:
                os.environ[one.name] = one.value
        if any(one.name == "TORCH_DISTRIBUTED_DEBUG" for one in self.settings):
            torch.distributed.set_debug_level_from_env()  # torch read it when it was imported


def count_nodes(world_size: int, local_world_size: int) -> int:
    """Hosts of this job, as its launcher says (`deepspeed`, `torchrun`), else by this host's share of the ranks."""
    for name in ("CROSS_SIZE", "GROUP_WORLD_SIZE"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return -(-world_size // max(1, local_world_size))


def read_fabric(nodes: int, device_type: str) -> Fabric:
    """Look at this host."""
    master = os.environ.get("MASTER_ADDR")
    route = route_to(master) if master else None
    return Fabric(
        nodes=nodes,
        device_type=device_type,
        master=master,
        route=route,
        infiniband=tuple(infiniband_ports()),
        gbits=link_gbits(route.interface) if route and route.interface else None,
        nccl_version=tuple(torch.cuda.nccl.version()) if device_type == "cuda" else None,
    )


def choose_preset(name: str, fabric: Fabric, zero_stage: int, user: Mapping[str, str] | None = None) -> NcclPreset:
    """Resolve `--nccl_preset`.

    Args:
        name: one of PRESETS.
        user: what the user set; default: this process's environment and NCCL's own configuration files.
    Raises:
        UserError: the named preset cannot work on this fabric.
    """
    given = {**_configuration_files(), **os.environ} if user is None else user
    warnings = tuple(_warnings(given, zero_stage))
    if name == "none":
        return NcclPreset("none", "--nccl_preset none: no variable is touched", warnings=warnings)
    if name == "single_node" and fabric.nodes > 1:
        raise UserError(f"--nccl_preset single_node: this job has {fabric.nodes} nodes; write auto")
    if fabric.device_type == "cpu":
        chosen, because, settings = _on_cpu(name, fabric)
    else:
        chosen, because, settings = _on_gpus(name, fabric)
    ours = tuple(Setting(one.name, one.value, one.reason, _kept(one.name, given)) for one in settings)
    return NcclPreset(chosen, because, ours, warnings)


def _on_cpu(name: str, fabric: Fabric) -> tuple[str, str, list[Setting]]:
    """gloo's one choice; NCCL's variables have no reader here."""
    settings = _debugging()[:1] if name == "debug" else []
    because = "no GPU on this host, so gloo in place of NCCL; "
    if fabric.nodes == 1:
        return name, because + "on one host there is nothing to choose for it", settings
    interface = _interface(fabric)
    reason = f"the way to {fabric.master}; gloo may otherwise take the loopback, where no other host is met"
    return name, because + f"{fabric.nodes} nodes", [Setting("GLOO_SOCKET_IFNAME", interface, reason), *settings]


def _on_gpus(name: str, fabric: Fabric) -> tuple[str, str, list[Setting]]:
    found = f"{fabric.nodes} node{'s' if fabric.nodes > 1 else ''}, " + (
        f"InfiniBand or RoCE on {', '.join(fabric.infiniband)}" if fabric.infiniband else "no active InfiniBand port"
    )
    fitting = "single_node" if fabric.nodes == 1 else "infiniband" if fabric.infiniband else "ethernet"
    if name == "infiniband" and not fabric.infiniband:
        raise UserError(
            "--nccl_preset infiniband: no port in /sys/class/infiniband is active on this host; write ethernet, or see "
            "to the link (ibstat)"
        )
    chosen = name
    if name == "auto":
        chosen = "large" if fabric.nodes > LARGE_NODES else fitting
    network = chosen if chosen in ("single_node", "ethernet", "infiniband") else fitting
    settings = {"single_node": _single_node, "ethernet": _ethernet, "infiniband": _infiniband}[network](fabric)
    if chosen == "large":
        settings += _large(fabric)
    settings += _flight_recorder()
    if chosen == "debug":
        settings += _debugging()
    because = f"{'chosen for ' if name == 'auto' else ''}{found}"
    return chosen, because, settings


def _interface(fabric: Fabric) -> str:
    """The interface to the master, which must not be the loopback once there are more nodes than one."""
    if fabric.route is None:
        raise UserError(
            f"MASTER_ADDR {fabric.master}: this host cannot find it; give deepspeed --master_addr an address"
        )
    if fabric.nodes > 1 and fabric.route.is_loopback:
        raise UserError(
            f"MASTER_ADDR {fabric.master}: is the loopback on this host, which the other nodes cannot reach; give "
            "deepspeed --master_addr the address of an interface"
        )
    if fabric.route.interface is None:
        raise UserError(f"MASTER_ADDR {fabric.master}: no interface has {fabric.route.local_address}, the way to it")
    return fabric.route.interface


def _single_node(fabric: Fabric) -> list[Setting]:
    return [Setting("NCCL_SOCKET_IFNAME", "=lo", "one host: its ranks meet without firewall, VPN or container bridge")]


def _bootstrap(fabric: Fabric) -> list[Setting]:
    if fabric.master is None:  # a job of one process
        return []
    interface = _interface(fabric)
    return [Setting("NCCL_SOCKET_IFNAME", f"={interface}", f"the way to {fabric.master}, and no other interface")]


def _ethernet(fabric: Fabric) -> list[Setting]:
    settings = [*_bootstrap(fabric), Setting("NCCL_IB_DISABLE", "1", "sockets only: no search for InfiniBand")]
    if fabric.gbits and fabric.gbits >= _GENERIC_100G_GBITS:
        why = f"NVIDIA's value for 100 Gbit/s and faster (this link: {fabric.gbits:.0f})"
        settings += [Setting(name, "4", why) for name in ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD")]
    return settings


def _infiniband(fabric: Fabric) -> list[Setting]:
    ports = "=" + ",".join(fabric.infiniband)
    return [*_bootstrap(fabric), Setting("NCCL_IB_HCA", ports, "exactly the active ports of one kind of link")]


def _large(fabric: Fabric) -> list[Setting]:
    scoped = fabric.nccl_version is None or fabric.nccl_version[:2] >= _SCOPED_ALGORITHMS
    version = ".".join(map(str, fabric.nccl_version or ())) or "unknown"
    settings = [
        Setting(
            "NCCL_ALGO",
            "allreduce:tree" if scoped else "Tree",
            f"over more than {LARGE_NODES} nodes an all-reduce's steps grow with their logarithm (NCCL {version}: the "
            + ("others keep their algorithms)" if scoped else "others fall back to the ring)"),
        )
    ]
    if fabric.infiniband:
        settings.append(
            Setting("NCCL_IB_TIMEOUT", "22", "17 s an attempt: a large network's congestion is no broken link")
        )
    return settings


def _flight_recorder() -> list[Setting]:
    return [
        Setting("TORCH_FR_BUFFER_SIZE", "2000", "torch's flight recorder keeps the last collectives with their stacks"),
        Setting("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", "and every rank writes them to a file when one times out"),
    ]


def _debugging() -> list[Setting]:
    return [
        Setting("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "each collective is compared over the ranks; slow"),
        Setting("NCCL_DEBUG", "INFO", "NCCL says what it finds and chooses"),
        Setting("NCCL_DEBUG_SUBSYS", "INIT,ENV,NET,GRAPH", "start, variables, network, topology"),
    ]


_OLD_NAMES = {"TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE"}


def _kept(name: str, given: Mapping[str, str]) -> str | None:
    return given.get(name, given.get(_OLD_NAMES.get(name, name)))


def _configuration_files() -> dict[str, str]:
    """Variables from NCCL's own files, over which an environment variable of ours would win.

    /etc/nccl.conf, and NCCL_CONF_FILE or, before NCCL 2.23, ~/.nccl.conf.
    """
    found: dict[str, str] = {}
    for path in ("/etc/nccl.conf", os.environ.get("NCCL_CONF_FILE") or str(Path.home() / ".nccl.conf")):
        try:
            lines = Path(path).read_text().splitlines()
        except (OSError, UnicodeDecodeError):
            continue
        pairs = (line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
        found |= {name.strip(): value.strip() for name, value in pairs}
    return found


def _warnings(given: Mapping[str, str], zero_stage: int) -> list[str]:
    algorithms = given.get("NCCL_ALGO", "")
    if zero_stage < 1 or not _leaves_out_ring(algorithms):
        return []
    return [
        f"NCCL_ALGO={algorithms}: from NCCL 2.24 on this makes ReduceScatter and AllGather, which ZeRO {zero_stage} "
        "needs, fail with 'no algorithm/protocol available'; write NCCL_ALGO=allreduce:tree"
    ]


def _leaves_out_ring(algorithms: str) -> bool:
    """Whether NCCL_ALGO's entry for all collectives, which can only be its first, has no ring."""
    first = algorithms.split(";")[0].strip().lower()
    if not first or ":" in first:
        return False
    names = re.split(r"\s*,\s*", first.removeprefix("^"))
    return ("ring" in names) == first.startswith("^")
