"""What one host says about itself: `python -m recipes.cluster.host_facts --json`, run on each host by the doctor."""

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

from recipes.cluster.launch import device_dtypes, device_type
from recipes.cluster.network import infiniband_ports, interfaces, port_is_free, route_to
from recipes.cluster.op_builds import extensions_folder, has_compiler, stale_locks
from recipes.config.run_config import REPOSITORY

PACKAGES = ("torch", "deepspeed", "transformers", "datasets", "accelerate", "numpy", "ninja")
SHARED_MEMORY = Path("/dev/shm")
# what a run's result depends on; tests and documents may differ between hosts
_SOURCES = ("model/**/*.py", "model/presets/*.json", "recipes/**/*.py", "recipes/presets/*.yaml", "ds_configs/*.json")


def gather(*, output_dir: Path, data: list[Path], master: str | None, port: int | None) -> dict[str, Any]:
    """Every fact of this host, as JSON can hold it.

    Args:
        output_dir: where runs will be written; its nearest folder that is there counts.
        data: prepared folders.
        master: the job's master address, to which the route is looked up.
        port: to be free on this host; None leaves the question out.
    """
    memory = psutil.virtual_memory()
    route = route_to(master) if master else None
    shm = shutil.disk_usage(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None
    return {
        "hostname": platform.node(),
        "machine": _machine(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "packages": {name: _version(name) for name in PACKAGES},
        "repository": str(REPOSITORY),
        "source_hash": _source_hash(REPOSITORY),
        "data": {str(folder): data_hash(folder) for folder in data},
        "interfaces": interfaces(),
        "infiniband": infiniband_ports(),
        "route": {"interface": route.interface, "loopback": route.is_loopback} if route else None,
        "port_free": port_is_free(port) if port else None,
        "compiler": has_compiler(),
        "stale_locks": {str(lock): age for lock, age in stale_locks(extensions_folder()).items()},
        "disk": {"folder": str(existing(output_dir)), "free": shutil.disk_usage(existing(output_dir)).free},
        "writable": os.access(existing(output_dir), os.W_OK),
        "shm": {"total": shm.total, "free": shm.free} if shm else None,
        "ram": {"total": memory.total, "available": memory.available},
        "dtypes": sorted(device_dtypes()),
        **_gpus(),
    }


def existing(folder: Path) -> Path:
    """The folder, or the nearest above it that is there."""
    folder = folder.expanduser().absolute()
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def data_hash(folder: Path) -> str | None:
    """A hash of what a prepared folder's manifest lists, with the hashes of its files; None where it is not there."""
    try:
        manifest = (folder / "manifest.json").read_bytes()
    except OSError:
        return None
    return hashlib.sha256(manifest).hexdigest()[:16]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _machine() -> str:
    """Differs between machines, and between network namespaces of one machine."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return platform.node()


def _source_hash(root: Path) -> str:
    total = hashlib.sha256()
    for path in sorted(path for pattern in _SOURCES for path in root.glob(pattern)):
        total.update(f"{path.relative_to(root)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()[:16]


def _gpus() -> dict[str, Any]:
    """GPUs as the driver and as torch see them."""
    driver = _nvidia_smi("driver_version")
    seen = torch.cuda.device_count() if device_type() == "cuda" else 0
    return {
        "device_type": device_type(),
        "driver": driver[0] if driver else None,
        "driver_gpus": len(driver),
        "torch_gpus": seen,
        "capabilities": [list(torch.cuda.get_device_capability(gpu)) for gpu in range(seen)],
        "gpu_names": [torch.cuda.get_device_name(gpu) for gpu in range(seen)],
        "gpu_free": [list(torch.cuda.mem_get_info(gpu)) for gpu in range(seen)],
        "torch_cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if seen else None,
    }


def _nvidia_smi(query: str) -> list[str]:
    """One answer for each GPU of the driver; none without a driver."""
    if not shutil.which("nvidia-smi"):
        return []
    words = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        finished = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True)
    except (subprocess.SubprocessError, OSError):
        return []
    return finished.stdout.split("\n")[:-1]


def main() -> int:
    """Print this host's facts; remove its stale locks first when asked to."""
    parser = argparse.ArgumentParser(prog="host_facts", description=__doc__)
    parser.add_argument("--output_dir", type=Path, default=REPOSITORY / "runs")
    parser.add_argument("--data", type=Path, nargs="*", default=[])
    parser.add_argument("--master")
    parser.add_argument("--port", type=int)
    parser.add_argument("--remove_locks", action="store_true", help="delete locks of killed op builds")
    parser.add_argument("--json", action="store_true", help="on one line")
    arguments = parser.parse_args()
    removed = list(stale_locks(extensions_folder())) if arguments.remove_locks else []
    for lock in removed:
        lock.unlink(missing_ok=True)
    facts = gather(
        output_dir=arguments.output_dir, data=arguments.data, master=arguments.master, port=arguments.port
    ) | {"removed_locks": [str(lock) for lock in removed]}
    print(json.dumps(facts, indent=None if arguments.json else 2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
