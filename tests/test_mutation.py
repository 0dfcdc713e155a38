"""The tool that mutates the package: what it changes, what it tries, what it counts."""

from __future__ import annotations

import ast
import json
from pathlib import Path

from tests.mutation import KILLED, SURVIVED, covering_files, draw, mutations_of, table, try_mutation
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
        print(min(ä, -ä))
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
        ("print(min(ä, -ä))", "pass"),
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


_SUMS = """
def add(a, b):
    return a + b

def half(a):
    return a / 2
"""


def _small(root: Path) -> Path:
    for path, text in {
        "megatron/toys/__init__.py": "",
        "megatron/__init__.py": "",
        "megatron/toys/sums.py": _SUMS,
        "tests/toys/test_sums.py": (
            "import os\nimport pytest\nfrom megatron.toys.sums import add\n\n"
            '@pytest.mark.parametrize("three", [3], ids=["so many"])\n'
            "def test_add(three):\n    assert add(1, 2) == three\n"
        ),
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def test_a_mutation_is_killed_by_a_test_that_passes_without_it(tmp_path: Path) -> None:
    root = _small(tmp_path)
    before = (root / "megatron/toys/sums.py").read_bytes()
    added, halved, *_ = mutations_of("megatron/toys/sums.py", before.decode())
    results = [try_mutation(one, root, 60.0) for one in (added, halved)]
    assert [result["outcome"] for result in results] == [KILLED, SURVIVED]
    assert results[0]["by"] == "tests/toys/test_sums.py::test_add[so many]"
    assert (root / "megatron/toys/sums.py").read_bytes() == before
    broken = root / "tests/toys/test_sums.py"
    broken.write_text(broken.read_text() + "    assert not os\n")
    third = try_mutation(added, root, 60.0)
    assert (third["outcome"], third["by"]) == (
        SURVIVED,
        "tests/toys/test_sums.py::test_add[so many] fails without the mutation too",
    )
    lines = table(json.loads(json.dumps([*results, third]))).splitlines()
    assert lines[2:4] == ["| toys | 3 | 1 (33%) | 2 | 0 |", "| all | 3 | 1 (33%) | 2 | 0 |"]
    assert "- survived: megatron/toys/sums.py:6: `a / 2` -> `(a * 2)`" in lines
