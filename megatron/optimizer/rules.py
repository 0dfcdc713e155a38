"""Update rules: Adam with decoupled weight decay, and SGD with momentum.

A rule is a few numbers and an update in place; its state tensors belong to the optimizer. Both
are one fused kernel a group, on CPU and GPU, that also divides the gradients by a scale and leaves
everything as it is where non-finite gradients were found: neither needs the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from megatron.config.optimizer import OptimizerConfig
from megatron.kernels.adam import AdamNumbers, AdamTensors, choose_adam, copy_weights
from megatron.kernels.library import KernelLibrary


@dataclass(frozen=True)
class Step:
    """One update, the same for all parameters of a learning rate but for the weight decay.

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


@dataclass(frozen=True)
class UpdateTensors:
    """What a rule changes, tensor by tensor. They stay where they are.

    Attributes:
        weights: fp32.
        copies: the same in 16 bits, written with each update; None where nobody needs them.
        gradients: in fp32 or 16 bits; an update may change them.
        state: by name, of the weights' shapes, fp32, zero at the start.
    """

    weights: Sequence[Tensor]
    copies: Sequence[Tensor | None]
    gradients: Sequence[Tensor]
    state: Mapping[str, Sequence[Tensor]]


Update = Callable[..., None]  # (step, *, weight_decay)


class UpdateRule(Protocol):
    """How weights follow from gradients."""

    @property
    def state_names(self) -> tuple[str, ...]:
        """The state tensors."""
        ...

    def bind(self, tensors: UpdateTensors, library: KernelLibrary | None) -> Update:
        """What carries out an update of these tensors.

        Args:
            tensors: of one parameter group.
            library: of kernels, where there are some.
        """
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

    def bind(self, tensors: UpdateTensors, library: KernelLibrary | None) -> Update:
        means = (tensors.state[name] for name in self.state_names)
        adam = AdamTensors(tensors.weights, tensors.copies, tensors.gradients, *means)
        return partial(self._update, choose_adam(adam, library))

    def _update(
        self, adam: Callable[[AdamNumbers], None], step: Step, *, weight_decay: float
    ) -> None:
        adam(
            AdamNumbers(
                lr=step.lr,
                beta1=self.beta1,
                beta2=self.beta2,
                eps=self.eps,
                weight_decay=weight_decay,
                step=step.count,
                gradient_scale=step.gradient_scale,
                found_nonfinite=step.found_nonfinite,
            )
        )


@dataclass(frozen=True)
class SGD:
    """g = g + weight_decay w;  u = momentum u + g;  w = w - lr u."""

    momentum: float

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()

    def bind(self, tensors: UpdateTensors, library: KernelLibrary | None) -> Update:
        return partial(self._update, tensors)

    def _update(self, tensors: UpdateTensors, step: Step, *, weight_decay: float) -> None:
        if not tensors.weights:
            return
        torch._fused_sgd_(
            list(tensors.weights),
            [gradient.float() for gradient in tensors.gradients],
            list(tensors.state["momentum"]) if self.momentum else [],
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
        copy_weights(tensors.weights, tensors.copies)


def rule_of(config: OptimizerConfig) -> UpdateRule:
    """The rule that the flags ask for."""
    if config.optimizer == "sgd":
        return SGD(config.sgd_momentum)
    return AdamW(config.adam_beta1, config.adam_beta2, config.adam_eps)
