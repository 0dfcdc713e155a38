"""Commands and other blocks in the documentation."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

from tests.repository import ROOT, name


class Command(NamedTuple):
    """One command on a page, with its backslash-continued lines joined."""

    page: str
    line: int
    args: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}:{' '.join(self.args[:3])}"


_HERE_DOCUMENT = re.compile(r"<<'?(\w+)'?\n.*?^\1$", re.MULTILINE | re.DOTALL)


def _as_empty_lines(match: re.Match[str]) -> str:
    return "\n" * match.group().count("\n")


def pages() -> list[Path]:
    """Return every Markdown page of the project."""
    return sorted(ROOT.glob("*.md")) + sorted(
        file for folder in ("docs", "examples") for file in (ROOT / folder).rglob("*.md")
    )


def blocks_of(page: Path, language: str) -> list[tuple[int, str]]:
    """Return (first line number, text) of every block marked with this language."""
    text = page.read_text(encoding="utf-8")
    matches = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text[: match.start(1)].count("\n") + 1, match.group(1)) for match in matches]


def commands(page: Path) -> list[Command]:
    """Return a page's bash commands, without here-documents, comments and redirections."""
    result = []
    for first, raw in blocks_of(page, "bash"):
        block = _HERE_DOCUMENT.sub(_as_empty_lines, raw)
        offset = 0
        for text in re.split(r"(?<!\\)\n", block):
            joined = re.sub(r"\\\n", " ", text)
            args = shlex.split(joined, comments=True)
            if ">" in args:
                args = args[: args.index(">")]
            if args:
                result.append(Command(name(page), first + offset, tuple(args)))
            offset += text.count("\n") + 1
    return result


def all_commands() -> list[Command]:
    """Return every documented command."""
    return [command for page in pages() for command in commands(page)]
