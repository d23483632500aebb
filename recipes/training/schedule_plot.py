"""A picture of everything that changes over a run by plan: learning rate, batch, bias speed, MTP weight."""

from collections.abc import Callable
from pathlib import Path

from model.config import ModelConfig
from recipes.config.ds_config import ResolvedDsConfig
from recipes.config.run_config import PretrainConfig
from recipes.training.schedule import build_schedule
from recipes.training.token_schedules import (
    bias_update_speed_at,
    follow_batch,
    mtp_loss_weight_at,
    parse_later_weight,
)

_POINTS = 2000


def plot_schedule(resolved: ResolvedDsConfig, config: PretrainConfig, model: ModelConfig, path: Path) -> None:
    """Draw the curves of a run over its tokens; those that never change are left out, but for the learning rate.

    Args:
        path: of the picture, in any format that matplotlib writes.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    plan = resolved.batch_plan
    multiplier = build_schedule(resolved.scheduler, resolved.max_steps, tokens_at_step=plan.tokens_before).multiplier
    if config.lr_follows_batch:
        multiplier = follow_batch(multiplier, plan, config.lr_scaling)
    later = parse_later_weight(config.mtp_loss_weight_later) if config.mtp_loss_weight_later else None
    speed, weight, until = model.bias_update_speed, model.mtp_loss_weight, config.bias_update_until_tokens
    curves: dict[str, Callable[[int], float]] = {
        "learning rate": lambda step: resolved.peak_learning_rate * multiplier(step),
        "global batch [sequences]": plan.batch_at,
        "bias update speed": lambda step: bias_update_speed_at(plan.tokens_before(step), speed, until),
        "MTP loss weight": lambda step: mtp_loss_weight_at(plan.tokens_before(step), weight, later),
    }
    # every step of the warm-up, which would otherwise fall between two points
    warm = int(resolved.scheduler["params"].get("warmup_num_steps", 0))
    stride = max(1, resolved.max_steps // _POINTS)
    steps = sorted(
        {*range(0, warm + 1, max(1, warm // 100)), *range(0, resolved.max_steps, stride), resolved.max_steps}
    )
    drawn = {name: [curve(step) for step in steps] for name, curve in curves.items()}
    shown = [name for name in drawn if name == "learning rate" or len(set(drawn[name])) > 1]
    figure, axes = pyplot.subplots(len(shown), sharex=True, squeeze=False, figsize=(9, 1.2 + 2.2 * len(shown)))
    tokens = [plan.tokens_before(step) / 1e9 for step in steps]
    for axis, name in zip(axes[:, 0], shown, strict=True):
        axis.plot(tokens, drawn[name], drawstyle="default" if name == "learning rate" else "steps-post")
        axis.set_ylabel(name)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0, 0].set_title(f"{resolved.scheduler['type']}: {resolved.max_steps:,} steps")
    axes[-1, 0].set_xlabel("tokens [billions]")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
