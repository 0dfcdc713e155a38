"""A command line as a list of flags with their values, before argparse sees it.

Old flags are translated and misspelt ones found here, because argparse stops at the first mistake
and we report all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Given:
    """One flag as typed, with the words after it. Words that belong to no flag stand under ""."""

    name: str
    values: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join((self.name, *self.values)).strip()

    def words(self) -> tuple[str, ...]:
        """As argparse takes it: joined where it would mistake a value such as -1e-5 for a flag."""
        if self.name and len(self.values) == 1:
            return (f"{self.name}={self.values[0]}",)
        return (self.name, *self.values) if self.name else self.values


def split(words: Sequence[str]) -> list[Given]:
    """`--lr 0.1 --fp16` as two flags, each with the values that follow it."""
    flags: list[Given] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            flags.append(Given(name, (value,) if equals else ()))
        elif word == "-h" or not flags:
            flags.append(Given(word) if word == "-h" else Given("", (word,)))
        else:
            last = flags.pop()
            flags.append(Given(last.name, (*last.values, word)))
    return flags


def join(flags: Iterable[Given]) -> list[str]:
    """The words that `split` took apart."""
    return [word for flag in flags for word in flag.words()]
