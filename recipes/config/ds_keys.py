"""Which keys a ds_config may have: asked of the installed DeepSpeed, so that the answer never ages.

DeepSpeed ignores a top-level key that it does not know, and so trains without it. Its own config class is therefore
given a dictionary that writes down every key it is asked for; where a section is parsed by a pydantic model instead,
the model's fields are the answer.
"""

import contextlib
import difflib
import functools
import inspect
import logging
import typing
from collections.abc import Iterator
from typing import Any

KeyTree = dict[str, "KeyTree | None"]  # None: a value, or a section whose keys are free

# Read by deepspeed.initialize itself before it builds its config class, which therefore never asks for them.
_READ_OUTSIDE_THE_CONFIG_CLASS = ("sequence_parallel_size", "data_parallel_size")
# Written by resolve_ds_config into a run's folder; DeepSpeed ignores it.
RECIPE_KEY = "recipe"
_PROBE = "__probe__"
_DEEPEST_SECTION = 4


class _Recorder(dict):
    """A dictionary that remembers which keys it was asked for."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.asked: set[str] = set()

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        # `key in d.keys()` has to come back to __contains__; `**d` needs real keys
        recorder = self

        class Keys:
            def __contains__(self, key: object) -> bool:
                return key in recorder

            def __iter__(self) -> Iterator[str]:
                return dict.__iter__(recorder)

        return Keys()

    def __copy__(self) -> "_Recorder":
        return self


@contextlib.contextmanager
def quiet_deepspeed() -> Iterator[None]:
    """Keep DeepSpeed's log lines away from the user while its config class is only being asked."""
    from deepspeed.utils import logger

    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _model_named(name: str) -> Any:
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    waiting = [DeepSpeedConfigModel]
    while waiting:
        model = waiting.pop()
        if model.__name__ == name:
            return model
        waiting += model.__subclasses__()
    return None


def _nested_model(annotation: Any) -> Any:
    """The pydantic model inside an annotation such as Optional[Model]; None if there is none."""
    from pydantic import BaseModel

    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return annotation
    for part in typing.get_args(annotation):
        if (model := _nested_model(part)) is not None and typing.get_origin(annotation) not in (dict, list, tuple):
            return model
    return None


def _model_keys(model: Any) -> KeyTree:
    tree: KeyTree = {}
    for name, field in model.model_fields.items():
        nested = _nested_model(field.annotation)
        tree[name] = tree[field.alias or name] = _model_keys(nested) if nested else None
    return tree


def _probe(path: tuple[str, ...]) -> KeyTree | None:
    """The keys of the section at `path`; None when it is a value."""
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
    from pydantic import ValidationError

    section = _Recorder({_PROBE: 1})
    inner: dict[str, Any] = section
    for key in reversed(path):
        # optimizer and scheduler are asked for their params only once they have a type
        inner = _Recorder({key: inner, "type": "AdamW"})
    inner["train_micro_batch_size_per_gpu"] = 1
    try:
        DeepSpeedConfig(inner)
    except ValidationError as error:
        model = _model_named(error.title)
        location = next((e["loc"] for e in error.errors() if e["loc"][-1:] == (_PROBE,)), ())
        for part in location[:-1]:
            model = _nested_model(model.model_fields[str(part)].annotation)
        return _model_keys(model)
    except (TypeError, ValueError, AttributeError, AssertionError, KeyError, DeepSpeedConfigError):
        pass  # the probe is no valid value; what was asked before it fell is recorded all the same
    asked = section.asked - {_PROBE}
    if not asked:
        return None
    if len(path) == _DEEPEST_SECTION:
        return dict.fromkeys(asked)
    return {key: _probe((*path, key)) for key in asked}


@functools.cache
def known_keys() -> KeyTree:
    """Every key that the installed DeepSpeed reads from a ds_config, as a tree."""
    from deepspeed.runtime.config import DeepSpeedConfig

    with quiet_deepspeed():
        top = _Recorder({"train_micro_batch_size_per_gpu": 1})
        pipeline_keys = DeepSpeedConfig(top).pipeline
        tree = {key: _probe((key,)) for key in top.asked - set(removed_keys())}
    tree["pipeline"] = dict.fromkeys(pipeline_keys)  # it is merged into defaults, not asked key by key
    tree["optimizer"] = {"type": None, "params": None, "legacy_fusion": None}  # params: see optimizer_keys
    tree["data_efficiency"] = None  # its metrics are named freely
    tree["scheduler"] = {"type": None, "params": None}  # params: see recipes.config.scheduler_section
    tree.update(dict.fromkeys(_READ_OUTSIDE_THE_CONFIG_CLASS))
    tree[RECIPE_KEY] = None
    return tree


def removed_keys() -> dict[str, str]:
    """Key path -> why DeepSpeed took it out."""
    from deepspeed.runtime import config as deepspeed_config

    removed = dict(getattr(deepspeed_config, "_REMOVED_TOP_LEVEL_CONFIG_KEYS", {}))
    for key, reason in getattr(deepspeed_config, "_REMOVED_ZERO_CONFIG_KEYS", {}).items():
        removed[f"zero_optimization.{key}"] = reason
    return removed


