"""NVIDIA's cuBLASLt, for matrix products that PyTorch does not offer.

These are FP8 products that accumulate into their output (`fp8_product.py`), and products in which
the bits of a row do not depend on the number of rows (`row_product.py`). The library is the one
that PyTorch has loaded. The constants below come from its public header, cublasLt.h.

A product is out [m, n] = left [m, k] right^T with right [n, k], all row-major. The library's
matrices are column-major, so right is its A, transposed, and left is its B.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.device import cuda_release, stream_handle
from megatron.kernels.library import system_library

_COMPUTE_32F = 68
_TYPES = {  # cudaDataType
    torch.float32: 0,
    torch.float16: 2,
    torch.bfloat16: 14,
    torch.float8_e4m3fn: 28,
    torch.float8_e5m2: 29,
}
_TRANSPOSED = 1
_TRANSPOSE_A, _EPILOGUE, _BIAS, SCALE_A, SCALE_B = 3, 7, 8, 17, 18  # attributes of an operation
_WITH_BIAS = 4
_PREFERRED_WORKSPACE, _PREFERRED_REDUCTION, _PREFERRED_ALIGNMENTS = 1, 3, (5, 6, 7, 8)
_KIND, _SPLIT_K, _REDUCTION = 0, 2, 3  # attributes of an algorithm
_NO_REDUCTION, _REDUCTION_IN_FP32 = 0, 2
ALIGNMENT = 16  # the alignment of addresses, in bytes
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t


class CublasLtError(RuntimeError):
    """A call that cuBLASLt rejected, which is a bug in this package."""


class Algorithm(ctypes.Structure):
    """The struct cublasLtMatmulHeuristicResult_t, which begins with the algorithm itself."""

    _fields_ = [
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", _SIZE),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


class Problem(NamedTuple):
    """A matrix product of given shapes and formats. Its handles are never destroyed.

    Attributes:
        operation: The handle of the operation's description.
        right: The handle of the layout of the right matrix.
        left: The handle of the layout of the left matrix.
        out: The handle of the layout of the result.
    """

    operation: ctypes.c_void_p
    right: ctypes.c_void_p
    left: ctypes.c_void_p
    out: ctypes.c_void_p


class CublasLt:
    """The loaded cuBLASLt library."""

    def __init__(self) -> None:
        """Load the library.

        Raises:
            OSError: The library is not installed.
        """
        self._library = system_library(f"libcublasLt.so.{cuda_release()}")
        self._library.cublasLtMatmul.argtypes = [_POINTER] * 14 + [_SIZE, _POINTER]
        self._handles: dict[int, ctypes.c_void_p] = {}

    def problem(self, left: Tensor, right: Tensor, out: Tensor, *, bias: bool = False) -> Problem:
        """Describe the product of matrices with these shapes and formats.

        Args:
            left: The left matrix [m, k].
            right: The right matrix [n, k].
            out: The result [m, n].
            bias: Whether a bias [n] is added before rounding.
        """
        operation = self._create("cublasLtMatmulDescCreate", _COMPUTE_32F, _TYPES[torch.float32])
        self._set("cublasLtMatmulDesc", operation, _TRANSPOSE_A, ctypes.c_int32(_TRANSPOSED))
        if bias:
            self._set("cublasLtMatmulDesc", operation, _EPILOGUE, ctypes.c_int32(_WITH_BIAS))
        return Problem(operation, *(self._layout(matrix) for matrix in (right, left, out)))

    def algorithms(
        self, problem: Problem, gpu: int, count: int, *, workspace: int, whole: bool = False
    ) -> list[Algorithm]:
        """Return algorithms for a product, if any, the one expected to be fastest first.

        Args:
            problem: The product.
            gpu: The index of the GPU.
            count: The maximum number of algorithms to return.
            workspace: The maximum workspace of an algorithm, in bytes.
            whole: Whether to return only algorithms that do not split k.
        """
        preference = self._create("cublasLtMatmulPreferenceCreate")
        preferences: list[tuple[int, Any]] = [(_PREFERRED_WORKSPACE, ctypes.c_uint64(workspace))]
        preferences += [(key, ctypes.c_uint32(ALIGNMENT)) for key in _PREFERRED_ALIGNMENTS]
        if whole:
            preferences.append((_PREFERRED_REDUCTION, ctypes.c_uint32(_NO_REDUCTION)))
        for attribute, setting in preferences:
            self._set("cublasLtMatmulPreference", preference, attribute, setting)
        count_found, results = ctypes.c_int(), (Algorithm * count)()
        self._call(
            "cublasLtMatmulAlgoGetHeuristic",
            *(self._handle(gpu), *problem, problem.out),
            *(preference, count, results, ctypes.byref(count_found)),
        )
        self._call("cublasLtMatmulPreferenceDestroy", preference)
        return [result for result in results[: count_found.value] if not result.state]

    def kind(self, algorithm: Algorithm) -> int:
        """Return the id of the kernel family to which an algorithm belongs."""
        return self._attribute(algorithm, _KIND)

    def split_k(self, algorithm: Algorithm) -> int:
        """Return the number of parts into which an algorithm splits k."""
        return self._attribute(algorithm, _SPLIT_K)

    def with_split_k(
        self, problem: Problem, gpu: int, algorithm: Algorithm, split_k: int, *, workspace: int
    ) -> Algorithm | None:
        """Return a variant of an algorithm that splits k into a different number of parts.

        Args:
            problem: The product.
            gpu: The index of the GPU.
            algorithm: The algorithm to vary, from `algorithms`.
            split_k: The number of parts.
            workspace: The maximum workspace, in bytes.

        Returns:
            The variant, or `None` if the algorithm does not support it or needs more workspace.
        """
        variant, checked = Algorithm.from_buffer_copy(algorithm), Algorithm()
        reduction = _NO_REDUCTION if split_k == 1 else _REDUCTION_IN_FP32
        for attribute, value in ((_SPLIT_K, split_k), (_REDUCTION, reduction)):
            self._set("cublasLtMatmulAlgoConfig", ctypes.byref(variant), attribute, value)
        results = (ctypes.byref(variant), ctypes.byref(checked))
        status = self._library.cublasLtMatmulAlgoCheck(
            self._handle(gpu), *problem, problem.out, *results
        )
        if status or checked.workspace > workspace:
            return None
        variant.workspace = checked.workspace
        return variant

    def set_pointer(self, problem: Problem, attribute: int, tensor: Tensor) -> None:
        """Set an attribute of a product's operation to the address of a tensor, such as a scale."""
        pointer = ctypes.c_void_p(tensor.data_ptr())
        self._set("cublasLtMatmulDesc", problem.operation, attribute, pointer)

    def multiply(
        self,
        problem: Problem,
        algorithm: Algorithm,
        left: Tensor,
        right: Tensor,
        out: Tensor,
        *,
        bias: Tensor | None = None,
        accumulate: bool = False,
    ) -> None:
        """Write the product to `out`, or add it to `out`, on the current GPU.

        Args:
            problem: The product.
            algorithm: An algorithm for this product.
            left: The left matrix [m, k].
            right: The right matrix [n, k].
            out: The result [m, n].
            bias: The bias [n], if the problem has one.
            accumulate: Whether to add the product to `out` instead of overwriting `out`.
        """
        gpu = out.get_device()
        if bias is not None:
            self.set_pointer(problem, _BIAS, bias)
        workspace_bytes, out_pointer, workspace_pointer = algorithm.workspace, out.data_ptr(), 0
        if workspace_bytes:
            workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=out.device)
            workspace_pointer = workspace.data_ptr()
        self._call(
            "cublasLtMatmul",
            *(self._handle(gpu), problem.operation),
            *(_ONE, right.data_ptr(), problem.right, left.data_ptr(), problem.left),
            *(_ONE if accumulate else _ZERO, out_pointer, problem.out, out_pointer, problem.out),
            *(ctypes.byref(algorithm), workspace_pointer, workspace_bytes, stream_handle(gpu)),
        )

    def _handle(self, gpu: int) -> ctypes.c_void_p:
        if gpu not in self._handles:
            self._handles[gpu] = self._create("cublasLtCreate")
        return self._handles[gpu]

    def _layout(self, matrix: Tensor) -> ctypes.c_void_p:
        rows, columns = matrix.shape
        sizes = (ctypes.c_uint64(columns), ctypes.c_uint64(rows), ctypes.c_int64(columns))
        return self._create("cublasLtMatrixLayoutCreate", _TYPES[matrix.dtype], *sizes)

    def _create(self, function: str, *arguments: Any) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self._call(function, ctypes.byref(handle), *arguments)
        return handle

    def _set(self, kind: str, target: Any, attribute: int, value: Any) -> None:
        value = ctypes.c_int32(value) if isinstance(value, int) else value
        size = ctypes.c_size_t(ctypes.sizeof(value))
        self._call(f"{kind}SetAttribute", target, attribute, ctypes.byref(value), size)

    def _attribute(self, algorithm: Algorithm, attribute: int) -> int:
        value, written = ctypes.c_int32(), ctypes.c_size_t()
        self._call(
            "cublasLtMatmulAlgoConfigGetAttribute",
            *(ctypes.byref(algorithm), attribute, ctypes.byref(value)),
            *(ctypes.c_size_t(ctypes.sizeof(value)), ctypes.byref(written)),
        )
        return value.value

    def _call(self, function: str, *arguments: Any) -> None:
        status = getattr(self._library, function)(*arguments)
        if status:
            raise CublasLtError(f"{function} returned status {status}")


_ONE, _ZERO = (ctypes.pointer(ctypes.c_float(value)) for value in (1, 0))
