"""Trials of mutations: trees to change, what tests execute, and the tests that kill a mutation.

A tree is a copy of the repository. First, every test file that covers one of the mutations runs
without any mutation, to see which tests pass here, how long they take and what they execute
(`plugin.py`). Then each mutation is tried with the tests that execute its statement, those of its
module and room first. A statement that is executed by an import, such as a default value, is tried
with the tests of the files that cover its module, and with those that call anything in it.
"""

from __future__ import annotations

import ast
import compileall
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Any, NamedTuple

import pytest

from tests.mutation.changes import Mutation
from tests.mutation.plugin import PASSED, TESTS, WATCH
from tests.repository import ROOT

_COPIED = ("megatron", "tests", "tools", "tasks", "examples", "docs", ".ci")
_ON_ALL = ("parallel", "models", "optimizer", "training")  # rooms covered by parity tests
_LEFT_OUT = ("tests/gpu/", "tests/kernels/", "tests/mutation/")
_FIRST, _LONG = 15.0, 5.0  # seconds of tests in the first run; of a test that runs last
_START = 2.0  # seconds to import a test file, at most
_NO_TESTS = 5  # pytest's exit code: the mutation changed the ids of tests
_RUN = "MUTATION_RUN"
_OURS = ("megatron", "tests", "tools", "tasks")  # packages of a tree
# What most tests import. It is imported once, in the process from which pytest is forked.
_LIBRARIES = (
    "torch.distributed torch.testing torch.utils.checkpoint numpy pydantic tokenizers orjson regex "
    "safetensors.torch yaml hypothesis _pytest.assertion _pytest.junitxml pytest pytest_timeout"
).split()
SURVIVED, KILLED, SLOW = "survived", "killed", "out of time"


@dataclass(frozen=True)
class Candidate:
    """A test that passes without mutations: its id and duration in seconds."""

    name: str
    seconds: float


@dataclass(frozen=True)
class Place:
    """The lines of the mutated statement, and whether an import executes them."""

    first: int
    last: int
    is_import: bool


@cache
def _statements(source: str) -> tuple[tuple[Place, ...], ...]:
    """Return the statements that contain each line of a file, the innermost last."""
    found: list[list[Place]] = [[] for _ in range(source.count("\n") + 2)]

    def enter(statements: Iterable[ast.AST], is_import: bool) -> None:
        for one in statements:
            if isinstance(one, ast.stmt | ast.match_case | ast.ExceptHandler):
                place = Place(_first(one), _last(one), is_import)
                for line in range(place.first, place.last + 1):
                    found[line].append(place)
            is_function = isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
            nested = [part for part in ast.iter_child_nodes(one) if not isinstance(part, ast.expr)]
            enter(nested, is_import and not is_function)

    enter(ast.parse(source).body, True)
    return tuple(map(tuple, found))


def _first(node: ast.AST) -> int:
    return node.pattern.lineno if isinstance(node, ast.match_case) else node.lineno


def _last(node: ast.AST) -> int:
    """Return the last line of a statement, or of its header."""
    inside = getattr(node, "body", None) or getattr(node, "cases", None)
    return max(_first(node), _first(inside[0]) - 1) if inside else node.end_lineno


def place_of(mutation: Mutation, source: str) -> Place:
    """Return the place of a mutation in its file."""
    lines = _statements(source)[mutation.line]
    return lines[-1] if lines else Place(mutation.line, mutation.line, True)


