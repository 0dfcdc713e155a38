"""Row 30: our own source, and calls planted in it."""

from __future__ import annotations

import ast
import random
from pathlib import Path

from tests.reliability.scoreboard.score import Trials, expect
from tests.repository import name as repository_name
from tests.test_banned_calls import (
    ALLOWED,
    BANNED_ATTRIBUTES,
    BANNED_CALLS,
    BANNED_KEYWORDS,
    BANNED_MODULES,
    BANNED_NAMES,
    _shipped,
    find_banned,
)

_MODULES = sorted(BANNED_MODULES)
_CALLS = sorted(BANNED_CALLS)
_KEYWORDS = sorted(BANNED_KEYWORDS.items())
_NAMES = sorted(BANNED_NAMES) + [f"dist.{name}" for name in sorted(BANNED_ATTRIBUTES)]


def banned_calls(folder: Path, count: int) -> Trials:
    """Try row 30: the source that we ship, and then calls planted at random places in it."""
    trials, draw = Trials("seed 30"), random.Random(30)
    files = _shipped()
    for file in files[:count]:
        name = repository_name(file)
        with trials.trial(name):
            banned = find_banned(file.read_text(), name)
            expect(not banned, f"holds {banned}")
    trials.note("files", trials.tried)
    for number in range(count):
        file, call = draw.choice(files), _random_call(draw)
        name = repository_name(file)
        if name in ALLOWED:
            continue
        with trials.trial(f"call {number} in {name}: {call}"):
            planted = _plant(file.read_text(), call, draw)
            expect(find_banned(planted, name), "was not found")
        trials.note("planted calls")
    return trials


def _random_call(draw: random.Random) -> list[str]:
    """Return lines that call something banned, under a random name."""
    alias = draw.choice(("x", "load", "json", "safe", "_run"))
    call = draw.choice(_CALLS)
    module, _, function = call.rpartition(".")
    keyword, value = draw.choice(_KEYWORDS)
    given = draw.choice((str(value), "flag", str(int(value)), "not b"))
    banned = draw.choice(_MODULES)
    name = draw.choice(_NAMES)
    return draw.choice(
        (
            [f"import {banned}"],
            [f"import {banned} as {alias}"],
            [f"from {module} import {function} as {alias}", f"{alias}(b)"],
            [f"import {module} as {alias}", f"{alias}.{function}(b)"],
            [f"import {module}", f"y = {call}"],
            [f"import {module} as {alias}", f"getattr({alias}, {function!r})(b)"],
            [f"{alias}(b, {keyword}={given})"],
            [f"{alias}(b, **{{{keyword!r}: {given}}})"],
            [f"{name}(b)"],
            [f"{alias} = {name}"],
        )
    )


def _plant(source: str, call: list[str], draw: random.Random) -> str:
    """Insert lines before a random statement."""
    lines = source.splitlines()
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    statements = [each for node in functions for each in node.body if each.lineno > node.lineno]
    if statements:
        at = draw.choice(statements)
        indent = " " * at.col_offset
        lines[at.lineno - 1 : at.lineno - 1] = [indent + line for line in call]
    else:
        lines += call
    return "\n".join(lines) + "\n"
