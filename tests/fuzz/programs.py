"""Random pickles: programs written instruction by instruction, and trees that Python pickles.

Half of the programs are well-formed, so that the reader goes through them to the end and the tree
that they build is what counts. The others ask for what a reader must refuse: nested tuples as keys,
loops, values with 2^60 leaves, integers of thousands of bits, calls of other functions.
"""

from __future__ import annotations

import math
import pickletools
import random
import struct
from argparse import Namespace
from collections import OrderedDict
from typing import Any

from megatron.checkpoint.legacy import unpickler

_TREE_LEVELS = 12
_NAMES = (
    *("os system", "builtins eval", "builtins getattr", "os x.y", "torch load", "posix system"),
    *("collections OrderedDict", "torch._utils _rebuild_tensor_v2", "argparse Namespace"),
    *("torch FloatStorage", "torch float32", "torch Size", "_codecs encode", "numpy dtype"),
    *("megatron.enums ModelType", "torch._utils _rebuild_parameter", "pathlib PosixPath"),
)


def _size(draw: random.Random, limit: int) -> int:
    """Return a number up to the limit; each order of magnitude is as likely as the others."""
    return int(math.exp(draw.uniform(0, math.log(limit))))


def _text(data: bytes) -> bytes:
    return b"X" + struct.pack("<I", len(data)) + data


def _integer(number: int) -> bytes:
    size = number.bit_length() // 8 + 1
    head = b"\x8a" + bytes([size]) if size < 256 else b"\x8b" + struct.pack("<i", size)
    return head + number.to_bytes(size, "little", signed=True)


