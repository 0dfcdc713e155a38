"""House rules that a syntax tree can check."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.repository import ROOT, name, python_files, tree

MAX_FILE_LINES = 700
MAX_FUNCTION_LINES = 100
# "file" or "file:function" that may be longer. This list may only shrink.
LONGER: frozenset[str] = frozenset()

DEVICE_MODULE = "megatron/device.py"
ENVIRONMENT_MODULES = {"megatron/environment.py", "megatron/processes/launch.py"}

# What each room of megatron/ may import from other rooms. Nothing is imported upwards.
ROOMS: dict[str, set[str]] = {
    "config": set(),
    "tokenizer": {"config"},
    "parallel": {"config", "kernels"},
    "kernels": {"config"},
    "models": {"config", "parallel", "kernels"},
    "data": {"config", "tokenizer", "parallel"},
    "corpora": {"config", "tokenizer", "data"},
    "optimizer": {"config", "parallel", "kernels"},
    "planner": {"config", "parallel", "kernels", "models", "tokenizer", "recipes"},
    # Records of networks, without layers.
    "checkpoint": {
        *("config", "parallel"),
        *("models.plan", "models.plans", "models.mixture_plan", "models.recurrent_plan"),
    },
    "submit": {"config", "recipes"},
    "processes": {"config", "parallel", "kernels"},
    "detoxify": {"config", "data", "tasks.results"},
}
BASE = {"device", "durable", "environment", "errors", "extras"}  # modules that every room may use


def _source() -> list[Path]:
    return [file for file in python_files() if not name(file).startswith("tests/")]


def _functions(file: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_files_and_functions_stay_small() -> None:
    long = set()
    for file in python_files():
        if len(file.read_text(encoding="utf-8").splitlines()) > MAX_FILE_LINES:
            long.add(name(file))
        for node in _functions(file):
            assert node.end_lineno is not None
            if node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES:
                long.add(f"{name(file)}:{node.name}")
    assert long == LONGER, "shorten these, or take them off the list if they are short now"


def _is_device_kind(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr == "cuda"
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value == "cuda" or node.value.startswith("cuda:")
    return False


def test_only_the_device_module_knows_the_kind_of_device() -> None:
    found = [
        f"{name(file)}:{node.lineno}"
        for file in _source()
        if name(file) != DEVICE_MODULE
        for node in ast.walk(tree(file))
        if isinstance(node, ast.expr) and _is_device_kind(node)
    ]
    assert not found


def test_environment_variables_are_read_in_two_files() -> None:
    found = [
        f"{name(file)}:{node.lineno}"
        for file in python_files("megatron")
        if name(file) not in ENVIRONMENT_MODULES
        for node in ast.walk(tree(file))
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}
    ]
    assert not found


def test_no_global_statements() -> None:
    found = [
        f"{name(file)}:{node.lineno}"
        for file in _source()
        for node in ast.walk(tree(file))
        if isinstance(node, ast.Global)
    ]
    assert not found


def _imports(file: Path, *, at_start: bool = False) -> Iterator[tuple[int, str]]:
    """Yield (line, module) of every absolute import, including those under TYPE_CHECKING.

    Args:
        file: The file.
        at_start: Leave out imports inside functions and conditions.
    """
    for node in tree(file).body if at_start else ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


@pytest.mark.parametrize("room", ROOMS)
def test_imports_go_one_way(room: str) -> None:
    allowed = ROOMS[room] | BASE | {room}
    rooms = {path.name for path in (ROOT / "megatron").iterdir() if path.is_dir()}
    found = []
    for file in python_files(f"megatron/{room}"):
        for line, module in _imports(file):
            parts = module.split(".")
            if parts[0] != "megatron" or len(parts) == 1 or ".".join(parts[1:3]) in allowed:
                continue
            if parts[1] in rooms - allowed:
                found.append(f"{name(file)}:{line} imports {module}")
    assert not found


def test_what_imports_slowly_is_imported_where_it_is_used() -> None:
    """DTensor, and what is built on it, would take every process half a second."""
    slow = {f"torch.distributed.{one}" for one in ("tensor", "fsdp", "checkpoint")}
    slow |= {"megatron.parallel.sharded", "megatron.checkpoint.core.writer"}
    users = {"megatron/parallel/sharded.py", "megatron/checkpoint/core/writer.py"}
    found = {
        f"{name(file)}:{line} imports {module}"
        for file in _source()
        if name(file) not in users and not name(file).startswith("megatron/tools/checkpoint/")
        for line, module in _imports(file, at_start=True)
        if any(f"{module}.".startswith(f"{one}.") for one in slow)
    }
    assert not found


def test_rooms_say_what_they_hold() -> None:
    """Modules that a room's docstring lists, each indented by four spaces, must exist."""
    found = []
    for file in python_files("megatron"):
        if file.name != "__init__.py":
            continue
        text = ast.get_docstring(tree(file), clean=False)
        if text is None:
            found.append(f"{name(file)}: no docstring")
            continue
        for names in re.findall(r"^    ((?:\w+, )*\w+)  ", text, re.MULTILINE):
            found += [
                f"{name(file)}: {module}"
                for module in names.split(", ")
                if not (file.parent / f"{module}.py").is_file()
                and not (file.parent / module).is_dir()
            ]
    assert not found


def test_no_two_classes_of_the_package_share_a_name() -> None:
    places: dict[str, list[str]] = {}
    for file in python_files("megatron"):
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(name(file))
    assert not {one: files for one, files in places.items() if len(files) > 1}


def test_no_docstring_only_points_elsewhere() -> None:
    found = [
        f"{name(file)}:{node.lineno}"
        for file in _source()
        for node in _functions(file)
        if re.match(r"(See|As in|Like) ", ast.get_docstring(node) or "")
    ]
    assert not found, "say what this function does, then point"
