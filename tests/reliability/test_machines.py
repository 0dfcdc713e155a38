"""Training on two machines, simulated by network namespaces connected by a veth pair."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.launch import run_ranks
from tests.reliability.machines import Machine, ip, launcher_flags, machines
from tests.reliability.processes import TIMEOUT, children, environment, module, torchrun, wait_until

__all__ = ["machines"]  # a fixture


def _words(machine: Machine, flags: list[str]) -> list[str]:
    return [*launcher_flags(machine), *module(*flags)]


def _losses(text: str) -> list[float]:
    lines = [line for line in text.splitlines() if "lm loss:" in line]
    return [float(line.split("lm loss:")[1].split()[0]) for line in lines]


@pytest.mark.slow
def test_two_machines_train_as_one_process(machines: list[Machine], tmp_path: Path) -> None:
    flags = ["--tensor-model-parallel-size", "2", "--attention-dropout", "0"]
    flags += ["--hidden-dropout", "0", "--distributed-timeout-minutes", "1"]
    a, b = machines
    with (
        torchrun(_words(a, flags), "none:0:0", tmp_path, prefix=a.command_prefix, name="a") as (
            one,
            _,
        ),
        torchrun(_words(b, flags), "none:0:0", tmp_path, prefix=b.command_prefix, name="b") as (
            two,
            out,
        ),
    ):
        assert one.wait(timeout=120) == 0, (tmp_path / "a").read_text()
        assert two.wait(timeout=120) == 0, out.read_text()
    flags[:2] = []
    alone = run_ranks(module(*flags), environment("none:0:0", tmp_path / "fault"))
    assert alone.returncode == 0, alone.stdout
    expected = _losses(alone.stdout)
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
        torchrun(_words(a, flags), "none:0:0", tmp_path, prefix=a.command_prefix, name="a") as (
            one,
            _,
        ),
        torchrun(_words(b, flags), "none:0:0", tmp_path, prefix=b.command_prefix, name="b") as (
            two,
            _,
        ),
    ):
        outputs = [tmp_path / "a", tmp_path / "b"]
        wait_until(lambda: any("iteration        3/" in o.read_text() for o in outputs), 120.0)
        workers = [children(one.pid), children(two.pid)]
        assert all(workers)
        ip("-n", a.namespace, "link", "set", a.interface, "down")
        cut = time.monotonic()
        wait_until(lambda: not children(one.pid) and not children(two.pid), TIMEOUT + 60.0)
        assert time.monotonic() - cut > TIMEOUT
    for output in outputs:
        text = output.read_text()
        assert text.count("error: hang in iteration") == 1, text
        assert "did not join the all-reduce within" in text
    texts = "".join(output.read_text() for output in outputs)
    assert "no sign of life (stopped, killed, or cut off)" in texts
    assert "the launcher's store does not answer" in texts
