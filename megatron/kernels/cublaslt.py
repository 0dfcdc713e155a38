"""One function of NVIDIA's cuBLASLt that PyTorch does not offer: an 8-bit product added to what its
output holds (`torch._scaled_mm` can only write over it). The library is the one PyTorch has loaded;
numbers below are those of its public header, cublasLt.h.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.device import Device, cuda_release, stream_handle
from megatron.kernels.fp8 import Fp8

_COMPUTE_32F = 68
_TYPES = {torch.float32: 0, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}  # cudaDataType
_TRANSPOSED = 1
_TRANSPOSE_A, _SCALE_A, _SCALE_B = 3, 17, 18
_PREFERRED_WORKSPACE = 1
WORKSPACE_BYTES = 32 * 1024 * 1024  # what NVIDIA recommends for Hopper


class CublasLtError(RuntimeError):
    """cuBLASLt refused a call: our mistake, not the user's."""


class _Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t, the algorithm itself first."""

    _fields_ = [
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


@dataclass(frozen=True)
class _Plan:
    """How to multiply matrices of one shape; it lives as long as the process."""

    operation: ctypes.c_void_p
    left: ctypes.c_void_p
    right: ctypes.c_void_p
    out: ctypes.c_void_p
    algorithm: _Algorithm


class CublasLt:
    """The library, and a plan for each shape that was asked for.

    Raises:
        OSError: the library is not there.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL(f"libcublasLt.so.{cuda_release()}")
        self._handles: dict[int, ctypes.c_void_p] = {}
        self._plans: dict[tuple[Any, ...], _Plan] = {}

    def add_product(self, left: Fp8, right: Fp8, into: Tensor) -> None:
        """into += left right^T, summed in fp32 without shortcuts.

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
            self._run(plan, gpu, left, right, into)

    def _run(self, plan: _Plan, gpu: int, left: Fp8, right: Fp8, into: Tensor) -> None:
        # Its matrices are by columns, ours by rows: right is its A, left its B.
        self._set(plan.operation, _SCALE_A, ctypes.c_void_p(right.inverse.data_ptr()))
        self._set(plan.operation, _SCALE_B, ctypes.c_void_p(left.inverse.data_ptr()))
        needed = plan.algorithm.workspace
        workspace = torch.empty(max(needed, 1), dtype=torch.uint8, device=into.device)
        one = ctypes.byref(ctypes.c_float(1))
        self._call(
            "cublasLtMatmul",
            *(self._handles[gpu], plan.operation),
            *(one, _address(right.values), plan.right, _address(left.values), plan.left),
            *(one, _address(into), plan.out, _address(into), plan.out),
            *(ctypes.byref(plan.algorithm), _address(workspace), ctypes.c_size_t(needed)),
            ctypes.c_void_p(stream_handle(gpu)),
        )

    def _plan(self, gpu: int, left: Fp8, right: Fp8, into: Tensor) -> _Plan:
        if gpu not in self._handles:
            self._handles[gpu] = self._create("cublasLtCreate")
        operation = self._create("cublasLtMatmulDescCreate", _COMPUTE_32F, _TYPES[torch.float32])
        self._set(operation, _TRANSPOSE_A, ctypes.c_int32(_TRANSPOSED))
        layouts = [self._layout(matrix) for matrix in (right.values, left.values, into)]
        preference = self._create("cublasLtMatmulPreferenceCreate")
        limit = ctypes.c_size_t(WORKSPACE_BYTES)
        self._call(
            "cublasLtMatmulPreferenceSetAttribute",
            *(preference, _PREFERRED_WORKSPACE, ctypes.byref(limit)),
            ctypes.c_size_t(ctypes.sizeof(limit)),
        )
        best, found = _Algorithm(), ctypes.c_int()
        self._call(
            "cublasLtMatmulAlgoGetHeuristic",
            *(self._handles[gpu], operation, *layouts, layouts[2], preference),
            *(1, ctypes.byref(best), ctypes.byref(found)),
        )
        self._call("cublasLtMatmulPreferenceDestroy", preference)
        if not found.value or best.state:
            raise CublasLtError(f"cuBLASLt knows no way to multiply {list(left.values.shape)}")
        return _Plan(operation, layouts[1], layouts[0], layouts[2], best)

    def _layout(self, matrix: Tensor) -> ctypes.c_void_p:
        rows, columns = matrix.shape
        sizes = (ctypes.c_uint64(columns), ctypes.c_uint64(rows), ctypes.c_int64(columns))
        return self._create("cublasLtMatrixLayoutCreate", _TYPES[matrix.dtype], *sizes)

    def _create(self, function: str, *arguments: Any) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self._call(function, ctypes.byref(made), *arguments)
        return made

    def _set(self, operation: ctypes.c_void_p, attribute: int, value: Any) -> None:
        self._call(
            "cublasLtMatmulDescSetAttribute",
            *(operation, attribute, ctypes.byref(value)),
            ctypes.c_size_t(ctypes.sizeof(value)),
        )

    def _call(self, function: str, *arguments: Any) -> None:
        status = getattr(self._library, function)(*arguments)
        if status:
            raise CublasLtError(f"{function} answered status {status}")


def _address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
