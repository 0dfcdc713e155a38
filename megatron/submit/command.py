r"""Write the job file of a run for a cluster, and submit it.

    megatron submit --to slurm --nodes 2 --time 24:00:00 --requeue -- \
        pretrain_gpt.py --config examples/gpt_tiny.yaml \
        --load checkpoints --save checkpoints --save-interval 1000

prints the job file. --output writes it to a file, and --submit also hands it to sbatch, kubectl or
bash. A --run file holds the same settings by section (docs/clusters.md).
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from pathlib import Path

from megatron.config.arguments import ToolParser, add_flags
from megatron.config.fields import fields_of
from megatron.durable import replace_file, writing_to
from megatron.errors import ConfigError, say_on_stderr
from megatron.submit.description import (
    SECTIONS,
    TARGETS,
    Description,
    read_description,
    unused_flags,
)
from megatron.submit.render import render

_PROGRAMS = {
    "slurm": ("sbatch", "run on a login node of the cluster"),
    "kubernetes": ("kubectl", "install it (https://kubernetes.io/docs/tasks/tools)"),
    "hostfile": ("bash", "install it"),
    "local": ("bash", "install it"),
}


def build_parser() -> ToolParser:
    """Define the command line."""
    parser = ToolParser("submit.py", __doc__)
    add = parser.add_argument
    add("--to", choices=TARGETS, required=True, help="Where the job runs.")
    add("--run", type=Path, metavar="FILE.yaml", help="Description of the run. Flags override it.")
    add("--output", type=Path, metavar="FILE", help="Job file to write. Default: print it.")
    add("--submit", action="store_true", help="Submit the job file. Needs --output.")
    add("words", nargs="*", metavar="-- COMMAND", help="The Python file and its flags.")
    for kind in SECTIONS.values():
        add_flags(parser, kind)
    return parser


def run(options: argparse.Namespace) -> None:
    """Print or write a job file. To submit it, this process becomes sbatch, kubectl or bash.

    Raises:
        ConfigError: The description has mistakes, or a program is missing.
        StorageError: The file cannot be written.
    """
    described = describe(options)
    text = render(described, options.to)
    if options.output is None:
        if options.submit:
            raise ConfigError("--submit needs --output: the job file is kept, to show what ran")
        print(text, end="")
        return
    with writing_to("--output", options.output):
        options.output.parent.mkdir(parents=True, exist_ok=True)
        replace_file(options.output, text.encode())
    words = submit_command(options.to, options.output)
    if not options.submit:
        say_on_stderr(f"wrote {options.output}; submit it with: {shlex.join(words)}")
        return
    program, remedy = _PROGRAMS[options.to]
    if shutil.which(program) is None:
        raise ConfigError(f"--to {options.to} --submit: there is no {program} here: {remedy}")
    if options.to == "slurm":  # which does not create the folder of a job's output
        Path(described.job.workdir or ".", described.job.logs).mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    # In place of this process: Python would kill a child a moment after Ctrl-C, before it can save.
    os.execvp(program, words)


def describe(options: argparse.Namespace) -> Description:
    """Return the run that a command line describes, with its --run file.

    Raises:
        ConfigError: The file cannot be read, or has unknown keys or values of another kind; or
            a flag has no effect on this kind of cluster.
    """
    given = {
        name: {
            field.name: tuple(value) if field.many else value
            for field in fields_of(kind)
            if (value := getattr(options, field.name, None)) is not None
        }
        for name, kind in SECTIONS.items()
    }
    if problems := unused_flags(given, options.to):
        raise ConfigError(problems)
    return read_description(options.run, given, options.words)


def submit_command(target: str, file: Path) -> list[str]:
    """Return the command that submits a job file."""
    if target == "kubernetes":
        return ["kubectl", "apply", "--filename", str(file)]
    return [_PROGRAMS[target][0], str(file)]
