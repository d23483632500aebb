"""The precision that is chosen where none is asked for."""

from typing import Any

import pytest
import torch

from recipes.cluster import launch


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"cpu_name": "Intel Xeon", "avx512_bf16": True, "amx_bf16": True}, True),
        ({"cpu_name": "Intel Xeon", "avx512_bf16": True, "amx_bf16": False}, False),  # slower than fp32 there
        ({"cpu_name": "AMD EPYC", "avx512_bf16": True, "amx_bf16": False}, True),
        ({"avx512_bf16": True}, True),
        ({"cpu_name": "AMD EPYC", "avx512_f": True}, False),
        ({}, False),  # another architecture
    ],
)
def test_bf16_is_chosen_on_a_cpu_where_it_is_the_faster_dtype(
    monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, Any], expected: bool
) -> None:
    monkeypatch.setattr(launch, "device_type", lambda: "cpu")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert launch.prefers_bf16() is expected
