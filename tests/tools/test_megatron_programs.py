"""Every program of every Megatron-LM release exists here, or the documentation names a substitute.

`megatron_programs.json` has the programs of Megatron-LM from v0.1 to Core 0.19 and of both
Megatron-DeepSpeeds, with all flags that any release took, for programs whose names exist here.
"""

from __future__ import annotations

import fnmatch
import importlib
import json
import re
from pathlib import Path

import pytest

from megatron.config.arguments import split
from megatron.config.fields import by_spelling
from megatron.config.generation import SamplesConfig, ServerConfig
from megatron.config.other_flags import other_flags
from megatron.config.run import sections
from megatron.tasks.table import OPTIONS
from tests.repository import ROOT
from tools.old_names import OLD_NAMES, translate_args

_PROGRAMS: dict[str, list[str]] = json.loads(
    Path(__file__).with_name("megatron_programs.json").read_text()
)
_MODELS = {
    "tools/generate_samples_gpt.py": (SamplesConfig,),
    "tools/run_text_generation_server.py": (ServerConfig,),
    "tasks/main.py": OPTIONS,
}


def _known(program: str) -> set[str]:
    """Return the flags that a program takes or reports by name."""
    if program in _MODELS:
        table = other_flags()
        names = {*by_spelling(sections().values()), *by_spelling(_MODELS[program])}
        return names | {f.name for f in (*table.unsupported, *table.translated, *table.removed)}
    name = program.removesuffix(".py").replace("/", ".")
    is_tool = (ROOT / "megatron" / program).is_file()
    parser = importlib.import_module(f"megatron.{name}" if is_tool else name).build_parser()
    return {*parser._spellings, *parser._removed}


@pytest.mark.parametrize("program", [program for program, flags in _PROGRAMS.items() if flags])
def test_every_flag_of_a_program_is_known(program: str) -> None:
    old = OLD_NAMES.get(program)
    if old is None:
        assert set(_PROGRAMS[program]) - _known(program) == set()
    elif old.successor:
        added = {word.split()[0] for word in old.adds}
        now = {flag.name for flag in split(translate_args(old, _PROGRAMS[program]))} - added
        assert now - _known(old.successor) == set()


def test_every_program_is_here_or_has_a_substitute() -> None:
    pages = [ROOT / "docs" / f"{page}.md" for page in ("coming-from-megatron", "compatibility")]
    named = set(re.findall(r"`([\w./*{},-]+\.(?:py|sh))`", "".join(p.read_text() for p in pages)))
    missing = [program for program in _PROGRAMS if not (ROOT / program).is_file()]
    assert len(missing) > 20
    unanswered = [p for p in missing if not any(fnmatch.fnmatch(p, name) for name in named)]
    assert unanswered == []
