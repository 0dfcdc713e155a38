"""Gradients of replicated parameters that each tensor rank knows in part.

With sequence parallelism a norm's weight is the same on every tensor rank, but each rank runs the
norm on its part of the sequence. The norm of queries and keys sees this rank's heads only. The
whole gradient is the sum.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from megatron.parallel.collectives import all_reduce
from megatron.parallel.layout import Axis


@torch.no_grad()
def sum_partial_gradients(parameters: Iterable[nn.Parameter], axis: Axis) -> None:
    """Add the gradients of parameters with `partial_gradient` over the tensor axis, in place.

    One all-reduce a gradient dtype. Collective over the axis; every rank gets the same bits. Call
    it once an update, after the last backward.
    """
    if axis.size == 1:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        spec = getattr(parameter, "spec", None)
        if spec is None or not spec.partial_gradient or not parameter.requires_grad:
            continue
        gradient = getattr(parameter, "main_grad", parameter.grad)
        assert gradient is not None, "a parameter took part in no backward"
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for gradients in by_dtype.values():
        total = all_reduce(torch.cat([gradient.flatten() for gradient in gradients]), axis)
        sizes = [gradient.numel() for gradient in gradients]
        for gradient, part in zip(gradients, total.split(sizes), strict=True):
            gradient.copy_(part.view_as(gradient))
