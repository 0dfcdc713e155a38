"""Rows grouped by expert: their order, each group's matrix product, and the sums for each token.

A router chooses k experts for each of T tokens. Each choice becomes a row, and rows are sorted by
expert, so that the rows of an expert are adjacent. The number of rows per expert stays on the
device, and functions do not wait for the device unless their docstring says so. Rows that are sent
to other processes are grouped by process in the same way.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.device import Device
from megatron.kernels.fp8 import E4M3, Fp8, Fp8Casts
from megatron.kernels.library import (
    DTYPE_CODES,
    VECTOR_BYTES,
    Kernel,
    KernelLibrary,
    operator,
    supports,
)
from megatron.kernels.plans import WARP, KernelLaunch, Pointer, divide_up, vector_size
from megatron.kernels.sources import FLOATS, constant, instance

WeightOperand = tuple[Tensor, ...]


def _threads_of(columns: int, name: str) -> int:
    """Return the number of threads per row in a block."""
    warps = divide_up(divide_up(columns, vector_size(name)), WARP)
    return min(warps * WARP, constant("experts.cu", "kMostThreads"))


class _CombineRows(NamedTuple):
    """The arguments of a kernel that computes the weighted sum of each token's rows."""

    rows: Pointer  # [n, columns]
    row_of_choice: Pointer  # int64 [tokens, chosen]
    weights: Pointer | None  # fp32 [tokens, chosen]
    out: Pointer  # [tokens, columns], of the type of rows
    tokens: int
    chosen: int
    columns: int
    dtype: int

    def plan(self) -> list[KernelLaunch]:
        """Return the kernel launches."""
        name = FLOATS[self.dtype]
        kernel, threads = instance("combine_rows_kernel", name), _threads_of(self.columns, name)
        return [
            KernelLaunch(
                kernel,
                (self.tokens,),
                (threads,),
                (*self[:4], self.chosen, self.columns),
            )
        ]


class _CombineRowsBackward(NamedTuple):
    """The arguments of a kernel that computes the gradients of rows and weights."""

    grad: Pointer
    rows: Pointer  # [row_count, columns], like rows_grad
    order: Pointer  # int64 [row_count]
    row_of_choice: Pointer  # int64 [tokens, chosen]
    weights: Pointer  # fp32 [tokens, chosen]
    rows_grad: Pointer
    weights_grad: Pointer  # like weights; written only where a choice has a row
    row_count: int
    chosen: int
    columns: int
    dtype: int

    def plan(self) -> list[KernelLaunch]:
        """Return the kernel launches."""
        name = FLOATS[self.dtype]
        kernel = instance("combine_rows_backward_kernel", name)
        parameters = (*self[:7], self.chosen, self.columns)
        return [
            KernelLaunch(kernel, (self.row_count,), (_threads_of(self.columns, name),), parameters)
        ]


class _TakeGradient(NamedTuple):
    """The arguments of a kernel that writes a gradient to fp32 memory, or adds it."""

    value: Pointer
    into: Pointer  # fp32 [elements], like value
    elements: int
    accumulate: int
    dtype: int

    def plan(self) -> list[KernelLaunch]:
        """Return the kernel launches."""
        name, threads = FLOATS[self.dtype], constant("experts.cu", "kMostThreads")
        kernel = instance("take_gradient_kernel", name, bool(self.accumulate))
        grid = (divide_up(self.elements, threads * vector_size(name)),)
        return [KernelLaunch(kernel, grid, (threads,), (self.value, self.into, self.elements))]


COMBINE_ROWS = Kernel.of("combine_rows", _CombineRows)
COMBINE_ROWS_BACKWARD = Kernel.of("combine_rows_backward", _CombineRowsBackward)
TAKE_GRADIENT = Kernel.of("take_gradient", _TakeGradient)


