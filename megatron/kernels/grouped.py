"""Rows grouped by expert: their order, the products of each group, and their way back to tokens.

A router chooses k experts for each of T tokens. Each choice becomes a row; rows are sorted by
expert, so that an expert multiplies neighboring rows. No function here waits for the device unless
it says so: the number of each expert's rows stays on the device. Rows that are sent to other
processes are grouped in the same way, by process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.device import Device


class Grouping(NamedTuple):
    """The n rows of all experts.

    Attributes:
        order: The choice that each row stands for, int64 [n]: choice c is that of token c // k.
            Choices of no expert come last, if they have rows.
        place: The row of each choice, int64 [T, k]; any row for a choice of no expert.
        kept: Whether a choice has an expert, bool [T, k].
        ends: The end of each expert's rows, int32 [experts].
    """

    order: Tensor
    place: Tensor
    kept: Tensor
    ends: Tensor

    @classmethod
    def of(cls, choices: Tensor, experts: int, rows: int | None = None) -> Grouping:
        """Group the choices of tokens.

        Args:
            choices: Experts, int64 [T, k]; a negative one stands for no expert.
            experts: Number of experts.
            rows: Number of choices that are not negative, if it is known. `None` gives every choice
                a row.
        """
        kept = choices >= 0
        keys = torch.where(kept, choices, experts).flatten()
        keys, order = keys.sort(stable=True)
        place = torch.empty_like(order).scatter_(
            0, order, torch.arange(len(order), device=order.device)
        )
        ends = torch.searchsorted(keys, torch.arange(experts, device=keys.device), right=True)
        order = order[:rows]
        place = place.clamp(max=max(len(order) - 1, 0))
        return cls(order, place.view_as(choices), kept, ends.int())

    def per_choice(self, rows: Tensor) -> Tensor:
        """Return the row of each choice, [n, h] -> [T, k, h]; 0 for choices of no expert."""
        if not len(rows):
            return rows.new_zeros(*self.place.shape, rows.shape[1])
        return rows[self.place].masked_fill(~self.kept.unsqueeze(-1), 0)

    def expert_of_row(self) -> Tensor:
        """Return the expert of each row, int64 [n]; rows without one have the last expert's."""
        rows = torch.arange(len(self.order), device=self.order.device)
        return torch.searchsorted(self.ends, rows, right=True).clamp(max=len(self.ends) - 1)


def spread(x: Tensor, grouping: Grouping) -> Tensor:
    """Copy tokens to the rows of their experts: [T, h] -> [n, h]."""
    rows: Tensor = _Spread.apply(x, grouping)
    return rows


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, grouping: Grouping) -> Tensor:
        ctx.grouping = grouping
        return x[grouping.order // grouping.place.shape[1]]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grouping: Grouping = ctx.grouping
        return grouping.per_choice(grad).sum(1), None


def collect(rows: Tensor, weights: Tensor, grouping: Grouping) -> Tensor:
    """Add up each token's rows by weight: [n, h], fp32 [T, k] -> [T, h] in the rows' type."""
    result: Tensor = _Collect.apply(rows, weights, grouping)
    return result


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, grouping: Grouping) -> Tensor:
        ctx.save_for_backward(rows, weights)
        ctx.grouping = grouping
        each = grouping.per_choice(rows)
        return torch.einsum("tk,tkh->th", weights, each.float()).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weights = ctx.saved_tensors
        grouping: Grouping = ctx.grouping
        chosen = weights.shape[1]
        each = grouping.per_choice(rows)
        weights_grad = torch.einsum("th,tkh->tk", grad.float(), each.float())
        kept = torch.where(grouping.kept, weights, 0).flatten()[grouping.order]
        rows_grad = grad[grouping.order // chosen].float() * kept.unsqueeze(-1)
        return rows_grad.to(rows.dtype), weights_grad.to(weights.dtype), None


class GroupedProduct(NamedTuple):
    """The form of products in which each expert multiplies its rows.

    Attributes:
        name: The name of the form.
        forward: Maps rows [n, in], weights [experts, out, in] and `Grouping.ends` to [n, out].
            Rows of no expert get any values.
        input_gradient: Maps the output's gradient [n, out], weights and ends to [n, in].
        weight_gradient: Adds to the weights' gradient `into` [experts, out, in], or overwrites it,
            given the output's gradient [n, out], the rows [n, in] and ends.
    """

    name: str
    forward: Callable[[Tensor, Tensor, Tensor], Tensor]
    input_gradient: Callable[[Tensor, Tensor, Tensor], Tensor]
    weight_gradient: Callable[..., None]


def choose_grouped_product(device: torch.device, dtype: torch.dtype) -> GroupedProduct:
    """Choose the form of an expert's products: PyTorch's grouped product, or one after another."""
    if Device(device).is_gpu and dtype == torch.bfloat16:
        return GroupedProduct(
            "grouped",
            lambda x, weight, ends: torch._grouped_mm(x, weight.transpose(1, 2), offs=ends),
            lambda grad, weight, ends: torch._grouped_mm(grad, weight, offs=ends),
            _grouped_weight_gradient,
        )
    return GroupedProduct(
        "one after another",
        lambda x, weight, ends: _one_by_one(x, weight.transpose(1, 2), ends),
        _one_by_one,
        _weight_gradient_one_by_one,
    )


def _grouped_weight_gradient(
    grad: Tensor, x: Tensor, ends: Tensor, into: Tensor, *, accumulate: bool
) -> None:
    value = torch._grouped_mm(grad.t(), x, offs=ends)
    if accumulate:
        into.add_(value)
    else:
        into.copy_(value)


def _spans(ends: Tensor) -> list[tuple[int, int]]:
    """Return the rows of each expert. Waits for the device."""
    stops = ends.tolist()
    return list(zip([0, *stops], stops, strict=False))


def _one_by_one(x: Tensor, factors: Tensor, ends: Tensor) -> Tensor:
    """Multiply each expert's rows [n, a] by its factor [experts, a, b]. Waits for the device."""
    out = x.new_zeros(len(x), factors.shape[2])
    for (start, stop), factor in zip(_spans(ends), factors, strict=True):
        torch.mm(x[start:stop], factor, out=out[start:stop])
    return out


def _weight_gradient_one_by_one(
    grad: Tensor, x: Tensor, ends: Tensor, into: Tensor, *, accumulate: bool
) -> None:
    for (start, stop), part in zip(_spans(ends), into, strict=True):
        value = grad[start:stop].t() @ x[start:stop]
        if accumulate:
            part.add_(value)
        else:
            part.copy_(value)
