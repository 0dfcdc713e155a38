"""Kernels compiled as C++, which run on CPU tensors; with sanitizers if they are asked for."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron.kernels.build import find_compiler

HERE = Path(__file__).parent


def build(folder: Path, sources: Sequence[Path], sanitizers: str = "") -> Path:
    """Compile sources of CUDA together with the emulator.

    Args:
        folder: Where the objects and the library are written.
        sources: The `.cu` files.
        sanitizers: The names of gcc's sanitizers, separated by commas; the process that loads the
            library needs `tests.kernels.sanitize.environment`.
    """
    nvcc = str(find_compiler().path)
    flags = ["-x", "c++", "-O1", "-std=c++17", "-U_FORTIFY_SOURCE", "-Xcompiler", "-fPIC,-w"]
    sanitize = [f"-fsanitize={name}" for name in sanitizers.split(",") if name]
    if sanitize:
        options = ["-g", "-fsanitize-recover=all", "-fsanitize-sections=emulated_shared"]
        flags += ["-Xcompiler", ",".join([*options, *sanitize])]
    header = ["-include", str(HERE / "emulator.h"), "-I", str(HERE)]
    # Compilers do not need the sanitizers that this process may run with.
    plain = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}

    def translate(source: Path) -> str:
        made = str(folder / (source.stem + ".o"))
        command = [nvcc, *flags, *header, "-c", str(source), "-o", made]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=plain)
        assert done.returncode == 0, done.stderr
        return made

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(translate, [*sources, HERE / "emulator.cpp"]))
    linked = folder / "linked.so"
    command = ["g++", "-shared", *sanitize, "-Wl,-Bsymbolic", *objects, "-o", str(linked)]
    subprocess.run(command, check=True, env=plain)
    return linked
