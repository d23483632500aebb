"""The `scheduler` section of a ds_config: its names and params, checked and brought to one form.

The form has only ratios of the peak learning rate, steps and tokens, so that recipes/training/schedule.py can build
a pure function from it. DeepSpeed's own names are taken too and translated; their traps are refused or mended.
"""

import inspect
from dataclasses import dataclass
from typing import Any

from recipes.config.ds_keys import nearest

AUTO_WARMUP_STEPS = 2000  # V3 sec. 4.2, V2 sec. 3.1, MoE sec. 5.1, LLM sec. 2.3: 2,000 warm-up steps everywhere
AUTO_WARMUP_SHARE = 0.1  # of a run that is too short for them

_WARMUP: dict[str, Any] = {"warmup_num_steps": "auto", "warmup_min_ratio": 0.0, "warmup_type": "linear"}
_TOTAL: dict[str, Any] = {"total_num_steps": "auto"}

# Our schedules: name -> params with their defaults. A ratio is relative to the peak learning rate.
SCHEDULES: dict[str, dict[str, Any]] = {
    "constant": {**_WARMUP},
    "linear": {**_WARMUP, **_TOTAL, "min_ratio": 0.0},
    "cosine": {**_WARMUP, **_TOTAL, "min_ratio": 0.1},
    # warm-up, stable, decay over the last share of the steps
    "wsd": {**_WARMUP, **_TOTAL, "decay_share": 0.2, "decay_type": "linear", "min_ratio": 0.0},
    # up linearly over the first share, down along a cosine; peak / div_factor at the start, that / final_div_factor
    # at the end
    "one_cycle": {**_TOTAL, "pct_start": 0.1, "div_factor": 25.0, "final_div_factor": 1e4},
    # LLM sec. 2.3: 31.6% of the peak after 80% of the tokens, 10% after 90%
    "multi_step": {**_WARMUP, "milestones": [0.8, 0.9], "ratios": [0.316, 0.1], "total_tokens": "auto"},
    # V3 sec. 4.2, in tokens
    "deepseek_v3": {
        "warmup_num_steps": 2000,
        "constant_tokens": 10e12,
        "decay_tokens": 4.3e12,
        "min_ratio": 2.2e-5 / 2.2e-4,
        "first_tail_tokens": 333e9,
        "final_ratio": 7.3e-6 / 2.2e-4,
    },
    # two straight lines and a floor: what DeepSpeed calls OneCycle
    "triangular": {
        "first_num_steps": "auto",
        "second_num_steps": "auto",
        "min_ratio": 0.1,
        "decay_rate": 0.0,
        "decay_num_steps": 0,
    },
    # grows without end, to find the largest rate that still trains
    "range_test": {"step_size": 2000, "step_rate": 1.0, "staircase": False},
}

_CHOICES = {"warmup_type": ("linear", "log"), "decay_type": ("linear", "cosine", "sqrt")}
_SHARES = ("pct_start", "decay_share")
_POSITIVE = ("div_factor", "final_div_factor", "step_size")


@dataclass(frozen=True)
class ResolvedScheduler:
    """A scheduler section in our form.

    Args:
        section: {"type": one of SCHEDULES, "params": all of them, no "auto"}.
        peak_learning_rate: the rate that the section itself states, before scaling; None: the optimizer's.
        notes: what was mended, for the user.
    """

    section: dict[str, Any]
    peak_learning_rate: float | None
    notes: tuple[str, ...]


def resolve_scheduler(
    section: Any, *, source: str, max_steps: int, total_tokens: int, optimizer_lr: Any
) -> tuple[ResolvedScheduler, list[str]]:
    """Check a `scheduler` section and fill it in.

    Args:
        section: the ds_config's section, or None for a constant rate without warm-up.
        max_steps: optimizer steps of the run.
        total_tokens: tokens of the run, of which a schedule's milestones are shares.
        optimizer_lr: `optimizer.params.lr`, whatever stands there.
    Returns:
        The section, and the faults found in it.
    """
    optimizer_lr = optimizer_lr if _is_number(optimizer_lr) else None
    default = {"type": "constant", "params": {**SCHEDULES["constant"], "warmup_num_steps": 0}}
    if section is None:
        return ResolvedScheduler(default, None, ("scheduler: none given, the learning rate stays constant",)), []
    if not isinstance(section, dict) or not isinstance(section.get("params", {}), dict):
        return ResolvedScheduler(default, None, ()), [
            f'{source}: scheduler: must be a section with "type" and "params"'
        ]
    name, params = section.get("type"), dict(section.get("params", {}))
    notes: list[str] = []
    peak = None
    if name in _deepspeed_schedules():
        name, params, peak, notes, faults = _translate(name, params, optimizer_lr)
        faults = [f"{source}: {fault}" for fault in faults]
        if faults:
            return ResolvedScheduler(default, None, ()), faults
    if name not in SCHEDULES:
        known = [*SCHEDULES, *_deepspeed_schedules()]
        return ResolvedScheduler(default, None, ()), [
            f"{source}: scheduler.type: {name!r} is no schedule{nearest(str(name), known)}"
        ]
    known_params = SCHEDULES[name]
    faults = [
        f"{source}: scheduler.params.{key}: {name} has no such param{nearest(key, known_params)}"
        for key in params
        if key not in known_params
    ]
    filled = {key: params.get(key, default) for key, default in known_params.items()}
    filled = _resolve_autos(filled, max_steps, total_tokens)
    faults += [f"{source}: scheduler.params.{fault}" for fault in _value_faults(name, filled, max_steps)]
    if not faults and filled.get("total_num_steps", max_steps) != max_steps:
        notes.append(
            f"scheduler.params.total_num_steps: {filled['total_num_steps']}, the run has {max_steps} steps; "
            f"past its end the rate stays at the last value"
        )
    return ResolvedScheduler({"type": name, "params": filled}, peak, tuple(notes)), faults


