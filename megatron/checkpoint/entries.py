"""Parts of tensors with their position in the whole tensor, dtypes, and boxes of indices."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map

from megatron.parallel.parameter import spec_of

# Anything that json.dumps accepts: a dict with string keys, list, string, number, bool or None.
Json = Any

# Dtypes by their name in safetensors headers.
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return safetensors' name for a dtype, for example "BF16".

    Raises:
        ValueError: Safetensors has no such dtype.
    """
    if dtype not in _DTYPE_NAMES:
        raise ValueError(f"checkpoints cannot store {dtype}")
    return _DTYPE_NAMES[dtype]


class Box(NamedTuple):
    """A hyper-rectangle of a tensor's indices: `offset[i] <= index[i] < offset[i] + shape[i]`."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """Return the box that covers a whole tensor."""
        return cls((0,) * len(shape), shape)

    @property
    def volume(self) -> int:
        """The number of elements in the box. It is 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        """The end of the box in each dimension, exclusive."""
        return tuple(o + s for o, s in zip(self.offset, self.shape, strict=True))

    def fits(self, global_shape: tuple[int, ...]) -> bool:
        """Return whether the box lies inside a tensor of this shape."""
        if not len(self.offset) == len(self.shape) == len(global_shape):
            return False
        spans = zip(self.offset, self.shape, global_shape, strict=True)
        return all(start >= 0 and size >= 0 and start + size <= end for start, size, end in spans)

    def intersect(self, other: Box) -> Box | None:
        """Return the intersection of two boxes, or None if they do not overlap."""
        start = tuple(map(max, self.offset, other.offset))
        end = map(min, self.end, other.end)
        shape = tuple(stop - begin for begin, stop in zip(start, end, strict=True))
        return Box(start, shape) if all(size > 0 for size in shape) else None

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """Return the slices that select this box from a tensor that covers `outer`."""
        starts = (o - p for o, p in zip(self.offset, outer.offset, strict=True))
        return tuple(slice(o, o + s) for o, s in zip(starts, self.shape, strict=True))


@dataclass(frozen=True)
class Entry:
    """A tensor of a run's state, or this process's part of it.

    Attributes:
        tensor: The values of the part, on any device.
        global_shape: The shape of the whole tensor.
        offset: The index of the part's first element in the whole tensor.
    """

    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> Entry:
        """Return the entry of a tensor that this process holds in full."""
        return cls(tensor, tuple(tensor.shape), (0,) * tensor.dim())

    @property
    def box(self) -> Box:
        """The box that this part covers in the whole tensor."""
        return Box(tuple(self.offset), tuple(self.tensor.shape))


WORD_EMBEDDING = "model.embedding.word.weight"  # its number of rows is the padded vocabulary size

# Entries by name. A name has several entries if this process holds several boxes of its tensor.
State = dict[str, Entry | Sequence[Entry]]


def flatten(state: Mapping[str, Entry | Sequence[Entry]]) -> Iterator[tuple[str, Entry]]:
    """Yield a (name, entry) pair for every entry of a state."""
    for name, value in state.items():
        for entry in [value] if isinstance(value, Entry) else value:
            yield name, entry


def model_state(parts: Iterable[nn.Module]) -> State:
    """Return this process's parameters and saved buffers, by their names in a checkpoint.

    Args:
        parts: The parts of the model that this process holds.
    """
    parts = list(parts)
    parameters: State = {
        f"model.{name}": Entry(parameter.detach(), spec.global_shape, spec.offset)
        for part in parts
        for name, parameter in part.named_parameters()
        for spec in [spec_of(parameter)]
    }
    return parameters | buffer_state(parts)


def buffer_state(parts: Iterable[nn.Module]) -> State:
    """Return the buffers that are saved in checkpoints, such as the biases of routers.

    A process holds either all of a buffer or none of it.

    Args:
        parts: The parts of the model that this process holds.
    """
    return {
        f"model.{name}": Entry.whole(value.detach())
        for part in parts
        for name, value in part.state_dict(keep_vars=True).items()
        if not isinstance(value, nn.Parameter)
    }


