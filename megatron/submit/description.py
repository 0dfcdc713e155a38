"""The description of a run for a cluster: its sections, how they are read, and their rules."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron.config.arguments import split
from megatron.config.fields import fields_of, flag
from megatron.config.generation import bounds_problems
from megatron.config.run import Findings
from megatron.config.yaml_file import load, read_sections
from megatron.errors import CheckpointError, ConfigError
from megatron.recipes import catalog

TARGETS = ("slurm", "kubernetes", "hostfile", "local")


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """Job: the command and its resources.

    Attributes:
        name: Name of the job: lowercase letters, digits and hyphens.
        nodes: Number of machines.
        gpus_per_node: GPUs of each machine. 0 trains on CPUs.
        processes_per_node: Processes on each machine. Default: one for each GPU.
        cpus_per_node: Processor cores of each machine.
        memory_gb: Memory of each machine.
        time: Time limit, as HH:MM:SS.
        image: Container image in which the job runs: a name in a registry, or a file.
        volume: Folders in the container, each as SOURCE:TARGET or SOURCE:TARGET:ro. A source
            without a slash is a Kubernetes volume claim.
        env: Environment variables, each as NAME=VALUE.
        workdir: Folder in which the command runs. It must contain this project.
        logs: Folder for the logs of all ranks.
        python: Python interpreter, for example that of a virtual environment.
        command: The command as one line: a Python file, -m MODULE or megatron, then its flags. On
            the command line it follows --.
    """

    name: str = "megatron"
    nodes: int = flag(1, at_least=1, at_most=100_000)
    gpus_per_node: int = flag(8, at_least=0, at_most=1024)
    processes_per_node: int | None = flag(None, at_least=1, at_most=1024)
    cpus_per_node: int | None = flag(None, at_least=1)
    memory_gb: int | None = flag(None, unit="GB", at_least=1)
    time: str | None = None
    image: str | None = None
    volume: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    workdir: str | None = None
    logs: str = "logs"
    python: str = "python"
    command: str = flag("", is_flag=False)

    @property
    def processes(self) -> int:
        """The number of processes on each node."""
        return self.processes_per_node or self.gpus_per_node or 1

    @property
    def threads(self) -> int:
        """The number of cores for each process; 1 if the cores of a machine are not given."""
        return max(1, (self.cpus_per_node or 1) // self.processes)

    @property
    def seconds(self) -> int | None:
        """The time limit in seconds, or `None` if there is none."""
        if self.time is None:
            return None
        hours, minutes, seconds = map(int, self.time.split(":"))
        return 3600 * hours + 60 * minutes + seconds

    @property
    def argv(self) -> list[str]:
        """The command's program and arguments, with `-m` before `megatron`."""
        argv = shlex.split(self.command)
        return ["-m", *argv] if argv[:1] == ["megatron"] else argv


