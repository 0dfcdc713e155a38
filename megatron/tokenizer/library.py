"""Calls to tokenizer libraries, which may raise any exception for a damaged or malicious file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.errors import DataError, UserError


class Library:
    """A wrapper around a tokenizer library's object that turns the library's errors into DataError.

    All library objects are built and called through this class. Libraries raise exceptions of any
    type: RuntimeError, plain Exception, and PanicException when Rust code panics. PanicException
    does not derive from Exception, so other handlers would not catch it.

    Args:
        file: The flag and path, for messages.
        kind: The kind of file that the library expects, for messages.
        build: A function that builds the object.

    Raises:
        DataError: The library rejects the file.
    """

    def __init__(self, file: object, kind: str, build: Callable[[], Any]) -> None:
        """Build the object."""
        problem = f"{file}: not {kind}, or damaged; give another file"
        self._object = _call(problem, build)
        self._problem = (
            f"{file}: the tokenizer failed; if it fails on every text, give another file"
        )

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return a method of the object, wrapped to raise DataError."""
        # Copying and unpickling look up such names before `_object` is set.
        if name.startswith("_"):
            raise AttributeError(name)
        return partial(_call, self._problem, getattr(self._object, name))

    def attribute(self, name: str) -> Any:
        """Return a data attribute of the object."""
        return _call(self._problem, getattr, self._object, name)


def _call(problem: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    try:
        return function(*args, **options)
    except (MemoryError, UserError):
        raise
    except BaseException as error:
        # Each library has its own class PanicException, which cannot be imported.
        name = type(error).__name__
        if isinstance(error, Exception) or name == "PanicException":
            raise DataError(f"{problem} ({name}: {error})") from error
        raise
