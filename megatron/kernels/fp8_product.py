"""Products of 8-bit matrices (`kernels.fp8.Fp8`), each with its scales."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.device import Device
from megatron.kernels.cublaslt import SCALE_A, SCALE_B, Algorithm, CublasLt, CublasLtError, Problem
from megatron.kernels.fp8 import Fp8

_WORKSPACE_BYTES = 32 * 1024 * 1024  # what NVIDIA recommends for Hopper


class Fp8Product:
    """Products in plain PyTorch, in fp32, because a CPU's library has no scales of rows."""

    def __call__(
        self,
        left: Fp8,
        right: Fp8,
        dtype: torch.dtype,
        *,
        bias: Tensor | None = None,
        fast: bool = False,
        into: Tensor | None = None,
        accumulate: bool = False,
    ) -> Tensor:
        """Multiply left by the transpose of right, and add the bias.

        Args:
            left: [m, k].
            right: [n, k].
            dtype: Type of the result.
            bias: [n].
            fast: Let the hardware keep fewer bits of its sums.
            into: Where the result goes, [m, n].
            accumulate: Add it to what `into` holds.

        Returns:
            [m, n]; `into` if given.
        """
        out = left.values.float() @ right.values.float().t() * left.inverse
        out = out * _along_columns(right.inverse)
        out = (out if bias is None else out + bias).to(dtype)
        if into is None:
            return out
        return into.add_(out) if accumulate else into.copy_(out)


reference_product = Fp8Product()


def choose_fp8_product(device: torch.device) -> Fp8Product:
    """Choose the GPU's library, or plain PyTorch elsewhere."""
    return LibraryProduct() if Device(device).is_gpu else reference_product


class LibraryProduct(Fp8Product):
    """Products by `torch._scaled_mm`, and by cuBLASLt itself to add to fp32 sums.

    Adding then costs no pass over memory of its own: 58 of the 2131 ms of a step of Llama 3 8B
    (docs/benchmarks.md). The sum is taken apart if rows have their own scales, and without
    cuBLASLt (another vendor's GPU).
    """

    def __init__(self) -> None:
        """Find cuBLASLt."""
        try:
            self._adding: AddingProduct | None = AddingProduct()
        except OSError:
            self._adding = None

    def __call__(
        self,
        left: Fp8,
        right: Fp8,
        dtype: torch.dtype,
        *,
        bias: Tensor | None = None,
        fast: bool = False,
        into: Tensor | None = None,
        accumulate: bool = False,
    ) -> Tensor:
        """Multiply; the arguments are those of `Fp8Product`."""
        if into is not None and accumulate:
            one_scale = left.inverse.numel() == right.inverse.numel() == 1
            if self._adding is not None and one_scale and into.dtype == torch.float32:
                self._adding(left, right, into)
                return into
            return into.add_(self(left, right, into.dtype, bias=bias, fast=fast))
        return torch._scaled_mm(
            left.values,
            right.values.t(),
            left.inverse,
            _along_columns(right.inverse),
            bias=bias,
            out_dtype=dtype,
            use_fast_accum=fast,
            **({} if into is None else {"out": into}),
        )


class AddingProduct:
    """Adds left right^T to an fp32 matrix, summed in fp32 without shortcuts.

    It keeps a plan for each shape.
    """

    def __init__(self) -> None:
        """Load cuBLASLt.

        Raises:
            OSError: There is none.
        """
        self._library = CublasLt()
        self._plans: dict[tuple[Any, ...], tuple[Problem, Algorithm]] = {}

    def __call__(self, left: Fp8, right: Fp8, into: Tensor) -> None:
        """Add left right^T.

        Args:
            left: [m, k] with one scale: the library has no such product for scales of rows.
            right: [n, k], likewise.
            into: [m, n], fp32, contiguous.
        """
        gpu = into.get_device()
        shapes = (left.values.shape, right.values.shape)
        key = (gpu, *shapes, left.values.dtype, right.values.dtype)
        with Device(into.device).as_current():
            plan = self._plans.get(key)
            if plan is None:
                plan = self._plans[key] = self._plan(gpu, left, right, into)
            problem, algorithm = plan
            self._library.set_pointer(problem, SCALE_A, right.inverse)
            self._library.set_pointer(problem, SCALE_B, left.inverse)
            matrices = (left.values, right.values, into)
            self._library.multiply(problem, algorithm, *matrices, accumulate=True)

    def _plan(self, gpu: int, left: Fp8, right: Fp8, into: Tensor) -> tuple[Problem, Algorithm]:
        problem = self._library.problem(left.values, right.values, into)
        found = self._library.choices(problem, gpu, 1, workspace=_WORKSPACE_BYTES)
        if not found:
            raise CublasLtError(f"cuBLASLt knows no way to multiply {list(left.values.shape)}")
        return problem, found[0]


def _along_columns(inverse: Tensor) -> Tensor:
    """Turn the scales of right's rows along the product's columns."""
    return inverse.t() if inverse.dim() == 2 else inverse
