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
    trials, rng = Trials("seed 30"), random.Random(30)
    files = _shipped()
    for file in files[:count]:
        name = repository_name(file)
        with trials.trial(name):
            banned = find_banned(file.read_text(), name)
            expect(not banned, f"holds {banned}")
    trials.note("files", trials.tried)
    for number in range(count):
        file, call = rng.choice(files), _random_call(rng)
        name = repository_name(file)
        if name in ALLOWED:
            continue
        with trials.trial(f"call {number} in {name}: {call}"):
            planted = _plant(file.read_text(), call, rng)
            expect(find_banned(planted, name), "was not found")
        trials.note("planted calls")
    return trials


def _random_call(rng: random.Random) -> list[str]:
    """Return lines that call something banned, under a random name."""
    alias = rng.choice(("x", "load", "json", "safe", "_run"))
    call = rng.choice(_CALLS)
    module, _, function = call.rpartition(".")
    keyword, value = rng.choice(_KEYWORDS)
    argument = rng.choice((str(value), "flag", str(int(value)), "not b"))
    banned = rng.choice(_MODULES)
    name = rng.choice(_NAMES)
    return rng.choice(
        (
            [f"import {banned}"],
            [f"import {banned} as {alias}"],
            [f"from {module} import {function} as {alias}", f"{alias}(b)"],
            [f"import {module} as {alias}", f"{alias}.{function}(b)"],
            [f"import {module}", f"y = {call}"],
            [f"import {module} as {alias}", f"getattr({alias}, {function!r})(b)"],
            [f"{alias}(b, {keyword}={argument})"],
            [f"{alias}(b, **{{{keyword!r}: {argument}}})"],
            [f"{name}(b)"],
            [f"{alias} = {name}"],
        )
    )


def _plant(source: str, call: list[str], rng: random.Random) -> str:
    """Insert lines before a random statement."""
    lines = source.splitlines()
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    statements = [child for node in functions for child in node.body if child.lineno > node.lineno]
    if statements:
        statement = rng.choice(statements)
        indent = " " * statement.col_offset
        lines[statement.lineno - 1 : statement.lineno - 1] = [indent + line for line in call]
    else:
        lines += call
    return "\n".join(lines) + "\n"
