"""What a pickled checkpoint turns into: plain data that can do nothing.

Every stand-in refuses `__setstate__`, through which a pickle could otherwise change it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


class RefusedError(Exception):
    """A file asks for something that a checkpoint has no need of."""


def show(value: Any) -> str:
    """A value in a message. A container is not printed: a small pickle can hold an endless one."""
    if value is None or type(value) in (str, int, float, bool):
        return repr(value)[:80]
    return f"a {type(value).__name__}"


class _Fixed:
    """An object that a pickle can build but not change."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        raise RefusedError(f"a {type(self).__name__} does not change")


@dataclass(frozen=True)
class Factory(_Fixed):
    """What a global name in the file becomes where the file calls it: one of our functions."""

    name: str
    call: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)


@dataclass(frozen=True)
class StorageType(_Fixed):
    """Element type of a storage."""

    dtype: torch.dtype


@dataclass(frozen=True)
class StorageRef(_Fixed):
    """A storage in the container: its record's key, and how many elements it claims to have."""

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
    """A value of a class that we do not have: an enum member, for example."""

    name: str
    args: tuple[Any, ...]


class Namespace:
    """Stands for argparse.Namespace: the command line of the run that wrote the file."""

    __slots__ = ("fields",)
    fields: dict[str, Any]

    def __new__(cls) -> Namespace:
        # A pickle makes one without calling __init__.
        made = super().__new__(cls)
        made.fields = {}
        return made

    def __setstate__(self, state: Any) -> None:
        if type(state) is not dict or self.fields:
            raise RefusedError("a Namespace is filled once, from a dict")
        self.fields = state


class StateDict(dict[Any, Any]):
    """Stands for OrderedDict. What PyTorch attaches to it (`_metadata`) is dropped."""

    def __setstate__(self, state: Any) -> None:
        pass


class Array:
    """Stands for a numpy array (of random states only): its content is dropped."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        pass
