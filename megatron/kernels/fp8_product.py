"""Products of 8-bit matrices (see `kernels.fp8`), each with its scales."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.device import Device
from megatron.kernels.cublaslt import SCALE_A, SCALE_B, Algorithm, CublasLt, CublasLtError, Problem
from megatron.kernels.fp8 import Fp8

_WORKSPACE_BYTES = 32 * 1024 * 1024  # what NVIDIA recommends for Hopper


class Fp8Product(Protocol):
    """What `parallel.fp8_products` calls."""

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
        """left times the transpose of right, plus the bias.

        Args:
            left: [m, k].
            right: [n, k].
            dtype: of the result.
            bias: [n].
            fast: the hardware may keep fewer bits of its sums.
            into: [m, n], where the result goes.
            accumulate: add it to what `into` holds.

        Returns:
            [m, n]; `into` where it is given.
        """
        ...


def choose_fp8_product(device: torch.device) -> Fp8Product:
    """The GPU's library, else plain PyTorch."""
    return LibraryProduct() if Device(device).is_gpu else reference_product


def reference_product(
    left: Fp8,
    right: Fp8,
    dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    fast: bool = False,
    into: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """See `Fp8Product`: in fp32, for a CPU's library knows no scales of rows."""
    out = left.values.float() @ right.values.float().t() * left.inverse
    out = out * _along_columns(right.inverse)
    out = (out if bias is None else out + bias).to(dtype)
    if into is None:
        return out
    return into.add_(out) if accumulate else into.copy_(out)


class LibraryProduct:
    """See `Fp8Product`: `torch._scaled_mm`, and cuBLASLt itself to add to fp32 sums.

    Adding costs no pass over memory of its own then: 58 of the 2131 ms of a step of Llama 3 8B
    (docs/benchmarks.md). The sum is taken apart where rows have their own scales, and without
    cuBLASLt (another vendor's GPU).
    """

    def __init__(self) -> None:
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
    """into += left right^T, summed in fp32 without shortcuts; for each shape a plan is kept.

    Raises:
        OSError: there is no cuBLASLt.
    """

    def __init__(self) -> None:
        self._library = CublasLt()
        self._plans: dict[tuple[Any, ...], tuple[Problem, Algorithm]] = {}

    def __call__(self, left: Fp8, right: Fp8, into: Tensor) -> None:
        """Add.

        Args:
            left: [m, k], with one scale (with one for each row the library has no such product).
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
    """Scales of right's rows, which are the product's columns."""
    return inverse.t() if inverse.dim() == 2 else inverse
