"""Environment variables, the processor cores available to this process, and its interpreter.

The variables of launchers and libraries are handled in `processes.launch`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from megatron.durable import private_folder
from megatron.errors import ConfigError

LOCAL_RANK_ENV = "LOCAL_RANK"
_START = """
import sys
if {root!r} not in sys.path:
    sys.path.insert(0, {root!r})
from {module} import main
sys.exit(main())
"""


def whole_number(name: str, default: int) -> int:
    """Return an environment variable as an integer, or the default if it is unset.

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


def local_world_size() -> int:
    """Return the number of processes on this machine, or 1 without a launcher."""
    # torchrun sets the first one, and DeepSpeed's launcher the second one.
    return whole_number("LOCAL_WORLD_SIZE", whole_number("LOCAL_SIZE", 1))


def usable_cores() -> int:
    """Return the number of processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cores_per_process() -> int:
    """Return the number of cores for each of the launcher's processes on this machine."""
    return max(1, usable_cores() // max(1, local_world_size()))


def gpus_are_chosen() -> bool:
    """Return whether CUDA_VISIBLE_DEVICES selects the GPUs that this process may use."""
    return "CUDA_VISIBLE_DEVICES" in os.environ


def gpus_are_hidden() -> bool:
    """Return whether CUDA_VISIBLE_DEVICES is empty, which hides all GPUs from this process."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") == ""


def cuda_home() -> Path | None:
    """Return the CUDA toolkit named by CUDA_HOME or CUDA_PATH, if any."""
    path = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return Path(path) if path else None


def corpora_file() -> Path | None:
    """Return the path of the YAML file of named corpora, if MEGATRON_CORPORA is set."""
    path = os.environ.get("MEGATRON_CORPORA")
    return Path(path).expanduser() if path else None


def perspective_api_key() -> str | None:
    """Return the Perspective API key in PERSPECTIVE_API_KEY, if any."""
    return os.environ.get("PERSPECTIVE_API_KEY") or None


def private_cache(name: str) -> Path:
    """Return this user's private folder for compiled files and files kept between sessions.

    It is in the folder that MEGATRON_CACHE names, or in the user's cache folder. The name ends with
    the user ID, so that several users can share MEGATRON_CACHE. Nobody else can access it.

    Args:
        name: The purpose of the folder, with which its name begins.

    Raises:
        OSError: The folder cannot be created, or other users have access to it.
        RuntimeError: The user has no home folder.
    """
    if root := os.environ.get("MEGATRON_CACHE"):
        base = Path(root).expanduser()
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron"
    return private_folder(base / f"{name}-{os.getuid()}")


def name_problem(name: str) -> str | None:
    """Return why libraries cannot use this path or text, with a remedy, or `None` if they can.

    Libraries expect names in UTF-8, but Python uses the encoding of the locale. A name is usable
    only if both encodings give the same bytes.
    """
    encoding = sys.getfilesystemencoding()
    if encoding != "utf-8" and not name.isascii():
        return f"is read as {encoding} in this locale: set PYTHONUTF8=1"
    try:
        name.encode()
    except UnicodeEncodeError:
        return "is not UTF-8: rename it"
    return None


def environment_with_interpreter() -> dict[str, str]:
    """Return the environment variables, with this interpreter's folder first on the PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, "PATH": path}


def share_cores(processes: int) -> None:
    """Set OMP_NUM_THREADS, unless it is set, to each new process's share of the cores."""
    threads = max(1, usable_cores() // processes)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))


def without_matrix_threads() -> None:
    """Prevent numpy, if imported after this, from starting threads for matrix products.

    The threads of its OpenBLAS take 20 to 70 ms to start and make forks unsafe.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def quieten_rust() -> None:
    """Let extensions written in Rust log warnings only, unless the user says otherwise."""
    os.environ.setdefault("RUST_LOG", "warn")


def module_command(module: str) -> list[str]:
    """Return the command that runs a module's `main` in a new interpreter.

    `python -m` would first look for every module in the current folder, where another user may have
    put a `json.py`. The new interpreter searches the folder that contains this package instead.
    """
    root = str(Path(__file__).resolve().parent.parent)
    return [sys.executable, "-P", "-c", _START.format(root=root, module=module)]