def _resolve_autos(params: dict[str, Any], max_steps: int, total_tokens: int) -> dict[str, Any]:
    values: dict[str, Any] = {
        "warmup_num_steps": min(AUTO_WARMUP_STEPS, int(max_steps * AUTO_WARMUP_SHARE)),
        "total_num_steps": max_steps,
        "total_tokens": total_tokens,
        "first_num_steps": max(1, max_steps // 2),
        "second_num_steps": max(1, max_steps - max_steps // 2),
    }
    return {key: values[key] if value == "auto" and key in values else value for key, value in params.items()}


def _value_faults(name: str, params: dict[str, Any], max_steps: int) -> list[str]:
    """What is wrong with the values; each fault starts with the param's name."""
    faults: list[str] = []
    for key, value in params.items():
        default = SCHEDULES[name][key]
        if key in _CHOICES:
            if value not in _CHOICES[key]:
                faults.append(f"{key}: {value!r}{nearest(str(value), _CHOICES[key])}")
        elif isinstance(default, list):
            if not isinstance(value, list) or not value or not all(_is_number(v) and 0 <= v <= 1 for v in value):
                faults.append(f"{key}: {value!r} must be a list of numbers between 0 and 1")
        elif isinstance(default, bool):
            if not isinstance(value, bool):
                faults.append(f"{key}: {value!r} must be true or false")
        elif not _is_number(value) or value < 0:
            faults.append(f"{key}: {value!r} must be a number of at least 0" + _or_auto(default))
        elif key.endswith("_steps") and value != int(value):
            faults.append(f"{key}: {value!r} must be a whole number" + _or_auto(default))
        elif key in _SHARES and value > 1:
            faults.append(f"{key}: {value!r} is a share of the run; it must be between 0 and 1")
        elif key in _POSITIVE and value == 0:
            faults.append(f"{key}: must be above 0")
    if faults:
        return faults
    warmup = params.get("warmup_num_steps", 0)
    if warmup > max_steps:
        faults.append(f'warmup_num_steps: {warmup} is longer than the run of {max_steps} steps; write less, or "auto"')
    elif warmup > params.get("total_num_steps", warmup):
        faults.append(f"warmup_num_steps: {warmup} is more than total_num_steps {params['total_num_steps']}")
    if name == "multi_step":
        if len(params["milestones"]) != len(params["ratios"]):
            faults.append("ratios: needs one ratio for each of milestones")
        if sorted(params["milestones"]) != params["milestones"]:
            faults.append(f"milestones: {params['milestones']} must ascend")
    return faults


def _or_auto(default: Any) -> str:
    return ', or "auto"' if default == "auto" else ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# --- DeepSpeed's own schedules ---------------------------------------------------------------------------------------


def _deepspeed_schedules() -> list[str]:
    from deepspeed.runtime import lr_schedules

    return list(lr_schedules.VALID_LR_SCHEDULES)


def _translate(
    name: str, params: dict[str, Any], optimizer_lr: float | None
) -> tuple[str, dict[str, Any], float | None, list[str], list[str]]:
    """A DeepSpeed schedule in our terms: (our name, params, stated peak, notes, faults)."""
    from deepspeed.runtime import lr_schedules

    signature = inspect.signature(getattr(lr_schedules, name).__init__).parameters
    known = {key for key in signature if key not in ("self", "optimizer", "last_batch_iteration")}
    faults = [
        f"scheduler.params.{key}: {name} has no such param{nearest(key, known)}" for key in params if key not in known
    ]
    given = {key: p.default for key, p in signature.items() if p.default is not inspect.Parameter.empty} | params
    for key, value in params.items():
        if isinstance(value, list):
            faults.append(f"scheduler.params.{key}: one number for all parameter groups, not a list")
    if name == "OneCycle":
        faults += [f"scheduler.params.{k}: missing" for k in ("cycle_min_lr", "cycle_max_lr") if k not in params]
    if faults:
        return name, {}, None, [], faults
    return _TRANSLATIONS[name](given, params, optimizer_lr)


def _peak(key: str, stated: Any, optimizer_lr: float | None, why: str) -> tuple[float | None, list[str]]:
    """The peak that a section states, and a fault where the optimizer's rate says otherwise."""
    if stated is None:
        return None, []
    if not _is_number(stated) or stated <= 0:
        return None, [f"scheduler.params.{key}: {stated!r} must be a number above 0"]
    if optimizer_lr is not None and optimizer_lr != stated:
        return None, [
            f"scheduler.params.{key}: {stated} and optimizer.params.lr {optimizer_lr} differ, {why}; write one value"
        ]
    return float(stated), []


def _translate_warmup(given: dict[str, Any], params: dict[str, Any], optimizer_lr: float | None) -> Any:
    # WarmupDecayLR's own default of 0.001 would silently replace the optimizer's rate: only a stated peak counts
    why = "and DeepSpeed would ignore the optimizer's"
    peak, faults = _peak("warmup_max_lr", params.get("warmup_max_lr"), optimizer_lr, why)
    top = peak or optimizer_lr
    ratio = given["warmup_min_lr"] / top if top else 0.0
    warmup = {"warmup_num_steps": given["warmup_num_steps"], "warmup_min_ratio": ratio}
    warmup["warmup_type"] = given["warmup_type"]
    notes = [_two_steps_note("warmup_min_lr")]
    if "total_num_steps" in given:
        return "linear", {**warmup, "total_num_steps": given["total_num_steps"]}, peak, notes, faults
    return "constant", warmup, peak, notes, faults


def _translate_warmup_cosine(given: dict[str, Any], params: dict[str, Any], optimizer_lr: float | None) -> Any:
    notes = [_two_steps_note("warmup_min_ratio"), "scheduler: WarmupCosineLR reaches the optimizer's lr at its peak"]
    ours = {
        "warmup_num_steps": given["warmup_num_steps"],
        "warmup_min_ratio": given["warmup_min_ratio"],
        "warmup_type": given["warmup_type"],
        "total_num_steps": given.get("total_num_steps", "auto"),
        "min_ratio": given["cos_min_ratio"],
    }
    return "cosine", ours, None, notes, []


def _translate_one_cycle(given: dict[str, Any], params: dict[str, Any], optimizer_lr: float | None) -> Any:
    peak, faults = _peak("cycle_max_lr", given["cycle_max_lr"], optimizer_lr, "and OneCycle would ignore it")
    if params.get("cycle_momentum"):
        faults.append(
            "scheduler.params.cycle_momentum: true would overwrite the optimizer's betas with "
            f"({given['cycle_min_mom']} to {given['cycle_max_mom']}, 0.99); write false"
        )
    for key in ("cycle_first_stair_count", "cycle_second_stair_count", "decay_mom_rate", "cycle_min_mom"):
        if params.get(key):
            faults.append(f"scheduler.params.{key}: {params[key]} is not supported here; delete it")
    first = given["cycle_first_step_size"]
    second = first if given["cycle_second_step_size"] is None else given["cycle_second_step_size"]
    ours = {
        "first_num_steps": first,
        "second_num_steps": second,
        "min_ratio": given["cycle_min_lr"] / peak if peak else 0.0,
        "decay_rate": given["decay_lr_rate"],
        "decay_num_steps": given["decay_step_size"],
    }
    notes = [
        "scheduler: OneCycle's two straight lines, without its momentum cycle: the optimizer's betas stay",
        'scheduler: for a cosine way down write "one_cycle"',
    ]
    return "triangular", ours, peak, notes, faults


def _translate_range_test(given: dict[str, Any], params: dict[str, Any], optimizer_lr: float | None) -> Any:
    stated = params.get("lr_range_test_min_lr")
    peak, faults = _peak("lr_range_test_min_lr", stated, optimizer_lr, "and LRRangeTest would ignore it")
    ours = {
        "step_size": given["lr_range_test_step_size"],
        "step_rate": given["lr_range_test_step_rate"],
        "staircase": given["lr_range_test_staircase"],
    }
    return "range_test", ours, peak, [], faults


def _two_steps_note(key: str) -> str:
    return f"scheduler: DeepSpeed takes two steps at {key}; here it is one, and the peak comes at warmup_num_steps"


_TRANSLATIONS = {
    "WarmupLR": _translate_warmup,
    "WarmupDecayLR": lambda given, *rest: _translate_warmup({"total_num_steps": "auto", **given}, *rest),
    "WarmupCosineLR": _translate_warmup_cosine,
    "OneCycle": _translate_one_cycle,
    "LRRangeTest": _translate_range_test,
}
