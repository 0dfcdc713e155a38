"""Which saves of a run would replace files that this program did not write."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.errors import CheckpointError
from megatron.parallel.layout import Layout
from megatron.training import build
from tests.config.command import parse

_EVERY_5 = "--save-interval 5"


def _refused(
    words: str, start: int, foreign: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> str | None:
    monkeypatch.setattr(build, "foreign_iterations", lambda root: list(foreign))
    try:
        build._check_saves(parse(words).config, Layout.single(), start, 12)
    except CheckpointError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("words", "start", "found"),
    [
        (_EVERY_5, 0, [5, 10, 12]),
        (_EVERY_5, 4, [5, 10, 12]),
        (_EVERY_5, 5, [10, 12]),
        (_EVERY_5, 12, []),
        ("--save-interval 20", 0, [12]),
        ("--save-interval 20 --exit-interval 4", 0, [4]),
        ("--save-interval 20 --exit-interval 4", 3, [4]),
        ("--save-interval 20 --exit-interval 4", 4, [8]),
        ("--save-interval 20 --exit-interval 4", 7, [8]),
        ("--save-interval 20 --exit-interval 4", 8, [12]),
        ("--save-interval 2 --exit-interval 5", 0, [2, 4, 5]),
        ("--save-interval 20 --exit-interval 13", 3, [12]),
        ("--save-interval 5 --ckpt-format legacy", 0, []),
        ("--save-interval 5 --skip-train", 0, []),
    ],
)
def test_saves_that_are_known_in_advance(
    words: str, start: int, found: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = f"--save s {words}"
    refused = [i for i in range(30) if _refused(words, start, [i], monkeypatch) is not None]
    assert refused == found


def test_the_remedy_for_a_folder_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = _refused(f"--save s {_EVERY_5}", 0, [3, 10, 12], monkeypatch)
    assert told is not None
    assert told.startswith("--save s: iter_0000010 contains ")
    assert told.endswith(
        ", and this run would save at iteration 10: continue from it with --load s, or give "
        "another folder to --save"
    )
    told = _refused(f"--save s --load ./x/../s {_EVERY_5}", 0, [5], monkeypatch)
    assert told is not None
    assert ": move it elsewhere, or give another folder to --save" in told
    told = _refused(f"--save s --load other {_EVERY_5}", 0, [5], monkeypatch)
    assert told is not None
    assert ": continue from it with --load s, or give" in told
    assert _refused("", 0, [12], monkeypatch) is None  # nothing is saved
