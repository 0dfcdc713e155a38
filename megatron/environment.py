"""Every environment variable that we read or set, in one place; and what the system grants."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.errors import ConfigError

RANK_ENV = "RANK"
WORLD_SIZE_ENV = "WORLD_SIZE"
LOCAL_RANK_ENV = "LOCAL_RANK"
LOCAL_WORLD_SIZE_ENV = "LOCAL_WORLD_SIZE"
RESTART_COUNT_ENV = "TORCHELASTIC_RESTART_COUNT"
_GLOO_INTERFACE_ENV = "GLOO_SOCKET_IFNAME"
_GET_ADDRESS = 0x8915  # ioctl SIOCGIFADDR


@dataclass(frozen=True)
class Launch:
    """How this process was started (by torchrun, by mpirun, or alone)."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    restart_count: int = 0


def read_launch(*, use_mpi: bool = False) -> Launch:
    """Read the launcher's variables; a process started alone is a world of one.

    Raises:
        ConfigError: a variable is not a number, the rank none of so many processes, or mpirun's are
            asked for and absent.
    """
    launch = _read_mpi() if use_mpi else _read_torchrun()
    if not 0 <= launch.rank < launch.world_size:
        rank, size, launcher = RANK_ENV, WORLD_SIZE_ENV, "torchrun"
        if use_mpi:
            rank, size, launcher = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "mpirun"
        raise ConfigError(
            f"{rank} is {launch.rank}, and {size} {launch.world_size} (unset: 1): ranks count from "
            f"0 to one below it: set both, as {launcher} does, or neither"
        )
    return launch


def _read_torchrun() -> Launch:
    return Launch(
        rank=_number(RANK_ENV, 0),
        world_size=_number(WORLD_SIZE_ENV, 1),
        local_rank=_number(LOCAL_RANK_ENV, 0),
        local_world_size=_number(LOCAL_WORLD_SIZE_ENV, 1),
        restart_count=_number(RESTART_COUNT_ENV, 0),
    )


def placed(launch: Launch, local_rank: int | None) -> Launch:
    """At the place on its machine that --local_rank names, where the launcher names none."""
    if local_rank is None or launch.local_rank or LOCAL_RANK_ENV in os.environ:
        return launch
    return replace(launch, local_rank=local_rank)


def check_meeting_place(world_size: int) -> None:
    """Whether the processes know where to meet.

    Raises:
        ConfigError: the launcher has not said it, or no port.
    """
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(
            f"{WORLD_SIZE_ENV} is {world_size}, and without {' and '.join(missing)} no process "
            f"knows where to meet: start with torchrun, or unset {WORLD_SIZE_ENV} for one process"
        )
    port = _number("MASTER_PORT", 0)
    if not 0 < port < 2**16:
        raise ConfigError(f"MASTER_PORT is {port}: a port is a number from 1 to 65535")


def _read_mpi() -> Launch:
    prefix = "OMPI_COMM_WORLD_"
    if prefix + "RANK" not in os.environ:
        raise ConfigError(
            "--use-mpi: OMPI_COMM_WORLD_RANK is not set; start with mpirun, or drop the flag "
            "and start with torchrun"
        )
    return Launch(
        rank=_number(prefix + "RANK", 0),
        world_size=_number(prefix + "SIZE", 1),
        local_rank=_number(prefix + "LOCAL_RANK", 0),
        local_world_size=_number(prefix + "LOCAL_SIZE", 1),
    )


def _number(name: str, default: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"environment variable {name}={text!r} is not a whole number") from None


def prepare(launch: Launch, *, deterministic: bool) -> None:
    """Set what CUDA, NCCL and OpenMP read once at start. Call before the first CUDA call."""
    os.environ[RANK_ENV] = str(launch.rank)
    os.environ[WORLD_SIZE_ENV] = str(launch.world_size)
    os.environ[LOCAL_RANK_ENV] = str(launch.local_rank)
    if launch.local_world_size < launch.world_size and _GLOO_INTERFACE_ENV not in os.environ:
        # gloo would take the address that the machine's name stands for: often the loopback's,
        # which no other machine reaches.
        interface = _interface_towards(os.environ.get("MASTER_ADDR", ""))
        if interface is not None:
            os.environ[_GLOO_INTERFACE_ENV] = interface
    # One hardware queue keeps kernels in launch order, so that communication launched before a
    # matrix product also starts before it.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # Mapped memory (`parallel.symmetric_memory`) does without, and a failure of NVLink's multicast
    # can put all GPUs of a machine out of service.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("NCCL_ALGO", "Ring")


def _interface_towards(host: str) -> str | None:
    """The network interface by which this machine reaches `host`; None where that is unclear."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # sends nothing: only chooses a route
        except OSError:
            return None
        address = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(
                    probe.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode())
                )
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(answer[20:24]) == address and not address.startswith("127."):
                return name
    return None


def use_one_math_thread() -> None:
    """Keep numpy's OpenBLAS from starting threads; call before numpy is imported.

    Tools that only move integers save 20 to 70 ms of start-up, and can be forked without threads.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def usable_cores() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cuda_home() -> Path | None:
    """The CUDA toolkit that the user points at, if any."""
    found = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return Path(found) if found else None


def cuda_architectures() -> list[str]:
    """MEGATRON_CUDA_ARCHS: GPU architectures for `pip install` to compile for, as in
    "sm_80,sm_90a"; empty where unset."""
    return os.environ.get("MEGATRON_CUDA_ARCHS", "").replace(",", " ").split()


def cache_folder() -> Path:
    """Where what we compile is kept: MEGATRON_CACHE, else the user's cache folder.

    Raises:
        RuntimeError: there is no such user.
    """
    asked = os.environ.get("MEGATRON_CACHE")
    if asked:
        return Path(asked).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "megatron"
