"""Kernels to test: on a GPU if there is one, and on an emulated one if nvcc is installed."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron.device import Device
from megatron.kernels import library
from megatron.kernels.library import Argument, Kernel, KernelLibrary, find_library
from tests.kernels.emulation import HERE, build, driver, index, missing

# Set by `python -m tests.kernels.sanitize`: the library to test, a file for the names of launched
# kernels, and whether one variant of each test is enough.
SANITIZED = os.environ.get("MEGATRON_TEST_SANITIZED", "")
CALLS = os.environ.get("MEGATRON_TEST_CALLS", "")
QUICK = os.environ.get("MEGATRON_TEST_QUICK", "")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests without emulated kernels if a library with sanitizers is tested.

    The tests that may compile kernels, or wait until another process has, get time for it: this
    takes a minute, but minutes on a busy machine.
    """
    for item in items:
        compiled = {"emulated", "kernels", "planted"} & {*getattr(item, "fixturenames", ())}
        if compiled and HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(1200))
    if not SANITIZED:
        return
    seen = set()

    def is_wanted(item: pytest.Item) -> bool:
        needs = getattr(item, "fixturenames", ())
        chosen = item.callspec.params if hasattr(item, "callspec") else {}
        if "emulated" not in needs and chosen.get("kernels") != "emulated":
            return False
        test = item.nodeid.partition("[")[0]
        is_first = test not in seen
        seen.add(test)
        return is_first or not QUICK

    wanted = [item for item in items if is_wanted(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
    items[:] = wanted


class NotingLibrary(KernelLibrary):
    """A library that records the names of the kernels that it launches."""

    def __init__(self, path: Path, linked: Path, notes: Path) -> None:
        super().__init__(path, driver(linked))
        self._notes = notes
        self._noted: set[str] = set()

    def launch(self, kernel: Kernel, *arguments: Argument) -> None:
        if kernel.name not in self._noted:
            self._noted.add(kernel.name)
            with self._notes.open("a") as file:
                print(kernel.name, file=file)
        super().launch(kernel, *arguments)


@pytest.fixture(scope="session")
def emulated(tmp_path_factory) -> Iterator[KernelLibrary]:
    """Return the kernels compiled as C++, which run on CPU tensors: slow, so only for small sizes.

    They are compiled once, by the first of several pytest-xdist workers.
    """
    if reason := missing():
        pytest.skip(reason)
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "emulator"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not [*folder.glob("emulated-*.bin")]:
            if not SANITIZED:
                build(folder)
            index(folder)
    (path,) = folder.glob("emulated-*.bin")
    if SANITIZED:
        made: KernelLibrary = NotingLibrary(path, Path(SANITIZED), Path(CALLS))
    else:
        made = KernelLibrary(path, driver(folder / "linked.so"))
    real = library.open_library

    def opened(path: str) -> KernelLibrary:  # compiled code finds the library by its path
        return made if path == made.path else real(path)

    opened.cache_clear = real.cache_clear  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "open_library", opened)
        yield made


@pytest.fixture(params=["emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def kernels(request) -> tuple[KernelLibrary, torch.device]:
    """Return a library and the device of its tensors."""
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
    """Fill uninitialized memory with NaN, so that elements not written by a kernel show."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
