"""`megatron pretrain`: start the script that trains a recipe's kind of network.

Outside a launcher, the command first prints a command line that does the same without `megatron`.
It then replaces this process with a script such as `pretrain_gpt.py` with the recipe as `--config`,
under `megatron.processes.torchrun` if several processes train.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.cli.main import with_task
from megatron.command import print_line, run_command
from megatron.config.arguments import ParsedFlag, split
from megatron.config.fields import suggestion
from megatron.config.finetuning import finetuning_args
from megatron.config.parser import show_help
from megatron.environment import gpus_are_hidden, module_command
from megatron.errors import ConfigError
from megatron.kernels.build import detect_architectures
from megatron.processes.launch import hide_gpus, is_launched
from megatron.recipes import catalog
from megatron.tasks.table import TASKS

_SMALL_FLAGS = ("--input", "--iters", "--out", "--overwrite")  # flags of the demo
# Like torchrun, but it returns the run's exit code and leaves time to save on SIGTERM.
_LAUNCHER = "megatron.processes.torchrun"
_HELP = {"-h", "--help", "--help-all"}


def pretrain(argv: Sequence[str]) -> int:
    """Replace this process with one that trains a recipe.

    Returns:
        The exit code after --help, --small or an error.
    """
    flags = split(argv)
    names = {flag.name for flag in flags}
    if "--small" in names:
        return run_command(lambda: _pretrain_small(flags))
    if names & _HELP:
        return run_command(lambda: _help("--help-all" in names))
    return run_command(lambda: _exec(argv))


def finetune(argv: Sequence[str]) -> int:
    """Train a classifier for a task, or replace this process with one that finetunes a model.

    Returns:
        The exit code of a task, or the one after --help or an error.
    """
    names = {flag.name for flag in split(argv)}
    if "--task" in names or (argv and _is_task(argv[0])):
        from megatron.tasks.main import main

        return main(with_task(argv), "megatron finetune")
    if names & _HELP:
        return run_command(lambda: _finetune_help("--help-all" in names))
    return run_command(lambda: _exec(argv, finetunes=True))


def _is_task(argument: str) -> bool:
    """Return whether a word names a task, or resembles a task's name but not a recipe's."""
    if argument in TASKS or argument.startswith("-") or catalog.is_recipe(argument):
        return argument in TASKS
    return bool(suggestion(argument.upper(), TASKS)) and not suggestion(argument, catalog.names())


_RECIPE_HELP = """
RECIPE is a name (`megatron recipes` lists them), a YAML file, or a Hugging Face folder.
--gpus N starts N processes on this machine; 0 starts one on its CPU (default: one per GPU)."""


def _help(everything: bool) -> None:
    show_help("megatron pretrain RECIPE [--gpus N] [--small]", everything=everything)
    print(
        f"{_RECIPE_HELP}\n"
        "--small trains a small model of the same kind in minutes, on the source code of Python's "
        "standard library."
    )


def _finetune_help(everything: bool) -> None:
    show_help("megatron finetune RECIPE --load CHECKPOINTS [--gpus N]", everything=everything)
    tasks = [name for name, task in TASKS.items() if task.kind in ("finetuning", "towers")]
    print(
        f"{_RECIPE_HELP}\n"
        "--load names the model to start from. --data-path names conversations in JSON lines or, "
        "with --no-sft, plain documents. To train a classifier, name a task instead of a recipe: "
        f"{', '.join(tasks)}."
    )


def _pretrain_small(flags: Sequence[ParsedFlag]) -> None:
    """Run the demo with the recipe's kind of network.

    Raises:
        UserError: No recipe or several are named, the recipe is missing or invalid, or a flag is
            not accepted with --small.
    """
    from megatron.tools import demo
    from megatron.tools.demo_kinds import small_kind

    name = catalog.name_of(flags)
    if name is None:
        raise ConfigError("--small: name a recipe before it, for example gpt-125m")
    for flag in flags:
        if flag.name in ("--gpus", "--model"):
            raise ConfigError(f"{flag}: --small chooses this itself: drop the flag")
        if flag.name == "--small" and flag.values:
            raise ConfigError(f"{flag}: --small takes no value: drop {' '.join(flag.values)}")
    accepted = ("", "-h", "--help", "--small", *_SMALL_FLAGS)
    others = [flag.name for flag in flags if flag.name not in accepted]
    if others:
        raise ConfigError(
            f"--small does not accept {', '.join(others)}, only {', '.join(_SMALL_FLAGS)}: drop "
            "what it does not accept, or drop --small to train the recipe itself, with all flags"
        )
    recipe = catalog.find(name)
    parser = demo.build_parser()
    parser.prog = "megatron pretrain RECIPE --small"
    parser.set_defaults(out=Path("runs") / f"{recipe.name}-small")
    overrides = catalog.command_line_of(
        [flag for flag in flags if flag.name not in ("", "--small")]
    )
    options = parser.read(overrides)
    options.model = recipe.name
    model = {path.removeprefix("model."): value for path, value in recipe.values.items()}
    demo.run(options, small_kind(recipe.architecture, model))


def _exec(argv: Sequence[str], *, finetunes: bool = False) -> None:
    program, script, flags = training_command(argv, finetunes=finetunes)
    if not is_launched():
        current = Path.cwd()
        script_path = script.relative_to(current) if script.is_relative_to(current) else script
        variables = ["CUDA_VISIBLE_DEVICES="] if gpus_are_hidden() else []
        print_line(f"$ {shlex.join([*variables, *program, str(script_path), *flags])}\n")
    _, *launcher = program
    prefix = [*module_command(_LAUNCHER), *launcher[2:]] if launcher else [sys.executable]
    os.execv(prefix[0], [*prefix, str(script), *flags])


def training_command(
    argv: Sequence[str], *, finetunes: bool = False
) -> tuple[list[str], Path, list[str]]:
    """Return the command that `megatron pretrain` or `megatron finetune` runs.

    With --gpus 0, this hides the machine's GPUs from this process and those that it starts.

    Args:
        argv: The arguments after `megatron pretrain` or `megatron finetune`.
        finetunes: Whether the command is `megatron finetune`.

    Returns:
        `python`, with the launcher and its flags if there are several processes; the script; and
        the script's flags.

    Raises:
        UserError: The recipe, --gpus, or a flag for several processes is invalid, or the script is
            not installed.
    """
    counts = [flag for flag in split(argv) if flag.name == "--gpus"]
    architecture, flags = catalog.as_script(argv)
    script = f"pretrain_{architecture}"
    if finetunes and architecture == "gpt":
        script, checked_argv = "finetune", finetuning_args(flags)
    elif finetunes:
        checked_argv = flags = [*flags, "--finetune"]
    else:
        checked_argv = flags
    count = _processes(counts[-1] if counts else None)
    launcher = f"-m {_LAUNCHER} --standalone --nproc-per-node {count}" if count > 1 else ""
    if count > 1:  # report an error in one line, without torchrun's report on each process
        catalog.check_flags(architecture, checked_argv, count)
    # Our scripts are installed as modules next to the package.
    path = getattr(importlib.util.find_spec(script), "origin", None)
    if path is None:
        raise ConfigError(f"{script}.py is not installed: install megatron again")
    return ["python", *launcher.split()], Path(path), flags


def _processes(flag: ParsedFlag | None) -> int:
    """Return how many processes to start on this machine. --gpus 0 hides its GPUs from them.

    Raises:
        ConfigError: --gpus is not a number, is more than the GPUs of a machine that has any, or is
            given under a launcher.
    """
    if flag is None:
        return 1 if is_launched() else max(1, _gpus())
    text = " ".join(flag.values)
    if not text.isdecimal():
        raise ConfigError(f"{flag}: give the number of GPUs to use on this machine, 0 for none")
    if is_launched():
        raise ConfigError(f"{flag}: a launcher has already started this process: drop the flag")
    count = int(text)
    if count == 0:
        hide_gpus()
    elif count > (gpus := _gpus() or count):
        raise ConfigError(
            f"{flag}: this machine has {gpus} GPU{'s' * (gpus > 1)}: give at most {gpus}"
        )
    return max(1, count)


def _gpus() -> int:
    """Return the number of GPUs that this process may use."""
    if not detect_architectures():
        return 0  # avoids importing torch
    import torch

    return torch.accelerator.device_count()