@cache
def _imports(file: Path) -> frozenset[str]:
    """Return the full names of the modules that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(names)


@cache
def _test_files(root: Path) -> tuple[Path, ...]:
    return tuple(sorted((root / "tests").rglob("test_*.py")))


def covering_files(mutation: Mutation, root: Path) -> list[str]:
    """Return the test files that cover a mutation's module, the most likely to fail first.

    These are the files that import it, those in its room first; then the other files in
    its room; then, for modules that every training uses, the comparison of layouts.
    """
    module = mutation.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    here = root / "tests" / mutation.room
    mirrored = f"test_{Path(mutation.file).stem}.py"
    ranked = []
    for file in _test_files(root):
        name = file.relative_to(root).as_posix()
        if name.startswith(_LEFT_OUT):
            continue
        imports = module in _imports(file)
        is_here = here in file.parents or file.name == mirrored
        is_general = mutation.room in _ON_ALL and file.parent.name in ("parity", "training")
        if imports or is_here or is_general:
            ranked.append((file.name != mirrored, not imports, not is_here, name))
    return [file for *_, file in sorted(ranked)]


class Tree:
    """A copy of the repository with nothing next to it, for one test run at a time."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._temporary = root.parent.parent / "t"
        plugin = Path(__file__).with_name("plugin.py").read_bytes()
        _write(root / "mutation_plugin.py", plugin)
        _write(root / "sitecustomize.py", b"import mutation_plugin\n\nmutation_plugin.watch()\n")

    def run(self, words: Sequence[str], limit: float, **variables: str) -> tuple[int | None, str]:
        """Run tests until one fails.

        Args:
            words: Arguments of pytest.
            limit: The time limit in seconds.
            **variables: Variables added to the environment.

        Returns:
            The exit code, or `None` if time ran out; the failed test with its message, or the
            last line.
        """
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir(exist_ok=True)
        flags = "-q -p no:cacheprovider -p mutation_plugin -rfE --tb no --timeout 300 -m".split()
        command = [*flags, "not gpu", *words, "--basetemp", str(self._temporary / "b")]
        paths = [str(self.root), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | variables
        environment |= {_RUN: str(self._temporary), "TMPDIR": str(self._temporary)}
        environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        # A process with a limit on file sizes would leave truncated modules to all later ones.
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        output = self._temporary / "output"
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_LIBRARIES)
        process = context.Process(target=_pytest, args=(self.root, command, environment, output))
        process.start()
        try:
            process.join(max(0.1, limit))
            code = process.exitcode
        finally:
            self._end(process)
        text = output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""
        failed = re.findall(r"^(?:FAILED|ERROR) (.+)$", text, re.MULTILINE)
        return code, failed[0] if failed else (text.splitlines() or [""])[-1]

    def _end(self, process: multiprocessing.process.BaseProcess) -> None:
        """Kill every process of a run, including those in their own sessions."""
        assert process.pid is not None
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
        variable = f"{_RUN}={self._temporary}\0".encode()
        for file in Path("/proc").glob("[0-9]*/environ"):
            try:
                if variable in file.read_bytes() + b"\0":
                    os.kill(int(file.parent.name), signal.SIGKILL)
            except OSError:  # it has ended, or is not ours
                continue


def _pytest(root: Path, command: list[str], environment: Mapping[str, str], output: Path) -> None:
    """Become `python -m pytest` in a tree, in a new process group; never return."""
    os.setsid()
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(root)
    for name in [name for name in sys.modules if name.partition(".")[0] in _OURS]:
        del sys.modules[name]
    # Only now: the tree's modules take the place of those that started the trials.
    sys.path[:] = [str(root), *(path for path in sys.path if path not in ("", str(ROOT)))]
    sys.argv[:] = sys.orig_argv[:] = [sys.executable, "-m", "pytest", *command]
    sys.exit(pytest.main(command))


def copied(folder: Path) -> Tree:
    """Copy the repository and compile it."""
    root = folder / "0" / "alone" / "repository"
    ignore = shutil.ignore_patterns("__pycache__", "built", ".venv", "runs")
    for name in _COPIED:
        shutil.copytree(ROOT / name, root / name, ignore=ignore)
    for file in ROOT.iterdir():
        if file.is_file() and file.name != ".git":
            shutil.copy(file, root / file.name)
    compileall.compile_dir(root, quiet=2, workers=0)
    return Tree(root)


def linked(tree: Tree, folder: Path) -> Tree:
    """Return another tree, whose files are hard links until they are changed."""
    root = folder / "alone" / "repository"
    shutil.copytree(tree.root, root, copy_function=os.link, symlinks=True)
    return Tree(root)


def _write(file: Path, data: bytes) -> None:
    file.unlink(missing_ok=True)  # another tree may have a link to it
    file.write_bytes(data)
    # Compiled files are validated by the source's size and modification time in seconds.
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        compiled.unlink()


