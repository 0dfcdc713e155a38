"""Frozen weights in 8 or 4 bits, for training adapters (QLoRA, Dettmers et al., 2023).

A `PackedWeight` is a tensor subclass that stores a matrix as codes and scales. Operations that need
the values recompute them (kernels/quantize.py). A product therefore saves only the codes for the
backward pass, and the whole matrix is in memory only while a product reads it.

Quantizing the dequantized matrix again changes nothing. A checkpoint can therefore store the matrix
in its wider dtype, and a resumed run continues with the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from megatron.kernels.library import KernelLibrary
from megatron.kernels.quantize import BLOCK, FrozenFormat, dequantize, prepare, quantize

if TYPE_CHECKING:  # slow to import
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy


class PackedWeight(torch.Tensor):
    """A frozen matrix that is stored in 8 or 4 bits and read in a wider dtype.

    `copy_` quantizes its source. Views in other shapes that keep blocks whole, and slices of the
    first dimension, are also packed. Slices of other dimensions raise an error. All other results
    are plain tensors. The weight has no gradient.

    Attributes:
        codes: The codes, uint8 [..., in], or [..., in / 2] for nf4.
        scales: The scale of each block, [..., in / BLOCK], in the dtype of the values.
        frozen_format: The format of the codes.
        library: Compiled kernels; `None` means PyTorch's operations.
    """

    codes: Tensor
    scales: Tensor
    frozen_format: FrozenFormat
    library: KernelLibrary | None

    @staticmethod
    def __new__(
        cls,
        codes: Tensor,
        scales: Tensor,
        frozen_format: FrozenFormat,
        library: KernelLibrary | None = None,
    ) -> PackedWeight:
        """Create a matrix from its codes and scales.

        Args:
            cls: This class.
            codes: The codes, uint8 [..., in], or [..., in / 2] for nf4.
            scales: The scale of each block, [..., in / BLOCK].
            frozen_format: The format of the codes.
            library: Compiled kernels; `None` means PyTorch's operations.
        """
        shape = (*scales.shape[:-1], scales.shape[-1] * BLOCK)
        weight: PackedWeight = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=scales.dtype, device=codes.device
        )
        weight.codes, weight.scales, weight.frozen_format = codes, scales, frozen_format
        weight.library = library
        return weight

    @classmethod
    def empty(
        cls,
        shape: tuple[int, ...],
        frozen_format: FrozenFormat,
        *,
        dtype: torch.dtype,
        device: torch.device,
        library: KernelLibrary | None = None,
    ) -> PackedWeight:
        """Allocate an uninitialized weight.

        Args:
            shape: The shape. The last dimension must be a multiple of `BLOCK`.
            frozen_format: The format of the codes.
            dtype: The data type of the values and of the scales.
            device: The device on which to allocate the weight.
            library: Compiled kernels for the device; `None` means PyTorch's operations.

        Raises:
            ValueError: The last dimension is not a multiple of `BLOCK`.
        """
        *rows, width = shape
        if width % BLOCK:
            raise ValueError(f"rows of {width} elements cannot be cut into blocks of {BLOCK}")
        codes = torch.empty(
            *rows, width if frozen_format == "fp8" else width // 2, dtype=torch.uint8, device=device
        )
        scales = torch.empty(*rows, width // BLOCK, dtype=dtype, device=device)
        prepare(frozen_format, dtype, device)
        return cls(codes, scales, frozen_format, library)

    def __repr__(self) -> str:  # type: ignore[override]
        """Return a description with the format, dtype and shape."""
        return f"PackedWeight({self.frozen_format}, {self.dtype}, {list(self.shape)})"

    @property
    def packed_bytes(self) -> int:
        """The memory that the weight uses, in bytes."""
        return self.codes.nbytes + self.scales.nbytes

    def values(self) -> Tensor:
        """Return the dequantized values as a plain tensor, [..., in]."""
        return dequantize(self.codes, self.scales, self.frozen_format, self.library)

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[Tensor, ...], None]:
        """Return the tensors that `fully_shard` gathers: a shard's codes and scales (ZeRO stage 3).

        If a single process has the whole weight, as is possible for experts, `fully_shard` copies
        only one tensor. The result is then a single tensor with the bytes of both.

        Args:
            mesh: The processes that share the weight.
            outer_size: The shape of the whole weight.
            outer_stride: The strides of the whole weight.
            module: The module that contains the weight.
            mp_policy: The data types of the other weights.
        """
        if mesh.size() > 1:
            return (self.codes, self.scales), None
        parts = (self.codes, self.scales)
        return (torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts]),), None

    def fsdp_post_all_gather(
        self,
        gathered: tuple[Tensor, ...],
        metadata: None,
        dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[PackedWeight, tuple[()]] | None:
        """Return the whole weight, which shares the memory of the gathered codes and scales.

        Args:
            gathered: The codes and scales of all rows, or one tensor with the bytes of both.
            metadata: Unused.
            dtype: Unused; the values have the dtype of the scales.
            out: The weight that an earlier call returned, whose memory `fully_shard` has filled.
                The result is then `None`.
        """
        if out is not None:
            return None
        if len(gathered) == 1:
            codes, scales = gathered[0].split([self.codes.nbytes, self.scales.nbytes])
            gathered = (
                codes.view(self.codes.shape),
                scales.view(self.scales.dtype).view(self.scales.shape),
            )
        codes, scales = gathered
        return PackedWeight(codes, scales, self.frozen_format, self.library), ()

    # Operations reach the dispatcher below, so overrides of Python functions are not needed.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation on the codes if it needs no values, otherwise on the values.

        Raises:
            NotImplementedError: The operation would change some of the values in place, or is a
                slice other than of whole rows, or a view with other strides.
        """
        first = args[0] if args else None
        if isinstance(first, PackedWeight):
            if func in _ON_CODES:
                return _ON_CODES[func](*args, **(kwargs or {}))
            if func is _aten.copy_.default:
                first._store(args[1])
                return first
            # The result would not share this weight's memory, so writes to it would be lost.
            if func in _REFUSED or func._schema.is_mutable:  # type: ignore[attr-defined]
                raise NotImplementedError(
                    f"{func} is not supported for a packed weight: copy the whole weight"
                )
        args, kwargs = tree_map(_values, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _store(self, values: Tensor) -> None:
        """Quantize a tensor of any dtype or packed format into this weight."""
        if isinstance(values, PackedWeight):
            if (values.frozen_format, values.dtype) == (self.frozen_format, self.dtype):
                self.codes.copy_(values.codes)
                self.scales.copy_(values.scales)
                return
            values = values.values()
        values = values.to(self.device, self.dtype).expand(self.shape)
        codes, scales = quantize(values, self.frozen_format)
        self.codes.copy_(codes)
        self.scales.copy_(scales)


def unpacked(tensor: Tensor) -> Tensor:
    """Return the values of a packed weight, or any other tensor unchanged."""
    return tensor.values() if isinstance(tensor, PackedWeight) else tensor


def _values(value: Any) -> Any:
    return unpacked(value) if isinstance(value, Tensor) else value


def _same(weight: PackedWeight, **kwargs: Any) -> PackedWeight:
    return PackedWeight(weight.codes, weight.scales, weight.frozen_format, weight.library)


def _block_bytes(weight: PackedWeight) -> int:
    """Return the number of bytes of the codes of a block."""
    return BLOCK if weight.frozen_format == "fp8" else BLOCK // 2


def _reshaped(weight: PackedWeight, shape: Sequence[int]) -> PackedWeight | Tensor:
    *rows, width = shape
    if width == -1:
        width = weight.numel() // math.prod(rows)
    if width % BLOCK:
        return weight.values().view(shape)
    codes, scales = weight.codes, weight.scales
    scales = scales.view(*rows, width // BLOCK)
    codes = codes.view(*scales.shape[:-1], scales.shape[-1] * _block_bytes(weight))
    return PackedWeight(codes, scales, weight.frozen_format, weight.library)


def _selected(weight: PackedWeight, dim: int, index: int) -> PackedWeight | Tensor:
    if dim != 0 or weight.dim() < 2:
        return weight.values().select(dim, index)
    codes, scales = weight.codes[index], weight.scales[index]
    return PackedWeight(codes, scales, weight.frozen_format, weight.library)


def _split(weight: PackedWeight, sizes: int | Sequence[int], dim: int = 0) -> list[PackedWeight]:
    """Split the first dimension into weights that share this weight's memory."""
    if isinstance(sizes, int):
        length = weight.shape[dim]
        sizes = [min(sizes, length - start) for start in range(0, max(length, 1), max(sizes, 1))]
    ends = list(accumulate(sizes))
    return [_slice(weight, dim, end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _slice(
    weight: PackedWeight,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> PackedWeight:
    first, last, _ = slice(start, end).indices(weight.shape[dim])
    unit = BLOCK if weight.dim() == 1 else 1  # slices of a vector start and end between blocks
    if dim != 0 or step != 1 or first % unit or last % unit:
        raise NotImplementedError(
            "only whole rows can be sliced from a packed weight: copy the whole weight"
        )
    first, last = first // unit, last // unit
    length = _block_bytes(weight) if unit > 1 else 1
    codes = weight.codes[first * length : last * length]
    return PackedWeight(codes, weight.scales[first:last], weight.frozen_format, weight.library)


def _new_zeros(weight: PackedWeight, shape: Sequence[int], **_: Any) -> PackedWeight:
    made = PackedWeight.empty(
        tuple(shape),
        weight.frozen_format,
        dtype=weight.dtype,
        device=weight.device,
        library=weight.library,
    )
    made.codes.zero_()
    made.scales.zero_()
    return made


def _empty_like(
    weight: PackedWeight, *, device: torch.device | None = None, **_: Any
) -> PackedWeight:
    return PackedWeight.empty(
        tuple(weight.shape),
        weight.frozen_format,
        dtype=weight.dtype,
        device=device or weight.device,
        library=weight.library,
    )


def _strided(
    weight: PackedWeight, shape: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> PackedWeight:
    if (tuple(shape), tuple(stride), offset or 0) != (weight.shape, weight.stride(), 0):
        raise NotImplementedError("other strides of a packed weight are not supported")
    return _same(weight)


_aten = torch.ops.aten
_ON_CODES: dict[Callable[..., Any], Callable[..., Any]] = {
    _aten.detach.default: _same,
    _aten.alias.default: _same,
    _aten.view.default: _reshaped,
    _aten._unsafe_view.default: _reshaped,
    _aten.select.int: _selected,
    _aten.slice.Tensor: _slice,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split,
    # The following are for `fully_shard` only.
    _aten.new_zeros.default: _new_zeros,
    _aten.empty_like.default: _empty_like,
    _aten.as_strided.default: _strided,
}
_REFUSED = (_aten.index_put_.default,)
