"""The tool that mutates the package: what it changes, what it tries, what it counts."""

from __future__ import annotations

import ast
import json
import time
from pathlib import Path

import pytest

from tests.mutation import trials
from tests.mutation.__main__ import table
from tests.mutation.changes import draw, mutations_of
from tests.mutation.trials import Place, Tree, covering_files, place_of, read_results, try_all
from tests.repository import ROOT

_SOURCE = '''
"""Numbers: 1, 2 and 3."""
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    LIMIT = 2

def first(ä: int = 3, b: "tuple[int, 4]" = ()) -> "5":
    """Return 6."""
    assert ä < 7, f"{ä + 8}"
    while not ä <= 9 and b:
        use(min(ä, -ä))
        continue
    return ä if b else True
'''


def test_one_place_is_changed_at_a_time() -> None:
    after = [(one.before, one.after) for one in mutations_of("a.py", _SOURCE)]
    assert after == [
        ("3", "(4)"),
        ("not ä <= 9 and b", "(not ä <= 9 or b)"),
        ("not ä <= 9", "(ä <= 9)"),
        ("ä <= 9", "(ä < 9)"),
        ("9", "(10)"),
        ("use(min(ä, -ä))", "pass"),
        ("min(ä, -ä)", "(max(ä, -ä))"),
        ("-ä", "(ä)"),
        ("continue", "break"),
        ("ä if b else True", "(ä if not b else True)"),
        ("True", "(False)"),
    ]
    for one in mutations_of("a.py", _SOURCE):
        changed = one.apply_to(_SOURCE.encode())
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(_SOURCE))


def test_every_room_but_kernels_is_drawn_from_alike() -> None:
    drawn = draw(ROOT, 60, seed=3)
    assert drawn == draw(ROOT, 60, seed=3)
    assert drawn != draw(ROOT, 60, seed=4)
    rooms = [one.room for one in drawn]
    folders = {path.name for path in (ROOT / "megatron").iterdir() if path.is_dir()}
    assert set(rooms) == {"base", *folders} - {"kernels", "__pycache__"}
    counts = [rooms.count(room) for room in set(rooms)]
    assert max(counts) - min(counts) <= 1
    for one in drawn:
        ast.parse(one.apply_to((ROOT / one.file).read_bytes()))


def test_a_module_is_tried_with_the_tests_that_import_it_first() -> None:
    (one, *_) = mutations_of("megatron/data/loader.py", "x = 1\n")
    files = covering_files(one, ROOT)
    assert files[0] == "tests/data/test_loader.py"
    assert "tests/data/test_masking.py" in files
    assert "tests/optimizer/test_muon.py" not in files
    assert "tests/parity/test_gpt.py" not in files


_LEFT_OUT = """
import time, torch
_WAIT_SECONDS = 1.0
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0
FACTOR = 1.0

def wait(a, b, device):
    time.sleep(2)
    print(a + 3, file=None if a else b)
    run(timeout=4, tries=5)
    if not a:
        raise ValueError("no a", 6)
    for x, y in zip(a, b, strict=True):
        pass
    c = 7 if device.is_gpu else 8
    if not device.is_gpu:
        return 9
    return 10

def only_there(a):
    return torch.cuda.device(a + 11)
"""


def test_what_cannot_matter_is_left_out() -> None:
    assert [one.before for one in mutations_of("a.py", _LEFT_OUT)] == [
        "1.0",
        "run(timeout=4, tries=5)",
        "5",
        "not a",
        "7 if device.is_gpu else 8",
        "8",
        "not device.is_gpu",
        "9",
    ]


_PLACES = """
LIMIT = (1,
  2)
def f(a=3):
    if (a
        + 4):
        return g(
            5)
    match a:
        case 6 if a > 7:
            return 8
"""


def test_a_mutation_is_executed_with_its_statement() -> None:
    places = {one.before: place_of(one, _PLACES) for one in mutations_of("a.py", _PLACES)}
    assert places["2"] == Place(2, 3, True)
    assert places["3"] == Place(4, 4, True)
    assert places["4"] == Place(5, 6, False)
    assert places["5"] == Place(7, 8, False)
    assert places["7"] == Place(10, 10, False)
    assert places["8"] == Place(11, 11, False)