class Baseline:
    """What the tests do without mutations, recorded by test file and kept in a file."""

    def __init__(self, path: Path, mutations: Sequence[Mutation], root: Path) -> None:
        self._path, self._mutations, self._root = path, mutations, root
        names = sorted({one.file for one in mutations})
        sources = {name: (root / name).read_text(encoding="utf-8") for name in names}
        self._numbers = {one: number for number, one in enumerate(mutations)}
        self._places = [place_of(one, sources[one.file]) for one in mutations]
        pairs = zip(mutations, self._places, strict=True)
        marked = dict.fromkeys(one.file for one, place in pairs if place.is_import)
        self._marks = {name: number for number, name in enumerate(marked, len(mutations))}
        self._watched: dict[str, tuple[int | None, dict[int, list[int]]]] = {
            name: (self._marks.get(name), {}) for name in names
        }
        for number, (one, place) in enumerate(zip(mutations, self._places, strict=True)):
            for line in range(place.first, place.last + 1):
                self._watched[one.file][1].setdefault(line, []).append(number)
        drawn = json.dumps([*map(asdict, mutations), sources]).encode()
        self._key = hashlib.sha256(drawn).hexdigest()[:16]
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self._records: dict[str, dict[str, Any]] = {}
        for record in map(json.loads, lines):
            if record["key"] == self._key and self._digest(record["file"]) == record["digest"]:
                self._records[record["file"]] = record

    def _digest(self, file: str) -> str:
        path = self._root / file
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else ""

    def missing(self) -> list[str]:
        """Return the test files still to be recorded, slow ones first."""
        files = {file for one in self._mutations for file in covering_files(one, self._root)}
        long = [file for file in files if b"mark.slow" in (self._root / file).read_bytes()]
        return sorted(files - set(self._records), key=lambda file: (file not in long, file))

    def record(self, file: str, tree: Tree, limit: float) -> dict[str, Any]:
        """Run a test file, and keep which of its tests pass and what each executes."""
        with tempfile.TemporaryDirectory() as folder:
            out, marks, work = (Path(folder, name) for name in ("out", "marks", "work"))
            out.touch()
            marks.write_bytes(bytes(len(self._mutations) + len(self._marks)))
            paths = {"marks": str(marks), "out": str(out)}
            work.write_text(json.dumps({"files": self._watched, **paths}), encoding="utf-8")
            began = time.monotonic()
            code, said = tree.run([file], limit, **{WATCH: str(work)})
            seconds = round(time.monotonic() - began, 1)
            tests = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
        about = {"key": self._key, "file": file, "digest": self._digest(file), "said": said}
        self._records[file] = {**about, "code": code, "seconds": seconds, "tests": tests}
        return self._records[file]

    def chosen(self, mutation: Mutation) -> list[Candidate]:
        """Return the tests that can kill a mutation, the likeliest and fastest first."""
        index, ranks = self._index, covering_files(mutation, self._root)
        number = self._numbers[mutation]
        executing = {test for _, test in index.tests_of_mark[number]}
        found = set(index.tests_of_mark[number])
        for file in index.files_of_mark[number]:
            if _shares(self._root / file):
                found.update(index.tests_of_file[file])
        if self._places[number].is_import:
            found.update(index.tests_of_mark[self._marks[mutation.file]])
            found.update(test for file in ranks for test in index.tests_of_file[file])

        def order(pair: tuple[str, Candidate]) -> tuple[bool, int, bool, str, float, str]:
            file, test = pair
            rank = ranks.index(file) if file in ranks else len(ranks)
            # Keep tests of each further file together, because of their fixtures.
            fast_first = test.seconds if file in ranks else 0.0
            is_executing = test in executing
            return test.seconds > _LONG, rank, not is_executing, file, fast_first, test.name

        return [test for _, test in sorted(found, key=order)]

    @cached_property
    def _index(self) -> _Index:
        """Return the records by mark and file; call it after the last of them has been made."""
        index = _Index(defaultdict(list), defaultdict(set), defaultdict(list))
        for file, record in self._records.items():
            for name, outcome, seconds, marks in record["tests"]:
                test = file, Candidate(name, seconds)
                for mark in marks:
                    index.files_of_mark[mark].add(file)
                if outcome == PASSED:
                    index.tests_of_file[file].append(test)
                    for mark in marks:
                        index.tests_of_mark[mark].append(test)
        return index


class _Index(NamedTuple):
    """Tests that pass, with their files, and files of any tests, by the marks that they set."""

    tests_of_mark: dict[int, list[tuple[str, Candidate]]]
    files_of_mark: dict[int, set[str]]
    tests_of_file: dict[str, list[tuple[str, Candidate]]]


@cache
def _shares(file: Path) -> bool:
    """Return whether tests of a file use something that only the first of them computes."""
    return re.search(r"@(functools\.)?(lru_)?cache|scope=", file.read_text("utf-8")) is not None


def try_mutation(
    mutation: Mutation, tests: Sequence[Candidate], tree: Tree, limit: float
) -> dict[str, object]:
    """Try a mutation in a tree, and restore the tree.

    Returns:
        The mutation, the outcome, the test that killed it, the number of tests and the seconds.

    Raises:
        RuntimeError: No test can be run, even without the mutation.
    """
    file, began = tree.root / mutation.file, time.monotonic()
    before = file.read_bytes()
    _write(file, mutation.apply_to(before))
    outcome, said, rest = SURVIVED, "", list(tests)
    try:
        while rest and outcome == SURVIVED:
            count = _of_first_run(rest) if len(rest) == len(tests) else len(rest)
            left = limit - (time.monotonic() - began)
            outcome, said = _run_chosen(tree, rest[:count], left)
            if outcome == KILLED:  # retried, because some tests fail occasionally
                culprits = _named(rest[:count], said)
                said = culprits[0].name if said.startswith(culprits[0].name) else said
                left = limit - (time.monotonic() - began)
                outcome, _ = _run_chosen(tree, culprits, left)
                if outcome == SURVIVED:
                    rest = [one for one in rest if one not in culprits]
            else:
                rest = rest[count:]
    finally:
        _write(file, before)
    # Without a failed test, pytest has failed to import something. Is the mutation the reason?
    is_unnamed = outcome == KILLED and "::" not in said
    if is_unnamed and _run_chosen(tree, tests[:1], limit)[0] == KILLED:
        raise RuntimeError(f"the tests fail without a mutation: {said}")
    seconds = round(time.monotonic() - began, 1)
    by = said if outcome == KILLED else ""
    return {**asdict(mutation), "outcome": outcome, "by": by, "tests": len(tests), "s": seconds}