class Grouping(NamedTuple):
    """The order of n rows that are grouped by expert.

    Attributes:
        order: The choice of each row, int64 [n]. Choice c belongs to token c // k. Choices without
            an expert come last, if they have rows.
        row_of_choice: The row of each choice, int64 [T, k]; -1 for a choice without an expert.
        ends: The end of each expert's rows, int32 [experts].
    """

    order: Tensor
    row_of_choice: Tensor
    ends: Tensor

    @classmethod
    def of(cls, choices: Tensor, experts: int) -> Grouping:
        """Group the choices of tokens. Every choice has a row.

        Args:
            choices: The experts of each token, int64 [T, k]; negative for no expert.
            experts: The number of experts.
        """
        # The sorting time is proportional to the number of bytes in a key.
        dtype = torch.int16 if experts < 2**15 else torch.int64
        keys = torch.where(choices >= 0, choices, experts).flatten().to(dtype)
        keys, order = keys.sort(stable=True)
        rows = torch.arange(len(order), device=order.device)
        row_of_choice = torch.empty_like(order).scatter_(0, order, rows).view_as(choices)
        row_of_choice = row_of_choice.masked_fill_(choices < 0, -1)
        all_experts = torch.arange(experts, device=order.device, dtype=dtype)
        ends = torch.searchsorted(keys, all_experts, right=True)
        return cls(order, row_of_choice, ends.int())

    def first(self, rows: int) -> Grouping:
        """Return this grouping without the rows of choices that have no expert.

        Args:
            rows: The number of choices that have an expert.
        """
        return self._replace(order=self.order[:rows])

    @property
    def tokens(self) -> Tensor:
        """The token of each row, int64 [n]."""
        return self.order // self.row_of_choice.shape[1]

    def expert_of_row(self) -> Tensor:
        """Return the expert of each row, int64 [n]; the number of experts for a row without one."""
        rows = torch.arange(len(self.order), device=self.order.device)
        return torch.searchsorted(self.ends, rows, right=True)

    def per_choice(self, rows: Tensor) -> Tensor:
        """Return the row of each choice, or zeros if it has none: [n, h] -> [T, k, h]."""
        if not len(rows):
            return rows.new_zeros(*self.row_of_choice.shape, rows.shape[1])
        absent = (self.row_of_choice < 0).unsqueeze(-1)
        return rows[self.row_of_choice.clamp(min=0)].masked_fill(absent, 0)


def permute(x: Tensor, grouping: Grouping, library: KernelLibrary | None = None) -> Tensor:
    """Copy tokens to the rows of their experts: [T, h] -> [n, h].

    Args:
        x: The tokens.
        grouping: The grouping of the rows.
        library: Compiled kernels, for the sums in the backward pass; `None` means PyTorch's
            operations.
    """
    rows: Tensor = _Permute.apply(x, Permutation(grouping, library))
    return rows


class Permutation(NamedTuple):
    """The map of `permute` and its backward pass, for callers with their own autograd function.

    Attributes:
        grouping: The grouping of the rows.
        library: Compiled kernels; `None` means PyTorch's operations.
    """

    grouping: Grouping
    library: KernelLibrary | None

    def forward(self, x: Tensor) -> Tensor:
        """Copy tokens to rows: [T, h] -> [n, h]."""
        return x.index_select(0, self.grouping.tokens)

    def backward(self, grad: Tensor) -> Tensor:
        """Sum the gradients of each token's rows: [n, h] -> [T, h]."""
        if self.library is not None and _fits(grad):
            return combine_rows(self.library, grad.contiguous(), self.grouping.row_of_choice, None)
        return self.grouping.per_choice(grad).sum(1)


