"""How evenly the experts of each layer are used, in numbers."""

import math
from typing import Any

import numpy as np

PERCENTILES = (5, 25, 50, 75, 95)


def expert_metrics(expert_load: dict[str, list[float]], router_entropy: dict[str, float]) -> dict[str, Any]:
    """The part of a metrics line that speaks of the experts; the keys that name layers are missing in a dense model.

    Args:
        expert_load: router -> share of its tokens by expert, summing to 1.
        router_entropy: router -> mean entropy of its tokens' affinities [nats].
    Returns:
        `expert_load_violation`, max over layers of max load / mean load - 1 (0 is perfect balance); `dead_experts` of
        all layers, which got no token; `router_entropy`, mean over layers as a share of ln E (1 is no preference);
        the same by layer; `expert_load_percentiles`, of load / mean load; and `expert_load` itself.
    """
    violation = {layer: max(shares) * len(shares) - 1 for layer, shares in expert_load.items()}
    dead = {layer: sum(share == 0 for share in shares) for layer, shares in expert_load.items()}
    entropy = {layer: router_entropy[layer] / math.log(max(len(shares), 2)) for layer, shares in expert_load.items()}
    line: dict[str, Any] = {
        "expert_load_violation": max(violation.values(), default=0.0),
        "dead_experts": sum(dead.values()),
    }
    if not expert_load:
        return line
    return line | {
        "router_entropy": sum(entropy.values()) / len(entropy),
        "expert_load_violation_by_layer": {layer: round(value, 5) for layer, value in violation.items()},
        "dead_experts_by_layer": dead,
        "router_entropy_by_layer": {layer: round(value, 5) for layer, value in entropy.items()},
        "expert_load_percentiles": {
            layer: np.percentile(np.array(shares) * len(shares), PERCENTILES).round(4).tolist()
            for layer, shares in expert_load.items()
        },
        "expert_load": {layer: [round(share, 5) for share in shares] for layer, shares in expert_load.items()},
    }
