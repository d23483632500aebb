"""`--profile`: some steps under torch.profiler, a trace of them, and what they say."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, tensorboard_trace_handler

from recipes.config.instrument_flags import ProfileSteps
from recipes.training.communication_clock import CommunicationClock
from recipes.training.profile_verdict import RANGE_PREFIX, STEP_RANGE, part_seconds, top_operators, verdict_lines

# By a module's own name, which a block of DeepSpeed's that takes its place keeps; `mlp` see below.
_PART_OF_MODULE = {
    "self_attn": "attention",
    "gate": "router",
    "router": "router",
    "lm_head": "head and loss",
    "embed_tokens": "embedding",
}


class StepProfiler:
    """Profiles the steps asked for on this rank; before and after them it costs nothing and leaves nothing behind."""

    def __init__(self, steps: ProfileSteps, engine: Any, clock: CommunicationClock, folder: Path, rank: int) -> None:
        self.steps = steps
        self._engine, self._clock, self._folder, self._rank = engine, clock, folder / "profile", rank
        self._on_gpu = engine.device.type == "cuda"
        self._profile: profile | None = None
        self._step_range: record_function | None = None
        self._undo: list[Callable[[], None]] = []
        self._step_seconds = self._data_wait_seconds = 0.0

    def before_step(self, step: int) -> None:
        """Start at the first of the steps."""
        if step == self.steps.first:
            self._add_ranges()
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self._on_gpu
            self._profile = profile(activities=activities)
            self._profile.start()
        if self._step_range:  # a rewind has left the step before without its end
            self._step_range.__exit__(None, None, None)
        if self._profile:
            self._step_range = record_function(f"{STEP_RANGE}{step}")
            self._step_range.__enter__()

    def after_step(self, step: int, seconds: float, data_wait_seconds: float) -> list[str]:
        """Stop at the last of the steps; returns what to print, nothing before that."""
        if self._profile is None or self._step_range is None:
            return []
        self._step_range.__exit__(None, None, None)
        self._step_range = None
        self._step_seconds += seconds
        self._data_wait_seconds += data_wait_seconds
        if step < self.steps.last:
            return []
        finished = self._profile
        self.stop()
        worker = f"rank_{self._rank:05d}"
        tensorboard_trace_handler(str(self._folder), worker_name=worker)(finished)
        lines = self._report(finished)
        (self._folder / "verdict.txt").write_text("\n".join(lines) + "\n")
        return lines

    def stop(self) -> None:
        """End the profile, wherever it stands."""
        if self._profile:
            self._profile.stop()
            self._profile = None
        while self._undo:
            self._undo.pop()()

    def _report(self, finished: profile) -> list[str]:
        steps = self.steps.last - self.steps.first + 1
        seconds = part_seconds(finished.events() or [], self._on_gpu)
        return [
            f"profile        steps {self.steps.first} to {self.steps.last} of rank {self._rank}, "
            f"{self._step_seconds / steps:.3f} s a step; trace in {self._folder}",
            *top_operators(finished.key_averages(), self._on_gpu),
            "",
            f"where {'the GPU' if self._on_gpu else 'the'} time of a step went, forward and backward together",
            *verdict_lines(seconds, self._step_seconds, self._data_wait_seconds, self._on_gpu),
        ]

    def _add_ranges(self) -> None:
        """Name the parts of the model and the optimizer in the trace, by hooks that live only as long as it."""
        for name, module in self._engine.module.named_modules():
            own_name = name.rpartition(".")[2]
            part = _PART_OF_MODULE.get(own_name)
            if own_name == "mlp":
                has_experts = any(child_name == "experts" for child_name, _ in module.named_children())
                part = "experts" if has_experts else "dense feed-forward"
            if part:
                self._add_range(module, RANGE_PREFIX + part)
        self._engine.step = _ranged(self._engine.step, RANGE_PREFIX + "optimizer")
        self._undo.append(lambda: delattr(self._engine, "step"))
        self._clock.ranges = True
        self._undo.append(lambda: setattr(self._clock, "ranges", False))

    def _add_range(self, module: nn.Module, name: str) -> None:
        opened: list[record_function] = []

        def enter(_: nn.Module, __: Any) -> None:
            opened.append(record_function(name))
            opened[-1].__enter__()

        def leave(_: nn.Module, __: Any, ___: Any) -> None:
            opened.pop().__exit__(None, None, None)

        # always_call: a recomputed forward is left by an exception as soon as it has all that it needs
        for handle in (
            module.register_forward_pre_hook(enter),
            module.register_forward_hook(leave, always_call=True),
        ):
            self._undo.append(handle.remove)


def _ranged(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def ranged(*args: Any, **keywords: Any) -> Any:
        with record_function(name):
            return function(*args, **keywords)

    return ranged
