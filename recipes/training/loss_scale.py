"""What DeepSpeed does with an update and its loss scale at the end of a step, under our control.

DeepSpeed 0.19.8 looks at the gradients and moves the dynamic loss scale before it divides them by that scale, so in
each step that raises the scale it would divide by twice what the loss was multiplied with; at the smallest scale it
raises a bare Exception. And it offers no way to leave an update out, except by finding it not finite.
"""

from typing import Any


class UpdateControl:
    """Takes an engine's accumulated gradients into the weights, or drops them and changes nothing.

    An update that is left out goes DeepSpeed's own way of an overflow, wherever that is: gradients are dropped in every
    form that the ZeRO stage keeps them in; weights, moments and the schedule stay, and so does the loss scale if the
    gradients were finite.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._leave_out = False
        self._grown_scale: float | None = None
        self.overflowed = False  # a gradient of the last update was not finite
        self.at_floor = False  # the last update overflowed at the smallest scale there is
        # ZeRO's optimizers move their scale (1.0 outside fp16) between looking at the gradients and using them.
        self._has_scaler = hasattr(engine.optimizer, "loss_scaler")
        if self._has_scaler:
            engine.optimizer._update_scale = self._update_scale

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied with in the next backward; 1.0 outside fp16."""
        return float(self._engine.optimizer.loss_scaler.cur_scale) if self._has_scaler else 1.0

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        if self._has_scaler:
            self._engine.optimizer.loss_scaler.cur_scale = scale

    def step(self, leave_out: bool) -> None:
        """engine.step() at the end of the accumulation; every rank must pass the same."""
        engine, self._leave_out, self.overflowed, self.at_floor = self._engine, leave_out, False, False
        if leave_out and not self._has_scaler:
            self._step_without_optimizer()
            return
        engine.step()
        if not self._has_scaler:
            self.overflowed = not engine.was_step_applied()
        elif self._grown_scale is not None:
            self.loss_scale, self._grown_scale = self._grown_scale, None

    def _update_scale(self, has_overflow: bool = False) -> None:
        """Stands in for the ZeRO optimizer's method of this name, which it calls before it uses the gradients."""
        optimizer = self._engine.optimizer
        scaler = optimizer.loss_scaler
        self.overflowed = has_overflow
        if self._leave_out and not has_overflow:
            optimizer.overflow = True
            return
        before = scaler.cur_scale
        if has_overflow and scaler.dynamic:
            exhausted = scaler.delayed_shift == 1 or scaler.cur_hysteresis == 1
            self.at_floor = exhausted and before <= scaler.min_scale
            scaler.raise_error_at_min_scale = False  # the caller says so, naming the layer
        scaler.update_scale(has_overflow)
        if scaler.cur_scale > before:
            # the gradients were made at the old scale and are still to be divided by it
            self._grown_scale, scaler.cur_scale = scaler.cur_scale, before

    def _step_without_optimizer(self) -> None:
        """Without ZeRO, or in its bf16 optimizer with fp32 gradients: engine.step() clears them after this."""
        optimizer = self._engine.optimizer
        step = optimizer.step
        optimizer.step = lambda *_, **__: None
        optimizer.overflow = True  # the engine then leaves the schedule alone
        try:
            self._engine.step()
        finally:
            optimizer.step, optimizer.overflow = step, False
