"""Small mutations of the package, each of which some test should detect.

    python -m tests.mutation --count 400 --seed 1 --out mutations.jsonl
    python -m tests.mutation --out mutations.jsonl --table

A mutation changes one operator, number, condition or statement of `megatron/`, kernels aside. It is
tried in a copy of the repository, which has no `../shared` beside it, with the tests that cover its
module: those that import it, then the others of its room. A mutation is killed by a test that fails
with it and passes without it. All results are kept in the file, and a run with the same seed
continues where an earlier one stopped.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from tests.repository import ROOT

_COPIED = ("megatron", "tests", "tools", "tasks", "examples", "docs", ".ci")
_ON_ALL = ("parallel", "models", "optimizer", "training")  # rooms that parity tests cover
_LINE = 100  # characters of code shown
SURVIVED, KILLED, SLOW = "survived", "killed", "out of time"

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutation:
    """A change of one place of a file.

    Attributes:
        file: The file, relative to the root.
        line: The line where the place begins, from 1.
        start, end: The place in the file, in bytes.
        after: What replaces it.
        before: What it replaces.
    """

    file: str
    line: int
    start: int
    end: int
    after: str
    before: str

    @property
    def room(self) -> str:
        """The folder of `megatron/` with the file, or "base"."""
        parts = self.file.split("/")
        return parts[1] if len(parts) > 2 else "base"

    def __str__(self) -> str:
        before, after = (" ".join(text.split())[:_LINE] for text in (self.before, self.after))
        return f"{self.file}:{self.line}: `{before}` -> `{after}`"

    def apply_to(self, source: bytes) -> bytes:
        """Return the file's content with the change."""
        return source[: self.start] + self.after.encode() + source[self.end :]


@cache
def mutations_of(file: str, source: str) -> tuple[Mutation, ...]:
    """Return every mutation of a file, in source order."""
    starts = [0]  # of each line, in bytes, as syntax trees count
    for line in source.encode().split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    data, found = source.encode(), []
    for node, changed in _changes(ast.parse(source)):
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        text = ast.unparse(changed)
        after = f"({text})" if isinstance(node, ast.expr) else text
        found.append(Mutation(file, node.lineno, start, end, after, data[start:end].decode()))
    return tuple(sorted(found, key=lambda one: (one.start, -one.end, one.after)))


def _changes(tree: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, ast.AST]]:
    """Yield expressions and statements with what they become."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.expr | ast.stmt):
            for changed in _become(node):
                yield node, changed
        pending += _inside(node)


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a node that may change: no annotations, assertions, texts, decorators."""
    left_out: set[str] = {"annotation", "returns", "decorator_list"}
    if isinstance(node, ast.Assert | ast.JoinedStr):
        return
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    for name, value in ast.iter_fields(node):
        if name not in left_out:
            values = value if isinstance(value, list) else [value]
            yield from (part for part in values if isinstance(part, ast.AST))


