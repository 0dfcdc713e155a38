"""The configuration of a run: frozen dataclasses that define the flags and the YAML keys.

    fields           a dataclass field as a flag: its help, bounds and requirements
    run              `RunOptions` (as given) and `RunConfig` (resolved), with a section per
                     concern: `model`, `training`, `parallel` ...
    parser           reads the command line and YAML into one checked `RunConfig`
    resolve          derives the values that were not given
    checks           the table of rules, which are functions in the modules `rules_*`
    stages           which layers each pipeline stage holds
    other_flags      flags without a field, old and current, with what to do instead
    __main__         the table of all flags in docs/compatibility.md

A new flag is a new field: see docs/tour.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.config.parser import ParsedRun, Program, parse_config
    from megatron.config.run import RunConfig

__all__ = ["ParsedRun", "Program", "RunConfig", "parse_config"]


def __getattr__(name: str) -> Any:
    # Loaded on first use, because a tool that needs a single dataclass then starts 50 ms sooner.
    if name == "RunConfig":
        from megatron.config.run import RunConfig

        return RunConfig
    if name in __all__:
        from megatron.config import parser

        return getattr(parser, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
