"""One optimizer update from start to finish."""

from __future__ import annotations

from megatron.optimizer.optimizer import Optimizer, StepResult


def step(optimizer: Optimizer, lr: float, weight_decay: float, **others: float) -> StepResult:
    """Make an update and wait for its outcome."""
    return optimizer.end_step(optimizer.begin_step(lr, weight_decay, **others).tolist())  # type: ignore[arg-type]
