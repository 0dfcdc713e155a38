"""The repository's files and syntax trees, shared by the tests that read them."""

from __future__ import annotations

import ast
import gc
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
_SKIPPED = {".git", ".venv", "runs", "build", "dist", "__pycache__"}


def python_files(*folders: str) -> list[Path]:
    """Return the .py files in these folders; by default, in the root and all code folders."""
    if not folders:
        return sorted(ROOT.glob("*.py")) + python_files("megatron", "tools", "tasks", "tests")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    return sorted(file for file in files if _SKIPPED.isdisjoint(file.parts))


def entry_points() -> list[Path]:
    """Return what a user starts with `python`: the root's pretrain scripts and the tools."""
    return sorted(ROOT.glob("pretrain_*.py")) + [
        file for file in python_files("tools", "tasks") if "__main__" in file.read_text()
    ]


@cache
def tree(file: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    gc.disable()  # collections would scan the growing tree, which takes longer than parsing
    try:
        return ast.parse(file.read_text(encoding="utf-8"), str(file))
    finally:
        gc.enable()


def name(file: Path) -> str:
    """Return a path relative to the root, with forward slashes."""
    return file.relative_to(ROOT).as_posix()


def command_environment(**variables: str) -> dict[str, str]:
    """Return the environment of a command that runs this checkout, with one thread per process.

    Args:
        variables: Further variables.
    """
    programs = [str(Path(sys.executable).parent), os.environ["PATH"]]
    modules = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    overrides = {"PATH": os.pathsep.join(programs), "PYTHONPATH": os.pathsep.join(modules)}
    return {**os.environ, **overrides, "OMP_NUM_THREADS": "1", **variables}


def tracked_files() -> list[Path]:
    """Return the files that git tracks; skip the test outside a git checkout."""
    git = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if git.returncode:
        pytest.skip("not a git checkout")
    paths = [ROOT / path for path in git.stdout.split("\0") if path]
    return [path for path in paths if path.is_file()]
