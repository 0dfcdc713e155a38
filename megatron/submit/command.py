r"""Write the job file of a run for a cluster, and submit it.

    megatron submit --to slurm --nodes 2 --time 24:00:00 --requeue -- \
        pretrain_gpt.py --config examples/gpt_tiny.yaml \
        --load checkpoints --save checkpoints --save-interval 1000

prints the job file. --output writes it to a file, and --submit also hands it to sbatch, kubectl or
bash. A --run file contains the same settings by section (docs/clusters.md).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from megatron.config.arguments import ToolParser, add_flags
from megatron.config.fields import fields_of
from megatron.durable import expect_no_file, replace_file, writing_to
from megatron.errors import (
    EXIT_SAVED_ON_SIGNAL,
    CheckpointError,
    ConfigError,
    CrashLoopError,
    DataError,
    NumericsError,
    ShortageError,
    StorageError,
    print_to_stderr,
)
from megatron.submit.description import (
    SECTIONS,
    TARGETS,
    Description,
    problems_of,
    read_description,
    training_problems,
    unused_flags,
    volumes,
)

_PROGRAMS = {
    "slurm": ("sbatch", "run on a login node of the cluster"),
    "kubernetes": ("kubectl", "install it (https://kubernetes.io/docs/tasks/tools)"),
    "hostfile": ("bash", "install it"),
    "local": ("bash", "install it"),
}
# Exit codes of runs that would only fail again if restarted.
_FATAL_EXIT_CODES = {
    CheckpointError.exit_code: "checkpoint",
    DataError.exit_code: "data",
    NumericsError.exit_code: "numerics",
    StorageError.exit_code: "disk",
    ConfigError.exit_code: "configuration",
    ShortageError.exit_code: "memory",
    CrashLoopError.exit_code: "crash loop",
}
_MARK = b"\n# Written by megatron submit "  # in the first lines of every template
_HOST_LINE = re.compile(
    r"([A-Za-z0-9][\w.-]*)(?:\s+slots\s*=\s*([1-9]\d*)|:([1-9]\d*))?(?:\s+max[_-]slots=\d+)?",
    re.ASCII,
)


def build_parser() -> ToolParser:
    """Build the command-line parser."""
    parser = ToolParser("submit.py", __doc__)
    add = parser.add_argument
    add("--to", choices=TARGETS, required=True, help="Where the job runs.")
    add("--run", type=Path, metavar="FILE.yaml", help="Description of the run. Flags override it.")
    add("--output", type=Path, metavar="FILE", help="Job file to write. Default: print it.")
    add("--overwrite", action="store_true", help="Replace FILE even if it is not a job file.")
    add("--submit", action="store_true", help="Submit the job file. Needs --output.")
    add("argv", nargs="*", metavar="-- COMMAND", help="The Python file and its flags.")
    for name, kind in SECTIONS.items():
        add_flags(parser, kind, prefix=f"{name}.")
    return parser


def run(options: argparse.Namespace) -> None:
    """Print or write a job file. With --submit, replace this process with sbatch, kubectl or bash.

    Folders are created for the file and, before a job is submitted to SLURM, for its logs.

    Raises:
        ConfigError: The description is invalid, the output exists and is not a job file, --submit
            is given without --output, or a program is missing.
        StorageError: The file cannot be written.
    """
    description = describe(options)
    text = render(description, options.to)
    if options.output is None:
        if options.submit:
            raise ConfigError("--submit needs --output: the job file stays as a record of what ran")
        print(text, end="")
        return
    if not _is_job_file(options.output):  # an earlier job file may be replaced
        expect_no_file("--output", [options.output], overwrite=options.overwrite)
    with writing_to("--output", options.output):
        options.output.parent.mkdir(parents=True, exist_ok=True)
        replace_file(options.output, text.encode())
    command = submit_command(options.to, options.output)
    if not options.submit:
        print_to_stderr(f"wrote {options.output}; submit it with: {shlex.join(command)}")
        return
    program, remedy = _PROGRAMS[options.to]
    if shutil.which(program) is None:
        raise ConfigError(f"--to {options.to} --submit: {program} is not installed here: {remedy}")
    if options.to == "slurm":
        # SLURM does not create the folder for a job's output, which it looks for where sbatch runs.
        Path(description.job.logs).mkdir(parents=True, exist_ok=True)
    # Replace this process: Python would kill a child right after Ctrl-C, before it can save.
    os.execvp(program, command)


def _is_job_file(path: Path) -> bool:
    """Return whether this program wrote the file."""
    try:
        with path.open("rb") as file:
            return _MARK in file.read(1024)
    except OSError:
        return False


def describe(options: argparse.Namespace) -> Description:
    """Return the run that a command line and its --run file describe.

    Raises:
        ConfigError: The file cannot be read, or has unknown keys or values of the wrong type; or a
            flag has no effect on this kind of cluster.
    """
    given = {
        name: {
            field.name: tuple(value) if field.many else value
            for field in fields_of(kind)
            if (value := getattr(options, f"{name}.{field.name}", None)) is not None
        }
        for name, kind in SECTIONS.items()
    }
    if problems := unused_flags(given, options.to):
        raise ConfigError(problems)
    return read_description(options.run, given, options.argv)


def submit_command(target: str, file: Path) -> list[str]:
    """Return the command that submits a job file."""
    if target == "kubernetes":
        return ["kubectl", "apply", "--filename", str(file)]
    return [_PROGRAMS[target][0], str(file)]


def render(run: Description, target: str) -> str:
    """Return the job file of a run.

    Args:
        run: The description.
        target: "slurm", "kubernetes", "hostfile" or "local".

    Raises:
        ConfigError: The description or a flag of the training command is invalid, or the hostfile
            cannot be used.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    if problems := problems_of(run, target):
        raise ConfigError(problems)
    hosts = _hosts(run) if target == "hostfile" else []
    if hosts:
        processes = run.job.processes_per_node or hosts[0].slots or run.job.processes
        run = run._replace(job=replace(run.job, nodes=len(hosts), processes_per_node=processes))
    if problems := training_problems(run.job):
        raise ConfigError(problems)
    environment = Environment(
        loader=PackageLoader("megatron.submit"),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    # Every value is quoted for the language of its file: shlex.quote for bash, JSON for YAML.
    environment.filters |= {
        "quote": shlex.quote,
        "json": json.dumps,
        # Kubernetes replaces $(NAME) with the value of a variable and $$ with $.
        "literal": lambda word: word.replace("$", "$$"),
    }
    # The user's variables override ours.
    variables = {"OMP_NUM_THREADS": str(run.job.threads), "NCCL_DEBUG": "WARN"}
    variables |= dict(value.split("=", 1) for value in run.job.env)
    name = {"slurm": "slurm.sh", "kubernetes": "kubernetes.yaml", "local": "local.sh"}.get(
        target, "mpi.sh" if run.hosts.launcher == "mpi" else "hostfile.sh"
    )
    is_pytorch_job = run.kubernetes.kind == "pytorchjob"
    return environment.get_template(f"{name}.j2").render(
        run=run,
        environment=list(variables.items()),
        flags=_flags(run.job.argv),
        volumes=volumes(run),
        mounts=",".join(run.job.volume),
        saved=EXIT_SAVED_ON_SIGNAL,
        fatal=_FATAL_EXIT_CODES,
        hosts=hosts,
        mpi_hosts=",".join(f"{host.name}:{run.job.processes}" for host in hosts),
        cwd=str(Path.cwd()),
        # Kubeflow's operator looks for its container and its port by these names.
        container="pytorch" if is_pytorch_job else "trainer",
        port_name="pytorchjob-port" if is_pytorch_job else "rendezvous",
        seconds=run.job.seconds,
        tolerations=[_toleration(value) for value in run.kubernetes.toleration],
        resources=_resources(run),
    )


def _hosts(run: Description) -> list[Host]:
    assert run.hosts.hostfile is not None, "already checked"
    hosts = read_hostfile(Path(run.hosts.hostfile))
    counts = {host.slots for host in hosts}
    if len(counts) > 1:
        slots = ", ".join(f"{host.name} has {host.slots or 'none'}" for host in hosts)
        raise ConfigError(
            f"--hostfile {run.hosts.hostfile}: the numbers of slots differ ({slots}): give each "
            "line the same number, because all machines run the same number of processes"
        )
    return hosts


def _flags(argv: list[str]) -> list[list[str]]:
    """Return the words of a command in groups, one for each flag and its values."""
    groups: list[list[str]] = []
    for arg in argv:
        if not groups or arg.startswith("--"):
            groups.append([])
        groups[-1].append(arg)
    return groups


def _toleration(text: str) -> dict[str, str]:
    """Return the toleration of a pod from kubectl's notation, such as KEY=VALUE:EFFECT."""
    taint, _, effect = text.partition(":")
    key, equals, value = taint.partition("=")
    matching = {"operator": "Equal", "value": value} if equals else {"operator": "Exists"}
    return {"key": key, **matching, **({"effect": effect} if effect else {})}


def _resources(run: Description) -> dict[str, str]:
    """Return the resources that each pod requests."""
    job = run.job
    requests = {
        run.kubernetes.gpu_resource: job.gpus_per_node,
        "cpu": job.cpus_per_node,
        "memory": f"{job.memory_gb}Gi" if job.memory_gb else None,
    }
    return {name: str(amount) for name, amount in requests.items() if amount}


class Host(NamedTuple):
    """A machine in a hostfile, and its number of slots (`None` if its line does not say)."""

    name: str
    slots: int | None


def read_hostfile(path: Path) -> list[Host]:
    """Read the machines of a hostfile, in order.

    Raises:
        ConfigError: The file cannot be read, lists no machine, lists a machine twice, or has a line
            that is not `HOST`, `HOST slots=N` or `HOST:N`. A `max_slots=N` after it is ignored.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--hostfile {path}: cannot be read: {reason}") from None
    hosts: list[Host] = []
    problems = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = _HOST_LINE.fullmatch(text)
        if match is None:
            problems.append(
                f"--hostfile {path}, line {number}: {text!r}: expected HOST, HOST slots=8 or HOST:8"
            )
            continue
        name, slots = match[1], match[2] or match[3]
        if name in [host.name for host in hosts]:
            problems.append(
                f"--hostfile {path}, line {number}: {name} appears twice: keep one line with the "
                "sum of its slots"
            )
        hosts.append(Host(name, int(slots) if slots else None))
    if not hosts and not problems:
        problems.append(f"--hostfile {path}: no machines: write one per line, as HOST slots=8")
    if problems:
        raise ConfigError(problems)
    return hosts
