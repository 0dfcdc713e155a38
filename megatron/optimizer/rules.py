"""Update rules: Adam with decoupled weight decay, SGD with momentum, and the choice of rules.

A rule consists of a few numbers and an in-place update. Its state tensors belong to the optimizer.
The rules in this module run one fused kernel per group, on CPU and GPU, unless weights or states
are packed (see `packed`). The kernel also divides the gradients by a scale and changes nothing if
non-finite gradients were found, so neither rule has to synchronize with the host.

To add a rule, write a frozen dataclass that satisfies `UpdateRule` and add an entry to `RULES`. The
entry chooses a rule for each parameter, so different parameters may have different rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from megatron.config.optimizer import OptimizerConfig
from megatron.device import CopyStream, Device
from megatron.kernels.adam import AdamNumbers, AdamTensors, choose_adam, copy_weights
from megatron.kernels.library import KernelLibrary
from megatron.optimizer.muon import Muon
from megatron.optimizer.packed import PackedTensor, packed_adam
from megatron.optimizer.update import Step, Update, UpdateRule, UpdateTensors


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay.

    m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  with bias-corrected m', v':
    w = w - lr (m' / (sqrt(v') + eps) + weight_decay w).

    Attributes:
        beta1: The decay rate b1.
        beta2: The decay rate b2.
        eps: The number added to the square root in the denominator.
        rate: A factor applied to the learning rate.
    """

    beta1: float
    beta2: float
    eps: float
    rate: float = 1.0

    state_names = ("exp_avg", "exp_avg_sq")
    needs_whole = False
    joins_rows = False

    def bind(self, tensors: UpdateTensors, library: KernelLibrary | None) -> Update:
        """Return a function that updates these tensors."""
        means = [tensors.state[name] for name in self.state_names]
        sequences = (tensors.weights, tensors.copies, tensors.gradients, *means)
        if any(isinstance(state, PackedTensor) for states in sequences for state in states):
            return partial(self._update, packed_adam(*sequences))
        return partial(self._update, choose_adam(AdamTensors(*sequences), library))

    def _update(
        self, adam: Callable[[AdamNumbers], None], step: Step, *, weight_decay: float
    ) -> None:
        adam(
            AdamNumbers(
                lr=step.lr * self.rate,
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
    """SGD with momentum: g = g + weight_decay w;  u = momentum u + g;  w = w - lr u.

    Attributes:
        momentum: The momentum; 0 disables it.
    """

    momentum: float

    needs_whole = False
    joins_rows = False

    @property
    def state_names(self) -> tuple[str, ...]:
        """The names of the state tensors: "momentum", or none without momentum."""
        return ("momentum",) if self.momentum else ()

    def bind(self, tensors: UpdateTensors, library: KernelLibrary | None) -> Update:
        """Return a function that updates these tensors."""
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
            is_first_step=False,  # momentum starts at zero, so the first step is not special
            grad_scale=step.gradient_scale,
            found_inf=step.found_nonfinite,
        )
        copy_weights(tensors.weights, tensors.copies)


# The host updates weights with 64 MiB of gradients in about the time that it takes to copy them.
# Smaller pieces would shorten the first and the last copy, which overlap with nothing, but would
# add launches.
_PIECE_BYTES = 64 * 2**20
RuleChoice = Callable[[str, nn.Parameter], UpdateRule]
"""A function that returns the update rule of a parameter, given its name and the parameter."""


def _muon(c: OptimizerConfig) -> RuleChoice:
    """Choose Muon for the weight matrices of hidden layers, and AdamW for other parameters."""
    adam = _adam(c)
    muon = Muon(
        momentum=c.muon_momentum,
        nesterov=c.muon_use_nesterov,
        split_qkv=c.muon_split_qkv,
        scale_mode=c.muon_scale_mode,
        extra_scale=c.muon_extra_scale_factor,
        steps=c.muon_num_ns_steps,
        coefficients=c.muon_coefficient_type,
        precision=c.muon_fp32_matmul_prec,
        tensor_mode=c.muon_tp_mode,
    )
    return lambda name, parameter: muon if has_matrices(parameter) else adam(name, parameter)


def _adam(c: OptimizerConfig) -> RuleChoice:
    """Choose AdamW, with a learning-rate factor for each parameter (muP).

    As the width grows, gradients shrink by the same factor as the learning rate. Epsilon is also
    scaled by this factor, so its relative effect stays the same.
    """

    def choose(name: str, parameter: nn.Parameter) -> UpdateRule:
        spec = getattr(parameter, "spec", None)
        rate = 1.0 if spec is None else spec.init.rate
        return AdamW(c.adam_beta1, c.adam_beta2, c.adam_eps * rate, rate)

    return choose


def has_matrices(parameter: nn.Parameter) -> bool:
    """Return whether a parameter consists of one or more weight matrices of a hidden layer."""
    spec = getattr(parameter, "spec", None)
    return spec is not None and spec.matrices is not None


def _sgd(c: OptimizerConfig) -> RuleChoice:
    rule = SGD(c.sgd_momentum)
    return lambda name, parameter: rule


RULES: dict[str, Callable[[OptimizerConfig], RuleChoice]] = {
    "adam": _adam,
    "sgd": _sgd,
    "muon": _muon,
}
"""The choice of rules for each value of --optimizer."""


def rules_of(config: OptimizerConfig) -> RuleChoice:
    """Return the function that chooses the update rule of each parameter, as the flags specify."""
    return RULES[config.optimizer](config)


def on_host(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an uninitialized host tensor in the shape of `like`, pinned if `like` is on a GPU."""
    return torch.empty(like.shape, dtype=dtype, device="cpu", pin_memory=like.is_cuda)


class OffloadedUpdate:
    """An update that copies gradients to the host, runs there, and copies the weights back.

    Weights and states are in host memory (ZeRO-Offload, Ren et al., 2021).

    Args:
        rule: The update rule.
        tensors: The weights and state in host memory, and the gradients on the device.
        parts: The model's weights on the device.
    """

    def __init__(self, rule: UpdateRule, tensors: UpdateTensors, parts: Sequence[Tensor]) -> None:
        """Allocate host memory for the gradients."""
        self.received = [(on_host(g, g.dtype), g) for g in tensors.gradients]
        self.sent = list(zip(parts, tensors.weights, strict=True))
        host_tensors = replace(
            tensors,
            copies=[None] * len(tensors.weights),
            gradients=[received for received, _ in self.received],
        )
        self.on_host = rule.bind(host_tensors, None)

    def __call__(self, step: Step, /, *, weight_decay: float) -> None:
        """Run the update. Return once the host has updated its weights."""
        if not self.received:
            return
        for received, gradient in self.received:
            received.copy_(gradient, non_blocking=True)
        Device(self.received[0][1].device).synchronize()
        self.on_host(step, weight_decay=weight_decay)
        for part, weight in self.sent:
            part.copy_(weight, non_blocking=True)


class OverlappedUpdate:
    """An offloaded update in pieces, whose copies overlap with the host's computation.

    While the host updates one piece, gradients of later pieces arrive, and new weights of earlier
    pieces are sent back.

    Args:
        rule: The update rule.
        tensors: The weights and state in host memory, and the gradients on the device.
        parts: The model's weights on the device.
        queues: The queue for copies to the host and the queue for copies to the device.
        piece_bytes: The minimum size of the gradients of a piece that is not the last, in bytes.
    """

    def __init__(
        self,
        rule: UpdateRule,
        tensors: UpdateTensors,
        parts: Sequence[Tensor],
        *,
        queues: tuple[CopyStream, CopyStream],
        piece_bytes: int = _PIECE_BYTES,
    ) -> None:
        """Divide the tensors into pieces."""
        self._arrivals, self._departures = queues
        self._pieces = []
        sizes = [gradient.numel() * gradient.itemsize for gradient in tensors.gradients]
        for piece in _pieces(sizes, piece_bytes):
            own = replace(
                tensors,
                weights=tensors.weights[piece],
                copies=tensors.copies[piece],
                gradients=tensors.gradients[piece],
                state={name: states[piece] for name, states in tensors.state.items()},
                shards=tensors.shards[piece],
            )
            self._pieces.append(OffloadedUpdate(rule, own, parts[piece]))

    def __call__(self, step: Step, /, *, weight_decay: float) -> None:
        """Run the update. Return once the host has updated its weights.

        Later work on the device waits for the new weights.
        """
        self._arrivals.wait_for_device()  # the gradients are complete
        arrivals = [
            [self._arrivals.copy(received, gradient) for received, gradient in piece.received]
            for piece in self._pieces
        ]
        self._departures.wait_for_device()  # nothing reads the old weights anymore
        sent = []
        for piece, copies in zip(self._pieces, arrivals, strict=True):
            for copied in copies[-1:]:  # a queue completes its copies in order
                copied.wait()
            piece.on_host(step, weight_decay=weight_decay)
            sent += [self._departures.copy(part, weight) for part, weight in piece.sent]
        for copied in sent[-1:]:
            copied.delay_device()


def _pieces(sizes: Sequence[int], limit: int) -> list[slice]:
    """Return slices in order. All but the last end once their sizes add up to at least `limit`."""
    pieces, start, filled = [], 0, 0
    for index, size in enumerate(sizes, 1):
        filled += size
        if filled >= limit or index == len(sizes):
            pieces.append(slice(start, index))
            start, filled = index, 0
    return pieces
