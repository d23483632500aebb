"""Runs that repeat to the bit on a GPU: torch's switches, and what lies outside them."""

import os

import torch

CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def make_deterministic(device_type: str, speaks: bool) -> None:
    """Choose the algorithms that give the same bits each time; must run before the first use of a GPU.

    An operation that has none warns by its name when it runs, and the run goes on.

    Args:
        device_type: "cuda" or "cpu".
        speaks: whether this process says what stays out of reach.
    Source: https://docs.pytorch.org/docs/stable/notes/randomness.html.
    """
    os.environ.setdefault(CUBLAS_WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    if speaks:
        print("\n".join(f"deterministic: {line}" for line in limits(device_type)), flush=True)


def limits(device_type: str) -> list[str]:
    """What equal seeds cannot make equal, a line each."""
    lines = [
        "equal bits need the same number of ranks, ZeRO stage, micro batch, thread count and versions of torch and "
        "DeepSpeed: each changes the order of sums"
    ]
    if device_type == "cuda":
        lines += [
            f"{CUBLAS_WORKSPACE}={os.environ.get(CUBLAS_WORKSPACE)}; another kind of GPU, driver or CUDA version "
            "rounds otherwise",
            "NCCL adds in the order of its topology: set NCCL_ALGO and NCCL_PROTO, and use the same hosts",
            "operations without a deterministic algorithm warn by name; DeepSpeed's and fused kernels do not",
        ]
    return lines
