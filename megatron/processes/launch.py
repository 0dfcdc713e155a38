"""This process's ranks and launcher, and the environment variables that libraries read once."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.environment import LOCAL_RANK_ENV, local_world_size, whole_number
from megatron.errors import ConfigError

RANK_ENV = "RANK"
WORLD_SIZE_ENV = "WORLD_SIZE"
_END_SIGNAL_ENV = "MEGATRON_LAUNCHER_SIGNAL"  # the signal on which our launcher stops restarting
_LAUNCHER_ENV = "MEGATRON_LAUNCHER_PID"
SAVED = signal.SIGUSR1  # tells our launcher that the run has saved because of a signal
_PYTHON_PATH_ENV = "PYTHONPATH"  # where Python looks for modules
_SLURM_TASK_ENV = "SLURM_PROCID"
_GET_ADDRESS = 0x8915  # ioctl SIOCGIFADDR


@dataclass(frozen=True)
class Launch:
    """The ranks of this process, as set by its launcher; the defaults fit a single process.

    Attributes:
        rank: The index of this process.
        world_size: The number of processes.
        local_rank: The index of this process among those on this machine.
        local_world_size: The number of processes on this machine.
        restart_count: How many times torchrun has restarted the processes of this machine.
        is_restart: Whether torchrun or SLURM, not a person, has restarted the run.
        store_outlives_ranks: Whether the store lasts until all processes have ended, because the
            run has a single machine, whose launcher hosts it.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    restart_count: int = 0
    is_restart: bool = False
    store_outlives_ranks: bool = False

    @property
    def machine(self) -> range:
        """The ranks on this machine, or only those up to this rank if their number is unknown."""
        first = self.rank - self.local_rank
        return range(first, first + max(self.local_world_size, self.local_rank + 1))

    @property
    def is_multi_node(self) -> bool:
        """Whether other machines take part."""
        return self.local_world_size < self.world_size


def read_launch(*, use_mpi: bool = False) -> Launch:
    """Read this process's ranks from the variables of torchrun, `deepspeed` or mpirun.

    If none of these variables is set, the world size is 1.

    Args:
        use_mpi: Whether to read mpirun's variables instead of those of the other launchers
            (`--use-mpi`).

    Raises:
        ConfigError: A variable is not a number, the rank is outside the world, mpirun's variables
            are requested but not set, or SLURM or mpirun started several processes that are not
            connected.
    """
    names = [RANK_ENV, WORLD_SIZE_ENV, LOCAL_RANK_ENV]
    if use_mpi:
        names = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK")]
        if "OMPI_COMM_WORLD_RANK" not in os.environ:
            raise ConfigError(
                "--use-mpi: OMPI_COMM_WORLD_RANK is not set: start with mpirun, or drop the flag "
                "and start with torchrun"
            )
    elif not is_launched():
        _refuse_bare_slurm()
        _refuse_bare_mpi()
    rank, size, local_rank = map(whole_number, names, (0, 1, 0))
    local_size = whole_number("OMPI_COMM_WORLD_LOCAL_SIZE", 1) if use_mpi else local_world_size()
    restarts = 0 if use_mpi else whole_number("TORCHELASTIC_RESTART_COUNT", 0)
    if not 0 <= rank < size:
        rank_name, size_name, _ = names
        launcher = "mpirun" if use_mpi else "torchrun"
        raise ConfigError(
            f"{rank_name} is {rank}, but {size_name} is {size} (1 if unset), and ranks must be "
            f"at least 0 and less than that: set both, as {launcher} does, or neither"
        )
    is_restart = restarts > 0 or whole_number("SLURM_RESTART_COUNT", 0) > 0
    store_outlives_ranks = (
        os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and local_size == size
    )
    return Launch(rank, size, local_rank, local_size, restarts, is_restart, store_outlives_ranks)


