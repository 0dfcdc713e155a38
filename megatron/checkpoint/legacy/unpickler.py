"""Read a checkpoint's pickle into plain records.

Nothing here uses the `pickle` module. A small virtual machine interprets the pickle: it knows the
instructions that checkpoints use, builds only dicts, lists, tuples, scalars and the records below,
and refuses everything else. A name in the file is looked up in a table of our own functions.
Nothing that a file names is imported or called.

A hostile file cannot hang or crash the reader either. There are limits on bytes, instructions, the
sizes of integers, and the items that calls copy. Dict keys are strings, small integers, flat tuples
of these, or records, because hashing nested tuples takes time exponential in their depth. A
finished tree contains no cycle, and its depth and its number of values are limited, counting a
shared value each time it occurs. Code that walks the tree may therefore use recursion.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron.errors import CheckpointError

MAX_BYTES = 64 << 20  # largest pickle; the tree of a model with a hundred layers takes 100 KB
MAX_INSTRUCTIONS = 2_000_000  # this many take about five seconds; a tensor needs about 60
MAX_INTEGER_BITS = 128  # the integers of random states have up to 64
MAX_ITEMS = 8_000_000  # values in the tree, counting a shared value each time it occurs
MAX_DEPTH = 100
MAX_DIMENSIONS = 32

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
    """An error for content of a pickle that no checkpoint needs."""


def show(value: Any) -> str:
    """Return text for a value in a message: a scalar's value, or the type of any other value.

    Containers are not printed, because a small pickle can encode an endless one.
    """
    if value is None or type(value) in (str, int, float, bool):
        return repr(value)[:80]
    return f"a {type(value).__name__}"


@dataclass(frozen=True)
class Factory:
    """A function of this program that replaces a global name called by a pickle.

    Attributes:
        name: A name for messages.
        call: The function, which gets the arguments in the pickle.
        is_class: Whether the pickle may create objects of this class and set their state.
    """

    name: str
    call: Callable[..., Any]
    is_class: bool = False


@dataclass(frozen=True)
class StorageType:
    """The element type of a storage."""

    dtype: torch.dtype


@dataclass(frozen=True)
class StorageRef:
    """A reference to a storage.

    Attributes:
        dtype: The dtype of its elements.
        key: The key of its record in the file.
        numel: The number of elements according to the pickle.
    """

    dtype: torch.dtype
    key: str
    numel: int


@dataclass(frozen=True)
class TensorRef:
    """A reference to a tensor: a strided view of a storage whose bytes have not been read.

    Attributes:
        storage: The storage that contains the elements.
        offset: The index of the tensor's first element in the storage.
        shape: The tensor's shape.
        stride: The tensor's strides, in elements.
    """

    storage: StorageRef
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Opaque:
    """A value of a class that this program does not have, such as an enum member.

    Attributes:
        name: The name of the class.
        args: The arguments with which it was created.
    """

    name: str
    args: tuple[Any, ...]


class Namespace:
    """A stand-in for argparse.Namespace: the command line of the run that wrote the file."""

    def __init__(self) -> None:
        """Create an empty namespace, whose fields the pickle sets once."""
        self.fields: dict[str, Any] = {}


class Record:
    """A stand-in for an object.

    Attributes:
        kind: The name of its class.
        state: Its state, which the pickle sets once.
    """

    def __init__(self, kind: str) -> None:
        """Create a record without a state."""
        self.kind = kind
        self.state: dict[str, Any] | tuple[Any, ...] | None = None


class StateDict(dict[Any, Any]):
    """A stand-in for OrderedDict."""


class Array:
    """A stand-in for a numpy array, scalar or dtype, without its content.

    Only random states are stored this way.
    """


def record_class(kind: str) -> Factory:
    """Return a stand-in for a class, whose objects are read as `Record`s.

    Args:
        kind: The name of the class.
    """
    return Factory(kind, lambda: Record(kind), is_class=True)


def read_pickle(
    data: bytes,
    source: str,
    *,
    names: Mapping[tuple[str, str], Any] | None = None,
    max_instructions: int = MAX_INSTRUCTIONS,
) -> Any:
    """Return the tree in a pickle: dicts, lists, tuples, scalars and the records above.

    Args:
        data: The bytes of the pickle.
        source: The file's name, for messages.
        names: The only global names that the pickle may use, with our stand-ins for them. The
            dtypes of torch are always allowed. `None` allows the names that torch.save uses
            (`NAMES`), and Megatron's own classes, whose objects are read as `Opaque`.
        max_instructions: The maximum number of instructions to run.

    Raises:
        CheckpointError: The pickle is damaged, or contains something that no checkpoint needs.
    """
    try:
        if len(data) > MAX_BYTES:
            raise RefusedError(f"{len(data):,} bytes of structure")
        tree = _Machine(names, max_instructions).run(data)
        _check_extent(tree)
        return tree
    except RefusedError as error:
        raise CheckpointError(f"{source}: refused, nothing in it was run: {error}") from None
    except Exception as error:
        # A broken pickle, or one that calls our functions with unsuitable arguments, can raise any
        # exception in the machine, for example because the stack is empty.
        raise CheckpointError(
            f"{source}: refused, nothing in it was run: {type(error).__name__}: {str(error)[:200]}"
        ) from None


class _Machine:
    """A virtual machine that interprets a pickle: its stack, marks and memo."""

    def __init__(self, names: Mapping[tuple[str, str], Any] | None, max_instructions: int) -> None:
        self._names, self._limit = names, max_instructions
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._copied = 0

    def run(self, data: bytes) -> Any:
        """Return the value that the pickle builds."""
        # This does the work of `pickletools.genops`, whose generator would take most of the time.
        # The functions of `pickletools` that read arguments check the lengths of strings and
        # numbers against the data.
        stream = io.BytesIO(data)
        for _ in range(self._limit):
            code = stream.read(1)
            known = _OPCODES.get(code)
            if known is None:
                end = "its end is missing"
                raise RefusedError(f"no instruction at byte {stream.tell() - 1}" if code else end)
            name, read_argument, instruction = known
            if name == "STOP":
                return self.pop()
            if instruction is None:
                raise RefusedError(f"instruction {name} at byte {stream.tell() - 1}")
            instruction(self, None if read_argument is None else read_argument(stream))
        raise RefusedError(f"more than {self._limit:,} instructions")

    def start(self, version: int) -> None:
        if version > 5:
            raise RefusedError(f"pickle protocol {version}, newer than 5")

    def push(self, value: Any) -> None:
        if type(value) is int and value.bit_length() > MAX_INTEGER_BITS:
            raise RefusedError(f"an integer of {value.bit_length():,} bits")
        self._stack.append(value)

    def pop(self) -> Any:
        return self._stack.pop()

    def mark(self) -> None:
        self._marks.append(len(self._stack))

    def take(self, count: int | None = None) -> list[Any]:
        """Pop the last `count` values, or all values since the last mark, and return them."""
        start = self._marks.pop() if count is None else len(self._stack) - count
        if not 0 <= start <= len(self._stack):
            raise RefusedError("an empty stack")
        items = self._stack[start:]
        del self._stack[start:]
        return items

    def remember(self, index: int | None = None) -> None:
        index = len(self._memo) if index is None else index
        if index > self._limit:
            raise RefusedError(f"memo index {index:,}")
        self._memo[index] = self._stack[-1]

    def recall(self, index: int) -> None:
        self._stack.append(self._memo[index])

    def append(self, values: list[Any]) -> None:
        """Extend the list on the stack."""
        if type(self._stack[-1]) is not list:
            raise RefusedError(f"an item appended to {show(self._stack[-1])}")
        self._stack[-1].extend(values)

    def set_items(self, flat: list[Any]) -> None:
        """Update the dict on the stack with alternating keys and values."""
        if type(self._stack[-1]) not in (dict, StateDict):
            raise RefusedError(f"an item set in {show(self._stack[-1])}")
        self._stack[-1].update(_checked_items(zip(flat[::2], flat[1::2], strict=True)))

    def call(self) -> None:
        """Pop a `Factory` and its arguments, call it, and push the result."""
        target, args = self.take(2)
        if type(target) is not Factory or type(args) is not tuple:
            raise RefusedError(f"a call of {show(target)}")
        # A call may copy its arguments, and a short pickle can repeat it with the same long values.
        self._copied += sum(len(arg) for arg in args if isinstance(arg, str | list | tuple))
        if self._copied > MAX_ITEMS:
            raise RefusedError(f"calls with more than {MAX_ITEMS:,} items")
        self._stack.append(target.call(*args))

    def find(self, module: Any, name: Any) -> None:
        """Push our stand-in for a global name in the pickle."""
        if type(module) is not str or type(name) is not str:
            raise RefusedError("a name that is not a string")
        self._stack.append(_find(module, name, self._names))

    def make_object(self) -> None:
        instance = self._stack[-2]
        if type(instance) is not Factory or not instance.is_class:
            raise RefusedError(f"a new object of {show(instance)}")
        self.call()

    def set_state(self) -> None:
        state, target = self.pop(), self._stack[-1]
        if type(target) in (StateDict, Array):
            return  # attributes that PyTorch adds (`_metadata`), and the content of an array
        if type(target) is Record:
            names = all(type(key) is str for key in state) if type(state) is dict else None
            if target.state is not None or not (names or type(state) is tuple):
                raise RefusedError(
                    f"a {target.kind} may be filled only once, from a dict or a tuple"
                )
            target.state = state
            return
        if type(target) is not Namespace:
            raise RefusedError(f"{show(target)} cannot be changed")
        if type(state) is not dict or target.fields or not all(type(key) is str for key in state):
            raise RefusedError("a Namespace is filled once, from a dict with names as keys")
        target.fields = state


_SCALARS = (
    "BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINUNICODE BINSTRING SHORT_BINSTRING "
    "BINBYTES SHORT_BINBYTES".split()
)
_INSTRUCTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": lambda machine, version: machine.start(version),
    "FRAME": lambda machine, _: None,
    **dict.fromkeys(_SCALARS, _Machine.push),
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "TUPLE1": lambda machine, _: machine.push(tuple(machine.take(1))),
    "TUPLE2": lambda machine, _: machine.push(tuple(machine.take(2))),
    "TUPLE3": lambda machine, _: machine.push(tuple(machine.take(3))),
    "MARK": lambda machine, _: machine.mark(),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.take())),
    "APPEND": lambda machine, _: machine.append(machine.take(1)),
    "APPENDS": lambda machine, _: machine.append(machine.take()),
    "SETITEM": lambda machine, _: machine.set_items(machine.take(2)),
    "SETITEMS": lambda machine, _: machine.set_items(machine.take()),
    "POP": lambda machine, _: machine.pop(),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), _Machine.remember),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine.recall),
    "GLOBAL": lambda machine, name: machine.find(*name.split(" ", 1)),
    "STACK_GLOBAL": lambda machine, _: machine.find(*machine.take(2)),
    "BINPERSID": lambda machine, _: machine.push(_storage(machine.pop())),
    "REDUCE": lambda machine, _: machine.call(),
    "NEWOBJ": lambda machine, _: machine.make_object(),
    "BUILD": lambda machine, _: machine.set_state(),
}
# Each instruction's name, the function that reads its argument, and our function that executes it.
_OPCODES = {
    opcode.code.encode("latin1"): (
        opcode.name,
        opcode.arg.reader if opcode.arg else None,
        _INSTRUCTIONS.get(opcode.name),
    )
    for opcode in pickletools.opcodes
}


def _checked_items(pairs: Iterable[Any]) -> Iterable[tuple[Any, Any]]:
    for key, value in pairs:
        parts = key if type(key) is tuple and len(key) <= 4 else (key,)
        for part in parts:
            is_small = type(part) is int and part.bit_length() < 32
            if type(part) is not str and not is_small and type(key) is not Record:
                raise RefusedError(f"{show(key)} as a dict's key")
        yield key, value


def _find(module: str, name: str, names: Mapping[tuple[str, str], Any] | None) -> Any:
    """Return our stand-in for a global name in the pickle."""
    # Use vars(): getattr on torch would import some modules.
    if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
        return f"torch.{name}"
    known = NAMES if names is None else names
    if (module, name) in known:
        return known[module, name]
    # Megatron's enums and similar classes: the name is enough, and nothing is imported.
    if names is None and module.partition(".")[0] == "megatron" and name.isidentifier():
        return Factory(name, lambda *args: Opaque(name, args))
    kind = "checkpoint" if names is None else "such file"
    raise RefusedError(f"it names {f'{module}.{name}'[:200]}, which no {kind} needs")


def _storage(reference: Any) -> StorageRef:
    """Return the storage that a reference points to."""
    if type(reference) is tuple and len(reference) == 5:
        word, kind, key, _location, numel = reference
        if word == "storage" and type(kind) is StorageType and type(key) is str:
            return StorageRef(kind.dtype, key, _size(numel))
    raise RefusedError("a reference that is not a storage")


def _check_extent(tree: Any) -> None:
    """Refuse a tree with a cycle, or one that is too deep or too large to walk."""
    extents: dict[int, tuple[int, int]] = {}  # depth and number of values of each container
    entered: set[int] = set()
    waiting = [tree]
    while waiting:
        node = waiting[-1]
        if id(node) in extents or type(node) not in _CONTAINERS:
            waiting.pop()
            continue
        inner = [child for child in _children(node) if type(child) in _CONTAINERS]
        if inner and id(node) not in entered:
            entered.add(id(node))
            waiting += inner
        elif not all(id(child) in extents for child in inner):
            raise RefusedError("a container that contains itself")
        else:
            parts = [extents[id(child)] for child in inner]
            depth = 1 + max((part[0] for part in parts), default=0)
            items = 1 + len(_children(node)) + sum(part[1] for part in parts)
            if depth > MAX_DEPTH or items > MAX_ITEMS:
                raise RefusedError(f"a tree of more than {MAX_DEPTH} levels or {MAX_ITEMS:,} items")
            extents[id(node)] = depth, items
            waiting.pop()


_CONTAINERS = (dict, StateDict, list, tuple, Namespace, Opaque, Record)


def _children(node: Any) -> list[Any]:
    if isinstance(node, dict):
        return [*node.values(), *(key for key in node if type(key) is Record)]
    if isinstance(node, Record):
        return _children(node.state)
    if isinstance(node, Namespace):
        return list(node.fields.values())
    if isinstance(node, Opaque):
        return list(node.args)
    return list(node) if isinstance(node, list | tuple) else []


def _size(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise RefusedError(f"{show(value)} is not a size")
    return value


def _sizes(value: Any) -> tuple[int, ...]:
    if type(value) not in (tuple, list):
        raise RefusedError("a shape that is not a tuple")
    if len(value) > MAX_DIMENSIONS:
        raise RefusedError(f"a tensor of {len(value):,} dimensions")
    return tuple(_size(item) for item in value)


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> TensorRef:
    """Return a reference to a tensor, after checking that the tensor fits into its storage."""
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
    return StateDict(_checked_items(pair for pairs in args for pair in pairs))


def _encode(text: Any, encoding: Any) -> bytes:
    """Return the bytes that pickle protocols before 3 store as latin1 text."""
    if type(text) is not str or encoding != "latin1":
        raise RefusedError("bytes in an encoding other than latin1")
    return text.encode("latin1")


def _attributed(function: Any, kind: Any, args: Any, *_: Any) -> TensorRef:
    """Return a tensor without the Python attributes with which PyTorch 1.12 and later save it.

    Megatron-LM's fp32 copies of 16-bit parameters have them (`tensor_model_parallel` and others).
    """
    if type(function) is not Factory or function.name != "tensor" or kind != "torch.Tensor":
        raise RefusedError("an unknown kind of tensor")
    if type(args) is not tuple:
        raise RefusedError("a tensor without arguments")
    ref: TensorRef = function.call(*args)
    return ref


_ARRAY = Factory("ndarray", lambda *_: Array())
SIZE = Factory("size", _sizes)
# Our stand-ins for the names that torch.save uses.
NAMES: dict[tuple[str, str], Any] = {
    **{
        (module, name): StorageType(dtype)
        for module in ("torch", "torch.cuda")
        for name, dtype in STORAGES.items()
    },
    ("torch._utils", "_rebuild_tensor"): Factory("tensor", _tensor),
    ("torch._utils", "_rebuild_tensor_v2"): Factory("tensor", _tensor),
    ("torch._utils", "_rebuild_parameter"): Factory("parameter", _parameter),
    ("torch._tensor", "_rebuild_from_type_v2"): Factory("tensor with attributes", _attributed),
    ("torch", "Tensor"): "torch.Tensor",
    ("torch", "Size"): SIZE,
    ("torch", "device"): Factory("device", lambda *args: Opaque("device", args)),
    ("collections", "OrderedDict"): Factory("OrderedDict", _ordered_dict),
    ("argparse", "Namespace"): Factory("Namespace", Namespace, is_class=True),
    ("signal", "Signals"): Factory("signal", lambda *args: Opaque("Signals", args)),
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