def _of_first_run(tests: Sequence[Candidate]) -> int:
    """Return how many tests to run first, so that easily killed mutations take little time."""
    seconds, files = 0.0, set()
    for count, test in enumerate(tests):
        files.add(test.name.partition("::")[0])
        seconds += test.seconds
        if count and seconds + _START * len(files) > _FIRST:
            return count
    return len(tests)


def _named(tests: Sequence[Candidate], said: str) -> list[Candidate]:
    """Return the test that pytest names, the tests of a file that fails to import, or all tests."""
    named = [one for one in tests if said.startswith(one.name)]
    if named:
        return [max(named, key=lambda one: len(one.name))]
    file = said.partition(" ")[0]
    return [one for one in tests if one.name.partition("::")[0] == file] or list(tests)


def _run_chosen(tree: Tree, tests: Sequence[Candidate], limit: float) -> tuple[str, str]:
    """Run tests until one fails; each may take several times its usual time."""
    limits = {test.name: 20.0 + 5.0 * test.seconds for test in tests}
    files = dict.fromkeys(test.name.partition("::")[0] for test in tests)
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as order:
        json.dump(limits, order)
        order.flush()
        code, said = tree.run(["-x", *files], limit, **{TESTS: order.name})
    return {0: SURVIVED, _NO_TESTS: SURVIVED, None: SLOW}.get(code, KILLED), said


def try_all(
    mutations: Sequence[Mutation],
    out: Path,
    *,
    jobs: int,
    limit: float,
    until: float,
    again: Collection[str] = (SLOW,),
) -> None:
    """Try mutations in parallel and append each result to a file.

    A second file next to it, with suffix `.tests`, keeps what the tests do without mutations.

    Args:
        mutations: The mutations.
        out: The file of results, JSON lines.
        jobs: How many run at a time.
        limit: The time limit for each mutation in seconds.
        until: The `time.monotonic` time at which to stop.
        again: Outcomes whose mutations are tried again.
    """
    before = read_results(out)
    done = {one for one, result in before.items() if result["outcome"] not in again}
    lock, trees = Lock(), SimpleQueue[Tree]()

    def append(path: Path, line: dict[str, Any], text: str) -> None:
        with lock, path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            print(text, flush=True)

    with tempfile.TemporaryDirectory(prefix="m", ignore_cleanup_errors=True) as folder:
        first = copied(Path(folder))
        trees.put(first)
        for number in range(1, jobs):
            trees.put(linked(first, Path(folder, str(number))))
        recorded = out.with_name(out.name + ".tests")
        baseline = Baseline(recorded, mutations, first.root)

        def record(file: str) -> None:
            tree = trees.get()
            try:
                if (left := until - time.monotonic()) > 0:
                    line = baseline.record(file, tree, min(limit, left))
                    passed = sum(test[1] == PASSED for test in line["tests"])
                    about = f"{passed} of {len(line['tests'])} pass, {line['seconds']:.0f} s"
                    if line["code"] is not None or left > limit:
                        append(recorded, line, f"{file}: {about}")
            finally:
                trees.put(tree)

        def attempt(one: Mutation, tests: Sequence[Candidate]) -> None:
            tree = trees.get()
            try:
                if (left := until - time.monotonic()) > 0:
                    result = try_mutation(one, tests, tree, min(limit, left))
                    if result["outcome"] != SLOW or left > limit:
                        append(out, result, f"{result['outcome']}: {one}  {result['by']}")
            finally:
                trees.put(tree)

        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(record, baseline.missing()))
            rest = [one for one in mutations if one not in done]
            # This thread chooses: threads that compute would slow down those that start processes.
            list(pool.map(attempt, rest, map(baseline.chosen, rest)))


def read_results(path: Path) -> dict[Mutation, dict[str, object]]:
    """Return the last result of each mutation in a results file."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    found = {}
    for result in map(json.loads, text.splitlines()):
        one = Mutation(**{name: result[name] for name in Mutation.__annotations__})
        found[one] = result
    return found
