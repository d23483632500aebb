"""What is freed stays with the process on a CPU, unless the user chose an allocator."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.cluster.host_memory import allocator_is_chosen, keep_freed_memory

ROOT = Path(__file__).parents[2]
RESIDENT = """
import sys
from recipes.cluster.host_memory import keep_freed_memory
done = keep_freed_memory()
block = bytearray(b"x" * (100 << 20))
del block
print(done, int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20)
"""


@pytest.mark.parametrize("chosen", [False, True])
def test_freed_blocks_stay_or_go(chosen):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    if chosen:
        environment["MALLOC_ARENA_MAX"] = "4"
    command = [sys.executable, "-c", RESIDENT]
    done, mebibytes = subprocess.check_output(command, env=environment, cwd=ROOT, text=True).split()
    assert done == str(not chosen)
    # 200 MiB were held at once (a string and its copy); the interpreter itself takes some 15
    assert (int(mebibytes) > 190) is not chosen


@pytest.mark.parametrize(
    ("environ", "chosen"),
    [
        ({}, False),
        ({"GLIBC_TUNABLES": "glibc.cpu.x86_shstk=on"}, False),
        ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}, True),
        ({"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}, True),
        ({"LD_PRELOAD": "/usr/lib/libiomp5.so"}, False),
    ],
)
def test_the_users_choice_wins(environ, chosen):
    assert allocator_is_chosen(environ) is chosen
    assert not (chosen and keep_freed_memory(environ))
