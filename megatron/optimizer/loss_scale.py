"""The loss scale: constant, or dynamic for fp16.

fp16 gradients below 6e-8 vanish. The loss is therefore multiplied by a scale before the backward
pass, and the gradients are divided by it before the update. A scale is immutable: `update` returns
the next one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megatron.config.precision import PrecisionConfig

GROWTH = 2.0


@dataclass(frozen=True)
class LossScale:
    """A factor by which the loss is multiplied.

    If dynamic, it halves on overflows and doubles after clean iterations.

    Attributes:
        value: Current scale. 1 means no scaling.
        is_dynamic: Whether the scale changes. If not, the other attributes have no meaning.
        minimum: Lower bound of the scale.
        window: Clean iterations before it doubles.
        hysteresis: Overflows, not necessarily in a row, before it starts to halve.
        overflows_left: Overflows left until it halves. Only a doubling resets this to `hysteresis`.
        clean_iterations: Iterations since the last overflow or doubling.
    """

    value: float = 1.0
    is_dynamic: bool = False
    minimum: float = 1.0
    window: float = 1000
    hysteresis: int = 2
    overflows_left: int = 2
    clean_iterations: int = 0

    @property
    def can_shrink(self) -> bool:
        """Whether the scale can still become smaller."""
        return self.is_dynamic and self.value > self.minimum

    def update(self, *, found_overflow: bool) -> LossScale:
        """Return the scale of the next iteration."""
        if not self.is_dynamic:
            return self
        if found_overflow:
            left = self.overflows_left - 1
            value = max(self.value / GROWTH, self.minimum) if left <= 0 else self.value
            return replace(self, value=value, clean_iterations=0, overflows_left=left)
        clean = self.clean_iterations + 1
        if clean < self.window:
            return replace(self, clean_iterations=clean)
        doubled = self.value * GROWTH
        return replace(self, value=doubled, clean_iterations=0, overflows_left=self.hysteresis)

    def state(self) -> dict[str, Any]:
        """Return the state to save in a checkpoint, under Megatron's names.

        It is empty if the scale is constant, because the flags give it.
        """
        if not self.is_dynamic:
            return {}
        return {
            "scale": self.value,
            "growth_tracker": self.clean_iterations,
            "hysteresis_tracker": self.overflows_left,
        }

    def with_state(self, state: dict[str, Any]) -> LossScale:
        """Return this scale with a state that `state()` returned, possibly in an earlier run.

        If this scale or the saved one is constant, this scale is returned unchanged.
        """
        if not (state and self.is_dynamic):
            return self
        return replace(
            self,
            value=float(state["scale"]),
            clean_iterations=int(state["growth_tracker"]),
            overflows_left=int(state["hysteresis_tracker"]),
        )


def loss_scale_of(precision: PrecisionConfig) -> LossScale:
    """Return the scale that the flags ask for: dynamic for fp16, constant if given, otherwise 1."""
    if precision.loss_scale is not None and (precision.fp16 or precision.bf16):
        return LossScale(precision.loss_scale)
    return LossScale(
        precision.initial_loss_scale if precision.fp16 else 1.0,
        is_dynamic=precision.fp16,
        minimum=precision.min_loss_scale,
        window=precision.loss_scale_window,
        hysteresis=precision.hysteresis,
        overflows_left=precision.hysteresis,
    )
