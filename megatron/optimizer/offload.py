"""Updates of weights and states that live in host memory (ZeRO-Offload, Ren et al., 2021)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron.device import Device
from megatron.optimizer.rules import Step, UpdateRule, UpdateTensors


def on_host(like: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor in host memory, not filled, that a GPU which holds `like` can copy by itself."""
    is_pinned = Device(like.device).is_gpu
    return torch.empty(like.shape, dtype=dtype, device="cpu", pin_memory=is_pinned)


class OffloadedUpdate:
    """Fetches gradients, updates on the host, and sends the weights back.

    Args:
        rule: how.
        tensors: weights and state in host memory; gradients on the device.
        parts: where the model reads its weights, on the device.
    """

    def __init__(self, rule: UpdateRule, tensors: UpdateTensors, parts: Sequence[Tensor]) -> None:
        self._pairs = [(on_host(g, g.dtype), g) for g in tensors.gradients]
        self._sent = list(zip(parts, tensors.weights, strict=True))
        held = replace(
            tensors,
            copies=[None] * len(tensors.weights),
            gradients=[received for received, _ in self._pairs],
        )
        self._update = rule.bind(held, None)

    def __call__(self, step: Step, *, weight_decay: float) -> None:
        if not self._pairs:
            return
        for received, gradient in self._pairs:
            received.copy_(gradient, non_blocking=True)
        Device(self._pairs[0][1].device).synchronize()
        self._update(step, weight_decay=weight_decay)
        for part, weight in self._sent:
            part.copy_(weight, non_blocking=True)
