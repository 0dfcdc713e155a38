"""Kernels to test: on a GPU where there is one, and on an emulator of one where nvcc is there."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from megatron.device import Device
from megatron.kernels.build import find_compiler, keep, source_files
from megatron.kernels.library import KernelLibrary, find_library

HERE = Path(__file__).parent
# For the run of docs/reliability.md that finds reads and writes outside tensors, and undefined
# behavior. The interpreter then needs libasan and libubsan in LD_PRELOAD.
SANITIZERS = os.environ.get("MEGATRON_TEST_SANITIZERS", "")


@pytest.fixture(scope="session")
def emulated(tmp_path_factory) -> KernelLibrary:
    """The kernels compiled as C++, which run on CPU tensors: slow, so for small sizes.

    Compiled once: of several workers of pytest-xdist the first to come does it.
    """
    if shutil.which("nvcc") is None or shutil.which("g++") is None:
        pytest.skip("needs nvcc (for its headers) and g++")
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "emulator"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not [*folder.glob("emulated-*.so")]:
            keep(_compile(folder), folder / "emulated")
    (library,) = folder.glob("emulated-*.so")
    return KernelLibrary(library)


def _compile(folder: Path) -> Path:
    nvcc = str(find_compiler().path)
    flags = ["-x", "c++", "-O1", "-std=c++17", "-U_FORTIFY_SOURCE", "-Xcompiler", "-fPIC,-w"]
    if SANITIZERS:
        chosen = [f"-fsanitize={name}" for name in SANITIZERS.split(",")]
        flags += ["-Xcompiler", ",".join(["-g", "-fno-sanitize-recover=all", *chosen])]
    header = ["-include", str(HERE / "emulator.h"), "-I", str(HERE)]

    def translate(source: Path) -> str:
        made = str(folder / (source.stem + ".o"))
        command = [nvcc, *flags, *header, "-c", str(source), "-o", made]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return made

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(translate, [*source_files(), HERE / "emulator.cpp"]))
    linked = folder / "linked.so"
    sanitize = [f"-fsanitize={SANITIZERS}"] if SANITIZERS else []
    command = ["g++", "-shared", *sanitize, "-Wl,-Bsymbolic", *objects, "-o", str(linked)]
    subprocess.run(command, check=True)
    return linked


@pytest.fixture(params=["emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def kernels(request) -> tuple[KernelLibrary, torch.device]:
    """A library and the device that its tensors live on."""
    if request.param == "emulated":
        return request.getfixturevalue("emulated"), torch.device("cpu")
    device = Device.pick()
    if not device.is_gpu:
        pytest.skip("needs a GPU")
    choice = find_library(device.torch_device)
    assert choice.library is not None, choice.reason
    return choice.library, device.torch_device


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Uninitialized memory is NaN, so that an element that no kernel writes shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