class Program:
    """A pickle that is being written; each method adds the code of one value."""

    def __init__(self, seed: int) -> None:
        """Choose what kind of program it is.

        Args:
            seed: The program's number.
        """
        self.draw = random.Random(seed)
        self.is_hostile = self.draw.random() < 0.5
        self.code = bytearray(b"\x80" + bytes([self.draw.choice((2, 3, 4, 5))]))
        self.left = _size(self.draw, 3000)  # values that may still be added
        self.longest = 100_000 if self.draw.random() < 0.02 else 300
        self.memo = 0  # entries of the memo

    def finish(self) -> bytes:
        """Return the whole program."""
        self.code += b"]("
        while self.left > 0:
            self.value()
        self.code += b"e."
        if self.is_hostile and self.draw.random() < 0.2:
            at, size = self.draw.randrange(len(self.code)), self.draw.randint(0, 4)
            self.code[at : at + size] = self.draw.randbytes(self.draw.randint(0, 4))
        return bytes(self.code)

    def value(self, level: int = 0) -> None:
        """Add any value."""
        self.left -= 1
        kinds = [self.scalar]
        if level < (40 if self.is_hostile else 5) and self.left > 0:
            kinds += [self.list, self.dict, self.tuple, self.namespace, self.ordered, self.opaque]
            kinds += [self.tensor, self.chain, self.doubled, self.crossed, self.recall, self.noise]
        if self.is_hostile and self.draw.random() < 0.05:
            kinds = [self.loop, self.foreign, self.any_instruction, self.hostile_dict, self.copies]
        self.draw.choice(kinds)(level + 1)
        if self.draw.random() < 0.3:
            self.keep()

    def values(self, level: int, most: int = 6) -> int:
        count = self.draw.randint(0, most)
        for _ in range(count):
            self.value(level)
        return count

    def keep(self) -> int:
        """Store the value on the stack in the memo, and return its index."""
        place, self.memo = self.memo, self.memo + 1
        short = b"q%c" % place if place < 256 else b"\x94"
        self.code += self.draw.choice((b"\x94", short, b"r" + struct.pack("<I", place)))
        return place

    def get(self, place: int) -> bytes:
        return b"h%c" % place if place < 256 else b"j" + struct.pack("<I", place)

    def name(self, name: str) -> None:
        """Add a global name in one of the two encodings."""
        module, _, word = name.partition(" ")
        if self.draw.random() < 0.5:
            self.code += f"c{module}\n{word}\n".encode()
        else:
            self.code += _text(module.encode()) + _text(word.encode()) + b"\x93"

    def scalar(self, level: int) -> None:
        draw = self.draw
        letters = (b"weight", "\u00e9\u4e2d".encode(), b"\xed\xa0\x80", b"\0")
        text = draw.choice(letters) * draw.randint(0, 9)
        bits = draw.choice((31, 63, 127)) if not self.is_hostile else _size(draw, 20_000)
        self.code += draw.choice(
            (
                *(b"N", b"\x88", b"\x89", b"K\x07", b"M\x07\x00", b"J\xff\xff\xff\xff"),
                *(b"G" + draw.randbytes(8), _integer(draw.getrandbits(bits)), _text(text)),
                *(b"\x8c%c" % len(text) + text, b"C%c" % len(text) + text),
            )
        )

    def key(self) -> None:
        word = _text(b"key%d" % self.draw.randint(0, 99))
        self.code += self.draw.choice((word, word, b"K\x05", word + word + b"\x86", word + b"\x85"))

    def list(self, level: int) -> None:
        self.code += b"]("
        self.values(level)
        self.code += b"e"

    def tuple(self, level: int) -> None:
        if self.draw.random() < 0.5:
            self.value(level)
            self.code += b"\x85"
        else:
            self.code += b"("
            self.values(level)
            self.code += b"t"

    def dict(self, level: int, key: Any = None) -> None:
        self.code += b"}("
        for _ in range(self.draw.randint(0, 5)):
            (key or self.key)()
            self.value(level)
        self.code += b"u"

    def hostile_dict(self, level: int) -> None:
        self.dict(level, lambda: self.value(level) if self.draw.random() < 0.5 else self.key())

    def namespace(self, level: int) -> None:
        self.name("argparse Namespace")
        self.code += self.draw.choice((b")\x81", b")R")) + b"}" + _text(b"a")
        self.value(level)
        self.code += b"sb" * (2 if self.is_hostile and self.draw.random() < 0.1 else 1)

    def ordered(self, level: int) -> None:
        self.name("collections OrderedDict")
        self.code += b")R("
        for _ in range(self.draw.randint(0, 5)):
            self.key()
            self.value(level)
        self.code += b"u}" + _text(b"_metadata")
        self.value(level)
        self.code += b"sb"

    def opaque(self, level: int) -> None:
        self.name("megatron.enums ModelType")
        self.tuple(level)
        self.code += b"R"

    def tensor(self, level: int) -> None:
        draw = self.draw
        edges = (0, 1, -1, 1 << 31, (1 << 62) - 1, 1 << 90) if self.is_hostile else (0, 1, 2)
        numbers = [_integer(draw.choice(edges)) for _ in range(3)]
        dimensions = draw.randint(0, 3)
        self.name("torch._utils _rebuild_tensor_v2")
        self.code += b"((" + _text(b"storage")
        self.name(draw.choice(("torch FloatStorage", "torch HalfStorage", "torch LongStorage")))
        self.code += _text(b"%d" % draw.randint(0, 9)) + _text(b"cpu") + _integer(64) + b"tQ"
        self.code += numbers[0] + b"(" + numbers[1] * dimensions + b"t("
        if self.is_hostile:
            dimensions = draw.choice((dimensions, dimensions, dimensions + 1, 40))
        self.code += numbers[2] * dimensions + b"t\x89"
        self.ordered(level)
        self.code += b"tR"

    def chain(self, level: int) -> None:
        """Nest a value repeatedly in the same kind of container."""
        count = _size(self.draw, self.longest)
        count = count if self.is_hostile else min(count, 10)
        self.name("megatron.enums ModelType")
        opaque = self.get(self.keep())
        self.name("argparse Namespace")
        space = self.get(self.keep())
        self.code += b"00"
        before, after = self.draw.choice(
            (
                *((b"", b"\x85"), (b"]", b"a"), (b"}K\x01", b"s"), (opaque, b"\x85R")),
                *((space + b")\x81}" + _text(b"a"), b"sb"), (opaque + b"]", b"a\x85R")),
            )
        )
        self.code += before * count
        self.value(level)
        self.code += after * count

    def doubled(self, level: int) -> None:
        """Add a value with 2^n leaves: each level contains the level below twice."""
        count = self.draw.randint(1, 70 if self.is_hostile else 8)
        self.value(level)
        form = self.draw.choice((b"%b%b\x86", b"](%b%be", b"}(K\x01%bK\x02%bu"))
        for _ in range(count):
            below = self.get(self.keep())
            self.code += b"0" + form % (below, below)

    def crossed(self, level: int) -> None:
        """List a long container many times."""
        size, times = (_size(self.draw, self.longest) for _ in range(2))
        many = b"".join(_text(b"%d" % i) + b"N" for i in range(min(size, 1000)))
        self.code += self.draw.choice((b"](" + b"K\x01" * size + b"e", b"}(" + many + b"u"))
        place = self.get(self.keep())
        self.code += b"0](" + place * times + b"e"

    def recall(self, level: int) -> None:
        """Add a value that has been stored, perhaps one that is not finished."""
        place = self.draw.randrange(self.memo) if self.memo and self.is_hostile else None
        self.code += b"N" if place is None else self.get(place)

    def noise(self, level: int) -> None:
        """Add instructions without effect, and a value."""
        count = _size(self.draw, self.longest)
        frame = b"\x95" + struct.pack("<Q", self.draw.randint(0, 99))
        self.code += self.draw.choice((b"N0", b")0", b"\x80\x04", frame, b"(t0", b"}0")) * count
        self.value(level)

    def loop(self, level: int) -> None:
        """Add a container that contains itself, some levels down."""
        before, after = self.draw.choice(((b"]", b"a"), (b"}", b"s")))
        key = b"K\x02" if before == b"}" else b""
        levels = self.draw.randint(0, 50)
        self.code += before
        place = self.get(self.keep())
        self.code += key + b"]" * levels + place + b"a" * levels + after

    def copies(self, level: int) -> None:
        """Call a function repeatedly with the same long list."""
        size, times = (_size(self.draw, self.longest) for _ in range(2))
        self.name(self.draw.choice(("torch Size", "collections OrderedDict", "pathlib PosixPath")))
        call = self.get(self.keep())
        self.code += b"0](" + b"K\x01" * size + b"e"
        many = self.get(self.keep())
        self.code += b"0](" + (call + many + b"\x85R") * times + b"e"

    def foreign(self, level: int) -> None:
        """Call, construct or modify what a name refers to, in a chain."""
        self.name(self.draw.choice(_NAMES))
        uses = (
            *(b")R", b")\x81", b"}b", b")}\x92", b"Q", b"}" + _text(b"a") + b"Nsb", b"]a"),
            *(_text(b"touch executed") + b"\x85R", b"N\x86R", b"\x85R", b"K\x01K\x02s"),
        )
        self.code += b"".join(self.draw.choices(uses, k=self.draw.randint(0, 4)))

    def any_instruction(self, level: int) -> None:
        """Add a few instructions, including some that no checkpoint uses."""
        arguments = (bytes(4), b"1\n", b"os\nsystem\n", b"\xff" * 8)
        for op in self.draw.choices(pickletools.opcodes, k=self.draw.randint(1, 5)):
            self.code += op.code.encode("latin-1")
            if op.arg is not None:
                self.code += self.draw.choice(arguments)


