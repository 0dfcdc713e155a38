"""Every reader of untrusted bytes, fuzzed briefly; `python -m tests.fuzz` does it for longer."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.fuzz import harness
from tests.fuzz.harness import Target, fuzz
from tests.fuzz.targets import TARGETS


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_damaged_input_is_refused_and_nothing_else_happens(target: Target) -> None:
    outcome = fuzz(target, inputs=150, number=0)
    assert not outcome.failure, f"{outcome.failure}\ninput: {outcome.example[:500]!r}"
    assert outcome.inputs >= 150


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_a_seed_is_sound(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise mutations of it would be refused because of the seed."""
    monkeypatch.chdir(tmp_path)
    target.read(target.seeds()[0], tmp_path)


def _crash(data: bytes, folder: Path) -> None:
    if data.startswith(b"crash"):
        import ctypes

        ctypes.string_at(0)


def _hang(data: bytes, folder: Path) -> None:
    while b"hang" in data:
        time.process_time()


def _raise(data: bytes, folder: Path) -> None:
    if b"x" in data:
        raise KeyError("not an error of the target")


def _grow(data: bytes, folder: Path) -> None:
    if b"x" in data:
        bytearray(8 << 30)


@pytest.mark.parametrize(
    ("read", "sound", "bad", "failure"),
    [
        (_crash, b"sound", b"crash", "ended by SIGSEGV"),
        (_hang, b"sound", b"hang", "more than 1 s of work"),
        (_raise, b"sound", b"x", "KeyError: 'not an error of the target'"),
        (_grow, b"sound", b"x", "MemoryError"),
    ],
    ids=["crash", "hang", "foreign error", "memory"],
)
def test_what_must_not_happen_is_found(read, sound, bad, failure, monkeypatch) -> None:
    monkeypatch.setattr(harness, "SECONDS", 1)
    target = Target("none", lambda: [sound], read, (ValueError,), tokens=(bad,))
    outcome = fuzz(target, inputs=200, number=0)
    assert failure in outcome.failure
    assert bad in outcome.example
