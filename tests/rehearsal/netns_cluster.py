"""A cluster of network namespaces on one machine.

`python tests/rehearsal/netns_cluster.py COMMAND...` runs a command on its first host, with a hostfile in $HOSTFILE, and
removes the cluster.

Each host is a network and a UTS namespace with a name, an address and an sshd of its own; all hang on one switch, a
bridge in a namespace of its own. They share the file system, as hosts do over NFS.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGES = {"pdsh": "pdsh", "/usr/sbin/sshd": "openssh-server", "ssh": "openssh-client", "ip": "iproute2"}
NETWORK = "10.213.77"
INTERFACE = "eth0"
PRIVILEGE_FOLDER = Path("/run/sshd")  # sshd does not start without it


class NotPossible(Exception):
    """Why no cluster can be made here."""


@dataclass(frozen=True)
class Cluster:
    """A running one.

    Args:
        folder: of its keys, settings and logs.
        hosts: their names; the first is the master.
    """

    folder: Path
    hosts: list[str]
    prefix: str

    @property
    def hostfile(self) -> Path:
        return self.folder / "hostfile"

    def on(self, host: str, words: list[str]) -> list[str]:
        """A command as it is run on a host."""
        named = ["unshare", "--uts", "sh", "-c", f'hostname {host} && exec "$@"', "sh"]
        return ["ip", "netns", "exec", f"{self.prefix}{host}", *named, *words]

    def environment(self) -> dict[str, str]:
        """What a command on a host needs: an `ssh` that knows the hosts, and the variables that DeepSpeed passes on."""
        return {
            "PATH": os.pathsep.join([str(self.folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]),
            "DS_ENV_FILE": str(self.folder / "deepspeed_env"),
            "HOSTFILE": str(self.hostfile),
        }

    def cut_link(self, host: str, *, cut: bool = True) -> None:
        """Unplug a host from the switch, or plug it in again."""
        _run(f"ip -n {self.prefix}switch link set {host} {'down' if cut else 'up'}")

    def processes(self) -> list[int]:
        """Of all hosts, the sshds that wait for connections left out."""
        found = []
        for host in self.hosts:
            listing = _run(f"ip netns pids {self.prefix}{host}").split()
            found += [int(pid) for pid in listing if int(pid) != _sshd_pid(self.folder, host)]
        return found

    def listing(self) -> str:
        """The same as ps prints them; `none` where there are none."""
        pids = self.processes()
        words = ["ps", "-o", "pid,ppid,stat,comm,args", "--cols", "150", "-p", ",".join(map(str, pids))]
        return subprocess.run(words, capture_output=True, text=True, check=False).stdout if pids else "none"


def _run(command: str) -> str:
    result = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if result.returncode:
        raise NotPossible(f"`{command}` failed: {result.stderr.strip() or result.returncode}")
    return result.stdout


def install_packages() -> None:
    """Install what is missing from Debian's packages.

    Raises:
        NotPossible: it cannot be had.
    """
    if os.geteuid() != 0:
        raise NotPossible("network namespaces and sshd need root")
    missing = [package for program, package in PACKAGES.items() if not shutil.which(program)]
    if not missing:
        return
    if not shutil.which("apt-get"):
        raise NotPossible(f"needs the packages {' '.join(missing)}, and there is no apt-get to install them")
    _run("apt-get update")
    _run(f"apt-get install -y --no-install-recommends {' '.join(missing)}")


@contextlib.contextmanager
def rehearsal_cluster(size: int = 2, slots: int = 1) -> Iterator[Cluster]:
    """Make a cluster, and remove whatever was made of it, also after a failure.

    Raises:
        NotPossible: namespaces are not allowed here, or packages are missing.
    """
    install_packages()
    hosts = [f"node{number}" for number in range(1, size + 1)]
    with contextlib.ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="rehearsal_")))
        folder.chmod(0o755)
        cluster = Cluster(folder, hosts, f"{folder.name}_")
        _add_namespace(f"{cluster.prefix}switch", cleanup)
        _run(f"ip -n {cluster.prefix}switch link add switch type bridge")
        _run(f"ip -n {cluster.prefix}switch link set switch up")
        for number, host in enumerate(hosts, start=1):
            _add_host(cluster, host, f"{NETWORK}.{number}", cleanup)
        _write_settings(cluster, slots)
        if not PRIVILEGE_FOLDER.exists():
            PRIVILEGE_FOLDER.mkdir()
            cleanup.callback(_remove_privilege_folder, folder.name)
        for host in hosts:
            _start_sshd(cluster, host)
        yield cluster


def _remove_privilege_folder(own: str) -> None:
    others = [line for line in _run("ip netns list").splitlines() if line.startswith("rehearsal_") and own not in line]
    if not others:  # another cluster on this machine needs it as long as it stands
        PRIVILEGE_FOLDER.rmdir()


def _add_namespace(name: str, cleanup: contextlib.ExitStack) -> None:
    _run(f"ip netns add {name}")
    cleanup.callback(_remove_namespace, name)
    _run(f"ip -n {name} link set lo up")


def _remove_namespace(name: str) -> None:
    for pid in _run(f"ip netns pids {name}").split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    _run(f"ip netns delete {name}")


def _add_host(cluster: Cluster, host: str, address: str, cleanup: contextlib.ExitStack) -> None:
    name, switch = f"{cluster.prefix}{host}", f"{cluster.prefix}switch"
    _add_namespace(name, cleanup)
    _run(f"ip -n {switch} link add {host} type veth peer name {INTERFACE} netns {name}")
    _run(f"ip -n {switch} link set {host} master switch up")
    _run(f"ip -n {name} address add {address}/24 dev {INTERFACE}")
    _run(f"ip -n {name} link set {INTERFACE} up")


def _write_settings(cluster: Cluster, slots: int) -> None:
    folder = cluster.folder
    for name in ("key", "host_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    (folder / "ssh_config").write_text(
        "".join(f"Host {host}\n  HostName {NETWORK}.{i}\n" for i, host in enumerate(cluster.hosts, start=1))
        + f"Host *\n  IdentityFile {folder}/key\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n"
        "  LogLevel ERROR\n  ServerAliveInterval 5\n  ServerAliveCountMax 3\n"
    )
    wrapper = folder / "bin" / "ssh"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n')
    wrapper.chmod(0o755)
    cluster.hostfile.write_text("".join(f"{host} slots={slots}\n" for host in cluster.hosts))
    passed_on = {
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions")),
    }
    (folder / "deepspeed_env").write_text("".join(f"{name}={value}\n" for name, value in passed_on.items()))


def _start_sshd(cluster: Cluster, host: str) -> None:
    folder = cluster.folder
    settings = folder / f"sshd_{host}"
    settings.write_text(
        f"HostKey {folder}/host_key\nAuthorizedKeysFile {folder}/key.pub\nStrictModes no\nUsePAM no\n"
        f"PermitRootLogin yes\nPasswordAuthentication no\nPidFile {folder}/{host}.pid\n"
        "ClientAliveInterval 5\nClientAliveCountMax 3\n"
    )
    log = f"{folder}/{host}.log"
    subprocess.run(cluster.on(host, ["/usr/sbin/sshd", "-f", str(settings), "-E", log]), check=True)
    deadline = time.monotonic() + 10
    while _sshd_pid(folder, host) is None:
        if time.monotonic() > deadline:
            raise NotPossible(f"sshd of {host} did not start: {Path(log).read_text()}")
        time.sleep(0.05)


def _sshd_pid(folder: Path, host: str) -> int | None:
    path = folder / f"{host}.pid"
    return int(path.read_text()) if path.exists() and path.read_text().strip() else None


if __name__ == "__main__":
    try:
        with rehearsal_cluster() as made:
            command = made.on(made.hosts[0], sys.argv[1:] or ["bash"])
            sys.exit(subprocess.run(command, env=os.environ | made.environment(), check=False).returncode)
    except NotPossible as reason:
        sys.exit(f"no cluster of namespaces here: {reason}")
