"""`megatron pretrain`: start the script that trains a recipe's kind of network.

The command becomes the script (`pretrain_gpt.py`, `pretrain_bert.py` or `pretrain_t5.py`) with the
recipe as `--config`, under torchrun if several processes train. It prints that command line, which
does the same without `megatron`.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.command import run_command, say
from megatron.config.arguments import Given, split
from megatron.config.parser import show_help
from megatron.environment import module_command
from megatron.errors import ConfigError
from megatron.kernels.build import detect_architectures
from megatron.processes.launch import hide_gpus, is_launched
from megatron.recipes import catalog

_PROGRAM = "megatron pretrain"


def pretrain(words: Sequence[str]) -> int:
    """Train a recipe, and return the exit code if that cannot begin."""
    names = {flag.name for flag in split(words)}
    if names & {"-h", "--help", "--help-all"}:
        show_help(f"{_PROGRAM} RECIPE [--gpus N]", everything="--help-all" in names)
        print(
            f"\nRECIPE is one of these, or a YAML file: {', '.join(catalog.names())}\n"
            "--gpus N starts N processes on this machine (default: one for each GPU)."
        )
        return 0
    return run_command(lambda: _become(words))


def _become(words: Sequence[str]) -> None:
    program, script, flags = training_command(words)
    if not is_launched():
        say(f"$ {shlex.join([*program, script.name, *flags])}\n")
    start = [sys.executable]
    if program[0] == "torchrun":
        start = [*module_command("torch.distributed.run"), *program[1:]]
    os.execv(start[0], [*start, str(script), *flags])


def training_command(words: Sequence[str]) -> tuple[list[str], Path, list[str]]:
    """Return what `megatron pretrain` becomes.

    Args:
        words: The words after `megatron pretrain`.

    Returns:
        `python`, or `torchrun` with its flags; the script; the script's flags.

    Raises:
        ConfigError: The recipe or --gpus is wrong.
    """
    given = split(words)
    flags = [word for flag in given if flag.name not in ("", "--gpus") for word in _words(flag)]
    counts = [flag for flag in given if flag.name == "--gpus"]
    named = [value for flag in given if not flag.name for value in flag.values]
    script = "pretrain_gpt"
    if len(named) > 1:
        raise ConfigError(f"{' '.join(named)}: give one recipe: `megatron recipes` lists them")
    if named:
        if "--config" in {flag.name for flag in given}:
            raise ConfigError(f"{named[0]} and --config: both name a YAML file: give one of them")
        recipe = catalog.find(named[0])
        script = f"pretrain_{recipe.architecture}"
        flags = ["--config", str(recipe.path), *flags]
    count = _processes(counts[-1] if counts else None)
    launcher = f"torchrun --standalone --nproc-per-node {count}" if count > 1 else "python"
    return launcher.split(), _path_of(script), flags


def _words(flag: Given) -> list[str]:
    return [flag.name, *flag.values]


def _processes(asked: Given | None) -> int:
    """Return how many processes to start on this machine.

    Raises:
        ConfigError: --gpus is no number, more than this machine has, or superfluous.
    """
    if asked is None:
        return 1 if is_launched() else max(1, _gpus())
    try:
        (text,) = asked.values
        count = int(text)
    except ValueError:
        count = -1
    if count < 0:
        raise ConfigError(f"{asked}: give the number of GPUs to use on this machine, 0 for none")
    if is_launched():
        raise ConfigError(f"{asked}: a launcher has started this process already: drop the flag")
    if count == 0:
        hide_gpus()
    elif count > (present := _gpus() or count):
        raise ConfigError(f"{asked}: this machine has {present} GPU(s): give at most {present}")
    return max(1, count)


def _gpus() -> int:
    """Return the number of GPUs that this process may use."""
    if not detect_architectures():
        return 0  # without importing torch
    import torch

    return torch.accelerator.device_count()


def _path_of(script: str) -> Path:
    """Return the path of one of our scripts, which are installed as modules beside the package."""
    spec = importlib.util.find_spec(script)
    if spec is None or spec.origin is None:
        raise ConfigError(f"{script}.py is not installed: install megatron again")
    return Path(spec.origin)
