"""The commands of `megatron`. Each one imports its modules only when it runs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron import __version__
from megatron.command import guard_imports, run_command
from megatron.config.fields import suggestion
from megatron.errors import ConfigError


class Command(NamedTuple):
    """An entry in the table of commands.

    Attributes:
        help: A one-line description.
        module: The module that implements it. If a function follows a colon, it takes the arguments
            after the command and returns an exit code. Otherwise the module is a tool with
            `build_parser()` and `run(options)`.
    """

    help: str
    module: str


COMMANDS: Mapping[str, Command] = {
    "plan": Command("find the fastest layouts on a cluster", "megatron.planner.command"),
    "pretrain": Command("train a model from a recipe", "megatron.cli.pretrain:pretrain"),
    "finetune": Command(
        "finetune a model, or train a classifier", "megatron.cli.pretrain:finetune"
    ),
    "evaluate": Command("evaluate a model on a task", "megatron.cli.main:evaluate"),
    "chat": Command("chat with a checkpoint or server", "megatron.tools.text_generation_cli:chat"),
    "generate": Command("generate text or continue prompts", "megatron.cli.main:generate"),
    "fill-in": Command("fill in the masked words of a text", "megatron.tools.fill_in"),
    "score": Command("score answers with a reward model", "megatron.tools.score"),
    "embed": Command("compute a vector for each text", "megatron.tools.bert_embedding"),
    "serve": Command("serve a model: two APIs and a web page", "megatron.cli.main:serve"),
    "convert": Command("convert checkpoints", "megatron.cli.main:convert"),
    "find-lr": Command("plot the loss against the learning rate", "megatron.training.find_lr"),
    "coordinate-check": Command("check muP at several widths", "megatron.tools.coordinate_check"),
    "health": Command("test the machines: speed, links, disks", "megatron.cli.health:main"),
    "submit": Command("write and submit the job file for a cluster", "megatron.submit.command"),
    "report": Command("write or serve a page about runs", "megatron.report.__main__"),
    "plot": Command("draw the loss curve of a run", "megatron.tools.plot_loss"),
    "data": Command("make and inspect datasets", "megatron.cli.main:data"),
    "detoxify": Command("make a GPT less toxic and measure it", "megatron.cli.main:detoxify"),
    "demo": Command("train a small model on text, step by step", "megatron.tools.demo"),
    "recipes": Command("list the named models", "megatron.cli.recipes"),
}
DATA: Mapping[str, Command] = {
    "tokenizer": Command("train a tokenizer on text", "megatron.tools.train_tokenizer"),
    "preprocess": Command("turn text into token ids", "megatron.tools.preprocess_data"),
    "show": Command("show documents, samples and statistics", "megatron.tools.show_data"),
    "merge": Command("join datasets", "megatron.tools.merge_datasets"),
    "split": Command("split text into training and test sets", "megatron.tools.split_json"),
    "build-corpus": Command("clean and deduplicate crawl files", "megatron.tools.build_corpus"),
    "retro": Command("find neighbors for training Retro", "megatron.retro.command:main"),
}
DETOXIFY: Mapping[str, Command] = {
    "annotate": Command("add scores to texts", "megatron.detoxify.annotate"),
    "select": Command("keep the texts with the lowest scores", "megatron.detoxify.select_texts"),
    "evaluate": Command("compare models in one table", "megatron.detoxify.evaluate"),
    "demo": Command("run all steps on a small scale", "megatron.tools.demo_detoxify"),
}
_HELP = ("-h", "--help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command named on the command line, and return its exit code."""
    guard_imports()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["--version"]:
        print(f"megatron {__version__}")
        return 0
    return dispatch("megatron", COMMANDS, arguments)


def dispatch(program: str, commands: Mapping[str, Command], argv: Sequence[str]) -> int:
    """Run the command that the first word names. Without a word or with --help, print the help.

    Args:
        program: The part of the command line before `argv`, for messages.
        commands: The table of commands.
        argv: The name of a command and its arguments, nothing, or a flag that asks for help.

    Returns:
        The exit code.

    Raises:
        SystemExit: The flags of a tool ask for its help or contain a mistake.
    """
    if not argv or argv[0] in _HELP:
        return run_command(lambda: print(overview(program, commands)))
    name, *arguments = argv
    command = commands.get(name)
    if command is None:
        hint = suggestion(name, commands) or f": `{program} --help` lists all commands"
        print(f"error: unknown command {name}{hint}", file=sys.stderr)
        return ConfigError.exit_code
    module, _, function = command.module.partition(":")
    tool = importlib.import_module(module)
    if function:
        code: int = getattr(tool, function)(arguments)
        return code
    parser = tool.build_parser()
    script = f"python tools/{parser.prog}"
    parser.prog = f"{program} {name}"
    parser.description = (parser.description or "").replace(script, parser.prog)
    options = parser.read(arguments)
    return run_command(lambda: tool.run(options))


def overview(program: str, commands: Mapping[str, Command]) -> str:
    """Return the help text for a table of commands."""
    width = max(map(len, commands))
    rows = [f"  {name.ljust(width)}  {command.help}" for name, command in commands.items()]
    return "\n".join(
        [
            f"usage: {program} COMMAND [...]",
            "",
            *rows,
            f"`{program} COMMAND --help` explains a command.",
        ]
    )


def serve(argv: Sequence[str]) -> int:
    """Run one process of the text generation server, and return the exit code."""
    from megatron.config.generation import ServerConfig
    from megatron.config.parser import help_if_asked

    help_if_asked("megatron serve", (ServerConfig,), trains=False, argv=argv)
    from megatron.inference.server.run import main as run

    return run(argv)


def generate(argv: Sequence[str]) -> int:
    """Run one process that generates text, and return the exit code."""
    from megatron.config.generation import SamplesConfig
    from megatron.config.parser import help_if_asked

    help_if_asked("megatron generate", (SamplesConfig,), trains=False, argv=argv)
    from megatron.inference.samples import main as run

    return run("megatron generate", argv)


def evaluate(argv: Sequence[str]) -> int:
    """Run one process of the task that `--task` or the first argument names.

    Returns:
        The exit code.
    """
    from megatron.tasks.main import main as run

    return run(_without_training(with_task(argv)), "megatron evaluate")


def _without_training(words: list[str]) -> list[str]:
    """Return the arguments, with --epochs 0 if they evaluate a classifier and train nothing."""
    from megatron.config.arguments import split
    from megatron.tasks.table import TASKS

    flags = {flag.name: flag.values for flag in split(words)}
    task = TASKS.get("".join(flags.get("--task", ())))
    trains = flags.keys() & {"--train-data", "--epochs", "--config"}
    is_classifier = task is not None and task.kind == "finetuning"
    return [*words, "--epochs", "0"] if is_classifier and not trains else words


def with_task(argv: Sequence[str]) -> list[str]:
    """Return the arguments, with `--task` before the first one if that is not a flag."""
    return [*(["--task"] if argv and not argv[0].startswith("-") else []), *argv]


def convert(argv: Sequence[str]) -> int:
    """Convert a checkpoint, and return the exit code."""
    from megatron.tools.checkpoint.util import main as run

    return run(argv, "megatron convert")


def data(argv: Sequence[str]) -> int:
    """Run a command for datasets and return the exit code."""
    return dispatch("megatron data", DATA, argv)


def detoxify(argv: Sequence[str]) -> int:
    """Run a step of detoxification, and return the exit code."""
    return dispatch("megatron detoxify", DETOXIFY, argv)
