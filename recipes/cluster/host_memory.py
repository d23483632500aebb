"""How this process's memory is given back to the system, or kept."""

import contextlib
import ctypes
import os
from collections.abc import Mapping

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # of glibc's malloc.h
_NEVER, _TOP_PAD_BYTES = -1, 64 << 20


def allocator_is_chosen(environ: Mapping[str, str]) -> bool:
    """Whether the user set malloc up by the environment, which wins: glibc's variables, or another library's malloc."""
    names = ("malloc", "tcmalloc", "jemalloc", "mimalloc")
    return (
        any(name.startswith("MALLOC_") for name in environ)
        or "glibc.malloc." in environ.get("GLIBC_TUNABLES", "")
        or any(name in environ.get("LD_PRELOAD", "") for name in names)
    )


def keep_freed_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """Have malloc keep what tensors free, for the next ones, instead of giving it back to the system.

    A training step on a CPU frees and takes the same gigabytes over and over. By default each block of more than 32 MiB
    is mapped anew and the end of the heap is given back, so the system clears the same pages in each step: a fifth of
    the step's time where it was measured (benchmarks/README.md). Kept is what the largest step needed, no more.

    Returns:
        whether it was done: not with a malloc that the user chose, nor with a C library without this setting.
    """
    if allocator_is_chosen(environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _NEVER), (_M_TOP_PAD, _TOP_PAD_BYTES))
    return all(mallopt(name, value) for name, value in settings)


def give_back_freed_memory() -> None:
    """Give the system what is free now; before the first step, so that what loading needed does not hide a leak."""
    with contextlib.suppress(AttributeError):  # a C library without it
        ctypes.CDLL(None).malloc_trim(0)
