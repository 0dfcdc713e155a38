"""The defaults of every command's flags, recorded in defaults.json, so that none changes unnoticed.

To record them again after a deliberate change:

    python -m tests.cli.test_defaults
"""

from __future__ import annotations

import argparse
import importlib
import json
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from megatron.corpora.plan import STEPS
from megatron.submit.description import SECTIONS
from tests.repository import ROOT

FILE = Path(__file__).with_name("defaults.json")


def _modules() -> list[str]:
    """Return the names of the modules that build a command's parser."""
    files = sorted((ROOT / "megatron").rglob("*.py"))
    found = [file for file in files if "\ndef build_parser() ->" in file.read_text()]
    return [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in found]


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
        found[name] = {
            field.name: field.default
            for field in fields(kind)
            if field.default not in (None, MISSING)
        }
    # Paths become text, and tuples lists.
    return json.loads(json.dumps(found, default=str))


def test_defaults_are_the_recorded_ones() -> None:
    recorded = json.loads(FILE.read_text())
    found = _defaults()
    assert len(found) > 20
    assert found.keys() == recorded.keys()
    for name, defaults in found.items():
        assert defaults == recorded[name], name


if __name__ == "__main__":
    FILE.write_text(json.dumps(_defaults(), indent=1) + "\n")
