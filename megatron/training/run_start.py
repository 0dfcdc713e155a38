"""What a run is, as its records tell it: all settings, and what was decided at its start."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from typing import Any

import torch

from megatron import __version__
from megatron.config.run import values_of
from megatron.training.panel import start_rows
from megatron.training.run import Run


@dataclass(frozen=True)
class RunStart:
    """What a run is.

    Attributes:
        program: The script that trains.
        iterations: The number of iterations of the run.
        tokens_per_sample: The number of tokens of a sample.
        settings: The value of every setting by its flag.
        changed: The flags whose values differ from their defaults, because they were given or
            follow from others.
        facts: Versions, and the rows of the start-up panel.
    """

    program: str
    iterations: int
    tokens_per_sample: int
    settings: dict[str, Any]
    changed: list[str]
    facts: dict[str, str]

    @classmethod
    def of(cls, run: Run) -> RunStart:
        """Describe a run after its checkpoint has been loaded."""
        settings, changed = {}, []
        for path, field, value in values_of(run.config):
            flag = field.names[0] if field.names else path
            settings[flag] = list(value) if isinstance(value, tuple) else value
            if value != field.default:
                changed.append(flag)
        versions = f"megatron {__version__}, torch {torch.__version__}"
        return cls(
            program=run.recipe.program,
            iterations=run.train_iterations,
            tokens_per_sample=run.config.data.sample_tokens * run.recipe.head.sequences,
            settings=settings,
            changed=changed,
            facts={
                "versions": f"{versions}, Python {platform.python_version()}",
                "host": platform.node(),
                **dict(start_rows(run)),
            },
        )

    def record(self) -> dict[str, Any]:
        """Return the description as plain data."""
        return asdict(self)

    def tables(self) -> str:
        """Return two Markdown tables: the settings, changed ones first, and the facts."""
        names = [*self.changed, *(name for name in self.settings if name not in self.changed)]
        settings = [
            (f"**{name}**" if name in self.changed else name, self.settings[name]) for name in names
        ]
        return f"{_table('flag', settings)}\n\n{_table('fact', list(self.facts.items()))}"


def _table(head: str, rows: list[tuple[str, Any]]) -> str:
    lines = [
        f"| {name} | {str(value).replace('|', chr(92) + '|').replace(chr(10), ' ')} |"
        for name, value in rows
    ]
    return "\n".join([f"| {head} | value |", "| --- | --- |", *lines])
