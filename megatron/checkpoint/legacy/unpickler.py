"""Read a checkpoint's pickle into plain records.

This is the only module that may use `pickle.Unpickler`. There are two gates. First the byte code is
scanned without running it. It is refused if it holds an instruction that checkpoints do not use, or
a length or memo index that does not fit its size. Then the unpickler runs with a `find_class` that
never imports: a name is looked up in a table of our own stand-ins, and every other name is refused.
So nothing that a file names is imported or called. Stand-ins are plain data without behavior, and
each refuses `__setstate__`, through which a pickle could otherwise change it.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron.errors import CheckpointError

MAX_BYTES = 64 << 20  # largest pickle; the tree of a model with a hundred layers takes 100 KB

_OPCODES = frozenset(
    "PROTO STOP FRAME MARK POP POP_MARK NONE NEWTRUE NEWFALSE "
    "BININT BININT1 BININT2 LONG1 BINFLOAT "
    "BINUNICODE SHORT_BINUNICODE BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES "
    "EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST LIST APPEND APPENDS "
    "EMPTY_DICT DICT SETITEM SETITEMS EMPTY_SET ADDITEMS "
    "BINPUT LONG_BINPUT BINGET LONG_BINGET MEMOIZE "
    "GLOBAL STACK_GLOBAL REDUCE NEWOBJ BUILD BINPERSID ".split()
)
STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


class RefusedError(Exception):
    """An error for a file that asks for something that no checkpoint needs."""


def show(value: Any) -> str:
    """Return a value for a message, or only its type if it is not a scalar.

    A small pickle can hold an endless container.
    """
    if value is None or type(value) in (str, int, float, bool):
        return repr(value)[:80]
    return f"a {type(value).__name__}"


class _Fixed:
    """An object that a pickle can build but not change."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        """Refuse the change."""
        raise RefusedError(f"a {type(self).__name__} does not change")


@dataclass(frozen=True)
class Factory(_Fixed):
    """A stand-in for a global name that the file calls: one of our own functions."""

    name: str
    call: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        """Call the function."""
        return self.call(*args)


@dataclass(frozen=True)
class StorageType(_Fixed):
    """The element type of a storage."""

    dtype: torch.dtype


@dataclass(frozen=True)
class StorageRef(_Fixed):
    """A storage in the container: its record's key and the number of elements that it claims."""

    dtype: torch.dtype
    key: str
    numel: int


@dataclass(frozen=True)
class TensorRef(_Fixed):
    """A tensor as a window into a storage; its bytes are not read."""

    storage: StorageRef
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Opaque(_Fixed):
    """A value of a class that we do not have, such as an enum member."""

    name: str
    args: tuple[Any, ...]


class Namespace:
    """A stand-in for argparse.Namespace: the command line of the run that wrote the file."""

    __slots__ = ("fields",)
    fields: dict[str, Any]

    def __new__(cls) -> Namespace:
        """Create an empty namespace. A pickle creates one without calling `__init__`."""
        made = super().__new__(cls)
        made.fields = {}
        return made

    def __setstate__(self, state: Any) -> None:
        """Set the fields. This is allowed only once."""
        if type(state) is not dict or self.fields:
            raise RefusedError("a Namespace is filled once, from a dict")
        self.fields = state


class StateDict(dict[Any, Any]):
    """A stand-in for OrderedDict."""

    def __setstate__(self, state: Any) -> None:
        """Ignore the attributes that PyTorch adds (`_metadata`)."""


