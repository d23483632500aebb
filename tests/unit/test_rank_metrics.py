"""What a line says of all ranks, of the experts and of the device, against numbers worked by hand."""

import math

import pytest
import torch

from recipes.training import device_peak
from recipes.training.device_peak import known_peak_flops, measured_matmul_flops
from recipes.training.expert_metrics import expert_metrics
from recipes.training.rank_metrics import rank_metrics


def test_ranks_by_hand():
    line = rank_metrics(
        {
            "own_seconds": [1.0, 1.2, 3.0, 1.1],
            "data_wait_seconds": [0.0, 0.5, 0.1, 0.0],
            "communication_seconds": [2.0, 1.8, 0.0, 1.8],
            "memory_bytes": [10.0, 40.0, 20.0, 30.0],
            "host_rss_bytes": [7.0, 5.0, 6.0, 8.0],
            "host memory growth": [0.0, 0.0, 0.0, 0.0],
        }
    )
    assert line == {
        "data_wait_seconds": 0.5,
        "communication_seconds": pytest.approx(1.4),
        "slowest_rank": 2,
        "slowest_rank_ratio": pytest.approx(3.0 / 1.1),
        "memory_bytes": 40,
        "host_rss_bytes": 8,
    }


def test_of_two_ranks_the_slow_one_is_measured_against_the_fast_one():
    line = rank_metrics({"own_seconds": [3.0, 1.0], "data_wait_seconds": [0, 0], "communication_seconds": [0, 2.0]})
    assert (line["slowest_rank"], line["slowest_rank_ratio"]) == (0, 3.0)


def test_experts_by_hand():
    line = expert_metrics(
        {"a": [0.25, 0.25, 0.25, 0.25], "b": [0.7, 0.3, 0.0, 0.0]}, {"a": math.log(4), "b": math.log(2)}
    )
    assert line["expert_load_violation"] == pytest.approx(0.7 * 4 - 1)
    assert line["expert_load_violation_by_layer"] == {"a": 0.0, "b": pytest.approx(1.8)}
    assert line["dead_experts"] == 2 and line["dead_experts_by_layer"] == {"a": 0, "b": 2}
    assert line["router_entropy"] == pytest.approx(0.75)  # ln 4 of ln 4, and ln 2 of ln 4
    # of 0, 0, 1.2, 2.8 times the mean: the middle is half-way between 0 and 1.2
    assert line["expert_load_percentiles"]["b"] == [0.0, 0.0, 0.6, pytest.approx(1.6), pytest.approx(2.56)]


def test_a_dense_model_has_no_layers_to_name():
    assert expert_metrics({}, {}) == {"expert_load_violation": 0.0, "dead_experts": 0}


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("Tesla V100-SXM2-16GB", 125),
        ("Tesla V100-PCIE-32GB", 112),
        ("NVIDIA GB200", 2500),
        ("NVIDIA B200", 2250),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_peaks_by_the_names_that_torch_gives(name, teraflops):
    """As the data sheets say; no entry may stand in for a longer name."""
    assert known_peak_flops(name) == teraflops * 1e12


def test_an_unknown_device_is_measured():
    # no entry stands for a name that only begins or ends like it
    assert [known_peak_flops(name) for name in ("NVIDIA RTX A1000", "NVIDIA RTX A4000", "NVIDIA H2000")] == [None] * 3
    assert 1e8 < measured_matmul_flops(torch.device("cpu"), torch.float32) < 1e14


def test_a_slow_device_is_measured_on_a_small_product(monkeypatch):
    """Where a product of 256 cubed takes 2 s, and four times that many ever larger ones would take the day."""
    sizes = []
    monkeypatch.setattr(device_peak, "_product_seconds", lambda a: sizes.append(len(a)) or len(a) ** 3 / 256**3 * 2)
    assert measured_matmul_flops(torch.device("cpu"), torch.float16) == 256**3
    assert sizes == [256] * 4
    sizes.clear()
    monkeypatch.setattr(device_peak, "_product_seconds", lambda a: sizes.append(len(a)) or len(a) ** 3 / 512**3 * 0.004)
    assert measured_matmul_flops(torch.device("cpu"), torch.float32) == pytest.approx(2 * 512**3 / 0.004)
    assert sizes == [256] * 4 + [512] * 4 + [1024] * 4