def walk(tree: Any) -> int:
    """Go through a tree as the reader's callers do, and return the number of its values.

    Raises:
        AssertionError: It contains something that the reader guarantees to keep out.
    """
    kind = type(tree)
    if kind in (dict, unpickler.StateDict):
        for key in tree:
            assert type(key) in (str, int, tuple), f"a {type(key).__name__} as a key"
        return 1 + sum(map(walk, tree.values()))
    if kind in (list, tuple):
        return 1 + sum(map(walk, tree))
    if kind is unpickler.Namespace:
        return 1 + sum(map(walk, tree.fields.values()))
    if kind is unpickler.Opaque:
        return 1 + sum(map(walk, tree.args))
    assert kind is not int or tree.bit_length() <= unpickler.MAX_INTEGER_BITS
    plain = (type(None), bool, int, float, str, bytes, unpickler.Factory, unpickler.Array)
    records = (unpickler.StorageType, unpickler.StorageRef, unpickler.TensorRef)
    assert kind in (*plain, *records), f"a {kind.__name__}"
    return 1


def random_tree(draw: random.Random, level: int = 0) -> Any:
    """Return a tree like those in checkpoints."""
    if level == _TREE_LEVELS or draw.random() < 0.3:
        return draw.choice(
            (None, True, -1, 1 << 100, 0.1, "", "\u00e9" * 300, "a", b"\xff\x00", b"x" * 300)
        )
    parts = [random_tree(draw, level + 1) for _ in range(draw.randint(0, 3))]
    if parts and draw.random() < 0.3:
        parts.append(parts[0])  # a part that occurs twice
    named = {f"name{i}": part for i, part in enumerate(parts)}
    numbered = {(f"a{i}", i) if i % 2 else i: part for i, part in enumerate(parts)}
    return draw.choice(
        (parts, tuple(parts), named, numbered, OrderedDict(named), Namespace(**named))
    )


def plain(tree: Any) -> Any:
    """Return a tree in which stand-ins equal what they stand for."""
    match tree:
        case Namespace():
            return "Namespace", plain(vars(tree))
        case unpickler.Namespace():
            return "Namespace", plain(tree.fields)
        case dict():
            kind = "ordered" if type(tree) is not dict else "dict"
            return kind, [(key, plain(value)) for key, value in tree.items()]
        case list() | tuple():
            return type(tree).__name__, [plain(part) for part in tree]
    return type(tree).__name__, tree
