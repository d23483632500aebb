"""DeepSpeed's ops that are compiled at run time: where they are built, and locks of builds that were killed."""

import os
import shutil
import sys
import time
from pathlib import Path

from recipes.config.errors import UserError, run_command

SHARED_MEMORY_OP = "deepspeed_shm_comm"
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


def _someone_builds(folder: Path) -> bool:
    """Whether a process of this host works in the build folder (ninja does)."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if folder in (cwd := Path(os.readlink(process / "cwd")), *cwd.parents):
                return True
        except OSError:
            continue  # the process is gone, or another user's
    return False


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
            raise UserError(
                f"{lock}: left by a build that was killed ({age:.0f} s ago); delete this file and run again"
            )
        if time.monotonic() - begin > wait:
            raise UserError(
                f"{lock}: another process still builds this op after {wait:.0f} s; wait for it, or delete it"
            )
        if not announced:
            print(f"waiting for another process to build {lock.parent.name} ({lock})", flush=True)
            announced = True
        time.sleep(0.5)


def has_compiler() -> bool:
    """Whether ninja and a C++ compiler are on PATH (ninja also beside this Python, where pip puts it)."""
    ninja = shutil.which("ninja") or (Path(sys.executable).parent / "ninja").exists()
    return bool(ninja) and shutil.which(os.environ.get("CXX", "c++")) is not None


def prepare_shared_memory_op(local_world_size: int, on_cpu: bool) -> None:
    """Make DeepSpeed's shared-memory all-reduce available, or tell DeepSpeed to do without.

    One rank a host has nobody to share memory with, and without a compiler gloo alone works as well.
    """
    if not on_cpu:
        return
    folder = extensions_folder()
    # The venv's bin is not on PATH when python is called by its path; DeepSpeed looks for ninja there.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    if local_world_size > 1 and has_compiler():
        wait_for_build_lock(folder / SHARED_MEMORY_OP / "lock")
        return
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__[SHARED_MEMORY_OP] = False


def main() -> int:
    """Build, once, what CPU training with several ranks needs (`make` calls this at set-up)."""
    prepare_shared_memory_op(local_world_size=2, on_cpu=True)
    if not has_compiler():
        print("no C++ compiler: ranks on one CPU host will talk through gloo alone, which is slower")
        return 0
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    ShareMemCommBuilder().load(verbose=False)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
