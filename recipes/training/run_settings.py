"""What a run was told, kept in its checkpoints, so that a resumed run shows what is different now."""

from typing import Any

from recipes.data.corpus import PreparedCorpus
from recipes.training.plan_run import RunPlan

LINES_SHOWN = 12


def settings_of(plan: RunPlan, sources: list[tuple[PreparedCorpus, float]]) -> dict[str, Any]:
    """Everything that decides how training goes on, flat: name -> value.

    Args:
        sources: (training corpus, its part of the tokens) for each source.
    """
    config, resolved = plan.config, plan.resolved
    data = [f"{corpus.folder.name} {corpus.content_hash[:12]} = {weight:.4g}" for corpus, weight in sources]
    settings: dict[str, Any] = {
        "data": ", ".join(data),
        "data order's seed": config.seed,
        "seq_length": plan.seq_length,
        "document_mask": config.document_mask,
        "packing": config.packing,
        "fim_rate": config.fim_rate,
        "global batch size": resolved.global_batch_size,
        "micro-batch size": resolved.micro_batch_size,
        "gradient accumulation steps": resolved.gradient_accumulation_steps,
        "batch_ramp": config.batch_ramp,
        "steps of the run": resolved.max_steps,
        "peak learning rate": resolved.peak_learning_rate,
        "gradient_clipping": resolved.config.get("gradient_clipping"),
        "optimizer": resolved.config["optimizer"]["type"],
        "bias_update_speed": plan.model.bias_update_speed,
        "balance_loss_alpha": plan.model.balance_loss_alpha,
        "mtp_loss_weight": plan.model.mtp_loss_weight,
    }
    optimizer = {f"optimizer.{k}": v for k, v in resolved.config["optimizer"]["params"].items() if k != "lr"}
    scheduler = resolved.scheduler or {}
    schedule = {f"schedule.{k}": v for k, v in scheduler.get("params", {}).items()} | {
        "schedule": scheduler.get("type")
    }
    return settings | optimizer | schedule


def changed_settings(saved: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """A line for each setting that differs; what takes effect is this run's.

    Args:
        saved: from the checkpoint; one without settings has nothing to compare.
    """
    if not saved:
        return []
    names = [name for name in here | saved if saved.get(name) != here.get(name)]
    lines = [f"{name}: {_shown(saved.get(name))} -> {_shown(here.get(name))}" for name in names]
    if len(lines) > LINES_SHOWN:
        lines[LINES_SHOWN:] = [f"and {len(lines) - LINES_SHOWN} more"]
    return lines


def _shown(value: Any) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
