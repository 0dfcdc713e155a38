"""`--DDP-impl torch`: gradients averaged by PyTorch's own DistributedDataParallel.

Gradients stay where a `GradientBuffer` of one replica keeps them: PyTorch averages them in place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megatron.parallel.layout import Axis

# torch 2.13 renamed it.
_SYNC_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


class TorchDataParallel:
    """The forward of a model whose gradients the backward averages over `axis`.

    Collective, to construct and to call.

    Args:
        model: not cut into pipeline stages: its backward passes follow its forward passes.
        forward: called with the model and what `__call__` is given.
        axis: who holds the same weights.
    """

    def __init__(self, model: nn.Module, forward: Callable[..., Any], axis: Axis) -> None:
        options: dict[str, Any] = {"process_group": axis.group, _SYNC_BUFFERS: False}
        self._replica = DistributedDataParallel(_Forward(model, forward), **options)

    def __call__(self, *args: Any, is_last: bool) -> Any:
        """One micro-batch; the backward of an update's last one averages the sums of all."""
        with nullcontext() if is_last else self._replica.no_sync():
            return self._replica(*args)


class _Forward(nn.Module):
    """What PyTorch may wrap: the model, called by `function`."""

    def __init__(self, model: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(self.model, *args)