@dataclass(frozen=True, kw_only=True)
class SlurmConfig:
    """SLURM.

    Attributes:
        partition: Partition in which the job runs.
        account: Account to charge.
        qos: Quality of service (QOS) of the job.
        constraint: Features that the nodes must have.
        module: Environment modules to load.
        requeue: Requeue the job when it is preempted or its time is up, until training is complete.
            Requires --load and --save.
        chain: Number of jobs, submitted as an array, that run one after another and continue the
            same run. Requires --load and --save.
        save_seconds: With --requeue or --chain, number of seconds before its time limit at which a
            job receives the signal to save.
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    module: tuple[str, ...] = ()
    requeue: bool = False
    chain: int = flag(1, at_least=1, at_most=1000)
    save_seconds: int = flag(120, unit="seconds", at_least=1, at_most=65535)


@dataclass(frozen=True, kw_only=True)
class KubernetesConfig:
    """Kubernetes.

    Attributes:
        kind: Kind of object to create. A job of several nodes is an Indexed Job with a headless
            Service. A debug pod has the same resources and volumes, and waits for `kubectl exec`.
        namespace: Namespace in which objects are created.
        queue: Kueue queue in which the job waits until all its pods fit.
        service_account: Service account of the pods.
        pull_secret: Secret for pulling the image.
        node_selector: Labels that nodes must have, each as KEY=VALUE.
        toleration: Taints that the pods tolerate, in kubectl's notation: KEY=VALUE:EFFECT,
            KEY:EFFECT or KEY.
        gpu_resource: Name of the GPU resource.
        shared_memory_gb: Size of /dev/shm, for data loading and NCCL.
        restarts: Number of restarts after failures. Preemption does not count as one.
        save_seconds: Time that a pod has to save after a stop signal.
        silence_minutes: Stop a pod whose ranks have logged nothing for this long. 0 disables the
            probe.
    """

    kind: str = flag(
        "job", names="--kubernetes-kind", choices=("job", "jobset", "pytorchjob", "debug")
    )
    namespace: str | None = None
    queue: str | None = None
    service_account: str | None = None
    pull_secret: str | None = None
    node_selector: tuple[str, ...] = ()
    toleration: tuple[str, ...] = ("nvidia.com/gpu:NoSchedule",)
    gpu_resource: str = "nvidia.com/gpu"
    shared_memory_gb: int = flag(64, unit="GB", at_least=1)
    restarts: int = flag(10, at_least=0, at_most=10_000)
    save_seconds: int = flag(
        300, names="--pod-save-seconds", unit="seconds", at_least=1, at_most=86_400
    )
    silence_minutes: int = flag(60, unit="minutes", at_least=0, at_most=10_000)


@dataclass(frozen=True, kw_only=True)
class HostsConfig:
    """Machines without a scheduler.

    Attributes:
        hostfile: File with one machine per line, as for MPI or DeepSpeed: HOST, HOST slots=8
            or HOST:8. It determines the number of nodes and, by its slots, the processes on each
            unless --processes-per-node is given.
        launcher: How processes are started: by one launcher per machine, which ssh starts (ssh), or
            by mpirun (mpi).
        ssh_config: Configuration file for ssh. Default: the user's own.
        port: Port through which the processes find each other.
    """

    hostfile: str | None = None
    launcher: str = flag("ssh", choices=("ssh", "mpi"))
    ssh_config: str | None = None
    port: int = flag(29500, names="--port", at_least=1024, at_most=65535)


class Description(NamedTuple):
    """The description of a run for a cluster, by section."""

    job: JobConfig
    slurm: SlurmConfig
    kubernetes: KubernetesConfig
    hosts: HostsConfig


SECTIONS: Mapping[str, type] = {
    "job": JobConfig,
    "slurm": SlurmConfig,
    "kubernetes": KubernetesConfig,
    "hosts": HostsConfig,
}


def read_description(
    file: Path | None, given: Mapping[str, Mapping[str, Any]], command: Sequence[str]
) -> Description:
    """Read a description from a file, flags and a command. Flags override the file.

    Args:
        file: The YAML file, if any.
        given: The values of the flags that were given, by section and field.
        command: The words of the command, if given on the command line.

    Raises:
        ConfigError: The file cannot be read, or has unknown keys or values of the wrong type.
    """
    findings = Findings()
    values: dict[str, Any] = {}
    if file is not None:
        values = read_sections(load("--run", file) or {}, str(file), findings, SECTIONS)
    if findings.problems:
        raise ConfigError(findings.problems)
    if command:
        values["job.command"] = shlex.join(command)
    configs = []
    for name, config_type in SECTIONS.items():
        field_names = {entry.name for entry in fields_of(config_type)}
        in_file = {key: values[f"{name}.{key}"] for key in field_names if f"{name}.{key}" in values}
        configs.append(config_type(**in_file | dict(given[name])))
    return Description(*configs)


_PATTERNS = {
    "name": (r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", "at most 40 lowercase letters, digits and "
             "hyphens, beginning with a letter and not ending with a hyphen"),
    "time": (r"\d{1,4}:[0-5]\d:[0-5]\d", "HH:MM:SS, such as 24:00:00"),
    "partition": (r"[\w.,-]+", "letters, digits, dots, commas and hyphens"),
    "account": (r"[\w.-]+", "letters, digits, dots and hyphens"),
    "qos": (r"[\w.-]+", "letters, digits, dots and hyphens"),
    "constraint": (r"[\w.,&|()\[\]*-]+", "features joined by &, | or commas"),
    "module": (r"[\w.+/-]+", "a module such as cuda/12.8"),
    "logs": (r"[\w.+/-]+", "a path without spaces, because they are special to SLURM"),
    "env": (r"[A-Za-z_]\w*=[^\0\r\n]*", "NAME=VALUE on one line"),
    "volume": (r"[^:,\0\r\n]+:/[^:,\0\r\n]*(:ro)?", "SOURCE:/TARGET or SOURCE:/TARGET:ro"),
    "image": (r"[\w.:/@#+-]+", "an image such as nvcr.io/nvidia/pytorch:25.10-py3, or a file"),
    "namespace": (r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", "a Kubernetes name"),
    "queue": (r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", "a Kubernetes name"),
    "service_account": (r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", "a Kubernetes name"),
    "pull_secret": (r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", "a Kubernetes name"),
    "node_selector": (r"[\w./-]+=[\w.-]*", "KEY=VALUE"),
    "toleration": (r"[\w./-]+(=[\w.-]*)?(:(NoSchedule|PreferNoSchedule|NoExecute))?",
                   "KEY=VALUE:EFFECT, KEY:EFFECT or KEY, with the effect NoSchedule, "
                   "PreferNoSchedule or NoExecute"),
    "gpu_resource": (r"[a-z0-9.-]+/[\w.-]+", "a resource such as nvidia.com/gpu"),
}  # fmt: skip


# The targets that use a section or field. A file may also set it for other targets; a flag may not.
_USED_BY: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("job.memory_gb", "job.time", "job.volume"), ("slurm", "kubernetes")),
    "slurm": ("slurm",),
    "kubernetes": ("kubernetes",),
    "hosts": ("hostfile",),
    "hosts.port": ("hostfile", "kubernetes"),
    "job.nodes": ("slurm", "kubernetes", "local"),
}


def unused_flags(given: Mapping[str, Mapping[str, Any]], target: str) -> list[str]:
    """Return a line for each flag that a target would ignore.

    Args:
        given: The values of the flags that were given, by section and field.
        target: "slurm", "kubernetes", "hostfile" or "local".
    """
    problems = [
        f"{field.display_name} has no effect with --to {target}: remove it"
        for name, config_type in SECTIONS.items()
        for field in fields_of(config_type)
        if field.name in given[name]
        and target not in _USED_BY.get(f"{name}.{field.name}", _USED_BY.get(name, TARGETS))
    ]
    if given["hosts"].get("launcher") == "mpi" and "logs" in given["job"]:
        problems.append(
            "--logs has no effect with --launcher mpi, which prints to stdout: remove it"
        )
    return problems


def problems_of(run: Description, target: str) -> list[str]:
    """Return a line for each error in a description, with the remedy.

    The command and the target's own rules are checked only if all values are valid by themselves.
    `training_problems` checks the flags of the command.
    """
    problems = [problem for part in run for problem in bounds_problems(part)]
    problems += _pattern_problems(run)
    if not problems:
        problems += _command_problems(run, target)
        problems += _target_problems(run, target)
    return problems


def _pattern_problems(run: Description) -> Iterator[str]:
    """Yield a line for each value that breaks its pattern, and for a command with an open quote."""
    for part in run:
        kind: type = type(part)
        for field in fields_of(kind):
            value = getattr(part, field.name)
            pattern, expected = _PATTERNS.get(field.name, (r"[^\0\r\n]*", "text on one line"))
            for entry in value if field.many else [value]:
                is_checked = isinstance(entry, str) and field.name != "command"
                if is_checked and not re.fullmatch(pattern, entry, re.ASCII):
                    yield f"{field.display_name} {entry!r}: expected {expected}"
    try:
        shlex.split(run.job.command)
    except ValueError as error:
        yield f"job.command: {error}: close the quotes, or write the command after --"


def _command_problems(run: Description, target: str) -> Iterator[str]:
    argv, job = run.job.argv, run.job
    is_debug = target == "kubernetes" and run.kubernetes.kind == "debug"
    if not argv:
        if not is_debug:
            yield (
                "no command: write it after --, as in `-- pretrain_gpt.py --config run.yaml`, or "
                "as job.command in the --run file"
            )
        return
    if "\0" in job.command:
        yield "job.command: it contains a NUL character: remove it"
    if not argv[0].endswith(".py") and (argv[0] != "-m" or len(argv) < 2):
        yield (
            f"the command begins with {argv[0]!r}: begin with a Python file, such as "
            "pretrain_gpt.py, with -m MODULE or with megatron; the launcher is added to it"
        )
    if job.gpus_per_node and job.processes_per_node and job.processes > job.gpus_per_node:
        yield (
            f"--processes-per-node {job.processes} is more than --gpus-per-node "
            f"{job.gpus_per_node}: each process needs its own GPU"
        )


def training_problems(job: JobConfig) -> list[str]:
    """Return the errors in the flags of a pretraining run, to find them before the job is queued.

    Nothing is checked for other commands, with --small or --use-checkpoint-args, or if the flags
    depend on files that this machine does not have.
    """
    program, *args = job.argv or [""]
    script = re.fullmatch(r"(?:.*/)?pretrain_(gpt|bert|t5)\.py", program)
    is_recipe = args[:2] == ["megatron", "pretrain"]
    given = split(args[2:] if is_recipe else args)
    names = {flag.name for flag in given}
    files = [
        Path(value)
        for flag in given
        for value in flag.values
        if flag.name == "--config" or (not flag.name and Path(value).suffix in catalog.FILES)
    ]
    if script is None and not is_recipe or not all(map(Path.is_file, files)):
        return []
    if is_recipe and "--gpus" in names:
        return ["--gpus: the job starts the processes: drop --gpus, and set --processes-per-node"]
    if "--small" in names:
        return []
    try:
        architecture, flags = (script[1] if script else "gpt"), args
        if is_recipe:
            architecture, flags = catalog.as_script(args[2:])
        catalog.check_flags(architecture, flags, job.nodes * job.processes)
    except ConfigError as error:
        return error.problems
    except CheckpointError as error:
        return [str(error)]
    return []


def _target_problems(run: Description, target: str) -> Iterator[str]:
    claims = [volume.source for volume in volumes(run) if not volume.source.startswith("/")]
    if claims and target != "kubernetes":
        yield (
            f"--volume {claims[0]}:...: volume claims need --to kubernetes; folders begin with /"
        )
    if target == "slurm":
        yield from _slurm_problems(run)
    if target == "kubernetes" and run.job.image is None:
        yield "--to kubernetes needs --image: an image that contains this project (see Dockerfile)"
    memory, shared = run.job.memory_gb, run.kubernetes.shared_memory_gb
    if target == "kubernetes" and memory is not None and shared >= memory:
        yield (
            f"--shared-memory-gb {shared} counts toward --memory-gb {memory}: request more memory "
            "or less shared memory"
        )
    if target == "hostfile" and run.hosts.hostfile is None:
        yield "--to hostfile needs --hostfile: a file with one machine per line"
    if target in ("hostfile", "local") and run.job.image is not None:
        yield f"--to {target} does not start containers: remove --image"
    if target == "local" and run.job.nodes > 1:
        yield f"--to local uses one machine, but --nodes is {run.job.nodes}: use --to hostfile"


def _slurm_problems(run: Description) -> Iterator[str]:
    slurm, names = run.slurm, {flag.name for flag in split(run.job.argv)}
    if run.job.volume and run.job.image is None:
        yield "--volume needs --image: without a container, a job uses the machine's folders"
    if slurm.requeue and slurm.chain > 1:
        yield f"--requeue and --chain {slurm.chain} both continue a run: give only one of them"
    if slurm.requeue or slurm.chain > 1:
        option = "--requeue" if slurm.requeue else f"--chain {slurm.chain}"
        # A configuration file may set both, so the command alone does not show it.
        if "--config" not in names:
            missing = [name for name in ("--load", "--save") if name not in names]
            if missing:
                yield (
                    f"{option} continues from a checkpoint, but the command has no "
                    f"{' and no '.join(missing)}: add --load and --save with the same folder"
                )
        if run.job.seconds is not None and run.job.seconds <= slurm.save_seconds:
            yield (
                f"--save-seconds {slurm.save_seconds}: the job would receive the signal to save "
                f"when it starts, because --time is {run.job.time}: give a longer --time or fewer "
                "seconds"
            )
    if run.job.time is None and slurm.requeue is False and slurm.chain > 1:
        yield f"--chain {slurm.chain} needs --time: without a limit, the first job never ends early"


class Volume(NamedTuple):
    """A volume of a container: its source, its mount path, and whether it is read-only."""

    source: str
    target: str
    read_only: bool


def volumes(run: Description) -> list[Volume]:
    """Return the volumes to mount in the container."""
    parts = [volume.split(":") for volume in run.job.volume]
    return [Volume(source, target, bool(mode)) for source, target, *mode in parts]
