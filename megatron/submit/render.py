"""Job files from a description, by the templates in templates/."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

from megatron.errors import (
    EXIT_SAVED_ON_SIGNAL,
    CheckpointError,
    ConfigError,
    DataError,
    NumericsError,
    ShortageError,
    StorageError,
)
from megatron.submit.description import Description, problems_of, training_problems, volumes
from megatron.submit.hosts import Host, read_hostfile

# Exit codes of a run that would only fail again.
_HOPELESS = {
    CheckpointError.exit_code: "checkpoint",
    DataError.exit_code: "data",
    NumericsError.exit_code: "numerics",
    StorageError.exit_code: "disk",
    ConfigError.exit_code: "configuration",
    ShortageError.exit_code: "memory",
}


def render(run: Description, target: str) -> str:
    """Return the job file of a run.

    Args:
        run: The description.
        target: "slurm", "kubernetes", "hostfile" or "local".

    Raises:
        ConfigError: The description has mistakes, or the hostfile cannot be used.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    if problems := problems_of(run, target):
        raise ConfigError(problems)
    hosts = _hosts(run) if target == "hostfile" else []
    if hosts:
        processes = hosts[0].slots or run.job.processes
        run = run._replace(job=replace(run.job, nodes=len(hosts), processes_per_node=processes))
    if problems := training_problems(run.job):
        raise ConfigError(problems)
    environment = Environment(
        loader=PackageLoader("megatron.submit"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    # Every value is quoted for the language of its file: shlex.quote for bash, JSON for YAML.
    environment.filters |= {"quote": shlex.quote, "json": json.dumps, "literal": _literal}
    name = {"slurm": "slurm.sh", "kubernetes": "kubernetes.yaml", "local": "local.sh"}.get(
        target, "mpi.sh" if run.hosts.launcher == "mpi" else "hostfile.sh"
    )
    is_pytorch_job = run.kubernetes.kind == "pytorchjob"
    return environment.get_template(f"{name}.j2").render(
        run=run,
        environment=list(_variables(run).items()),
        flags=_flags(run.job.words),
        volumes=volumes(run),
        mounts=",".join(run.job.volume),
        saved=EXIT_SAVED_ON_SIGNAL,
        hopeless=_HOPELESS,
        hosts=hosts,
        mpi_hosts=",".join(f"{host.name}:{run.job.processes}" for host in hosts),
        cwd=str(Path.cwd()),
        # Kubeflow's operator looks for its container and its port by these names.
        container="pytorch" if is_pytorch_job else "trainer",
        port_name="pytorchjob-port" if is_pytorch_job else "rendezvous",
        seconds=_seconds(run.job.time),
        tolerations=[_toleration(one) for one in run.kubernetes.toleration],
        resources=_resources(run),
    )


def _variables(run: Description) -> dict[str, str]:
    """Return the environment variables of all ranks, by name. Those of the user win."""
    ours = {"OMP_NUM_THREADS": str(run.job.threads), "NCCL_DEBUG": "WARN"}
    return ours | dict(one.split("=", 1) for one in run.job.env)


def _hosts(run: Description) -> list[Host]:
    assert run.hosts.hostfile is not None, "checked before"
    hosts = read_hostfile(Path(run.hosts.hostfile))
    counts = {host.slots for host in hosts}
    if len(counts) > 1:
        shown = ", ".join(f"{host.name} has {host.slots or 'none'}" for host in hosts)
        raise ConfigError(
            f"--hostfile {run.hosts.hostfile}: the numbers of slots differ ({shown}): give each "
            "line the same number, because all machines run as many processes"
        )
    return hosts


def _flags(words: list[str]) -> list[list[str]]:
    """Return the words of a command, with a list for each flag and its values."""
    lines: list[list[str]] = []
    for word in words:
        if not lines or word.startswith("--"):
            lines.append([])
        lines[-1].append(word)
    return lines


def _literal(word: str) -> str:
    """Return a word for Kubernetes, which replaces $(NAME) by a variable's value and $$ by $."""
    return word.replace("$", "$$")


def _seconds(time: str | None) -> int | None:
    if time is None:
        return None
    hours, minutes, seconds = map(int, time.split(":"))
    return 3600 * hours + 60 * minutes + seconds


def _toleration(text: str) -> dict[str, str]:
    """Return a toleration for a taint as kubectl writes it."""
    taint, _, effect = text.partition(":")
    key, equals, value = taint.partition("=")
    matching = {"operator": "Equal", "value": value} if equals else {"operator": "Exists"}
    return {"key": key, **matching, **({"effect": effect} if effect else {})}


def _resources(run: Description) -> dict[str, str]:
    """Return what each pod asks for."""
    job = run.job
    asked = {
        run.kubernetes.gpu_resource: job.gpus_per_node,
        "cpu": job.cpus_per_node,
        "memory": f"{job.memory_gb}G" if job.memory_gb else None,
    }
    return {name: str(amount) for name, amount in asked.items() if amount}
