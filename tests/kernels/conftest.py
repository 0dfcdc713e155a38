"""Kernels to test: on a GPU where there is one, and on an emulator of one where nvcc is there."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator

import pytest
import torch

from megatron.device import Device
from megatron.kernels.build import keep, source_files
from megatron.kernels.library import KernelLibrary, find_library
from tests.kernels.emulation import build

# For `python -m tests.kernels.sanitize`, which then runs only tests of emulated kernels.
SANITIZERS = os.environ.get("MEGATRON_TEST_SANITIZERS", "")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out tests without emulated kernels where sanitizers are asked for."""
    if not SANITIZERS:
        return

    def is_emulated(item: pytest.Item) -> bool:
        needs = getattr(item, "fixturenames", ())
        return "emulated" in needs or ("kernels" in needs and "[gpu" not in item.name)

    items[:] = filter(is_emulated, items)


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
            keep(build(folder, source_files(), SANITIZERS), folder / "emulated")
    (library,) = folder.glob("emulated-*.so")
    return KernelLibrary(library)


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