def _become(node: ast.expr | ast.stmt) -> Iterator[ast.AST]:
    """Yield what a single expression or statement may become."""

    def with_(**fields: object) -> ast.AST:
        changed = copy.copy(node)
        for name, value in fields.items():
            setattr(changed, name, value)
        return changed

    match node:
        case ast.Compare(ops=[operator, *others]) if type(operator) in _COMPARISONS:
            yield with_(ops=[_COMPARISONS[type(operator)](), *others])
        case ast.BinOp(op=operator) if type(operator) in _ARITHMETIC and not _is_type(node):
            yield with_(op=_ARITHMETIC[type(operator)]())
        case ast.BoolOp(op=operator):
            yield with_(op=ast.Or() if isinstance(operator, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield ast.Constant(value + 1)
        case ast.Constant(value=float(value)):
            yield ast.Constant(2 * value or 1.0)
        case ast.Call(func=ast.Name(id=name)) if name in _FUNCTIONS:
            yield with_(func=ast.Name(_FUNCTIONS[name]))
        case ast.IfExp(test=test):
            yield with_(test=ast.UnaryOp(ast.Not(), test))
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield ast.Pass()
        case ast.Continue():
            yield ast.Break()
        case ast.Break():
            yield ast.Continue()


def _is_type(node: ast.expr) -> bool:
    """Whether `a | b` looks like a type."""
    text = ast.unparse(node)
    return re.fullmatch(r"[A-Za-z.\[\], |]+", text) is not None and "|" in text


def draw(root: Path, count: int, seed: int, rooms: Sequence[str] = ()) -> list[Mutation]:
    """Draw different mutations at random, from each room in turn until it has no more.

    Args:
        root: The repository.
        count: Their number.
        seed: The seed.
        rooms: The rooms to draw from; empty for all but kernels.
    """
    chance, by_room = random.Random(seed), defaultdict(list)
    for file in sorted((root / "megatron").rglob("*.py")):
        path = file.relative_to(root).as_posix()
        for one in mutations_of(path, file.read_text(encoding="utf-8")):
            if one.room in rooms or not (rooms or one.room == "kernels"):
                by_room[one.room].append(one)
    for found in by_room.values():
        chance.shuffle(found)
    drawn: list[Mutation] = []
    while len(drawn) < count and any(by_room.values()):
        drawn += [found.pop() for _, found in sorted(by_room.items()) if found]
    return drawn[:count]


@cache
def _imports(file: Path) -> frozenset[str]:
    """Return the modules that a file imports, by their full names."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(names)


def covering_files(mutation: Mutation, root: Path) -> list[str]:
    """Return the test files that cover a mutation's module, the likeliest to fail first.

    These are the files that import it, those of its room before others; then the other files of
    its room; then, for modules of every training, the comparison of layouts.
    """
    module = mutation.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    here = root / "tests" / mutation.room
    mirrored = f"test_{Path(mutation.file).stem}.py"
    ranked = []
    for file in sorted((root / "tests").rglob("test_*.py")):
        imports = module in _imports(file)
        is_here = here in file.parents or file.name == mirrored
        is_general = mutation.room in _ON_ALL and file.parent.name in ("parity", "training")
        if imports or is_here or is_general:
            rank = (file.name != mirrored, not imports, not is_here)
            ranked.append((*rank, file.relative_to(root).as_posix()))
    return [file for *_, file in sorted(ranked)]


def copied(folder: Path) -> Path:
    """Copy the repository into a separate folder, so that nothing is next to it."""
    root = folder / "alone" / "repository"
    ignore = shutil.ignore_patterns("__pycache__", "built", ".venv", "runs")
    for name in _COPIED:
        shutil.copytree(ROOT / name, root / name, ignore=ignore)
    for file in ROOT.iterdir():
        if file.is_file():
            shutil.copy(file, root / file.name)
    return root


def run_tests(root: Path, tests: Sequence[str], limit: float) -> tuple[int | None, str]:
    """Run tests until one fails.

    Returns:
        The exit code, `None` if time is up; and the tests that failed, or the last line.
    """
    words = ["-q", "-x", "-p", "no:cacheprovider", "--timeout", "300", "-rfE", "--tb", "no"]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as output:  # what tests leave running keeps no pipe open
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *words, *tests],
            cwd=root,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
        output.seek(0)
        text = output.read()
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", text, re.MULTILINE)
    return code, failed[0] if failed else (text.splitlines() or [""])[-1]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a session leader and every process in its session."""
    try:
        os.killpg(process.pid, 9)
    except ProcessLookupError:
        return
    process.wait()


def try_mutation(mutation: Mutation, root: Path, limit: float) -> dict[str, object]:
    """Try a mutation in a copy of the repository, and restore the copy.

    Returns:
        The mutation, the outcome and the test that killed it.
    """
    file = root / mutation.file
    before, tests = file.read_bytes(), covering_files(mutation, root)
    _write(file, mutation.apply_to(before))
    try:
        code, said = run_tests(root, tests, limit)
    finally:
        _write(file, before)
    outcome = {0: SURVIVED, None: SLOW}.get(code, KILLED)
    if outcome == KILLED and "::" in said:
        code, _ = run_tests(root, [said], limit)
        assert code in (0, 1, None), f"{said} is not found"
        if code != 0:
            outcome, said = SURVIVED, f"{said} fails without the mutation too"
    return {**asdict(mutation), "outcome": outcome, "by": said, "tests": len(tests)}


def _write(file: Path, data: bytes) -> None:
    file.write_bytes(data)
    # Compiled files are compared with the source's size and second of change.
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        compiled.unlink()


def table(results: Sequence[dict[str, object]]) -> str:
    """Return the results as a Markdown table of rooms, and a list of what was not killed."""
    by_room: dict[str, Counter[str]] = defaultdict(Counter)
    others = []
    for result in results:
        one = Mutation(**{name: result[name] for name in Mutation.__annotations__})  # type: ignore[arg-type]
        for room in (one.room, "all"):
            by_room[room][str(result["outcome"])] += 1
        if result["outcome"] != KILLED:
            others.append(f"- {result['outcome']}: {one}")
    lines = ["| room | tried | killed | survived | out of time |", "| --- " * 5 + "|"]
    for room, counts in sorted(by_room.items(), key=lambda pair: (pair[0] == "all", pair[0])):
        share = counts[KILLED] / counts.total()
        lines.append(
            f"| {room} | {counts.total()} | {counts[KILLED]} ({share:.0%}) | {counts[SURVIVED]} "
            f"| {counts[SLOW]} |"
        )
    return "\n".join([*lines, "", *others])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--count", type=int, default=15, help="how many mutations")
    parser.add_argument("--seed", type=int, default=1, help="of the draws")
    parser.add_argument("--rooms", nargs="+", default=[], help="default: all but kernels")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for one mutation")
    parser.add_argument("--out", type=Path, required=True, help="file of results, JSON lines")
    parser.add_argument("--table", action="store_true", help="only show the results in the file")
    options = parser.parse_args(argv)
    text = options.out.read_text(encoding="utf-8") if options.out.exists() else ""
    results = [json.loads(line) for line in text.splitlines()]
    if not options.table:
        done = {(result["file"], result["start"], result["after"]) for result in results}
        with tempfile.TemporaryDirectory() as folder:
            root = copied(Path(folder))
            for one in draw(root, options.count, options.seed, options.rooms):
                if (one.file, one.start, one.after) in done:
                    continue
                results.append(try_mutation(one, root, options.limit))
                print(f"{results[-1]['outcome']}: {one}  {results[-1]['by']}", flush=True)
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(results[-1]) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