def unpermute(rows: Tensor, grouping: Grouping, library: KernelLibrary | None = None) -> Tensor:
    """Sum each token's rows: [n, h] -> [T, h].

    Args:
        rows: The rows, in the order of the grouping.
        grouping: The grouping of the rows.
        library: Compiled kernels; `None` means PyTorch's operations.
    """
    result: Tensor = _Unpermute.apply(rows, Permutation(grouping, library))
    return result


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, permutation: Permutation) -> Tensor:
        ctx.permutation = permutation
        return permutation.forward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.permutation.backward(grad), None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, permutation: Permutation) -> Tensor:
        ctx.permutation = permutation
        return permutation.backward(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.permutation.forward(grad), None


def combine(
    rows: Tensor, weights: Tensor, grouping: Grouping, library: KernelLibrary | None = None
) -> Tensor:
    """Return the weighted sum of each token's rows: [n, h] -> [T, h], in the dtype of the rows.

    Args:
        rows: The outputs of the experts.
        weights: The weight of each choice, fp32 [T, k].
        grouping: The grouping of the rows.
        library: Compiled kernels; `None` means PyTorch's operations.
    """
    result: Tensor = _Combine.apply(rows, weights, grouping, library)
    return result


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor, grouping: Grouping, library: KernelLibrary | None
    ) -> Tensor:
        ctx.library = library if _fits(rows) else None
        ctx.save_for_backward(rows, weights)
        ctx.grouping = grouping
        if ctx.library is not None:
            return combine_rows(ctx.library, rows.contiguous(), grouping.row_of_choice, weights)
        choice_rows = grouping.per_choice(rows).float()  # [T, k, h]
        return torch.einsum("tk,tkh->th", weights, choice_rows).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, weights = ctx.saved_tensors
        grouping: Grouping = ctx.grouping
        if ctx.library is not None:
            rows_grad, weights_grad = combine_rows_backward(
                ctx.library,
                grad.contiguous(),
                rows,
                grouping.order,
                grouping.row_of_choice,
                weights,
            )
            return rows_grad, weights_grad, None, None
        choice_rows = grouping.per_choice(rows).float()
        weights_grad = torch.einsum("th,tkh->tk", grad.float(), choice_rows)
        row_weights = torch.where(grouping.row_of_choice >= 0, weights, 0).flatten()[grouping.order]
        rows_grad = grad[grouping.tokens].float() * row_weights.unsqueeze(-1)
        return rows_grad.to(rows.dtype), weights_grad, None, None


def _fits(rows: Tensor) -> bool:
    """Return whether the kernels support these rows."""
    return supports(rows) and rows.shape[1] * rows.element_size() % VECTOR_BYTES == 0


@operator()
def combine_rows(
    library: KernelLibrary, rows: Tensor, row_of_choice: Tensor, weights: Tensor | None
) -> Tensor:
    """Sum each token's rows with one kernel, in fp32 and in the order of the choices.

    Args:
        library: Compiled kernels.
        rows: The rows [n, h], contiguous.
        row_of_choice: The row of each choice, int64 [T, k]; -1 for none.
        weights: The weight of each choice, fp32 [T, k]; `None` means 1.

    Returns:
        The sums [T, h] in the dtype of the rows.
    """
    tokens, chosen = row_of_choice.shape
    out = rows.new_empty(tokens, rows.shape[1])
    sizes = (tokens, chosen, rows.shape[1], DTYPE_CODES[rows.dtype])
    library.launch(COMBINE_ROWS, rows, row_of_choice.contiguous(), weights, out, *sizes)
    return out


