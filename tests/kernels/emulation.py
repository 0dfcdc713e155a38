"""Kernels compiled as C++, which run on CPU tensors, optionally with sanitizers."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron.kernels.build import join, keep
from megatron.kernels.driver import Driver
from megatron.kernels.sources import instances, source_files

HERE = Path(__file__).parent


def missing() -> str:
    """Return why kernels cannot be compiled as C++ here, or an empty string."""
    tools = [name for name in ("nvcc", "g++") if shutil.which(name) is None]
    return "needs nvcc (for its headers) and g++" if tools else ""


def build(
    folder: Path, kernels: Mapping[Path, Sequence[str]] | None = None, sanitizers: str = ""
) -> Path:
    """Compile CUDA sources together with the emulator.

    Args:
        folder: Where the objects and the library are written.
        kernels: The kernels of each `.cu` file; `None` for those of the package.
        sanitizers: The names of gcc's sanitizers, separated by commas; the process that loads the
            library needs `tests.kernels.sanitize.environment`.

    Returns:
        A shared library with the functions of the CUDA driver.
    """
    if kernels is None:
        kernels = {source: instances()[source.stem] for source in source_files()}
    flags = ["-x", "c++", "-O1", "-std=c++17", "-U_FORTIFY_SOURCE", "-Xcompiler", "-fPIC,-w"]
    sanitize = [f"-fsanitize={name}" for name in sanitizers.split(",") if name]
    if sanitize:
        options = ["-g", "-fsanitize-recover=all", "-fsanitize-sections=emulated_shared"]
        flags += ["-Xcompiler", ",".join([*options, *sanitize])]
    header = ["-include", str(HERE / "emulator.h"), "-I", str(HERE)]
    # Compilers do not need the sanitizers that this process may be running with.
    plain = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}

    def translate(source: Path) -> str:
        made = str(folder / (source.stem + ".o"))
        command = ["nvcc", *flags, *header, "-c", str(source), "-o", made]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=plain)
        assert done.returncode == 0, done.stderr
        return made

    registering = []
    for source, names in kernels.items():
        lines = [f"REGISTER({number}, {name})" for number, name in enumerate(names)]
        registering.append(folder / f"{source.stem}.cpp")
        registering[-1].write_text("\n".join([f'#include "{source}"', *lines, ""]))
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(translate, [*registering, HERE / "emulator.cpp"]))
    linked = folder / "linked.so"
    command = ["g++", "-shared", *sanitize, "-Wl,-Bsymbolic", *objects, "-o", str(linked)]
    subprocess.run(command, check=True, env=plain)
    return linked


def index(folder: Path) -> Path:
    """Return a library, as stored by `megatron.kernels.build`, of kernels under their own names."""
    made = folder / "index"
    names = {name: name for listed in instances().values() for name in listed}
    made.write_bytes(join([json.dumps(names).encode() + b"\n"]))
    return keep(made, folder / "emulated")


def driver(linked: Path) -> Driver:
    """Return the emulator's driver."""
    return Driver(ctypes.CDLL(str(linked)))
