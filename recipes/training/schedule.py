"""Learning-rate schedules: pure functions of the step, relative to the peak learning rate.

`step` is the number of optimizer steps already applied, 0 for the first, so that a resumed run needs nothing but the
step, and a step that the loss scaler skipped moves no schedule. Past its end a schedule keeps its last value.
DeepSpeed's own schedulers are not used: they repeat the first step, overwrite Adam's betas or ignore the optimizer's
rate; a LambdaLR over one of these functions does none of that.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from recipes.config.scheduler_section import SCHEDULES

TokensAtStep = Callable[[int], float]


@dataclass(frozen=True)
class Schedule:
    """A learning rate over a run.

    Args:
        name: the schedule's name in the ds_config.
        multiplier: step -> learning rate / peak learning rate.
    """

    name: str
    multiplier: Callable[[int], float]


def build_schedule(
    section: dict[str, Any] | None, max_steps: int, *, tokens_at_step: TokensAtStep | None = None
) -> Schedule:
    """The schedule of a resolved `scheduler` section.

    Args:
        section: ResolvedDsConfig.config["scheduler"]: {"type": ..., "params": ...} without any "auto"; None: constant.
        max_steps: optimizer steps of the run [steps]; it places milestones that are shares of the run.
        tokens_at_step: tokens consumed before a step; for schedules that count in tokens. None: every step has as
            many tokens as the next, and milestones are shares of `max_steps`.
    Raises:
        ValueError: a token-counting schedule without `tokens_at_step`, or an unknown type.
    """
    name = section["type"] if section else "constant"
    params = dict(section["params"]) if section else {**SCHEDULES["constant"], "warmup_num_steps": 0}
    if name == "deepseek_v3" and tokens_at_step is None:
        raise ValueError("deepseek_v3 counts in tokens: give tokens_at_step")
    if name in ("multi_step", "deepseek_v3"):
        if tokens_at_step is None:
            params["total_tokens"] = max_steps
        params["tokens_at_step"] = tokens_at_step or float
    if name not in _FUNCTIONS:
        raise ValueError(f"no schedule {name!r}; there are {', '.join(_FUNCTIONS)}")
    function = _FUNCTIONS[name]
    return Schedule(name, lambda step: function(step, **params))


def warmup(step: int, *, warmup_num_steps: int, warmup_min_ratio: float, warmup_type: str) -> float | None:
    """The rise from `warmup_min_ratio` to 1, reached exactly at `warmup_num_steps`; None after it."""
    if step >= warmup_num_steps:
        return None
    if warmup_type == "log":  # DeepSpeed's default
        rise = math.log(step + 1) / math.log(max(2, warmup_num_steps))
    else:
        rise = step / warmup_num_steps
    return warmup_min_ratio + (1.0 - warmup_min_ratio) * rise


def constant(step: int, **rise: Any) -> float:
    """Warm-up, then 1."""
    risen = warmup(step, **rise)
    return 1.0 if risen is None else risen


def linear(step: int, *, total_num_steps: int, min_ratio: float, **rise: Any) -> float:
    """Warm-up, then a straight line to `min_ratio` at `total_num_steps`."""
    risen = warmup(step, **rise)
    if risen is not None:
        return risen
    return _fall("linear", _progress(step, rise["warmup_num_steps"], total_num_steps), min_ratio)


def cosine(step: int, *, total_num_steps: int, min_ratio: float, **rise: Any) -> float:
    """Warm-up, then half a cosine to `min_ratio` at `total_num_steps`."""
    risen = warmup(step, **rise)
    if risen is not None:
        return risen
    return _fall("cosine", _progress(step, rise["warmup_num_steps"], total_num_steps), min_ratio)


def wsd(
    step: int, *, total_num_steps: int, decay_share: float, decay_type: str, min_ratio: float, **rise: Any
) -> float:
    """Warm-up, stable, then a decay to `min_ratio` over the last `decay_share` of the steps.

    Source: MiniCPM (arXiv 2404.06395), section 4; "sqrt" is the 1 - sqrt decay of arXiv 2405.18392.
    """
    risen = warmup(step, **rise)
    if risen is not None:
        return risen
    decay_start = max(rise["warmup_num_steps"], total_num_steps - round(decay_share * total_num_steps))
    return _fall(decay_type, _progress(step, decay_start, total_num_steps), min_ratio)


def one_cycle(
    step: int, *, total_num_steps: int, pct_start: float, div_factor: float, final_div_factor: float
) -> float:
    """Up a straight line from 1 / div_factor over `pct_start` of the steps, down a cosine to that / final_div_factor.

    Betas stay as they are. The factors are those of torch's OneCycleLR.
    """
    first, last = 1.0 / div_factor, 1.0 / div_factor / final_div_factor
    peak_step = pct_start * total_num_steps
    if step < peak_step:
        return first + (1.0 - first) * step / peak_step
    return _fall("cosine", _progress(step, peak_step, total_num_steps), last)


def multi_step(
    step: int,
    *,
    milestones: list[float],
    ratios: list[float],
    total_tokens: float,
    tokens_at_step: TokensAtStep,
    **rise: Any,
) -> float:
    """Warm-up, then 1, then `ratios[i]` once `milestones[i]` of the tokens are consumed.

    Source: DeepSeek LLM (arXiv 2401.02954), section 2.3; V2 (arXiv 2405.04434), section 3.1.
    """
    risen = warmup(step, **rise)
    if risen is not None:
        return risen
    ratio = 1.0
    for milestone, next_ratio in zip(milestones, ratios, strict=True):
        if tokens_at_step(step) >= milestone * total_tokens:
            ratio = next_ratio
    return ratio


def deepseek_v3(
    step: int,
    *,
    warmup_num_steps: int,
    constant_tokens: float,
    decay_tokens: float,
    min_ratio: float,
    first_tail_tokens: float,
    final_ratio: float,
    tokens_at_step: TokensAtStep,
) -> float:
    """0 to 1 over the warm-up steps, 1 up to `constant_tokens`, a cosine to `min_ratio`, then two constant tails.

    Source: DeepSeek-V3 (arXiv 2412.19437), section 4.2.
    """
    risen = warmup(step, warmup_num_steps=warmup_num_steps, warmup_min_ratio=0.0, warmup_type="linear")
    if risen is not None:
        return risen
    tokens = tokens_at_step(step)
    decay_end = constant_tokens + decay_tokens
    if tokens >= decay_end + first_tail_tokens:
        return final_ratio
    return _fall("cosine", _progress(tokens, constant_tokens, decay_end), min_ratio)


def triangular(
    step: int, *, first_num_steps: int, second_num_steps: int, min_ratio: float, decay_rate: float, decay_num_steps: int
) -> float:
    """Up a straight line from `min_ratio` and down another; then min_ratio / (1 + decay_rate * s / decay_num_steps),
    s the steps since the end. Source: Smith (arXiv 1803.09820); DeepSpeed's OneCycle without its momentum.
    """
    if step < first_num_steps:
        return min_ratio + (1.0 - min_ratio) * step / first_num_steps
    end = first_num_steps + second_num_steps
    if step < end:
        return min_ratio + (1.0 - min_ratio) * (end - step) / second_num_steps
    decay = decay_rate * (step - end) / decay_num_steps if decay_num_steps else 0.0
    return min_ratio / (1.0 + decay)


def range_test(step: int, *, step_size: float, step_rate: float, staircase: bool) -> float:
    """1 + step_rate * step / step_size, in stairs if asked. Source: Smith (arXiv 1803.09820)."""
    interval = step / step_size
    return 1.0 + step_rate * (math.floor(interval) if staircase else interval)


def _progress(at: float, start: float, end: float) -> float:
    """How far `at` is from start to end, between 0 and 1."""
    if at >= end:
        return 1.0
    if end <= start:  # a run too short for this part
        return 0.0 if at < end else 1.0
    return max(0.0, (at - start) / (end - start))


def _fall(shape: str, progress: float, floor: float) -> float:
    """From 1 at progress 0 to `floor` at progress 1, exact at both ends."""
    if progress >= 1.0:
        return floor
    if shape == "cosine":
        left = 0.5 * (1.0 + math.cos(math.pi * progress))
    elif shape == "sqrt":
        left = 1.0 - math.sqrt(progress)
    else:
        left = 1.0 - progress
    return floor + (1.0 - floor) * left


_FUNCTIONS: dict[str, Callable[..., float]] = {
    "constant": constant,
    "linear": linear,
    "cosine": cosine,
    "wsd": wsd,
    "one_cycle": one_cycle,
    "multi_step": multi_step,
    "deepseek_v3": deepseek_v3,
    "triangular": triangular,
    "range_test": range_test,
}
