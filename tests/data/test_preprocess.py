"""Work in several processes: order, and every way in which a process can fail."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.config.data import TokenizerConfig
from megatron.data import preprocess as module
from megatron.data.preprocess import (
    BlockEncoder,
    EncodingOptions,
    SentenceSplitter,
    choose_workers,
    find_punkt,
    map_in_order,
    split_lines,
    train_punkt,
)
from megatron.data.text_input import TextBlock
from megatron.errors import ConfigError, DataError, ShortageError
from tests.repository import ROOT

REMEDY = "Use less"
LARGE = 1 << 20  # more than a pipe holds


def run(function: Callable[[Any], Any], tasks: Callable[[], Iterator[Any]], workers: int) -> Any:
    with map_in_order(function, tasks, workers, REMEDY) as results:
        return list(results)


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    """Check that no process is left; every test also ends within seconds, if it gets a core."""
    earlier = _children()  # of other tests in this process
    started = time.monotonic()
    yield
    assert time.monotonic() - started < 150
    assert not _children() - earlier


def _children() -> set[str]:
    """Return the ids of this process's children, zombies included."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


@pytest.mark.parametrize("workers", [0, 1, 2, 5])
@pytest.mark.parametrize("size", [1, LARGE])
def test_results_keep_the_order_of_the_tasks(workers: int, size: int) -> None:
    def work(task: tuple[int, bytes]) -> tuple[int, bytes]:
        time.sleep(0.002 * (task[0] % 3))
        return task

    tasks = [(i, b"x" * size) for i in range(23)]
    for count in (0, 1, 2, 23):
        assert run(work, lambda count=count: iter(tasks[:count]), workers) == tasks[:count]


def test_a_small_input_gets_a_worker_only_if_it_may_be_packed(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("plain.jsonl", "packed.jsonl.gz", "rows.parquet")}
    for file in files.values():
        file.write_bytes(b"x")
    plain, packed, rows = map(str, files.values())
    assert choose_workers([plain, plain]) == 0
    for paths in ([packed], [plain, packed], [rows, plain]):
        assert choose_workers(paths) == 1


def test_every_8_mib_get_a_worker_up_to_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.data.preprocess.usable_cores", lambda: 3)
    path = tmp_path / "a.jsonl"
    for size, workers in ((8 << 20) - 1, 0), (8 << 20, 1), ((24 << 20) - 1, 2), (99 << 20, 3):
        path.touch()
        os.truncate(path, size)
        assert choose_workers([str(path)]) == workers
    assert choose_workers([str(path)] * 2) == 3


class _Words:
    """A stand-in for Punkt: each word is a sentence."""

    def span_tokenize(self, text: str) -> Iterator[tuple[int, int]]:
        return (found.span() for found in re.finditer(r"\S+", text))


