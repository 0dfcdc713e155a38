"""Loss scales: constant ones, and dynamic ones for fp16.

fp16 gradients below 6e-8 vanish. So the loss is multiplied by a scale before backward, and the
gradients are divided by it before the update. A scale is immutable: `update` returns the next one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megatron.config.precision import PrecisionConfig

GROWTH = 2.0


@dataclass(frozen=True)
class ConstantScale:
    """A scale that does not change (1 means no scaling)."""

    value: float = 1.0

    @property
    def can_shrink(self) -> bool:
        """Whether the scale can still become smaller: never."""
        return False

    def update(self, *, found_overflow: bool) -> ConstantScale:
        """Return this scale for the next iteration."""
        return self

    def state(self) -> dict[str, Any]:
        """Return an empty state, because the scale comes from the flags."""
        return {}

    def with_state(self, state: dict[str, Any]) -> ConstantScale:
        """Return this scale, whatever the saved run used."""
        return self


@dataclass(frozen=True)
class DynamicScale:
    """A scale that halves on repeated overflow and doubles after a run of clean iterations.

    Attributes:
        value: Current scale.
        minimum: Lower bound of the scale.
        window: Clean iterations before it doubles.
        hysteresis: Overflows, not necessarily in a row, before it starts to halve.
        clean_iterations: Iterations since the last overflow or doubling.
        overflows_left: Overflows left until it halves. Only a doubling refills them.
    """

    value: float
    minimum: float
    window: float
    hysteresis: int
    clean_iterations: int
    overflows_left: int

    @classmethod
    def start(
        cls, *, initial: float, minimum: float, window: float, hysteresis: int
    ) -> DynamicScale:
        """Return the scale of a new run."""
        return cls(initial, minimum, window, hysteresis, 0, hysteresis)

    @property
    def can_shrink(self) -> bool:
        """Whether the scale can still become smaller."""
        return self.value > self.minimum

    def update(self, *, found_overflow: bool) -> DynamicScale:
        """Return the scale of the next iteration."""
        if found_overflow:
            left = self.overflows_left - 1
            value = max(self.value / GROWTH, self.minimum) if left <= 0 else self.value
            return replace(self, value=value, clean_iterations=0, overflows_left=left)
        clean = self.clean_iterations + 1
        if clean < self.window:
            return replace(self, clean_iterations=clean)
        return replace(
            self,
            value=self.value * GROWTH,
            clean_iterations=0,
            overflows_left=self.hysteresis,
        )

    def state(self) -> dict[str, Any]:
        """Return the state to save in a checkpoint, under Megatron's names."""
        return {
            "scale": self.value,
            "growth_tracker": self.clean_iterations,
            "hysteresis_tracker": self.overflows_left,
        }

    def with_state(self, state: dict[str, Any]) -> DynamicScale:
        """Return this scale with a state that `state()` gave.

        If the saved run had no dynamic scale (bf16, constant), this one starts from the flags.
        """
        if not state:
            return self
        return replace(
            self,
            value=float(state["scale"]),
            clean_iterations=int(state["growth_tracker"]),
            overflows_left=int(state["hysteresis_tracker"]),
        )


LossScale = ConstantScale | DynamicScale


def loss_scale_of(precision: PrecisionConfig) -> LossScale:
    """Return the scale that the flags ask for: dynamic for fp16, constant if given, otherwise 1."""
    is_16bit = precision.fp16 or precision.bf16
    if is_16bit and precision.loss_scale is not None:
        return ConstantScale(precision.loss_scale)
    if not precision.fp16:
        return ConstantScale()
    return DynamicScale.start(
        initial=precision.initial_loss_scale,
        minimum=precision.min_loss_scale,
        window=precision.loss_scale_window,
        hysteresis=precision.hysteresis,
    )