_SUMS = """
import os, subprocess, sys

def add(a, b):
    return a + b

def half(a):
    return a / 2

def third(a):
    return a / 3

def elsewhere():
    process = os.fork()
    if not process:
        os._exit(third(30) != 10)
    return os.waitpid(process, 0)[1]

def new():
    code = "from megatron.toys.sums import third; print(third(30))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
"""
_TESTS = """
import pytest
from megatron.toys.sums import add, elsewhere, half, new

@pytest.mark.parametrize("three", [3], ids=["so many - or more"])
def test_add(three):
    assert add(1, 2) == three

def test_half():
    half(3)

def test_a_fork():
    assert elsewhere() == 0

def test_a_new_interpreter():
    assert new().startswith("10")

def test_that_fails_anyway():
    assert half(4) == 3
"""


def _repository(root: Path) -> Tree:
    for path, text in {
        "megatron/toys/__init__.py": "",
        "megatron/__init__.py": "",
        "megatron/toys/sums.py": _SUMS,
        "tests/toys/test_sums.py": _TESTS,
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return Tree(root)


def test_a_mutation_is_killed_by_tests_that_execute_it_and_pass_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = _repository(tmp_path / "0" / "alone" / "repository")
    monkeypatch.setattr(trials, "copied", lambda _: tree)
    file = "megatron/toys/sums.py"
    found = {str(one).partition(": ")[2]: one for one in mutations_of(file, _SUMS)}
    chosen = [found[text] for text in ("`a + b` -> `(a - b)`", "`a / 2` -> `(a * 2)`")]
    chosen.append(found["`a / 3` -> `(a * 3)`"])
    out = tmp_path / "out.jsonl"
    until = time.monotonic() + 1000.0
    try_all(chosen, out, jobs=1, limit=240.0, until=until)
    assert (tree.root / file).read_text() == _SUMS
    name = "tests/toys/test_sums.py::test_"
    (recorded,) = map(json.loads, Path(f"{out}.tests").read_text().splitlines())
    executed = {test[0].removeprefix(name): (test[1], test[3]) for test in recorded["tests"]}
    assert executed == {
        "add[so many - or more]": ("passed", [0]),
        "half": ("passed", [1]),
        "a_fork": ("passed", [2]),
        "a_new_interpreter": ("passed", [2]),
        "that_fails_anyway": ("failed", [1]),
    }
    results = read_results(out)
    assert [results[one]["outcome"] for one in chosen] == ["killed", "survived", "killed"]
    killers = [str(results[one]["by"]).removeprefix(name) for one in chosen]
    assert killers[:2] == ["add[so many - or more]", ""]
    assert killers[2] in ("a_fork", "a_new_interpreter")  # the faster one is tried first
    assert [results[one]["tests"] for one in chosen] == [1, 1, 2]
    lines = table(out).splitlines()
    assert lines[2:4] == ["| toys | 3 | 2 (67%) | 1 | 0 |", "| all | 3 | 2 (67%) | 1 | 0 |"]
    assert f"- survived (1 tests): {file}:8: `a / 2` -> `(a * 2)`" in lines


def test_results_are_kept_and_not_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = _repository(tmp_path / "0" / "alone" / "repository")
    monkeypatch.setattr(trials, "copied", lambda _: tree)
    one = next(one for one in mutations_of("megatron/toys/sums.py", _SUMS) if one.before == "a + b")
    out = tmp_path / "out.jsonl"
    for minutes, lines in ((0.0, 0), (20.0, 1), (20.0, 1)):
        try_all([one], out, jobs=1, limit=240.0, until=time.monotonic() + 60.0 * minutes)
        assert len(out.read_text().splitlines() if out.exists() else []) == lines
    again = {"killed"}
    try_all([one], out, jobs=1, limit=240.0, until=time.monotonic() + 1000.0, again=again)
    assert len(out.read_text().splitlines()) == 2
    assert len(Path(f"{out}.tests").read_text().splitlines()) == 1
    assert list(read_results(out)) == [one]


def test_what_fails_without_a_mutation_kills_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = _repository(tmp_path / "0" / "alone" / "repository")
    monkeypatch.setattr(trials, "copied", lambda _: tree)
    one = next(one for one in mutations_of("megatron/toys/sums.py", _SUMS) if one.before == "a + b")
    out = tmp_path / "out.jsonl"
    until = time.monotonic() + 1000.0
    try_all([one], out, jobs=1, limit=240.0, until=until)
    (tree.root / "tests/toys/conftest.py").write_text("import a_package_that_is_damaged")
    with pytest.raises(RuntimeError, match="fail without a mutation: .*a_package_that_is_damaged"):
        try_all([one], out, jobs=1, limit=240.0, until=until, again={"killed"})
    assert len(out.read_text().splitlines()) == 1