def is_launched() -> bool:
    """Return whether torchrun, or a launcher that sets the same variables, started this process."""
    return RANK_ENV in os.environ or WORLD_SIZE_ENV in os.environ


def bare_task() -> int:
    """Return the index that SLURM or mpirun gave this task, or 0 with any other launcher or none.

    Raises:
        ConfigError: The launcher's variable with the index is not a number.
    """
    tasks = (whole_number(name, 0) for name in (_SLURM_TASK_ENV, "OMPI_COMM_WORLD_RANK"))
    return 0 if is_launched() else max(tasks)


def _refuse_bare_slurm() -> None:
    """Refuse to run as one of several SLURM tasks that are not connected.

    Each would silently train alone, and all would save to the same folder. A shell opened by
    `salloc` or `srun --pty` has a single task, or no SLURM_PROCID.
    """
    task = os.environ.get(_SLURM_TASK_ENV)
    # `srun` sets the count of its step. A script that `sbatch` runs has the count of the job.
    name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in os.environ else "SLURM_NTASKS"
    tasks = whole_number(name, 1)
    if task is not None and tasks > 1:
        raise ConfigError(
            f"SLURM started this as task {task} of {tasks} ({name}), but {RANK_ENV} and "
            f"{WORLD_SIZE_ENV} are not set, so each task would train alone: start one "
            "torchrun on each machine (srun --ntasks-per-node 1 torchrun --nnodes ... "
            "--nproc-per-node GPUS ..., see docs/clusters.md), or for a single process set "
            f"{RANK_ENV}=0 {WORLD_SIZE_ENV}=1"
        )


def hide_gpus() -> None:
    """Hide the GPUs from the programs that this process starts or replaces itself with."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _refuse_bare_mpi() -> None:
    """Refuse to run as one of several mpirun processes that would each train alone."""
    size = whole_number("OMPI_COMM_WORLD_SIZE", 1)
    if size > 1:
        raise ConfigError(
            f"mpirun started this as one of {size} processes (OMPI_COMM_WORLD_SIZE), each of which "
            "would train alone: add --use-mpi, and set MASTER_ADDR and MASTER_PORT "
            "(mpirun -x MASTER_ADDR=... -x MASTER_PORT=..., see docs/clusters.md)"
        )


def prefix_log_lines() -> None:
    """Make torchrun's --tee begin each line with the global rank instead of the local rank."""
    os.environ.setdefault("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[rank ${rank}] ")


def write_error_file(text: str) -> None:
    """Pass the reason for this process's failure to torchrun, for its final report.

    Without this text, the report ends with "To enable traceback see ...", 40 lines below our
    message.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        message = {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")


def announce_launcher(signum: signal.Signals) -> None:
    """Tell the ranks the launcher's process id and the signal that ends it without a restart."""
    os.environ[_END_SIGNAL_ENV] = str(signum.value)
    os.environ[_LAUNCHER_ENV] = str(os.getpid())


@contextmanager
def module_search_path(folders: Sequence[str]) -> Iterator[None]:
    """Add `folders` to the module search path of Python processes started inside the block."""
    previous = python_path()
    os.environ[_PYTHON_PATH_ENV] = os.pathsep.join([*folders, *filter(None, [previous])])
    try:
        yield
    finally:
        set_python_path(previous)


def set_python_path(folders: str | None) -> None:
    """Set PYTHONPATH, or remove it if `folders` is `None`."""
    os.environ.pop(_PYTHON_PATH_ENV, None)
    if folders is not None:
        os.environ[_PYTHON_PATH_ENV] = folders


def python_path() -> str | None:
    """Return the value of PYTHONPATH, or `None` if it is not set."""
    return os.environ.get(_PYTHON_PATH_ENV)


