"""Frozen weights in 8 or 4 bits, for training adapters (QLoRA, Dettmers et al., 2023).

A `PackedWeight` represents a matrix. It is a tensor without memory of its own, and every operation
on it recomputes the matrix from codes and scales (kernels/quantize.py). A product therefore saves
only the codes for the backward pass, and the matrix exists only while a product reads it.

Quantizing a matrix that was read back changes nothing. A checkpoint can therefore hold the matrix
in the weights' wider format, and a resumed run continues with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from megatron.kernels.library import KernelLibrary
from megatron.kernels.quantize import BLOCK, FrozenFormat, dequantize, prepare, quantize


class PackedWeight(torch.Tensor):
    """A frozen matrix that is kept in 8 or 4 bits and read in a wider format.

    `copy_` quantizes its source. Views of other shapes and single entries of the first dimension
    are packed too; all other results are plain tensors. The weight has no gradient.

    Attributes:
        codes: The codes, uint8 [..., in], or [..., in / 2] for nf4.
        scales: The scale of each block, [..., in / BLOCK], in the format of the values.
        form: The format of the codes.
        library: Compiled kernels; `None` means PyTorch's operations.
    """

    codes: Tensor
    scales: Tensor
    form: FrozenFormat
    library: KernelLibrary | None

    @staticmethod
    def __new__(
        cls,
        codes: Tensor,
        scales: Tensor,
        form: FrozenFormat,
        library: KernelLibrary | None = None,
    ) -> PackedWeight:
        """Create the matrix with these codes and scales.

        Args:
            cls: This class.
            codes: The codes.
            scales: The scales.
            form: The format of the codes.
            library: Compiled kernels; `None` means PyTorch's operations.
        """
        shape = (*scales.shape[:-1], scales.shape[-1] * BLOCK)
        weight: PackedWeight = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=scales.dtype, device=codes.device
        )
        weight.codes, weight.scales, weight.form = codes, scales, form
        weight.library = library
        return weight

    @classmethod
    def empty(
        cls,
        shape: tuple[int, ...],
        form: FrozenFormat,
        *,
        dtype: torch.dtype,
        device: torch.device,
        library: KernelLibrary | None = None,
    ) -> PackedWeight:
        """Allocate a weight whose values are not set.

        Args:
            shape: The shape; the last dimension is a multiple of `BLOCK`.
            form: The format of the codes.
            dtype: The number format of the values, and of the scales.
            device: The device.
            library: Compiled kernels for the device; `None` means PyTorch's operations.

        Raises:
            ValueError: The last dimension cannot be cut into blocks.
        """
        *rows, width = shape
        if width % BLOCK:
            raise ValueError(f"rows of {width} elements cannot be cut into blocks of {BLOCK}")
        codes = torch.empty(
            *rows, width if form == "fp8" else width // 2, dtype=torch.uint8, device=device
        )
        scales = torch.empty(*rows, width // BLOCK, dtype=dtype, device=device)
        prepare(form, dtype, device)
        return cls(codes, scales, form, library)

    def __repr__(self) -> str:  # type: ignore[override]
        """Return the format and the shape."""
        return f"PackedWeight({self.form}, {self.dtype}, {list(self.shape)})"

    @property
    def packed_bytes(self) -> int:
        """The bytes of memory that the weight takes."""
        return self.codes.nbytes + self.scales.nbytes

    def values(self) -> Tensor:
        """Return the values as a plain tensor."""
        return dequantize(self.codes, self.scales, self.form, self.library)

    # Operations reach the dispatcher below, so overrides of Python functions are not needed.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation on the values, or on the codes if it needs no values."""
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
                    f"{func} is not supported for a packed weight: copy all of it"
                )
        args, kwargs = tree_map(_values, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _store(self, values: Tensor) -> None:
        """Quantize the values of a tensor of any format into the weight."""
        if isinstance(values, PackedWeight):
            values = values.values()
        values = values.to(self.device, self.dtype).expand(self.shape)
        codes, scales = quantize(values, self.form)
        self.codes.copy_(codes)
        self.scales.copy_(scales)


def unpacked(tensor: Tensor) -> Tensor:
    """Return the values of a packed weight, or any other tensor unchanged."""
    return tensor.values() if isinstance(tensor, PackedWeight) else tensor


def _values(value: Any) -> Any:
    return unpacked(value) if isinstance(value, Tensor) else value


def _same(weight: PackedWeight, **kwargs: Any) -> PackedWeight:
    return PackedWeight(weight.codes, weight.scales, weight.form, weight.library)


def _reshaped(weight: PackedWeight, shape: list[int]) -> PackedWeight | Tensor:
    rows = shape[:-1]
    if shape[-1] != weight.shape[-1]:
        return weight.values().view(shape)
    codes, scales = weight.codes, weight.scales
    codes, scales = (part.view(*rows, part.shape[-1]) for part in (codes, scales))
    return PackedWeight(codes, scales, weight.form, weight.library)


def _selected(weight: PackedWeight, dim: int, index: int) -> PackedWeight | Tensor:
    if dim != 0 or weight.dim() < 2:
        return weight.values().select(dim, index)
    codes, scales = weight.codes[index], weight.scales[index]
    return PackedWeight(codes, scales, weight.form, weight.library)


_aten = torch.ops.aten
_ON_CODES: dict[Callable[..., Any], Callable[..., Any]] = {
    _aten.detach.default: _same,
    _aten.alias.default: _same,
    _aten.view.default: _reshaped,
    _aten._unsafe_view.default: _reshaped,
    _aten.select.int: _selected,
}
_REFUSED = (_aten.slice.Tensor, _aten.index_put_.default)
