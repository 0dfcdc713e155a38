"""Two machines, simulated by two network namespaces connected by a virtual cable (a veth pair)."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest

_PATH = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])


def ip(*args: str) -> None:
    program = shutil.which("ip", path=_PATH)
    if program is None:
        raise OSError("the program ip is not installed")
    process = subprocess.run([program, *args], capture_output=True, text=True, check=False)
    if process.returncode:
        raise OSError(f"ip {' '.join(args)}: {process.stderr.strip()}")


@dataclass(frozen=True)
class Machine:
    """One network namespace, its end of the cable, and its address."""

    namespace: str
    interface: str
    address: str

    @property
    def command_prefix(self) -> tuple[str, ...]:
        """Return the command prefix that runs a command on this machine."""
        return (shutil.which("ip", path=_PATH) or "ip", "netns", "exec", self.namespace)


@contextmanager
def two_machines() -> Iterator[list[Machine]]:
    """Yield two machines and their cable. Raises OSError if this user may not create them."""
    suffix = os.getpid() % 10000
    both = [Machine(f"host{i}-{suffix}", f"v{i}x{suffix}", f"10.77.0.{i + 1}") for i in range(2)]
    try:
        ip("link", "add", both[0].interface, "type", "veth", "peer", "name", both[1].interface)
        for machine in both:
            ip("netns", "add", machine.namespace)
            ip("link", "set", machine.interface, "netns", machine.namespace)
            netns_flag = ("-n", machine.namespace)
            ip(*netns_flag, "addr", "add", f"{machine.address}/24", "dev", machine.interface)
            for name in ("lo", machine.interface):
                ip(*netns_flag, "link", "set", name, "up")
        yield both
    finally:
        _remove(both)


@pytest.fixture
def machines() -> Iterator[list[Machine]]:
    with ExitStack() as stack:
        try:
            both = stack.enter_context(two_machines())
        except OSError as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield both


def launcher_flags(machine: Machine) -> list[str]:
    """Return the flags that torchrun needs on each of the two machines."""
    is_host = machine.address.endswith(".1")
    return [
        *("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"),
        *("--rdzv-id", "test", "--rdzv-endpoint", "10.77.0.1:29500"),
        *("--rdzv-conf", f"is_host={int(is_host)}", "--local-addr", machine.address),
    ]


def _remove(machines: list[Machine]) -> None:
    for args in [("netns", "del", machine.namespace) for machine in machines] + [
        ("link", "del", machines[0].interface)
    ]:
        try:
            ip(*args)
        except OSError:
            continue  # it was never created, or went away with its namespace
