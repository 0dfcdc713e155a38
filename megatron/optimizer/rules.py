"""Update rules: Adam with decoupled weight decay, and SGD with momentum.

A rule is a few numbers and an update in place; its state tensors belong to the optimizer. Both
are one fused PyTorch kernel a group, on CPU and GPU, that also divides the gradients by a scale
and leaves everything as it is where non-finite gradients were found: neither needs the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron.config.optimizer import OptimizerConfig

State = Mapping[str, list[Tensor]]


@dataclass(frozen=True)
class Step:
    """One update, the same for all parameters but for the weight decay.

    Attributes:
        lr: learning rate.
        count: scalar fp32 on the device: which update this is, from 1 (bias correction).
        gradient_scale: scalar fp32 on the device: gradients are divided by it.
        found_nonfinite: scalar fp32 on the device: 1 where the update must not happen, else 0.
    """

    lr: float
    count: Tensor
    gradient_scale: Tensor
    found_nonfinite: Tensor


class UpdateRule(Protocol):
    """How weights follow from gradients."""

    @property
    def state_names(self) -> tuple[str, ...]:
        """The state tensors, each of the weight's shape, fp32, zero at the start."""
        ...

    def update(
        self,
        weights: list[Tensor],
        gradients: list[Tensor],
        state: State,
        step: Step,
        *,
        weight_decay: float,
    ) -> None:
        """Change fp32 `weights` and `state` in place. `gradients` (fp32) are overwritten."""
        ...


@dataclass(frozen=True)
class AdamW:
    """m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  with bias-corrected m', v':
    w = w - lr (m' / (sqrt(v') + eps) + weight_decay w).
    """

    beta1: float
    beta2: float
    eps: float

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def update(
        self,
        weights: list[Tensor],
        gradients: list[Tensor],
        state: State,
        step: Step,
        *,
        weight_decay: float,
    ) -> None:
        torch._fused_adamw_(
            weights,
            gradients,
            state["exp_avg"],
            state["exp_avg_sq"],
            [],
            [step.count] * len(weights),
            lr=step.lr,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=weight_decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=step.gradient_scale,
            found_inf=step.found_nonfinite,
        )


@dataclass(frozen=True)
class SGD:
    """g = g + weight_decay w;  u = momentum u + g;  w = w - lr u."""

    momentum: float

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()

    def update(
        self,
        weights: list[Tensor],
        gradients: list[Tensor],
        state: State,
        step: Step,
        *,
        weight_decay: float,
    ) -> None:
        torch._fused_sgd_(
            weights,
            gradients,
            state["momentum"] if self.momentum else [],
            weight_decay=weight_decay,
            momentum=self.momentum,
            lr=step.lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,  # momentum starts at zero, so the first step needs no exception
            grad_scale=step.gradient_scale,
            found_inf=step.found_nonfinite,
        )


def rule_of(config: OptimizerConfig) -> UpdateRule:
    """The rule that the flags ask for."""
    if config.optimizer == "sgd":
        return SGD(config.sgd_momentum)
    return AdamW(config.adam_beta1, config.adam_beta2, config.adam_eps)
