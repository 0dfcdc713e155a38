"""Rows grouped by expert: their order, the products of each group, and their way back to tokens.

A router chooses k experts for each of T tokens. Each choice becomes a row; rows are sorted by
expert, so that an expert multiplies neighboring rows. No function here waits for the device unless
it says so: the number of each expert's rows stays on the device. Rows that are sent to other
processes are grouped in the same way, by process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.device import Device
from megatron.kernels.library import (
    DTYPE_CODES,
    VECTOR_BYTES,
    Kernel,
    KernelLibrary,
    operator,
    takes,
)
from megatron.kernels.plans import WARP, KernelLaunch, Pointer, divide_up, vector_size
from megatron.kernels.sources import FLOATS, constant, instance


def _threads_of(columns: int, name: str) -> int:
    """Return the number of threads of a block that share a row."""
    warps = divide_up(divide_up(columns, vector_size(name)), WARP)
    return min(warps * WARP, constant("experts.cu", "kMostThreads"))


def _plan_combine(
    rows: Pointer,
    place: Pointer,
    weights: Pointer | None,
    out: Pointer,
    tokens: int,
    chosen: int,
    columns: int,
    dtype: int,
) -> list[KernelLaunch]:
    """Plan out [tokens, columns] from rows [n, columns] of one type.

    place is int64 [tokens, chosen], weights fp32 [tokens, chosen].
    """
    name = FLOATS[dtype]
    kernel, threads = instance("combine_rows_kernel", name), _threads_of(columns, name)
    return [
        KernelLaunch(kernel, (tokens,), (threads,), (rows, place, weights, out, chosen, columns))
    ]


def _plan_combine_backward(
    grad: Pointer,
    rows: Pointer,
    order: Pointer,
    place: Pointer,
    weights: Pointer,
    rows_grad: Pointer,
    weights_grad: Pointer,
    count: int,
    chosen: int,
    columns: int,
    dtype: int,
) -> list[KernelLaunch]:
    """Plan the gradients of rows [count, columns] and of weights fp32 [tokens, chosen].

    order is int64 [count]. weights_grad is written only where a choice has a row.
    """
    name = FLOATS[dtype]
    kernel = instance("combine_rows_backward_kernel", name)
    given = (grad, rows, order, place, weights, rows_grad, weights_grad, chosen, columns)
    return [KernelLaunch(kernel, (count,), (_threads_of(columns, name),), given)]


def _plan_take_gradient(
    value: Pointer, into: Pointer, count: int, accumulate: int, dtype: int
) -> list[KernelLaunch]:
    """Plan into fp32 [count] = value, or into + value."""
    name, threads = FLOATS[dtype], constant("experts.cu", "kMostThreads")
    kernel = instance("take_gradient_kernel", name, bool(accumulate))
    grid = (divide_up(count, threads * vector_size(name)),)
    return [KernelLaunch(kernel, grid, (threads,), (value, into, count))]


COMBINE_ROWS = Kernel("combine_rows", "ppppiiii", _plan_combine)
COMBINE_ROWS_BACKWARD = Kernel("combine_rows_backward", "pppppppiiii", _plan_combine_backward)
TAKE_GRADIENT = Kernel("take_gradient", "ppiii", _plan_take_gradient)


class Grouping(NamedTuple):
    """The n rows of all experts.

    Attributes:
        order: The choice that each row stands for, int64 [n]: choice c is that of token c // k.
            Choices of no expert come last, if they have rows.
        place: The row of each choice, int64 [T, k]; -1 for a choice of no expert.
        ends: The end of each expert's rows, int32 [experts].
    """

    order: Tensor
    place: Tensor
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
        keys = torch.where(choices >= 0, choices, experts).flatten()
        keys, order = keys.sort(stable=True)
        numbers = torch.arange(len(order), device=order.device)
        place = torch.empty_like(order).scatter_(0, order, numbers).view_as(choices)
        place = place.masked_fill_(choices < 0, -1)
        every = torch.arange(experts, device=order.device)
        ends = torch.searchsorted(keys, every, right=True)
        return cls(order[:rows], place, ends.int())

    @property
    def tokens(self) -> Tensor:
        """The token of each row, int64 [n]."""
        return self.order // self.place.shape[1]

    def expert_of_row(self) -> Tensor:
        """Return the expert of each row, int64 [n]; the number of experts for rows without one."""
        rows = torch.arange(len(self.order), device=self.order.device)
        return torch.searchsorted(self.ends, rows, right=True)

    def per_choice(self, rows: Tensor) -> Tensor:
        """Return the row of each choice, [n, h] -> [T, k, h]; 0 for choices of no expert."""
        if not len(rows):
            return rows.new_zeros(*self.place.shape, rows.shape[1])
        absent = (self.place < 0).unsqueeze(-1)
        return rows[self.place.clamp(min=0)].masked_fill(absent, 0)


def spread(x: Tensor, grouping: Grouping, library: KernelLibrary | None = None) -> Tensor:
    """Copy tokens to the rows of their experts: [T, h] -> [n, h].

    Args:
        x: The tokens.
        grouping: The rows of the tokens.
        library: Compiled kernels, for the sum in the backward pass; `None` means PyTorch's
            operations.
    """
    rows: Tensor = _Spread.apply(x, grouping, library)
    return rows


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, grouping: Grouping, library: KernelLibrary | None) -> Tensor:
        ctx.grouping, ctx.library = grouping, library
        return x.index_select(0, grouping.tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        grouping: Grouping = ctx.grouping
        if ctx.library is not None and _fits(grad):
            return combine_rows(ctx.library, grad.contiguous(), grouping.place, None), None, None
        return grouping.per_choice(grad).sum(1), None, None


def collect(
    rows: Tensor, weights: Tensor, grouping: Grouping, library: KernelLibrary | None = None
) -> Tensor:
    """Add up each token's rows by weight: [n, h] -> [T, h] in the rows' type.

    Args:
        rows: The outputs of the experts.
        weights: The factor of each choice, fp32 [T, k].
        grouping: The rows of the tokens.
        library: Compiled kernels; `None` means PyTorch's operations.
    """
    result: Tensor = _Collect.apply(rows, weights, grouping, library)
    return result


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor, grouping: Grouping, library: KernelLibrary | None
    ) -> Tensor:
        ctx.library = library if _fits(rows) else None
        ctx.save_for_backward(rows, weights)
        ctx.grouping = grouping
        if ctx.library is not None:
            return combine_rows(ctx.library, rows.contiguous(), grouping.place, weights)
        each = grouping.per_choice(rows).float()  # [T, k, h]
        return torch.einsum("tk,tkh->th", weights, each).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, weights = ctx.saved_tensors
        grouping: Grouping = ctx.grouping
        if ctx.library is not None:
            rows_grad, weights_grad = combine_rows_backward(
                ctx.library, grad.contiguous(), rows, grouping.order, grouping.place, weights
            )
            return rows_grad, weights_grad, None, None
        each = grouping.per_choice(rows).float()
        weights_grad = torch.einsum("th,tkh->tk", grad.float(), each)
        kept = torch.where(grouping.place >= 0, weights, 0).flatten()[grouping.order]
        rows_grad = grad[grouping.tokens].float() * kept.unsqueeze(-1)
        return rows_grad.to(rows.dtype), weights_grad, None, None


def _fits(rows: Tensor) -> bool:
    """Return whether kernels take these rows."""
    return takes(rows) and rows.shape[1] * rows.element_size() % VECTOR_BYTES == 0


@operator()
def combine_rows(
    library: KernelLibrary, rows: Tensor, place: Tensor, weights: Tensor | None
) -> Tensor:
    """Add up each token's rows with one kernel, in fp32 and in the order of the choices.

    Args:
        library: Compiled kernels.
        rows: [n, h], contiguous.
        place: The row of each choice, int64 [T, k]; -1 for none.
        weights: The factor of each choice, fp32 [T, k]; `None` means 1.

    Returns:
        The sums [T, h] in the rows' type.
    """
    tokens, chosen = place.shape
    out = rows.new_empty(tokens, rows.shape[1])
    sizes = (tokens, chosen, rows.shape[1], DTYPE_CODES[rows.dtype])
    library.launch(COMBINE_ROWS, rows, place.contiguous(), weights, out, *sizes)
    return out


@operator()
def combine_rows_backward(
    library: KernelLibrary,
    grad: Tensor,
    rows: Tensor,
    order: Tensor,
    place: Tensor,
    weights: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of `combine_rows`' rows and weights.

    Args:
        library: Compiled kernels.
        grad: Gradient of the sums, [T, h], contiguous.
        rows: The rows [n, h] of `combine_rows`.
        order: The choice of each row, int64 [n].
        place: The row of each choice, int64 [T, k]; -1 for none.
        weights: The weights of `combine_rows`.

    Returns:
        The gradients of the rows [n, h] and of the weights, fp32 [T, k].
    """
    rows_grad, weights_grad = torch.empty_like(rows), torch.zeros_like(weights)
    library.launch(
        COMBINE_ROWS_BACKWARD,
        *(grad, rows, order, place.contiguous(), weights.contiguous(), rows_grad, weights_grad),
        *(len(order), place.shape[1], rows.shape[1], DTYPE_CODES[rows.dtype]),
    )
    return rows_grad, weights_grad