@pytest.mark.parametrize(
    ("keeps", "sentences"),
    [(False, ["a", "bc", "d", "ef"]), (True, ["a ", "bc\n", "d  ", "ef"])],
)
def test_a_long_text_is_split_piece_by_piece(
    keeps: bool, sentences: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SLICE", 5)
    assert SentenceSplitter(_Words(), keeps)("a bc\nd  ef") == sentences
    assert split_lines("a b\n\n \t\n c\n") == ["a b", " c"]


def test_punkt_is_trained_on_the_first_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []

    class Trainer:
        def train(self, text: str, *, finalize: bool) -> None:
            done.append((text, finalize))

        def finalize_training(self) -> None:
            done.append("end")

        def get_params(self) -> Any:
            from nltk.tokenize.punkt import PunktParameters

            return PunktParameters()

    monkeypatch.setattr("nltk.tokenize.punkt.PunktTrainer", Trainer)
    for characters, last in ((5, [("de", False)]), (3, []), (99, [("defg", False), ("h", False)])):
        done.clear()
        train_punkt(iter(["abc", "defg", "h"]), characters)
        assert done == [("abc", False), *last, "end"]
    for texts in ([], [""]):
        with pytest.raises(ConfigError, match="the input has no text from which to learn"):
            train_punkt(texts)


def test_text_without_an_installed_punkt_is_learned_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "installed_punkt", lambda language: None)
    seen: list[str] = []

    def train(texts: Iterator[str]) -> list[str]:
        seen[:] = texts
        return seen if seen else train_punkt(())

    monkeypatch.setattr(module, "train_punkt", train)
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a": "One.", "b": ["Two.", "Three."]}\n[1]\n')
    assert find_punkt([str(path)], ["a", "b"], "english") is seen
    assert seen == ["One.", "Two.\nThree."]
    find_punkt([str(path)], ["a", "b"], "klingon")
    first, second = capsys.readouterr().err.splitlines()
    instead = "training Punkt on the beginning of the input"
    assert first == f"NLTK's Punkt for english is not installed: {instead}"
    assert second.startswith("WARNING: --lang 'klingon': NLTK's Punkt exists only for czech, ")
    assert second.endswith(f", turkish: {instead}")
    path.write_text('\n{"a": 1}\n[1]\n')
    message = (
        f"{path}: 'a' is a number, expected a string (line starts at byte 1): fix the line; no "
        "other line has text"
    )
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        find_punkt([str(path)], ["a"], "english")


def _fail_after(count: int, error: BaseException) -> Iterator[bytes]:
    """Yield large tasks, then fail."""
    for _ in range(count):
        yield b"x" * LARGE
    raise error


def _end_after(count: int, end: Callable[[], object]) -> Iterator[bytes]:
    for _ in range(count):
        yield b"x" * LARGE
    end()


class _TooLarge:
    """A task or a result that is too large for the memory needed to send it."""

    def __reduce__(self) -> Any:
        raise MemoryError


class _TooLargeToRead:
    """A task or a result that is too large for the memory needed to receive it."""

    def __reduce__(self) -> Any:
        return _no_memory, ()


def _no_memory() -> None:
    raise MemoryError


def _send_after(count: int, task: object) -> Iterator[object]:
    for _ in range(count):
        yield b"x" * LARGE
    yield task


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _abort() -> None:
    faulthandler.disable()  # pytest's hook, which would print a traceback
    os.abort()


_FAILING_TASKS = {
    "no memory to read": partial(_fail_after, error=MemoryError()),
    "no memory to send": partial(_send_after, task=_TooLarge()),
    "no memory to receive": partial(_send_after, task=_TooLargeToRead()),
    "killed": partial(_end_after, end=_kill),
    "aborted": partial(_end_after, end=_abort),
    "ended": partial(_end_after, end=lambda: os._exit(1)),
    "ended as if well": partial(_end_after, end=lambda: os._exit(0)),
}


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("count", [0, 1, 7])
@pytest.mark.parametrize("tasks", _FAILING_TASKS.values(), ids=_FAILING_TASKS)
def test_a_reader_that_fails_ends_the_run(
    tasks: Callable[[int], Iterator[Any]], count: int, workers: int, capfd: Any
) -> None:
    with pytest.raises(ShortageError, match=REMEDY):
        run(len, lambda: tasks(count), workers)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("count", [0, 1, 7])
def test_errors_of_the_tasks_come_after_the_results_before_them(count: int) -> None:
    for error, shown in (
        (DataError("damaged"), pytest.raises(DataError, match="damaged")),
        (KeyError("ours"), pytest.raises(RuntimeError, match="KeyError: 'ours'")),
    ):
        done = []
        with (
            shown,
            map_in_order(len, partial(_fail_after, count, error), 2, REMEDY) as results,
        ):
            for result in results:
                done.append(result)
        assert done == [LARGE] * count


def _raise(error: Exception) -> None:
    raise error


