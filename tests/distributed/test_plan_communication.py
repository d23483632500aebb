"""The bytes that plan.py promises are those that DeepSpeed's communication logger counts, on 2 and 4 ranks."""

import json

import pytest
from launching import run_ranks

CASES = {
    2: {
        "ZeRO 0": ["zero_optimization.stage=0"],
        "ZeRO 1": [],
        "ZeRO 2": ["zero_optimization.stage=2"],
        "ZeRO 3": ["zero_optimization.stage=3", "zero_optimization.stage3_param_persistence_threshold=0"],
        "EP 2": ["expert_parallel.enabled=true", "expert_parallel.autoep_size=2"],
        "EP 2, recomputed": ["expert_parallel.enabled=true", "expert_parallel.autoep_size=2", "full"],
    },
    4: {
        "ZeRO 1": [],
        "ZeRO 2": ["zero_optimization.stage=2"],
        "ZeRO 3, small ones whole": ["zero_optimization.stage=3"],
        "EP 4": ["expert_parallel.enabled=true", "expert_parallel.autoep_size=4"],
    },
}
# What one rank sends round a ring of n ranks, for each byte that the logger writes down: of an all-gather that is the
# rank's own part, of the others the whole.
RING = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter_tensor": lambda n: (n - 1) / n,
    "all_gather_into_tensor": lambda n: n - 1,
    "all_to_all_single": lambda n: (n - 1) / n,
}


@pytest.fixture(scope="module")
def counted(tmp_path_factory, small_model):
    folder = tmp_path_factory.mktemp("bytes")
    found = {}
    for ranks, cases in CASES.items():
        output = folder / f"{ranks}.json"
        words = ["tests/distributed/count_bytes.py", str(small_model), str(output), json.dumps(cases)]
        run_ranks(words, ranks=ranks, PYTHONPATH=".")
        found |= {(ranks, name): case for name, case in json.loads(output.read_text()).items()}
    return found


def sent(case, ranks, operations):
    logged = case["logged"]
    return sum(
        RING[operation](ranks) * sum(int(size) * times for size, times in logged.get(operation, {}).items())
        for operation in operations
    )


@pytest.mark.parametrize("ranks, name", [(ranks, name) for ranks in CASES for name in CASES[ranks]])
def test_planned_bytes_are_the_counted_ones(counted, ranks, name):
    case = counted[ranks, name]
    exchanged = sent(case, ranks, ["all_to_all_single"])
    # besides the tokens each exchange sends the counts, and MTP's last tokens have nothing to predict
    assert case["planned_all_to_all"] == pytest.approx(exchanged, rel=0.05)
    if "EP" not in name:  # the logger does not say that experts are reduced over fewer ranks
        assert case["planned"] == pytest.approx(sent(case, ranks, RING), rel=0.05)
