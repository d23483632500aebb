"""The arithmetic that one device can do at most: what model FLOPs utilization is a share of."""

import functools
import re
import time

import torch

from model.wide_products import widens

# Dense peaks of matrix products, bf16 or fp16 in and fp32 sums, without sparsity [FLOP/s], by the word or words in
# torch's name of the device; the first that fits counts, so a variant stands before its family. Sources: NVIDIA's data
# sheet of each product, where a figure "with sparsity" is twice the one here; for GeForce NVIDIA's GA102, AD102 and
# RTX Blackwell architecture whitepapers; AMD's Instinct data sheets. Of an MI250X torch sees each of its two dies.
GPU_PEAK_FLOPS = {
    "GB300": 2500e12,
    "GB200": 2500e12,
    "B300": 2250e12,
    "B200": 2250e12,
    "GH200": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 149.7e12,
    "A30": 165e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L20": 119.5e12,
    "L4": 121e12,
    "RTX A6000": 154.8e12,
    "RTX 5090": 209.5e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
    "V100-PCIE": 112e12,
    "V100": 125e12,
    "T4": 65e12,
    "MI325X": 1307.4e12,
    "MI300X": 1307.4e12,
    "MI250X": 191.5e12,
}


def known_peak_flops(name: str) -> float | None:
    """The table's entry for a device as torch names it, e.g. `NVIDIA H100 80GB HBM3`; None for one not in it."""
    for product, peak in GPU_PEAK_FLOPS.items():
        if re.search(rf"\b{product}\b", name):
            return peak
    return None


@functools.cache
def device_peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Peak of one device [FLOP/s]: a known GPU's data sheet in half precision, else a measured matrix product."""
    if device.type == "cuda" and dtype != torch.float32:
        peak = known_peak_flops(torch.cuda.get_device_name(device))
        if peak:
            return peak
    return measured_matmul_flops(device, dtype)


def measured_matmul_flops(device: torch.device, dtype: torch.dtype, least_seconds: float = 0.01) -> float:
    """Best rate of a square matrix product, the smallest that takes `least_seconds` [FLOP/s].

    Of one size for all devices it would end too soon on a GPU to tell its rate, and in half precision take a CPU
    without units for it most of a minute.
    """
    generator = torch.Generator(device).manual_seed(0)  # the run's own random state stays as it is
    size = 256
    while True:
        a = torch.randn(size, size, device=device, generator=generator).to(dtype)
        best = min(_product_seconds(a) for _ in range(4))
        if best >= least_seconds or size >= 8192:
            return 2 * size**3 / best
        size *= 2


def _product_seconds(a: torch.Tensor) -> float:
    if widens(a):  # as the model multiplies it
        a = a.float()
    begin = time.perf_counter()
    a @ a
    if a.is_cuda:
        torch.cuda.synchronize(a.device)
    return time.perf_counter() - begin