class Array:
    """A stand-in for a numpy array. Only random states are numpy arrays."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        """Ignore the content."""


def read_pickle(data: bytes, source: str) -> Any:
    """Return the tree in `data`: dicts, lists, tuples, scalars and the records above.

    Args:
        data: The pickle.
        source: The file's name in messages.

    Raises:
        CheckpointError: The pickle is damaged, or asks for something that no checkpoint needs.
    """
    try:
        if len(data) > MAX_BYTES:
            raise RefusedError(f"{len(data):,} bytes of structure")
        _check_opcodes(data)
        return _RestrictedUnpickler(io.BytesIO(data)).load()
    except RefusedError as error:
        raise CheckpointError(f"{source}: refused, nothing in it was run: {error}") from None
    except Exception as error:
        # A broken pickle can make the unpickler fail in any way, as can one that calls our
        # stand-ins with unsuitable arguments.
        raise CheckpointError(
            f"{source}: refused, nothing in it was run: {type(error).__name__}: {error}"
        ) from None


def _check_opcodes(data: bytes) -> None:
    """Check every instruction. `genops` itself checks lengths against the data."""
    for opcode, argument, position in pickletools.genops(data):
        if opcode.name not in _OPCODES:
            raise RefusedError(f"instruction {opcode.name} at byte {position}")
        # The memo is an array: a large index would allocate everything before it.
        if opcode.name in ("BINPUT", "LONG_BINPUT") and int(argument or 0) > len(data):
            raise RefusedError(f"memo index {argument} at byte {position}")


class _RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return our stand-in for a global name in the file."""
        if module in ("torch", "torch.cuda") and name in STORAGES:
            return StorageType(STORAGES[name])
        # Use vars(): getattr on torch imports some modules when asked for their name.
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return f"torch.{name}"
        # These are enums and similar classes of Megatron. The name is enough; nothing is imported.
        if module.partition(".")[0] == "megatron" and name.isidentifier():
            return Factory(name, lambda *args: Opaque(name, args))
        if (module, name) in _STAND_INS:
            return _STAND_INS[module, name]
        raise RefusedError(f"it names {module}.{name}, which no checkpoint needs")

    def persistent_load(self, pid: Any) -> StorageRef:
        """Return the storage to which a reference points."""
        if type(pid) is tuple and len(pid) == 5:
            word, kind, key, _location, numel = pid
            if word == "storage" and type(kind) is StorageType and type(key) is str:
                return StorageRef(kind.dtype, key, _size(numel))
        raise RefusedError("a reference that is not a storage")


def _size(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise RefusedError(f"{show(value)} is not a size")
    return value


def _sizes(value: Any) -> tuple[int, ...]:
    if type(value) not in (tuple, list):
        raise RefusedError("a shape that is not a tuple")
    return tuple(_size(one) for one in value)


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> TensorRef:
    """Return a window into a storage, after checking that it fits inside."""
    if type(storage) is not StorageRef:
        raise RefusedError("a tensor without a storage")
    ref = TensorRef(storage, _size(offset), _sizes(shape), _sizes(stride))
    numel, last = 1, ref.offset
    if len(ref.shape) != len(ref.stride):
        raise RefusedError("a tensor whose shape and stride differ in length")
    for size, step in zip(ref.shape, ref.stride, strict=True):
        numel, last = numel * size, last + (size - 1) * step
    if numel > storage.numel or (numel and last >= storage.numel):
        raise RefusedError(f"a tensor {list(ref.shape)} larger than its storage of {storage.numel}")
    return ref


def _parameter(tensor: Any, *_: Any) -> TensorRef:
    if type(tensor) is not TensorRef:
        raise RefusedError("a parameter without a tensor")
    return tensor


def _ordered_dict(*args: Any) -> StateDict:
    if len(args) > 1 or any(type(pairs) is not list for pairs in args):
        raise RefusedError("an OrderedDict that is not made from a list")
    return StateDict((key, value) for pairs in args for key, value in pairs)


def _encode(text: Any, encoding: Any) -> bytes:
    """Return the bytes that Python 3 encodes as text in the older protocols."""
    if type(text) is not str or encoding != "latin1":
        raise RefusedError("bytes in an encoding other than latin1")
    return text.encode("latin1")


def _tuple(values: Any) -> tuple[Any, ...]:
    if type(values) not in (tuple, list):
        raise RefusedError("a torch.Size that is not made from a list")
    return tuple(values)


_ARRAY = Factory("ndarray", lambda *_: Array())
_STAND_INS: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor"): Factory("tensor", _tensor),
    ("torch._utils", "_rebuild_tensor_v2"): Factory("tensor", _tensor),
    ("torch._utils", "_rebuild_parameter"): Factory("parameter", _parameter),
    ("torch", "Size"): Factory("size", _tuple),
    ("torch", "device"): Factory("device", lambda *args: Opaque("device", args)),
    ("collections", "OrderedDict"): Factory("OrderedDict", _ordered_dict),
    ("argparse", "Namespace"): Namespace,
    ("pathlib", "PosixPath"): Factory("path", lambda *args: Opaque("path", args)),
    ("_codecs", "encode"): Factory("encode", _encode),
    ("numpy", "ndarray"): _ARRAY,
    ("numpy", "dtype"): _ARRAY,
    **{
        (f"numpy.{core}.multiarray", name): _ARRAY
        for core in ("core", "_core")
        for name in ("_reconstruct", "scalar")
    },
}
