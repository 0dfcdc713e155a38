"""Products of 8-bit matrices with scales (`kernels.fp8.Fp8`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.device import Device
from megatron.kernels.cublaslt import SCALE_A, SCALE_B, Algorithm, CublasLt, CublasLtError, Problem
from megatron.kernels.fp8 import Fp8

_WORKSPACE_BYTES = 32 * 1024 * 1024  # NVIDIA's recommendation for Hopper


class Fp8Product:
    """The product of 8-bit matrices in plain PyTorch.

    It is computed in fp32, because PyTorch does not support scales of rows on CPUs.
    """

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
        """Multiply `left` by the transpose of `right`, and add the bias.

        Args:
            left: The left matrix [m, k].
            right: The right matrix [n, k].
            dtype: The dtype of the result, unless the result is added to `into`.
            bias: The bias [n], or `None`, as it must be with `accumulate`.
            fast: Whether the hardware may accumulate with fewer bits.
            into: The memory for the result, [m, n]; `None` allocates it.
            accumulate: Whether to add the result to `into` instead of overwriting it.

        Returns:
            The result [m, n], which is `into` if given.
        """
        if into is None or not accumulate:
            return self._multiply(left, right, dtype, bias, into, fast=fast)
        if self._add(left, right, into):
            return into
        return into.add_(self._multiply(left, right, into.dtype, bias, None, fast=fast))

    def _multiply(
        self,
        left: Fp8,
        right: Fp8,
        dtype: torch.dtype,
        bias: Tensor | None,
        into: Tensor | None,
        *,
        fast: bool,
    ) -> Tensor:
        out = left.values.float() @ right.values.float().t() * left.inverse
        out = out * _along_columns(right.inverse)
        out = (out if bias is None else out + bias).to(dtype)
        return out if into is None else into.copy_(out)

    def _add(self, left: Fp8, right: Fp8, into: Tensor) -> bool:
        """Add the product to `into` in the same pass, and return whether this is supported."""
        return False


reference_product = Fp8Product()


def choose_fp8_product(device: torch.device) -> Fp8Product:
    """Choose `LibraryProduct` on a GPU, and plain PyTorch on other devices."""
    return LibraryProduct() if Device(device).is_gpu else reference_product


class LibraryProduct(Fp8Product):
    """Products computed by `torch._scaled_mm`, or by cuBLASLt itself if they accumulate into fp32.

    Accumulating within the product saves a pass over memory that would take 58 ms of a 2131 ms step
    of Llama 3 8B (docs/benchmarks.md). The addition is a separate pass if rows have their own
    scales, which cuBLASLt does not support in this case, or if there is no cuBLASLt (on other
    vendors' GPUs).
    """

    def __init__(self) -> None:
        """Load cuBLASLt."""
        self._plans: dict[tuple[Any, ...], tuple[Problem, Algorithm]] = {}
        try:
            self._library: CublasLt | None = CublasLt()
        except OSError:
            self._library = None

    def _multiply(
        self,
        left: Fp8,
        right: Fp8,
        dtype: torch.dtype,
        bias: Tensor | None,
        into: Tensor | None,
        *,
        fast: bool,
    ) -> Tensor:
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

    def _add(self, left: Fp8, right: Fp8, into: Tensor) -> bool:
        library, one_scale = self._library, left.inverse.numel() == right.inverse.numel() == 1
        if library is None or not one_scale or into.dtype != torch.float32:
            return False
        gpu, matrices = into.get_device(), (left.values, right.values, into)
        key = (gpu, *(x.shape for x in matrices), left.values.dtype, right.values.dtype)
        with Device(into.device).as_current():
            if key not in self._plans:
                problem = library.problem(*matrices)
                algorithms = library.algorithms(problem, gpu, 1, workspace=_WORKSPACE_BYTES)
                if not algorithms:
                    shape = list(left.values.shape)
                    raise CublasLtError(f"cuBLASLt has no algorithm to multiply {shape}")
                self._plans[key] = problem, algorithms[0]
            problem, algorithm = self._plans[key]
            library.set_pointer(problem, SCALE_A, right.inverse)
            library.set_pointer(problem, SCALE_B, left.inverse)
            library.multiply(problem, algorithm, *matrices, accumulate=True)
        return True


def _along_columns(inverse: Tensor) -> Tensor:
    """Return the inverse scale of the right matrix for broadcasting over the product's rows."""
    return inverse.t() if inverse.dim() == 2 else inverse
