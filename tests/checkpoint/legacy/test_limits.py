"""The largest values that a pickle may contain are read, and the next larger ones are refused."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron.checkpoint.legacy.unpickler import (
    NAMES,
    STORAGES,
    Factory,
    Opaque,
    StorageRef,
    TensorRef,
    read_pickle,
    record_class,
    show,
)
from megatron.errors import CheckpointError


def _read(body: bytes, protocol: int = 2, **options: Any) -> Any:
    return read_pickle(b"\x80%c" % protocol + body + b".", "file", **options)


def _integer(bits: int) -> bytes:
    return b"\x8a\x20" + (2**bits - 1).to_bytes(32, "little")


def _text(length: int) -> bytes:
    return b"X" + struct.pack("<I", length) + b"x" * length


def _lists(scalars: int) -> bytes:
    """Return 7984 times one list of 1000 numbers, and some numbers: 7,999,969 values and those."""
    inner = b"](" + b"K\x01" * 1000 + b"eq\x00"
    return inner + b"](" + b"h\x00" * 7984 + b"K\x01" * scalars + b"e"


def _call(module: bytes, name: bytes, arguments: bytes) -> bytes:
    return b"c" + module + b"\n" + name + b"\n(" + arguments + b"tR"


def _enums(last: int) -> bytes:
    """Return calls with 7 texts of 1,000,000 characters and one of `last`."""
    text = _text(1_000_000) + b"q\x000"
    call = _call(b"megatron.enums", b"Kind", b"h\x00") + b"0"
    return text + call * 7 + _call(b"megatron.enums", b"Kind", _text(last))


@pytest.mark.parametrize(
    ("body_of", "largest", "message"),
    [
        (_integer, 128, "an integer of 129 bits"),
        (lambda n: b"]" * n + b"a" * (n - 1), 100, "a tree of more than 100 levels"),
        (_lists, 31, "100 levels or 8,000,000 items"),
        (_enums, 1_000_000, "calls with more than 8,000,000 items"),
        (lambda n: b"Nr" + struct.pack("<I", n), 2_000_000, "memo index"),
        (lambda n: b"}" + _integer(n) + b"Ns", 31, "as a dict's key"),
        (lambda n: b"}(" + _text(1) * n + b"tNs", 4, "a tuple as a dict's key"),
        (
            lambda n: _call(b"torch", b"Size", b"(" + b"K\x01" * n + b"t"),
            32,
            "a tensor of 33 dimensions",
        ),
        (
            lambda n: b"B" + struct.pack("<I", n) + bytes(n),
            (64 << 20) - 8,
            "67,108,865 bytes of structure",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_largest_value_is_read_and_a_larger_one_refused(
    body_of: Callable[[int], bytes], largest: int, message: str
) -> None:
    _read(body_of(largest))
    with pytest.raises(CheckpointError, match=message):
        _read(body_of(largest + 1))


def test_protocols_and_instructions_have_limits_too() -> None:
    assert _read(b"N", 5) is None
    with pytest.raises(CheckpointError, match="pickle protocol 6, newer than 5"):
        _read(b"N", 6)
    assert _read(b"N", max_instructions=3) is None
    with pytest.raises(CheckpointError, match="more than 2 instructions"):
        _read(b"N", max_instructions=2)


def test_values_are_built_as_written() -> None:
    tree = _read(b"(K\x01K\x02\x86K\x03\x85\x88\x89NG" + struct.pack(">d", 0.5) + b"]})t")
    assert tree == ((1, 2), (3,), True, False, None, 0.5, [], {}, ())
    assert _read(b"](K\x01K\x02eK\x03a") == [1, 2, 3]
    assert _read(b"}(" + _text(1) + b"K\x01" + _text(2) + b"K\x02uK\x05]s") == {
        "x": 1,
        "xx": 2,
        5: [],
    }
    assert _read(b"K\x07q\x00K\x080h\x00\x86") == (7, 7)
    assert show("y" * 100) == "'" + "y" * 79
    assert [show(value) for value in (None, True, 3, 0.5, [1])] == [
        *("None", "True", "3", "0.5", "a list"),
    ]


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("module", ["torch", "torch.cuda"])
def test_storages_have_the_type_of_their_name(module: str) -> None:
    found = {
        name: kind.dtype
        for (where, name), kind in NAMES.items()
        if where == module and not isinstance(kind, Factory | str)
    }
    assert found == STORAGES
    for name, dtype in STORAGES.items():
        assert getattr(torch, name)().dtype == dtype


def _tensor(offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> TensorRef:
    storage = StorageRef(torch.float32, "0", 12)
    found = NAMES["torch._utils", "_rebuild_tensor_v2"].call(storage, offset, shape, stride)
    assert isinstance(found, TensorRef)
    return found


@pytest.mark.parametrize(
    ("offset", "shape", "stride"),
    [
        (0, (3, 4), (4, 1)),
        (0, (4, 3), (1, 4)),
        (2, (2, 5), (5, 1)),
        (11, (), ()),
        (1, (1, 11), (100, 1)),
        (90, (0, 4), (4, 1)),  # no element
        (0, (12,), (0,)),  # one element again and again, but no more than the storage has
    ],
)
def test_tensors_that_end_with_their_storage_are_read(
    offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> None:
    ref = _tensor(offset, shape, stride)
    assert (ref.offset, ref.shape, ref.stride) == (offset, shape, stride)
    if torch.Size(shape).numel():
        for more in range(len(shape)):
            larger = tuple(size + (i == more) for i, size in enumerate(shape))
            with pytest.raises(Exception, match="larger than its storage of 12"):
                _tensor(offset, larger, stride)
        if 0 not in stride:
            with pytest.raises(Exception, match="larger than its storage of 12"):
                _tensor(offset + 1, shape, stride)


def test_unknown_classes_become_opaque_values() -> None:
    assert _read(_call(b"torch", b"device", _text(4))) == Opaque("device", ("xxxx",))
    assert _read(_call(b"signal", b"Signals", b"K\x0f")) == Opaque("Signals", (15,))
    assert _read(b"ctorch\nfloat16\n") == "torch.float16"
    with pytest.raises(CheckpointError, match="it names os.x, which no such file needs"):
        _read(b"cos\nx\n", names={})
    with pytest.raises(CheckpointError, match=r"it names megatron\.a\.x, which no such file needs"):
        _read(b"cmegatron.a\nx\n", names={})
    with pytest.raises(CheckpointError, match=r"it names megatrons\.a\.x, which no checkpoint"):
        _read(b"cmegatrons.a\nx\n")


def test_objects_are_filled_once_from_a_dict_or_a_tuple() -> None:
    names = {("m", "C"): record_class("C")}
    made = b"cm\nC\n)\x81"
    for state, expected in ((b"}" + _text(1) + b"Ns", {"x": None}), (b"K\x01\x85", (1,))):
        found = _read(made + state + b"b", names=names)
        assert (found.kind, found.state) == ("C", expected)
        with pytest.raises(
            CheckpointError, match="a C may be filled only once, from a dict or a t"
        ):
            _read(made + state + b"b" + state + b"b", names=names)
    for state in (b"]", b"N", b"}K\x01Ns"):
        with pytest.raises(
            CheckpointError, match="a C may be filled only once, from a dict or a t"
        ):
            _read(made + state + b"b", names=names)
    assert _read(b"}" + made + b"K\x01s", names=names) != {}  # an object may be a key
    with pytest.raises(CheckpointError, match="a new object of a Factory"):
        _read(b"cm\nf\n)\x81", names={("m", "f"): Factory("f", tuple)})
