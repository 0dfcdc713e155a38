"""Shared fixtures: real data from ../shared, and settings for every test."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

# Keep compiled files, for all workers and the processes that tests start. To rewrite all tests'
# assertions takes a worker 13 s, and to compile the package takes a process 0.7 s.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

SHARED = Path(__file__).resolve().parent.parent.parent / "shared"


def _shared(name: str) -> Path:
    path = SHARED / name
    if not path.is_dir():
        pytest.skip(f"needs ../shared/{name}, which is not next to this checkout")
    return path


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage in the meantime: it would scan all tests again and again, for 2 s."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files with slow tests first, so that no worker starts one when the others are done."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def _seed(name: str) -> None:
    import numpy as np
    import torch

    seed = zlib.crc32(f"{os.environ.get('MEGATRON_TEST_SEED', '')}{name}".encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed all global generators by the test's name: what a test draws never depends on others.

    To draw other numbers, set MEGATRON_TEST_SEED to any text.
    """
    _seed(item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object],
) -> Generator[None, object, object]:
    """Seed a shared fixture by its own name, whichever test asks for it first."""
    if fixturedef.scope == "function":
        return (yield)
    import numpy as np
    import torch

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    _seed(f"{fixturedef.baseid}::{fixturedef.argname}")
    try:
        return (yield)
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder of real tokenizers, corpora and evaluation sets."""
    return _shared("data")


@pytest.fixture(scope="session")
def golden() -> Path:
    """Return the folder of recorded runs of Megatron-LM 23.08."""
    return _shared("golden")


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Use one thread, so that results do not depend on the machine and forked ranks start clean."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _interruptions_arrive() -> None:
    """Restore SIGINT, which is ignored in a suite that a shell started in the background.

    Child processes would inherit that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def handlers(_interruptions_arrive: None) -> dict[signal.Signals, Any]:
    """Return the handlers of signals before any test."""
    names = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    return {number: signal.getsignal(number) for number in names}


def _restore(handlers: dict[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _signals_are_restored(handlers: dict[signal.Signals, Any]) -> Iterator[None]:
    """Restore the handlers that a program has set which ran in the tests' process.

    Training handles SIGTERM and SIGINT, and other tests and their child processes would, too.
    """
    _restore(handlers)  # after programs that fixtures of a module have run
    yield
    _restore(handlers)


@pytest.fixture(autouse=True)
def _launches_are_forgotten() -> Iterator[None]:
    """Restore the launch variables that a program running in the test's process has set."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    before = {name: os.environ.get(name) for name in names}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture(scope="session", autouse=True)
def _trainings_freeze_nothing() -> Iterator[None]:
    """Keep trainings from unfreezing what this file has frozen (see below).

    At its end, a training unfreezes everything, not only what it froze at its start.
    """
    from megatron.training.callbacks import memory

    kept = {name: getattr(gc, name) for name in ("collect", "disable", "enable")}
    with pytest.MonkeyPatch.context() as patch:
        nothing = {"freeze": lambda: None, "unfreeze": lambda: None}
        patch.setattr(memory, "gc", SimpleNamespace(**kept, **nothing))
        yield


@pytest.fixture(scope="module", autouse=True)
def _what_is_loaded_stays() -> None:
    """Exclude modules and tests from garbage collections: scanning them takes 0.2 s.

    Every training starts with a collection, and the tests run hundreds of trainings.
    """
    gc.collect()
    gc.freeze()
