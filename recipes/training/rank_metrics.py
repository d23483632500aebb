"""Every rank's own numbers of a step, gathered in one small collective, and what a line of metrics says of them."""

import statistics

import torch


def gather_from_ranks(numbers: dict[str, float], device: torch.device) -> dict[str, list[float]]:
    """What each rank measured, by name and then by rank; all ranks give the same names and get the same answer."""
    own = torch.tensor(list(numbers.values()), dtype=torch.float64, device=device)
    world_size = torch.distributed.get_world_size()
    gathered = own.new_empty(world_size * len(numbers))
    torch.distributed.all_gather_into_tensor(gathered, own)
    columns = gathered.view(world_size, len(numbers)).T.tolist()
    return dict(zip(numbers, columns, strict=True))


def rank_metrics(by_rank: dict[str, list[float]]) -> dict[str, float]:
    """Over all ranks: the most memory, the longest wait for data, the mean time in collectives, the slowest rank.

    A rank's own time is its step without its time in collectives, where a fast rank waits for the slow ones.

    Args:
        by_rank: `own_seconds`, `data_wait_seconds`, `communication_seconds`, and names that end in `_bytes`.
    """
    own = by_rank["own_seconds"]
    slowest = max(own)
    return {
        "data_wait_seconds": max(by_rank["data_wait_seconds"]),
        "communication_seconds": statistics.fmean(by_rank["communication_seconds"]),
        "slowest_rank": own.index(slowest),
        # the lower median: of two ranks the faster one, or the slow one would be measured against itself
        "slowest_rank_ratio": slowest / max(statistics.median_low(own), 1e-9),
    } | {name: int(max(values)) for name, values in by_rank.items() if name.endswith("_bytes")}
