"""Two machines, played by two network namespaces that a cable (a veth pair) connects."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.reliability.processes import TIMEOUT, children, module, torchrun, until

_PATH = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])


def _ip(*words: str) -> None:
    program = shutil.which("ip", path=_PATH)
    if program is None:
        raise OSError("the program ip is not installed")
    done = subprocess.run([program, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@dataclass(frozen=True)
class Machine:
    """One namespace, its end of the cable, and its address."""

    namespace: str
    interface: str
    address: str


@pytest.fixture
def machines() -> Iterator[list[Machine]]:
    mark = os.getpid() % 10000
    both = [Machine(f"host{i}-{mark}", f"v{i}x{mark}", f"10.77.0.{i + 1}") for i in range(2)]
    try:
        _ip("link", "add", both[0].interface, "type", "veth", "peer", "name", both[1].interface)
        for machine in both:
            _ip("netns", "add", machine.namespace)
            _ip("link", "set", machine.interface, "netns", machine.namespace)
            inside = ("-n", machine.namespace)
            _ip(*inside, "addr", "add", f"{machine.address}/24", "dev", machine.interface)
            for name in ("lo", machine.interface):
                _ip(*inside, "link", "set", name, "up")
    except OSError as error:
        _remove(both)
        pytest.skip(f"no network namespaces here: {error}")
    yield both
    _remove(both)


def _remove(machines: list[Machine]) -> None:
    for words in [("netns", "del", machine.namespace) for machine in machines] + [
        ("link", "del", machines[0].interface)
    ]:
        try:
            _ip(*words)
        except OSError:
            continue  # was never made, or went with its namespace


def _words(machine: Machine, flags: list[str]) -> list[str]:
    first = machine.address.endswith(".1")
    return [
        *("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"),
        *("--rdzv-id", "test", "--rdzv-endpoint", "10.77.0.1:29500"),
        *("--rdzv-conf", f"is_host={int(first)}", "--local-addr", machine.address),
        *module(*flags),
    ]


def _inside(machine: Machine) -> tuple[str, ...]:
    return (shutil.which("ip", path=_PATH) or "ip", "netns", "exec", machine.namespace)


def _losses(text: str) -> list[float]:
    lines = [line for line in text.splitlines() if "lm loss:" in line]
    return [float(line.split("lm loss:")[1].split()[0]) for line in lines]


@pytest.mark.slow
def test_two_machines_train_as_one_process(machines: list[Machine], tmp_path: Path) -> None:
    flags = ["--tensor-model-parallel-size", "2", "--attention-dropout", "0"]
    flags += ["--hidden-dropout", "0", "--distributed-timeout-minutes", "1"]
    a, b = machines
    with (
        torchrun(_words(a, flags), "none:0:0", tmp_path, inside=_inside(a), name="a") as (one, _),
        torchrun(_words(b, flags), "none:0:0", tmp_path, inside=_inside(b), name="b") as (two, out),
    ):
        assert one.wait(timeout=120) == 0, (tmp_path / "a").read_text()
        assert two.wait(timeout=30) == 0, out.read_text()
    flags[:2] = []
    words = ["--standalone", "--nproc-per-node", "1", *module(*flags)]
    with torchrun(words, "none:0:0", tmp_path, name="alone") as (process, alone):
        assert process.wait(timeout=90) == 0, alone.read_text()
    expected = _losses(alone.read_text())
    assert len(expected) == 4
    # The last rank logs.
    assert _losses((tmp_path / "a").read_text() + out.read_text()) == pytest.approx(
        expected, rel=1e-5
    )


@pytest.mark.slow
def test_a_cut_cable_ends_both_sides(machines: list[Machine], tmp_path: Path) -> None:
    flags = ["--train-iters", "100000"]
    a, b = machines
    with (
        torchrun(_words(a, flags), "none:0:0", tmp_path, inside=_inside(a), name="a") as (one, _),
        torchrun(_words(b, flags), "none:0:0", tmp_path, inside=_inside(b), name="b") as (two, _),
    ):
        outputs = [tmp_path / "a", tmp_path / "b"]
        until(lambda: any("iteration        3/" in o.read_text() for o in outputs), 90.0)
        workers = [children(one.pid), children(two.pid)]
        assert all(workers)
        _ip("-n", a.namespace, "link", "set", a.interface, "down")
        cut = time.monotonic()
        until(lambda: not children(one.pid) and not children(two.pid), TIMEOUT + 12.0)
        assert time.monotonic() - cut > TIMEOUT
    for output in outputs:
        text = output.read_text()
        assert text.count("error: hang in iteration") == 1, text
        assert "did not join the all-reduce within" in text
    texts = "".join(output.read_text() for output in outputs)
    assert "no sign of life (stopped, killed, or cut off)" in texts
    assert "the launcher's store does not answer" in texts