def boxes_of_range(shape: tuple[int, ...], start: int, end: int) -> list[Box]:
    """Return the boxes that make up elements [start, end) of a tensor in row-major order.

    The boxes follow the order of the elements, and each is contiguous. A tensor with n dimensions
    needs at most 2n - 1 boxes.
    """
    if start >= end:
        return []
    if not shape:
        return [Box((), ())]
    inner = shape[1:]
    row_size = math.prod(inner)
    (first, head), (last, tail) = divmod(start, row_size), divmod(end, row_size)

    def in_row(row: int, start: int, end: int) -> list[Box]:
        boxes = boxes_of_range(inner, start, end)
        return [Box((row, *box.offset), (1, *box.shape)) for box in boxes]

    if first == last:
        return in_row(first, head, tail)
    boxes = in_row(first, head, row_size) if head else []
    complete = first + bool(head)  # the first complete row
    if complete < last:
        boxes.append(Box((complete, *(0 for _ in inner)), (last - complete, *inner)))
    return boxes + in_row(last, 0, tail)


def is_tiled(global_shape: tuple[int, ...], boxes: Iterable[Box]) -> bool:
    """Return whether boxes tile a tensor of this shape: no gaps, no overlaps, nothing outside.

    The time is linear in the number of boxes, regardless of their shapes, but doubles with each
    dimension in which some box does not span the tensor.
    """
    whole, boxes = Box.whole(global_shape), list(boxes)
    if not all(box.fits(global_shape) for box in (whole, *boxes)):
        return False
    if not whole.volume:
        return True
    cut = [
        axis
        for axis, size in enumerate(global_shape)
        if any(box.shape[axis] != size for box in boxes)
    ]
    # The number of boxes that cover an index, as a function of the index, is determined by its
    # differences along all dimensions. These are zero except at the boxes' corners: +1 where a box
    # starts in every dimension, with the sign flipped for each dimension in which it ends. So boxes
    # tile the whole if and only if their corners add up to those of the whole.
    corners = Counter[tuple[int, ...]]()
    for box, count in [(whole, -1), *((box, 1) for box in boxes)]:
        spans = (((box.offset[axis], 1), (box.end[axis], -1)) for axis in cut)
        for corner in itertools.product(*spans):
            signs = math.prod(sign for _, sign in corner)
            corners[tuple(position for position, _ in corner)] += count * signs
    return not any(corners.values())


class LazyTensor(torch.Tensor):
    """A tensor with a known shape and dtype that reads its values again for every operation.

    A checkpoint made of such tensors can be written one tensor at a time: a tensor's values stay in
    memory only as long as the result of the operation that read them.
    """

    read: Callable[[], torch.Tensor]
    parts: Callable[[], Iterator[torch.Tensor]]

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        read: Callable[[], torch.Tensor],
        parts: Callable[[], Iterator[torch.Tensor]] | None = None,
    ) -> LazyTensor:
        """Create a tensor of this shape and dtype.

        Args:
            cls: This class.
            shape: The shape of the values.
            dtype: The dtype of the values.
            read: Function that returns the values.
            parts: Function that yields the values in consecutive parts, in row-major order.
                Default: a single part.
        """
        tensor: LazyTensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        tensor.read = read
        tensor.parts = parts or (lambda: iter([read()]))
        return tensor

    # Results are plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Read the values and run an operation on them."""
        args, kwargs = tree_map(_values, (args, dict(kwargs or {})))
        return func(*args, **kwargs)


def _values(value: Any) -> Any:
    if not isinstance(value, LazyTensor):
        return value
    values = value.read()
    assert values.shape == value.shape and values.dtype == value.dtype, (value.shape, values.shape)
    return values