def end_launcher(launch: Launch) -> None:
    """Keep torchrun from restarting the processes of this machine, which are about to end.

    torchrun has no exit code that means this, but a signal ends it. torchrun forwards the signal,
    so every process first ignores it. Our own launcher exits with the code of `CrashLoopError`.
    """
    signum = whole_number(_END_SIGNAL_ENV, signal.SIGHUP)
    signal.signal(signum, signal.SIG_IGN)
    launcher = _running_launcher() or os.getppid()
    if _is_restarted(launch) and launch.local_rank == 0:
        os.kill(launcher, signum)


def notify_saved(launch: Launch) -> None:
    """Tell our launcher that this run has saved because of a signal and is about to end.

    If the signal came through the launcher, the launcher ends too. Otherwise it restarts the
    processes of this machine.
    """
    launcher = _running_launcher()
    if launcher is not None and _is_restarted(launch):
        signal.signal(SAVED, signal.SIG_IGN)  # the launcher ends processes with it
        if launch.local_rank == 0:
            with suppress(ProcessLookupError):  # the launcher has just ended
                os.kill(launcher, SAVED)


def _running_launcher() -> int | None:
    """Return our launcher's process id if it is still this process's parent or grandparent."""
    launcher, parent = whole_number(_LAUNCHER_ENV, 0), os.getppid()
    grandparent = 0
    with suppress(OSError):
        grandparent = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
    return launcher if launcher in (parent, grandparent) and launcher else None


def _is_restarted(launch: Launch) -> bool:
    return launch.restart_count < whole_number("TORCHELASTIC_MAX_RESTARTS", 0)


def with_local_rank(launch: Launch, local_rank: int | None) -> Launch:
    """Return the launch with `--local_rank` as its local rank, unless the launcher gave one."""
    if local_rank is None or launch.local_rank or LOCAL_RANK_ENV in os.environ:
        return launch
    return replace(launch, local_rank=local_rank)


def check_rendezvous_address(world_size: int) -> None:
    """Check that the launcher gave an address and a port at which the processes can connect.

    Raises:
        ConfigError: The address is missing, or the port is missing or invalid.
    """
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(
            f"{WORLD_SIZE_ENV} is {world_size}, but {' and '.join(missing)} must also be set "
            "for the processes to connect: start with torchrun, or for a single process unset "
            f"{WORLD_SIZE_ENV}"
        )
    port = whole_number("MASTER_PORT", 0)
    if not 0 < port < 2**16:
        raise ConfigError(f"MASTER_PORT is {port}: it must be a number from 1 to 65535")


def record_collectives(entries: int) -> None:
    """Make PyTorch's flight recorder keep the last `entries` NCCL collectives, for `hang_files`."""
    for name in ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"):  # PyTorch versions differ
        os.environ.setdefault(name, str(entries))


def prepare(launch: Launch, *, deterministic: bool) -> None:
    """Set the environment variables that PyTorch, CUDA and NCCL read once, before any CUDA call.

    Args:
        launch: The ranks of this process.
        deterministic: Whether to choose algorithms that give the same bits in every run.
    """
    os.environ[RANK_ENV] = str(launch.rank)
    os.environ[WORLD_SIZE_ENV] = str(launch.world_size)
    os.environ[LOCAL_RANK_ENV] = str(launch.local_rank)
    if launch.is_multi_node:
        # By default gloo uses the address that the machine's name resolves to. It is often the
        # loopback address, which no other machine can reach.
        interface = _interface_to(os.environ.get("MASTER_ADDR", ""))
        if interface is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    # One hardware queue keeps kernels in launch order, so that communication launched before a
    # matrix product also starts before it.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # Mapped memory (`parallel.symmetric_memory`) does not need NVLink multicast, whose failure can
    # take all GPUs of a machine out of service.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("NCCL_ALGO", "Ring")


def _interface_to(host: str) -> str | None:
    """Return the network interface that reaches `host`, or `None` if none can be determined."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect((host, 9))  # sends nothing, only chooses a route
        address = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                request = struct.pack("256s", name.encode())
                reply = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, request)
                if socket.inet_ntoa(reply[20:24]) == address and not address.startswith("127."):
                    return name
    return None
