"""Environment variables that we read, and the processor cores available to us.

`processes.launch` reads and sets the variables of launchers and libraries.
"""

from __future__ import annotations

import os
from pathlib import Path

from megatron.errors import ConfigError

LOCAL_RANK_ENV = "LOCAL_RANK"


def whole_number(name: str, default: int) -> int:
    """Return an environment variable's value, or the default if it is unset.

    Raises:
        ConfigError: The value is not a whole number.
    """
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"environment variable {name}={text!r} is not a whole number") from None


def local_rank() -> int:
    """Return this process's rank on its machine, or 0 without a launcher."""
    return whole_number(LOCAL_RANK_ENV, 0)


def usable_cores() -> int:
    """Return the number of processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cuda_home() -> Path | None:
    """Return the CUDA toolkit that CUDA_HOME or CUDA_PATH names, if any."""
    found = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return Path(found) if found else None


def cache_folder() -> Path:
    """Return the folder for compiled code: MEGATRON_CACHE, or one in the user's cache folder.

    Raises:
        RuntimeError: The user has no home folder.
    """
    if asked := os.environ.get("MEGATRON_CACHE"):
        return Path(asked).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron"
