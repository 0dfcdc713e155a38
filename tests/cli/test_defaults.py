"""The defaults and bounds of every flag, recorded in defaults.json, so that none changes unnoticed.

To record them again after a deliberate change:

    python -m tests.cli.test_defaults
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
from collections.abc import Collection
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from megatron.config.fields import FlagInfo
from megatron.corpora.plan import STEPS
from megatron.submit.description import SECTIONS
from tests.repository import ROOT

FILE = Path(__file__).with_name("defaults.json")


def _modules() -> list[str]:
    """Return the names of the modules that build a command's parser."""
    files = sorted((ROOT / "megatron").rglob("*.py"))
    found = [file for file in files if "\ndef build_parser() ->" in file.read_text()]
    return [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in found]


def _config_types() -> dict[str, type]:
    """Return the dataclasses whose fields are flags of trainings and servers, by name."""
    names = [f"megatron.config.{file.stem}" for file in (ROOT / "megatron/config").glob("*.py")]
    modules = [importlib.import_module(name) for name in sorted(names)]
    return {
        f"{module.__name__}.{name}": kind
        for module in modules
        for name, kind in sorted(vars(module).items())
        if kind.__class__ is type and kind.__module__ == module.__name__ and is_dataclass(kind)
        if name.endswith(("Config", "Options"))
    }


def _flags(kind: type, names: Collection[str]) -> dict[str, Any]:
    """Return the defaults and the bounds of these fields of a dataclass."""
    found = {}
    for field in fields(kind):
        if field.name not in names:
            continue
        if field.default not in (None, MISSING):
            found[field.name] = field.default
        info = field.metadata.get("flag", FlagInfo())
        for bound in ("at_least", "above", "below", "at_most"):
            if getattr(info, bound) is not None:
                found[f"{field.name}, {bound}"] = getattr(info, bound)
    return found


def _defaults() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name in _modules():
        actions = importlib.import_module(name).build_parser()._actions
        found[name] = {
            action.dest: action.default
            for action in actions
            if action.default not in (None, False, argparse.SUPPRESS)
        }
    records = {f"submit, {name}": kind for name, kind in SECTIONS.items()}
    records |= {f"step of a corpus, {name}": kind for name, kind in STEPS.items()}
    for name, kind in records.items():
        found[name] = _flags(kind, {field.name for field in fields(kind)})
    for name, kind in _config_types().items():
        found[name] = _flags(kind, inspect.get_annotations(kind))  # without inherited flags
    # Paths become text, and tuples lists.
    return json.loads(json.dumps(found, default=str))


def test_defaults_and_bounds_are_the_recorded_ones() -> None:
    recorded = json.loads(FILE.read_text())
    found = _defaults()
    assert len(found) > 20
    assert found.keys() == recorded.keys()
    for name, defaults in found.items():
        assert defaults == recorded[name], (
            f"{name}: to record it: python -m tests.cli.test_defaults"
        )


if __name__ == "__main__":
    FILE.write_text(json.dumps(_defaults(), indent=1) + "\n")
