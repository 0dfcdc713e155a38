"""Update rules: Adam with decoupled weight decay, and SGD with momentum.

A rule is a few numbers and an update in place; its state tensors belong to the optimizer. Both
rules here are one fused kernel a group, on CPU and GPU, that also divides the gradients by a scale
and leaves everything as it is if non-finite gradients were found: neither needs the host.

A new rule is a frozen dataclass that satisfies `UpdateRule`, and an entry of `RULES`. Different
parameters may have different rules: an entry of `RULES` gives each parameter its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from megatron.config.optimizer import OptimizerConfig
from megatron.device import Device
from megatron.kernels.adam import AdamNumbers, AdamTensors, choose_adam, copy_weights
from megatron.kernels.library import KernelLibrary


@dataclass(frozen=True)
class Step:
    """One update. Parameters with the same learning rate share it, except for the weight decay.

    Attributes:
        lr: learning rate.
        count: scalar fp32 on the device: which update this is, from 1 (bias correction).
        gradient_scale: scalar fp32 on the device: gradients are divided by it.
        found_nonfinite: scalar fp32 on the device: 1 if the update must not happen, otherwise 0.
    """

    lr: float
    count: Tensor
    gradient_scale: Tensor
    found_nonfinite: Tensor


@dataclass(frozen=True)
class UpdateTensors:
    """What a rule changes, tensor by tensor. The tensors stay where they are.

    Each is the part of a parameter that this process updates: 1-D if the update is shared, or in
    the parameter's own shape for a rule that needs whole tensors.

    Attributes:
        weights: fp32.
        copies: the same in 16 bits, written with each update; `None` if nobody needs them.
        gradients: in fp32 or 16 bits; an update may change them.
        state: by name, of the weights' shapes, fp32, zero at the start.
    """

    weights: Sequence[Tensor]
    copies: Sequence[Tensor | None]
    gradients: Sequence[Tensor]
    state: Mapping[str, Sequence[Tensor]]


class Update(Protocol):
    """One group's update, bound to its tensors."""

    def __call__(self, step: Step, /, *, weight_decay: float) -> None:
        """Change weights, their copies and the state in place."""


class UpdateRule(Protocol):
    """How weights follow from gradients. Rules that are equal share a group."""

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the state tensors, which a checkpoint holds as "<parameter>.<name>"."""
        ...

    @property
    def needs_whole(self) -> bool:
        """Whether each tensor must be whole on one process, and not a shard of it.

        Whole means the part that a tensor rank holds. ZeRO stages 0 to 2 can do so.
        """
        ...

    def bind(self, tensors: UpdateTensors, library: KernelLibrary | None) -> Update:
        """Return what carries out an update of these tensors.

        Args:
            tensors: of one parameter group.
            library: kernels, or `None` if there are none.
        """
        ...


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay.

    m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  with bias-corrected m', v':
    w = w - lr (m' / (sqrt(v') + eps) + weight_decay w).
    """

    beta1: float
    beta2: float
    eps: float

    state_names = ("exp_avg", "exp_avg_sq")
    needs_whole = False

    def bind(self, tensors: UpdateTensors, library: KernelLibrary | None) -> Update:
        """Return the update of these tensors."""
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

    needs_whole = False

    @property
    def state_names(self) -> tuple[str, ...]:
        """Return no names without momentum."""
        return ("momentum",) if self.momentum else ()

    def bind(self, tensors: UpdateTensors, library: KernelLibrary | None) -> Update:
        """Return the update of these tensors."""
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


RuleChoice = Callable[[str, nn.Parameter], UpdateRule]
"""Gives each parameter, by its name, the rule that updates it."""


def _everywhere(rule: UpdateRule) -> RuleChoice:
    return lambda name, parameter: rule


RULES: dict[str, Callable[[OptimizerConfig], RuleChoice]] = {
    "adam": lambda c: _everywhere(AdamW(c.adam_beta1, c.adam_beta2, c.adam_eps)),
    "sgd": lambda c: _everywhere(SGD(c.sgd_momentum)),
}
"""The rules that each value of --optimizer stands for."""


def rules_of(config: OptimizerConfig) -> RuleChoice:
    """Return the rules that the flags ask for."""
    return RULES[config.optimizer](config)


def on_host(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an empty tensor in host memory that a GPU which holds `like` can copy by itself."""
    is_pinned = Device(like.device).is_gpu
    return torch.empty(like.shape, dtype=dtype, device="cpu", pin_memory=is_pinned)


class OffloadedUpdate:
    """Fetches gradients, updates on the host, and sends the weights back.

    Weights and states live in host memory (ZeRO-Offload, Ren et al., 2021).

    Args:
        rule: how to update.
        tensors: weights and state in host memory; gradients on the device.
        parts: where the model reads its weights, on the device.
    """

    def __init__(self, rule: UpdateRule, tensors: UpdateTensors, parts: Sequence[Tensor]) -> None:
        """Allocate host memory for the gradients."""
        self._pairs = [(on_host(g, g.dtype), g) for g in tensors.gradients]
        self._sent = list(zip(parts, tensors.weights, strict=True))
        held = replace(
            tensors,
            copies=[None] * len(tensors.weights),
            gradients=[received for received, _ in self._pairs],
        )
        self._update = rule.bind(held, None)

    def __call__(self, step: Step, /, *, weight_decay: float) -> None:
        """Update, and return when the host has done its part."""
        if not self._pairs:
            return
        for received, gradient in self._pairs:
            received.copy_(gradient, non_blocking=True)
        Device(self._pairs[0][1].device).synchronize()
        self._update(step, weight_decay=weight_decay)
        for part, weight in self._sent:
            part.copy_(weight, non_blocking=True)
