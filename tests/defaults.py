"""Default values of parameters and fields in a room of the package, as recorded.

A default that changes unnoticed changes every caller that relies on it. `python -m tests.defaults`
records all of them again, after a change that is intended. New and removed ones need no record.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

ROOMS = ("data", "inference", "models", "retro", "training")


def check(room: str) -> None:
    """Compare the defaults of a room with the recorded ones."""
    recorded = json.loads(_file(room).read_text(encoding="utf-8"))
    found = defaults_of(room)
    shared = recorded.keys() & found.keys()
    assert len(shared) > 0.9 * len(recorded), "too few are left: record them again"
    assert {name: found[name] for name in shared} == {name: recorded[name] for name in shared}


def defaults_of(room: str) -> dict[str, str]:
    """Return the defaults of a room, by module, owner and name."""
    return {
        f"{module.__name__.removeprefix('megatron.')}.{name}": repr(value)
        for module in _modules(importlib.import_module(f"megatron.{room}"))
        for name, value in _of_module(module)
    }


def _modules(package: ModuleType) -> Iterator[ModuleType]:
    yield package
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not info.name.endswith("__main__"):
            yield importlib.import_module(info.name)


def _of_module(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield the defaults of functions and classes, and public constants, of a module."""
    source = inspect.getsource(module)
    constants = set(re.findall(r"^([A-Z][A-Z_]+) = ", source, re.MULTILINE))
    for name, value in vars(module).items():
        own = getattr(value, "__module__", None) == module.__name__
        if isinstance(value, bool | int | float) and name in constants:
            yield name, value
        elif own and inspect.isclass(value):
            for field, default in (*_of_fields(value), *_of_methods(value)):
                yield f"{name}.{field}", default
        elif own and callable(value):
            for parameter, default in _of_parameters(inspect.unwrap(value)):
                yield f"{name}.{parameter}", default


def _of_fields(kind: type) -> Iterator[tuple[str, Any]]:
    if dataclasses.is_dataclass(kind):
        for field in dataclasses.fields(kind):
            if field.default is not dataclasses.MISSING:
                yield field.name, field.default
    yield from getattr(kind, "_field_defaults", {}).items()
    for name, info in getattr(kind, "model_fields", {}).items():  # of pydantic
        bounds = {
            bound: getattr(one, bound)
            for one in info.metadata
            for bound in ("gt", "ge", "lt", "le", "min_length", "max_length")
            if hasattr(one, bound)
        }
        yield name, ("required" if info.is_required() else info.default, bounds)


def _of_methods(kind: type) -> Iterator[tuple[str, Any]]:
    for name, value in vars(kind).items():
        function = getattr(value, "__func__", value)
        if isinstance(function, FunctionType) and name != "__new__":
            for parameter, default in _of_parameters(inspect.unwrap(function)):
                if name != "__init__" or not dataclasses.is_dataclass(kind):
                    yield f"{name}.{parameter}", default


def _of_parameters(function: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(function, FunctionType):
        for parameter in inspect.signature(function).parameters.values():
            if isinstance(parameter.default, bool | int | float):
                yield parameter.name, parameter.default


def _file(room: str) -> Path:
    return Path(__file__).with_name(room) / "defaults.json"


def _record(room: str) -> None:
    found = {
        name: value
        for name, value in sorted(defaults_of(room).items())
        if " at 0x" not in value and not value.startswith("<")
    }
    _file(room).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for _room in ROOMS:
        _record(_room)