class GroupedProduct(NamedTuple):
    """An implementation of the products in which each expert multiplies its rows.

    Attributes:
        name: The name of the implementation.
        forward: Maps rows [n, in], weights [experts, out, in] and `Grouping.ends` to [n, out].
            Rows that belong to no expert get arbitrary values.
        input_gradient: Maps the output's gradient [n, out], weights and ends to [n, in].
        weight_gradient: Adds to the weights' gradient `into` [experts, out, in], or overwrites it,
            given the output's gradient [n, out], the rows [n, in] and ends.
    """

    name: str
    forward: Callable[[Tensor, Tensor, Tensor], Tensor]
    input_gradient: Callable[[Tensor, Tensor, Tensor], Tensor]
    weight_gradient: Callable[..., None]


def choose_grouped_product(
    device: torch.device, dtype: torch.dtype, library: KernelLibrary | None = None
) -> GroupedProduct:
    """Choose PyTorch's grouped product, or products of one expert after another.

    Args:
        device: The device of the weights.
        dtype: The type of the weights.
        library: Compiled kernels, which write weight gradients; `None` means PyTorch's operations.
    """
    if Device(device).is_gpu and dtype == torch.bfloat16:
        return GroupedProduct(
            "grouped",
            lambda x, weight, ends: torch._grouped_mm(x, weight.transpose(1, 2), offs=ends),
            lambda grad, weight, ends: torch._grouped_mm(grad, weight, offs=ends),
            partial(_grouped_weight_gradient, library),
        )
    return GroupedProduct(
        "one after another",
        lambda x, weight, ends: _one_by_one(x, weight.transpose(1, 2), ends),
        _one_by_one,
        _weight_gradient_one_by_one,
    )