def native_autos() -> set[str]:
    """Key paths at which DeepSpeed itself understands "auto"."""
    import dataclasses

    from deepspeed.module_inject.auto_ep_config import AutoEPConfig
    from deepspeed.runtime.config import get_pipeline_config
    from deepspeed.runtime.constants import DATA_TYPES, KEEP_IN_FP32_MODULES, KEEP_IN_FP32_MODULES_DEFAULT

    paths = {f"expert_parallel.{f.name}" for f in dataclasses.fields(AutoEPConfig) if f.default == "auto"}
    paths |= {f"pipeline.{key}" for key, default in get_pipeline_config({}).items() if default == "auto"}
    return paths | ({f"{DATA_TYPES}.{KEEP_IN_FP32_MODULES}"} if KEEP_IN_FP32_MODULES_DEFAULT == "auto" else set())


def nearest(word: str, known: Any) -> str:
    """`; did you mean "x"?`, or the valid words when none is near and they are few."""
    words = sorted(str(k) for k in known)
    if close := difflib.get_close_matches(word, words, n=1, cutoff=0.6):
        return f'; did you mean "{close[0]}"?'
    return f"; valid: {', '.join(words)}" if len(words) <= 20 else ""


def unknown_key_faults(config: dict[str, Any], source: str) -> list[str]:
    """One fault for each key that DeepSpeed does not read, or no longer reads, at any level."""
    removed = removed_keys()
    faults: list[str] = []

    def walk(section: dict[str, Any], tree: KeyTree, prefix: str) -> None:
        for key, value in section.items():
            path = f"{prefix}{key}"
            if path in removed:
                reason = removed[path].split(". ")[0]
                faults.append(f"{source}: {path}: DeepSpeed removed it ({reason}); delete it")
            elif key not in tree:
                faults.append(f"{source}: {path}: unknown key, DeepSpeed would ignore it{nearest(key, tree)}")
            elif isinstance(value, dict) and (subtree := tree[key]):
                walk(value, subtree, f"{path}.")
            elif tree[key] and not isinstance(value, dict) and value is not None:
                faults.append(f"{source}: {path}: {value!r} must be a section, {{...}}{nearest('', tree[key])}")

    walk(config, known_keys(), "")
    return faults


def optimizer_keys(optimizer_type: str, *, torch_adam: bool, offloaded: bool) -> tuple[list[str], set[str] | None]:
    """The optimizer types that DeepSpeed takes, and the params of this one.

    Args:
        optimizer_type: `optimizer.type`; DeepSpeed reads its own names in any case, torch's as they are.
        torch_adam: whether Adam is torch's own instead of DeepSpeed's compiled one.
        offloaded: whether the optimizer's state is kept off the device.
    Returns:
        All types; the params of `optimizer_type`, or None if it is none of them.
    """
    import torch
    from deepspeed.runtime import config as deepspeed_config

    torch_types = {
        name: value
        for name, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer) and name != "Optimizer"
    }
    types = sorted({*torch_types, "Lamb", "Lion"})  # DeepSpeed's others have the names of torch's
    name = optimizer_type.lower()
    if name not in deepspeed_config.DEEPSPEED_OPTIMIZERS:
        return types, _signature_keys(torch_types[optimizer_type]) if optimizer_type in torch_types else None
    if name == "muon":
        # the engine builds Muon's groups from these alone; any other AdamW param would be dropped
        return types, _muon_keys() | {"torch_adam", "adam_w_mode", "fp32_optimizer_states"}
    if name in ("adam", "adamw"):
        from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

        keys = _signature_keys(torch.optim.AdamW if torch_adam else DeepSpeedCPUAdam if offloaded else FusedAdam)
        # the engine passes these two itself; AdamW ignores adam_w_mode, so there it would do nothing
        keys = keys - {"adam_w_mode", "adamw_mode"} | {"torch_adam", "fp32_optimizer_states"}
        return types, keys | ({"adam_w_mode"} if name == "adam" else set())
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion

    classes: dict[str, Any] = {
        "lion": DeepSpeedCPULion if offloaded else FusedLion,
        "lamb": FusedLamb,
        "adagrad": torch.optim.Adagrad,
    }
    # mup's optimizers are left out: their package is none of ours
    return types, _signature_keys(classes[name]) - {"max_grad_norm"} if name in classes else None


def _signature_keys(optimizer_class: Any) -> set[str]:
    return set(inspect.signature(optimizer_class.__init__).parameters) - {"self", "params", "model_params", "kwargs"}


def _muon_keys() -> set[str]:
    """What the engine takes out of the params for Muon's parameters and for AdamW's beside them."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    halves = {*DeepSpeedEngine._MUON_HALF_KEYS, *DeepSpeedEngine._ADAM_HALF_KEYS}
    return halves | {"muon_lr", "adam_lr", "per_head_muon"}
