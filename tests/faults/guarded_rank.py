"""A rank that all-reduces for ever under a guardian: `guarded_rank.py FOLDER HOW`; rank 1 ends soon, as HOW says.

HOW: `runs` (it does not end), `raises`, `memory` (its address space is used up), `mistake` (a UserError of rank 1
alone), `before` (it raises before the process group, where rank 0 waits for it).
"""

import resource
import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])


def end(how: str) -> None:
    from recipes.config.errors import UserError

    if how in ("raises", "before"):
        raise ValueError("the router met\nan unknown expert")
    if how == "mistake":
        raise UserError("--data: the file of rank 1 is not there")
    if how == "memory":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))
        bytearray(2**30)


def work(launch, folder: Path, how: str) -> None:
    import torch

    if how == "before" and launch.rank == 1:
        end(how)
    torch.distributed.init_process_group("gloo")
    number = torch.ones(1)
    for step in range(10**6):
        torch.distributed.all_reduce(number)
        if step == 20:
            (folder / f"rank_{launch.rank}").touch()
            if launch.rank == 1:
                end(how)
        time.sleep(0.02)


def main() -> int:
    from recipes.cluster.guard import guarded
    from recipes.cluster.launch import read_launch

    launch = read_launch()
    with guarded(launch):
        work(launch, Path(sys.argv[-2]), sys.argv[-1])
    return 0


if __name__ == "__main__":
    import os

    from recipes.config.errors import run_command

    code = run_command(main)
    sys.stdout.flush()
    os._exit(code)
