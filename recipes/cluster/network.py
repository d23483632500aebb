"""This host's network, as far as a training job is concerned: interfaces, routes, InfiniBand ports."""

import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

_INFINIBAND = Path("/sys/class/infiniband")
_NET = Path("/sys/class/net")


@dataclass(frozen=True)
class Route:
    """The way from this host to an address. On the host that has the address it is that address's own interface.

    Args:
        interface: its name, or None where no interface has the local address.
        local_address: what the other side sees this host as.
    """

    interface: str | None
    local_address: str

    @property
    def is_loopback(self) -> bool:
        """Whether no other host can be reached this way."""
        return self.local_address.startswith("127.") or self.local_address == "::1"


def route_to(address: str) -> Route | None:
    """The route to a host's name or address; None where it is unknown or cannot be reached. Sends nothing."""
    try:
        found = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, target in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)  # a datagram socket's connect only asks the routing table
                local = str(probe.getsockname()[0])
        except OSError:
            continue
        return Route(next((name for name, own in interfaces().items() if local in own), None), local)
    return None


def interfaces() -> dict[str, list[str]]:
    """Name of each interface that is up -> its IP addresses."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    return {
        name: [a.address.split("%")[0] for a in addresses if a.family in (socket.AF_INET, socket.AF_INET6)]
        for name, addresses in psutil.net_if_addrs().items()
        if name in up
    }


def link_gbits(interface: str) -> float | None:
    """An interface's link speed [Gbit/s], where its driver tells."""
    try:
        mbits = int((_NET / interface / "speed").read_text())
    except (OSError, ValueError):
        return None
    return mbits / 1000 if mbits > 0 else None


def infiniband_ports(root: Path = _INFINIBAND) -> list[str]:
    """The active ports that NCCL's InfiniBand transport should use, as `device:port`.

    Ports of InfiniBand links where there are any, else those of RoCE, so that a node's management port, which is
    often of the other kind, stays out.
    """
    by_layer: dict[str, list[str]] = {}
    for port in sorted(root.glob("*/ports/*"), key=lambda path: (path.parts[-3], int(path.name))):
        try:
            state, layer = ((port / name).read_text().strip() for name in ("state", "link_layer"))
        except OSError:
            continue
        if state.endswith("ACTIVE"):
            by_layer.setdefault(layer, []).append(f"{port.parts[-3]}:{port.name}")
    return by_layer.get("InfiniBand") or by_layer.get("Ethernet") or []


def port_is_free(port: int) -> bool:
    """Whether a process of this host could listen on a TCP port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # as torch's store binds: a port whose last connections still close is free
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError:
            return False
    return True
