"""Small changes to the package's source, each of which some test should detect.

A mutation changes one operator, number, condition or statement of `megatron/`, except kernels.
These rules leave out what cannot matter, or cannot matter to a test on a CPU:

- Types, decorators and assertions, including the `strict` of `zip`.
- Messages: f-strings, `raise` statements with what they raise, calls of `print`, `print_line`,
  `warn` and loggers, and help texts.
- Time and memory: `time.sleep`, the garbage collector, arguments and constants whose names denote a
  timeout, a pause, an interval, or the size of a chunk, block, buffer or cache; and constants that
  set how much of something is shown, such as a chart's points.
- Code that needs a GPU: functions and classes that use `torch.cuda`, the `if` branches of GPUs, and
  the rest of a function after CPUs have left it.
"""

from __future__ import annotations

import ast
import copy
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_LINE = 100  # characters of code shown
_SAYS = {"print", "print_line", "print_to_stderr", "warn", "debug", "info", "warning", "exception"}
_TIME_AND_MEMORY = {"sleep", "collect", "freeze", "unfreeze"}
_ARGUMENTS = (
    "help metavar timeout interval maxsize chunk_size buffering flush daemon strict non_blocking "
    "pin_memory stacklevel repr persistent_workers prefetch_factor capture_output"
).split()
_CONSTANTS = re.compile(
    "CHUNK|PIECE|AT_ONCE|AT_A_TIME|CACHE|BUFFER|TIMEOUT|WAIT|PAUSE|REST|SECONDS|EVERY|INTERVAL"
    "|SHOWN|NAMED|LONGEST|BINS|BLOCK_BYTES"
)
_OF_GPUS = re.compile(r"(\w+\.)*(is_gpu|is_cuda|is_available\(\))|.*type == 'cuda'")

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
    """A change at one place in a file.

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
        """Return the folder of `megatron/` that contains the file, or "base"."""
        parts = self.file.split("/")
        return parts[1] if len(parts) > 2 else "base"

    def __str__(self) -> str:
        before, after = (" ".join(text.split())[:_LINE] for text in (self.before, self.after))
        return f"{self.file}:{self.line}: `{before}` -> `{after}`"

    def apply_to(self, source: bytes) -> bytes:
        """Return the file's content with the change applied."""
        return source[: self.start] + self.after.encode() + source[self.end :]


@cache
def mutations_of(file: str, source: str) -> tuple[Mutation, ...]:
    """Return every mutation of a file, in source order."""
    starts = [0]  # for each line, in bytes, as syntax trees count
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
    """Yield expressions and statements with their replacements."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.expr | ast.stmt):
            for changed in _become(node):
                yield node, changed
        pending += _inside(node)


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a node that may change under the rules above."""
    left_out: set[str] = {"annotation", "returns", "decorator_list"}
    if isinstance(node, ast.If | ast.IfExp):
        test = ast.unparse(node.test)
        if test == "TYPE_CHECKING" or _OF_GPUS.fullmatch(test):
            left_out.add("body")
        elif _is_of_cpus(test):
            left_out.add("orelse")
    for name, value in ast.iter_fields(node):
        if name not in left_out:
            values = value if isinstance(value, list) else [value]
            for part in values:
                if isinstance(part, ast.AST) and not _is_left_out(part):
                    yield part
                if isinstance(part, ast.If) and _leaves_cpus(part):
                    break


def _is_left_out(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name in _SAYS | _TIME_AND_MEMORY
        case ast.Expr(value=value):
            return _is_left_out(value)
        case ast.keyword(arg=name):
            return name in _ARGUMENTS
        case ast.Assign(targets=[ast.Name() | ast.Tuple() as target]):
            names = [part.id for part in ast.walk(target) if isinstance(part, ast.Name)]
            return all(name.isupper() and _CONSTANTS.search(name) for name in names)
        case ast.FunctionDef() | ast.ClassDef():
            return any(_is_cuda(part) for part in ast.walk(node) if part is not node)
    return isinstance(node, ast.Assert | ast.JoinedStr | ast.Raise)


def _is_cuda(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda"


def _leaves_cpus(node: ast.If) -> bool:
    """Return whether only GPUs get past a statement: `if not device.is_gpu: return`."""
    leaves = isinstance(node.body[-1], ast.Return | ast.Raise)
    return leaves and _is_of_cpus(ast.unparse(node.test))


def _is_of_cpus(test: str) -> bool:
    return test.startswith("not ") and _OF_GPUS.fullmatch(test[4:]) is not None


def _become(node: ast.expr | ast.stmt) -> Iterator[ast.AST]:
    """Yield the replacements of a single expression or statement."""

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
    """Return whether `a | b` looks like a type."""
    text = ast.unparse(node)
    return re.fullmatch(r"[A-Za-z.\[\], |]+", text) is not None and "|" in text


def draw(root: Path, count: int, seed: int, rooms: Sequence[str] = ()) -> list[Mutation]:
    """Draw distinct mutations at random, from each room in turn until it has no more.

    Args:
        root: The repository.
        count: The number of mutations.
        seed: The seed.
        rooms: The rooms to draw from; empty for all except kernels.
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
