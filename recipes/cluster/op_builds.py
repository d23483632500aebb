"""DeepSpeed's ops that are compiled at run time: which a run needs, where they lie, and locks of killed builds."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from recipes.config.ds_auto import takes_torch_adam
from recipes.config.ds_config import load_ds_config
from recipes.config.errors import EXIT_SUCCESS, UserError, run_command

# torch's build lock holds no owner. A calm build takes half a minute, so a lock with no process of this host at work
# in its folder is left over from a killed build once it is older than this.
STALE_LOCK_SECONDS = 60
LOCK_WAIT_SECONDS = 600


def extensions_folder() -> Path:
    """Where ops are built: inside the virtual environment, so that other projects' builds and locks stay out.

    Sets TORCH_EXTENSIONS_DIR unless the user did.
    """
    in_environment = sys.prefix != sys.base_prefix
    default = Path(sys.prefix) if in_environment else Path.home() / ".cache" / "deepseek_recipes"
    return Path(os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(default / "torch_extensions")))


def needed_ops(ds_config: dict[str, Any]) -> list[str]:
    """The ops that DeepSpeed will compile for a resolved ds_config, by the names of their build folders."""
    optimizer = ds_config.get("optimizer", {})
    devices = {
        ds_config.get("zero_optimization", {}).get(f"offload_{part}", {}).get("device", "none")
        for part in ("optimizer", "param")
    }
    adam = optimizer.get("type", "").lower() in ("adam", "adamw") and not optimizer["params"].get("torch_adam", False)
    ops = []
    if adam:
        ops.append("cpu_adam" if devices & {"cpu", "nvme"} else "fused_adam")
    if "nvme" in devices:
        ops += ["pin_memory", "async_io"]  # the second is linked against the first
    return ops


def prepare_op_builds(ds_config: dict[str, Any], device_type: str) -> None:
    """See to it that no op's build can hang this run; call before the process group starts.

    Raises:
        UserError: a lock of a killed build is in the way.
    """
    folder = extensions_folder()
    # The venv's bin is not on PATH when python is called by its path; DeepSpeed looks for ninja there.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    for op in needed_ops(ds_config):
        wait_for_build_lock(folder / op / "lock")
    if device_type == "cpu":
        _leave_out_shared_memory_op()


def main() -> int:
    """Build, once, the ops that a ds_config needs on this machine: `python -m recipes.cluster.op_builds FILE`."""
    folder = extensions_folder()
    config = load_ds_config(sys.argv[1])
    if config["optimizer"]["params"].get("torch_adam") == "auto":
        config["optimizer"]["params"]["torch_adam"] = takes_torch_adam(config)
    ops = needed_ops(config)
    prepare_op_builds(config, "cpu")
    from deepspeed.ops import op_builder

    builders = {
        "cpu_adam": op_builder.CPUAdamBuilder,
        "fused_adam": op_builder.FusedAdamBuilder,
        "pin_memory": op_builder.PinMemoryBuilder,
        "async_io": op_builder.AsyncIOBuilder,
    }
    for op in ops:
        builders[op]().load(verbose=False)
    print(f"{sys.argv[1]}: ops built in {folder}: {', '.join(ops) or 'none needed'}")
    return EXIT_SUCCESS


def _leave_out_shared_memory_op() -> None:
    """Let CPU ranks talk through gloo alone.

    DeepSpeed's shared-memory all-reduce spins while it waits, so with fewer free cores than ranks a run all but stops.
    It also costs a compilation, and leaves 69 MB a rank in /dev/shm (docs/decisions/0003-gloo-alone-on-cpu.md).
    """
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _someone_builds(folder: Path) -> bool:
    """Whether a process of this host works in the build folder (ninja does)."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if folder in (cwd := Path(os.readlink(process / "cwd")), *cwd.parents):
                return True
        except OSError:
            continue  # the process is gone, or another user's
    return False


def stale_locks(folder: Path, stale_seconds: float = STALE_LOCK_SECONDS) -> dict[Path, float]:
    """Locks below the folder of all builds that no process of this host will release, with their age [s]."""
    found = {}
    for lock in sorted(folder.glob("*/lock")):
        try:
            age = time.time() - lock.stat().st_mtime
        except FileNotFoundError:
            continue
        if age > stale_seconds and not _someone_builds(lock.parent):
            found[lock] = age
    return found


def wait_for_build_lock(lock: Path, stale_seconds: float = STALE_LOCK_SECONDS, wait: float = LOCK_WAIT_SECONDS) -> None:
    """Wait while another process builds; a lock that nobody will ever release is an error that names it.

    Raises:
        UserError: the lock is stale, or still held after `wait` seconds.
    """
    begin = time.monotonic()
    announced = False
    while lock.exists():
        try:
            age = time.time() - lock.stat().st_mtime
        except FileNotFoundError:
            return
        if age > stale_seconds and not _someone_builds(lock.parent):
            raise UserError(f"{lock}: left by a build that was killed {age:.0f} s ago; delete this file, run again")
        if time.monotonic() - begin > wait:
            raise UserError(f"{lock}: another process still builds this op after {wait:.0f} s; wait, or delete it")
        if not announced:
            print(f"waiting for another process to build {lock.parent.name} ({lock})", flush=True)
            announced = True
        time.sleep(0.5)


def has_compiler() -> bool:
    """Whether ninja and a C++ compiler are on PATH (ninja also beside this Python, where pip puts it)."""
    ninja = shutil.which("ninja") or (Path(sys.executable).parent / "ninja").exists()
    return bool(ninja) and shutil.which(os.environ.get("CXX", "c++")) is not None


def has_nvcc() -> bool:
    """Whether CUDA's compiler is where torch looks for it when it builds an op."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    return shutil.which("nvcc") is not None or any(home and (Path(home) / "bin" / "nvcc").exists() for home in homes)


def has_libaio() -> bool:
    """Whether the compiler finds libaio's header and library, which the op async_io is built with."""
    if not has_compiler():
        return False
    words = [os.environ.get("CXX", "c++"), "-x", "c++", "-", "-laio", "-o", os.devnull]
    program = b"#include <libaio.h>\nint main() { return 0; }\n"
    return subprocess.run(words, input=program, capture_output=True, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(run_command(main))