_FAILURES: dict[str, Callable[[], object]] = {
    "no memory": lambda: _raise(MemoryError()),
    "no memory to send": _TooLarge,
    "no memory to receive": _TooLargeToRead,
    "no memory of a library": lambda: _raise(ImportError("x.so: failed to map segment")),
    "killed": _kill,
    "aborted": _abort,
    "ended": lambda: os._exit(1),
}


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("failing", [0, 1, 7])
@pytest.mark.parametrize("fail", _FAILURES.values(), ids=_FAILURES)
def test_a_worker_that_fails_ends_the_run(
    fail: Callable[[], object], failing: int, workers: int, capfd: Any
) -> None:
    def work(task: tuple[int, bytes]) -> object:
        return fail() if task[0] == failing else task

    try:
        with pytest.raises(ShortageError, match=REMEDY):
            run(work, lambda: ((i, b"x" * LARGE) for i in range(20)), workers)
    except MemoryError:  # in this process, where a caller reports it
        assert fail is _TooLargeToRead
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("started", [0, 1, 2])
def test_a_process_that_cannot_be_started_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, started: int
) -> None:
    fork, left = os.fork, [None] * started

    def scarce() -> int:
        if not left:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        left.pop()
        return fork()

    monkeypatch.setattr(os, "fork", scarce)
    message = "cannot start a worker process (Resource temporarily unavailable). Use less"
    with pytest.raises(ShortageError, match=re.escape(message)):
        run(len, lambda: iter(["x"]), 2)


def test_a_caller_that_stops_early_ends_the_processes() -> None:
    with map_in_order(len, lambda: (b"x" * LARGE for _ in range(100)), 3, REMEDY) as results:
        assert next(results) == LARGE


@pytest.mark.parametrize("extra", [0, 1, 2, 4, 8, 16, 32, 64, 128])
def test_little_memory_anywhere_is_one_line(extra: int) -> None:
    """The address-space limit is raised in steps from what the process has at its start."""
    script = """
import resource, sys
import numpy
from megatron.command import run_command
from megatron.data.preprocess import map_in_order
def work():
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    limit = taken + int(float(sys.argv[1]) * 2**20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    tasks = lambda: (b"x" * (i << 20) for i in range(16))
    with map_in_order(lambda task: task + task, tasks, 2, "Use less") as results:
        assert [len(result) for result in results] == [2 * i << 20 for i in range(16)]
sys.exit(run_command(work))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(extra)],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode in (0, ShortageError.exit_code), done.stderr
    assert done.stderr.count("\n") == (done.returncode != 0), done.stderr


class _EndsTexts:
    """A tokenizer that ends texts with two ids, as some of Hugging Face do, but not sentences."""

    vocab_size, eod, appended_ids = 100, 9, (5, 9)

    def tokenize_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array([len(text), *self.appended_ids]) for text in texts]

    def tokenize_sentences(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array([len(text)]) for text in texts]


@pytest.mark.parametrize(
    ("appended", "append_eod", "whole", "sentences"),
    [
        ((5, 9), True, [3, 5, 9], [1, 2, 9]),
        ((9,), True, [3, 9], [1, 2, 9]),
        ((9, 5), True, [3, 9, 5, 9], [1, 2, 9]),
        ((), True, [3, 9], [1, 2, 9]),
        ((5, 9), False, [3, 5, 9], [1, 2]),
        ((), False, [3], [1, 2]),
    ],
)
def test_a_document_ends_with_a_single_end(
    appended: tuple[int, ...],
    append_eod: bool,
    whole: list[int],
    sentences: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_EndsTexts, "appended_ids", appended)
    options = EncodingOptions(TokenizerConfig(), append_eod=append_eod)
    lines = b'{"text": "abc"}\n{"text": ["a", "bc"]}\n'
    block = TextBlock("x", 0, len(lines), len(lines), lines)
    ((tokens, lengths, counts),) = BlockEncoder(options, _EndsTexts())(block).columns  # type: ignore[arg-type]
    assert tokens.tolist() == [*whole, *sentences]
    assert lengths.tolist() == [len(whole), 1, len(sentences) - 1]
    assert counts.tolist() == [1, 2]