@operator()
def combine_rows_backward(
    library: KernelLibrary,
    grad: Tensor,
    rows: Tensor,
    order: Tensor,
    row_of_choice: Tensor,
    weights: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of the rows and weights of `combine_rows`.

    Args:
        library: Compiled kernels.
        grad: The gradient of the sums, [T, h], contiguous.
        rows: The rows [n, h].
        order: The choice of each row, int64 [n].
        row_of_choice: The row of each choice, int64 [T, k]; -1 for none.
        weights: The weights, fp32 [T, k].

    Returns:
        The gradients of the rows [n, h] and of the weights, fp32 [T, k].
    """
    rows_grad, weights_grad = torch.empty_like(rows), torch.zeros_like(weights)
    library.launch(
        COMBINE_ROWS_BACKWARD,
        *(
            grad,
            rows,
            order,
            row_of_choice.contiguous(),
            weights.contiguous(),
            rows_grad,
            weights_grad,
        ),
        *(len(order), row_of_choice.shape[1], rows.shape[1], DTYPE_CODES[rows.dtype]),
    )
    return rows_grad, weights_grad


class GroupedProduct:
    """Matrix products of experts' rows and weights; in this class, one expert after another.

    Rows are [n, in], and weights are [experts, out, in]; `ends` is `Grouping.ends`. Results for
    rows without an expert are arbitrary.
    """

    def forward(self, rows: Tensor, weight: Tensor, ends: Tensor) -> tuple[Tensor, WeightOperand]:
        """Return the outputs [n, out] and the weights as an operand for the backward pass.

        This waits for the device.
        """
        return _product_per_expert(rows, weight.mT, ends), (weight,)

    def input_gradient(self, grad: Tensor, weight: WeightOperand, ends: Tensor) -> Tensor:
        """Return the gradient of the rows, [n, in]. This waits for the device.

        Args:
            grad: The gradient of the outputs, [n, out].
            weight: The operand that `forward` returned.
            ends: The end of each expert's rows.
        """
        return _product_per_expert(grad, weight[0], ends)

    def weight_gradient(
        self, grad: Tensor, rows: Tensor, ends: Tensor, into: Tensor, *, accumulate: bool
    ) -> None:
        """Compute the gradient of the weights. This waits for the device.

        Args:
            grad: The gradient of the outputs, [n, out].
            rows: The rows, [n, in].
            ends: The end of each expert's rows.
            into: The memory for the gradient, [experts, out, in].
            accumulate: Whether to add to `into` instead of overwriting it.
        """
        if not accumulate:
            into.zero_()
        for expert, span in _non_empty(ends):
            into[expert].add_(grad[span].t() @ rows[span])

    def forget(self) -> None:
        """Discard cached copies of the weights, because the weights have changed."""


class LibraryGroupedProduct(GroupedProduct):
    """PyTorch's grouped products, for bf16 on a GPU. They do not wait for the device.

    Args:
        library: Compiled kernels, which write weight gradients; `None` means PyTorch's operations.
    """

    def __init__(self, library: KernelLibrary | None) -> None:
        """Store the kernels."""
        self._library = library

    def forward(self, rows: Tensor, weight: Tensor, ends: Tensor) -> tuple[Tensor, WeightOperand]:
        """Return the outputs [n, out] and the weights."""
        return torch._grouped_mm(rows, weight.mT, offs=ends), (weight,)

    def input_gradient(self, grad: Tensor, weight: WeightOperand, ends: Tensor) -> Tensor:
        """Return the gradient of the rows, [n, in], given that of the outputs, [n, out]."""
        return torch._grouped_mm(grad, weight[0], offs=ends)

    def weight_gradient(
        self, grad: Tensor, rows: Tensor, ends: Tensor, into: Tensor, *, accumulate: bool
    ) -> None:
        """Write the weight gradient to `into` [experts, out, in], or add it if `accumulate`."""
        value = torch._grouped_mm(grad.t(), rows, offs=ends)
        if self._library is not None and into.dtype == torch.float32 and into.is_contiguous():
            take_gradient(self._library, value, into, accumulate)
        elif accumulate:
            into.add_(value)
        else:
            into.copy_(value)


class Fp8GroupedProduct(GroupedProduct):
    """Grouped products in FP8, except for weight gradients.

    Each row of an operand has its own scale, so a token's results do not depend on the other tokens
    of the batch or on the location of its experts. Gradients are also e4m3: grouped products do not
    support e5m2, and less range is needed when each row has its own scale. The hardware may
    accumulate with fewer bits in both passes, because otherwise grouped products take 2.5 times as
    long.

    Args:
        casts: The implementation of the casts.
        in_16_bits: The implementation that computes weight gradients.
    """

    def __init__(self, casts: Fp8Casts, in_16_bits: GroupedProduct) -> None:
        """Create products whose weights have not been cast yet."""
        self._casts = casts
        self._in_16_bits = in_16_bits
        self._weight: tuple[Fp8, Fp8] | None = None

    def forward(self, rows: Tensor, weight: Tensor, ends: Tensor) -> tuple[Tensor, WeightOperand]:
        """Return the outputs [n, out] and the transposed weights in 8 bits."""
        if self._weight is None:
            self._weight = self._casts.cast_transpose_rows(weight, E4M3)
        by_out, by_in = self._weight
        return self._multiply(rows, by_out, ends), by_in

    def input_gradient(self, grad: Tensor, weight: WeightOperand, ends: Tensor) -> Tensor:
        """Return the gradient of the rows, [n, in], given that of the outputs, [n, out]."""
        return self._multiply(grad, Fp8(*weight), ends)

    def weight_gradient(
        self, grad: Tensor, rows: Tensor, ends: Tensor, into: Tensor, *, accumulate: bool
    ) -> None:
        """Write the weight gradient, computed in 16 bits, to `into`, or add it if `accumulate`."""
        self._in_16_bits.weight_gradient(grad, rows, ends, into, accumulate=accumulate)

    def forget(self) -> None:
        """Discard the cached 8-bit weights, because the weights have changed."""
        self._weight = None

    def _multiply(self, rows: Tensor, weights: Fp8, ends: Tensor) -> Tensor:
        """Multiply each expert's rows by the transpose of its matrix: [n, a] -> [n, b].

        Args:
            rows: The rows of all experts.
            weights: The matrices, [experts, b, a].
            ends: The end of each expert's rows.
        """
        left = self._casts.cast_rows(rows, E4M3)
        if not Device(rows.device).is_gpu:
            matrices = weights.dequantized().mT
            return _product_per_expert(left.dequantized(), matrices, ends).to(rows.dtype)
        if not len(rows):
            return rows.new_empty(0, weights.values.shape[1])
        return torch._scaled_grouped_mm(
            left.values,
            weights.values.mT,
            left.inverse.squeeze(-1),
            weights.inverse.squeeze(-1),
            offs=ends,
            out_dtype=rows.dtype,
            use_fast_accum=True,
        )


def choose_grouped_product(
    device: torch.device,
    dtype: torch.dtype,
    library: KernelLibrary | None = None,
    casts: Fp8Casts | None = None,
) -> GroupedProduct:
    """Choose PyTorch's grouped product if it is supported, otherwise a product per expert.

    Args:
        device: The device of the weights.
        dtype: The dtype of the weights.
        library: Compiled kernels; `None` means PyTorch's operations.
        casts: The casts for 8-bit products; `None` for products in `dtype`.
    """
    in_dtype = GroupedProduct()
    if Device(device).is_gpu and dtype == torch.bfloat16:
        in_dtype = LibraryGroupedProduct(library)
    return in_dtype if casts is None else Fp8GroupedProduct(casts, in_dtype)


@operator("into")
def take_gradient(library: KernelLibrary, value: Tensor, into: Tensor, accumulate: bool) -> None:
    """Write a gradient to fp32 memory, or add it there, twice as fast as PyTorch's copy.

    Args:
        library: Compiled kernels.
        value: The gradient, contiguous.
        into: The memory, fp32 in the shape of `value`, contiguous.
        accumulate: Whether to add to `into` instead of overwriting it.
    """
    sizes = (value.numel(), int(accumulate), DTYPE_CODES[value.dtype])
    library.launch(TAKE_GRADIENT, value, into, *sizes)


def _non_empty(ends: Tensor) -> list[tuple[int, slice]]:
    """Return each expert that has rows, with the slice of its rows. This waits for the device.

    When text is generated for a single request, a token uses only a few experts, such as 8 of 128,
    and a loop over all experts would take three times as long as the products.
    """
    stops = ends.tolist()
    spans = enumerate(zip([0, *stops], stops, strict=False))
    return [(expert, slice(start, stop)) for expert, (start, stop) in spans if start < stop]


def _product_per_expert(x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Multiply the rows [n, a] of each expert by its matrix [a, b]. This waits for the device."""
    out = x.new_zeros(len(x), matrices.shape[2])
    for expert, rows in _non_empty(ends):
        torch.mm(x[rows], matrices[expert], out=out[rows])
    return out
