"""Commands that are separate programs: each parses the words that follow it."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.cli import main
from megatron.command import run_command
from megatron.config.generation import SamplesConfig, ServerConfig
from megatron.config.parser import help_if_asked


def serve(words: Sequence[str]) -> int:
    """Run one process of the text generation server, and return the exit code."""
    help_if_asked("megatron serve", (ServerConfig,), trains=False, argv=words)
    from megatron.inference.server.run import main as run

    return run(words)


def generate(words: Sequence[str]) -> int:
    """Run one process that generates text, and return the exit code."""
    help_if_asked("megatron generate", (SamplesConfig,), trains=False, argv=words)
    from megatron.inference.samples import main as run

    return run("megatron generate", words)


def evaluate(words: Sequence[str]) -> int:
    """Run one process of a task, which `--task` or the first word names."""
    from megatron.tasks.main import main as run

    return run(with_task(words), "megatron evaluate")


def with_task(words: Sequence[str]) -> list[str]:
    """Return the words with `--task` before a first word that is no flag."""
    return [*(["--task"] if words and not words[0].startswith("-") else []), *words]


def convert(words: Sequence[str]) -> int:
    """Convert a checkpoint, and return the exit code."""
    from megatron.tools.checkpoint.util import main as run

    return run(words, "megatron convert")


def data(words: Sequence[str]) -> int:
    """Run a command about data, and return the exit code."""
    if not words or words[0] in ("-h", "--help"):
        return run_command(lambda: print(main.overview("megatron data", main.DATA)))
    return main.dispatch("megatron data", main.DATA, words)


def detoxify(words: Sequence[str]) -> int:
    """Run a step of detoxification, and return the exit code."""
    if not words or words[0] in ("-h", "--help"):
        return run_command(lambda: print(main.overview("megatron detoxify", main.DETOXIFY)))
    return main.dispatch("megatron detoxify", main.DETOXIFY, words)
