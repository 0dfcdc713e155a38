"""The commands of `megatron`. Each imports what it needs when it runs."""

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
    """One command.

    Attributes:
        help: What it does, on one line.
        module: The module that does it. With a function behind a colon, that function takes the
            words after the command and returns an exit code. Otherwise the module is a tool: it has
            `build_parser()` and `run(options)`.
    """

    help: str
    module: str


COMMANDS: Mapping[str, Command] = {
    "plan": Command("find the fastest layouts on a cluster", "megatron.planner.command"),
    "pretrain": Command("train a model from a recipe", "megatron.cli.pretrain:pretrain"),
    "finetune": Command("train a model further, or for a task", "megatron.cli.pretrain:finetune"),
    "evaluate": Command("evaluate a model on a task", "megatron.cli.programs:evaluate"),
    "chat": Command("talk to a checkpoint or a server", "megatron.cli.chat:chat"),
    "generate": Command("write text, or continue prompts", "megatron.cli.programs:generate"),
    "fill-in": Command("fill in the masked words of a text", "megatron.tools.fill_in"),
    "score": Command("give answers a reward model's rewards", "megatron.tools.score"),
    "embed": Command("make a vector of each text", "megatron.tools.bert_embedding"),
    "serve": Command("serve a model: REST, OpenAI's API, a page", "megatron.cli.programs:serve"),
    "convert": Command("convert checkpoints", "megatron.cli.programs:convert"),
    "find-lr": Command("plot the loss over learning rates", "megatron.training.find_lr"),
    "submit": Command("write and submit the job file for a cluster", "megatron.submit.command"),
    "report": Command("write or serve a page about runs", "megatron.report.command"),
    "plot": Command("draw the loss curve of a run", "megatron.tools.plot_loss"),
    "data": Command("make and inspect datasets", "megatron.cli.programs:data"),
    "detoxify": Command("make a GPT less toxic, and measure it", "megatron.cli.programs:detoxify"),
    "demo": Command("train a small model on text, step by step", "megatron.tools.demo"),
    "recipes": Command("list the named models", "megatron.cli.recipes"),
}
DATA: Mapping[str, Command] = {
    "tokenizer": Command("train a tokenizer on text", "megatron.tools.train_tokenizer"),
    "preprocess": Command("turn text into token ids", "megatron.tools.preprocess_data"),
    "show": Command("show documents, samples, statistics", "megatron.tools.show_data"),
    "merge": Command("join datasets", "megatron.tools.merge_datasets"),
    "split": Command("split text for training and tests", "megatron.tools.split_json"),
    "build-corpus": Command("clean and deduplicate crawl files", "megatron.tools.build_corpus"),
    "retro": Command("find the neighbors for a Retro", "megatron.retro.command:main"),
}
DETOXIFY: Mapping[str, Command] = {
    "annotate": Command("add scores to texts", "megatron.detoxify.annotate"),
    "select": Command("keep the texts with the lowest scores", "megatron.detoxify.select_texts"),
    "evaluate": Command("compare models in one table", "megatron.detoxify.evaluate"),
    "demo": Command("run all steps in small", "megatron.tools.demo_detoxify"),
}
_HELP = ("-h", "--help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that a command line names, and return its exit code."""
    guard_imports()
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in _HELP:
        return run_command(lambda: print(overview("megatron", COMMANDS)))
    if words[0] == "--version":
        print(f"megatron {__version__}")
        return 0
    return dispatch("megatron", COMMANDS, words)


def dispatch(program: str, commands: Mapping[str, Command], words: Sequence[str]) -> int:
    """Run one of the commands of a table.

    Args:
        program: What was typed before `words`, for messages.
        commands: The table.
        words: The name of a command, and its own words.

    Returns:
        The exit code.
    """
    name, *rest = words
    command = commands.get(name)
    if command is None:
        hint = suggestion(name, commands) or f": `{program} --help` lists all commands"
        print(f"error: unknown command {name}{hint}", file=sys.stderr)
        return ConfigError.exit_code
    module, _, function = command.module.partition(":")
    tool = importlib.import_module(module)
    if function:
        code: int = getattr(tool, function)(rest)
        return code
    parser = tool.build_parser()
    script = f"python tools/{parser.prog}"
    parser.prog = f"{program} {name}"
    parser.description = (parser.description or "").replace(script, parser.prog)
    options = parser.read(rest)
    return run_command(lambda: tool.run(options))


def overview(program: str, commands: Mapping[str, Command]) -> str:
    """Return the help of a table of commands."""
    width = max(map(len, commands))
    rows = [f"  {name.ljust(width)}  {command.help}" for name, command in commands.items()]
    return "\n".join(
        [
            f"usage: {program} COMMAND [...]",
            "",
            *rows,
            "",
            f"`{program} COMMAND --help` explains a command.",
        ]
    )