def _grouped_weight_gradient(
    library: KernelLibrary | None,
    grad: Tensor,
    x: Tensor,
    ends: Tensor,
    into: Tensor,
    *,
    accumulate: bool,
) -> None:
    value = torch._grouped_mm(grad.t(), x, offs=ends)
    if library is not None and into.dtype == torch.float32 and into.is_contiguous():
        take_gradient(library, value, into, accumulate)
    elif accumulate:
        into.add_(value)
    else:
        into.copy_(value)


@operator("into")
def take_gradient(library: KernelLibrary, value: Tensor, into: Tensor, accumulate: bool) -> None:
    """Write a gradient to fp32 memory, or add it, at twice the speed of PyTorch's copy.

    Args:
        library: Compiled kernels.
        value: The gradient, contiguous.
        into: The memory, fp32 in the shape of `value`, contiguous.
        accumulate: Whether to add.
    """
    sizes = (value.numel(), int(accumulate), DTYPE_CODES[value.dtype])
    library.launch(TAKE_GRADIENT, value, into, *sizes)


def _occupied(ends: Tensor) -> list[tuple[int, slice]]:
    """Return the experts that have rows, each with its rows. Waits for the device.

    When text is generated for one request, a token reaches 8 of perhaps 128 experts: going through
    the others takes three times as long as the products.
    """
    stops = ends.tolist()
    spans = enumerate(zip([0, *stops], stops, strict=False))
    return [(expert, slice(start, stop)) for expert, (start, stop) in spans if start < stop]


def _one_by_one(x: Tensor, factors: Tensor, ends: Tensor) -> Tensor:
    """Multiply each expert's rows [n, a] by its factor [experts, a, b]. Waits for the device."""
    out = x.new_zeros(len(x), factors.shape[2])
    for expert, rows in _occupied(ends):
        torch.mm(x[rows], factors[expert], out=out[rows])
    return out


def _weight_gradient_one_by_one(
    grad: Tensor, x: Tensor, ends: Tensor, into: Tensor, *, accumulate: bool
) -> None:
    if not accumulate:
        into.zero_()
    for expert, rows in _occupied(ends):
        into[expert].add_(grad[rows].t() @ x[rows])
