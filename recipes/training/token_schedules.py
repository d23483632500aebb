"""What else changes over a run, as pure functions of the tokens consumed: V3's bias speed and MTP weight."""

from collections.abc import Callable

from recipes.config.batch_plan import BatchPlan
from recipes.config.ds_config import scaling_factor
from recipes.config.errors import UserError


def bias_update_speed_at(tokens: float, speed: float, until_tokens: float | None) -> float:
    """Gamma, by which the routing bias moves [bias units per optimizer step].

    Args:
        tokens: consumed before the step.
        speed: the model's `bias_update_speed`.
        until_tokens: from here on the bias stands still; None: never.
    Source: V3 sec. 4.2: 0.001 for the first 14.3T tokens, then 0.
    """
    return 0.0 if until_tokens is not None and tokens >= until_tokens else speed


def mtp_loss_weight_at(tokens: float, weight: float, later: tuple[float, float] | None) -> float:
    """Lambda, the weight of the multi-token prediction loss.

    Args:
        tokens: consumed before the step.
        weight: the model's `mtp_loss_weight`.
        later: (weight, tokens): the weight from so many tokens on; None: it stays.
    Source: V3 sec. 4.2: 0.3 for the first 10T tokens, 0.1 for the rest.
    """
    return later[0] if later is not None and tokens >= later[1] else weight


def parse_later_weight(text: str) -> tuple[float, float]:
    """Read `WEIGHT:TOKENS`, such as `0.1:10e12`.

    Raises:
        UserError: it is not of that form.
    """
    try:
        weight, tokens = (float(part) for part in text.split(":"))
        if weight < 0 or tokens < 0:
            raise ValueError(text)
    except ValueError:
        raise UserError(
            f"--mtp_loss_weight_later {text}: write WEIGHT:TOKENS, such as 0.1:10e12 for 0.1 from 10e12 tokens on"
        ) from None
    return weight, tokens


def follow_batch(multiplier: Callable[[int], float], plan: BatchPlan, rule: str) -> Callable[[int], float]:
    """A schedule whose rate is scaled with the batch of each step instead of with the run's final one.

    DeepSeek states no change of its rate during the batch ramp; this is for those who ask for it.

    Args:
        multiplier: step -> rate over the peak rate, which holds at the plan's final global batch.
        rule: `--lr_scaling`: "sqrt", "linear" or "none".
    """
    return lambda step: multiplier(step) * scaling_factor(rule, plan.batch_at(step), plan.global_batch_size)
