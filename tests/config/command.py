"""A small valid command line, and how tests modify it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import pytest

from megatron.config.parser import ParsedRun, Program, parse_config
from megatron.errors import ConfigError

BASE = {
    "--num-layers": "4",
    "--hidden-size": "64",
    "--num-attention-heads": "4",
    "--seq-length": "128",
    "--micro-batch-size": "4",
    "--lr": "1e-3",
    "--train-iters": "40",
    "--mock-data": None,
    "--tokenizer-type": "NullTokenizer",
    "--vocab-size": "100",
}


def command(*words: str, without: Sequence[str] = ()) -> list[str]:
    """Return the small run's command line with extra words and without some of its flags.

    Each argument may hold several words, quoted as in a shell.
    """
    base = [
        word
        for name, value in BASE.items()
        if name not in without
        for word in (name, value)
        if word is not None
    ]
    return [*base, *(word for part in words for word in shlex.split(part))]


def parse(
    *words: str, without: Sequence[str] = (), world_size: int = 1, architecture: str = "gpt"
) -> ParsedRun:
    return parse_config(
        command(*words, without=without),
        world_size=world_size,
        program=Program(name=f"pretrain_{architecture}.py"),
        architecture=architecture,
    )


def problems(
    *words: str, without: Sequence[str] = (), world_size: int = 1, architecture: str = "gpt"
) -> list[str]:
    """Return the problems that a command line is refused for; fail the test if there are none."""
    with pytest.raises(ConfigError) as caught:
        parse(*words, without=without, world_size=world_size, architecture=architecture)
    return caught.value.problems
