"""Fuzzing of every reader of untrusted bytes: damaged input is refused, with no other effect.

A target reads bytes, such as an index or a request. It gets seeds, which are sound inputs, and
mutations of them that Hypothesis draws. It may succeed or raise one of its own errors; any other
exception, a crash, more than `SECONDS` of CPU time or `WAIT` seconds for one input, or more than
`MEMORY` of new memory is a failure. Inputs run in a forked process, so that a crash or a hang is a
finding and does not end the search.
"""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import json
import mmap
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

SECONDS = 10
WAIT = 120  # seconds; the machine may be busy
MEMORY = 2 << 30  # bytes
CORPUS = Path(__file__).parent / "corpus"  # inputs that failed before, by target

_INTERESTING = (
    *(0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF),
    *(1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1),
)
_JSON = (
    *(b"NaN", b"-Infinity", b"1e999", b"-1", b"0", b"1.5", b"null", b"true", b'""', b"[]", b"{}"),
    *(b"9223372036854775808", b"1" * 400, b"[" * 5000, b'"\\ud800"', b"\xff", b"\x00", b","),
)


@dataclass(frozen=True)
class Target:
    """One reader of bytes.

    Attributes:
        name: its name, and the name of its folder of past failures.
        seeds: sound inputs.
        read: reads an input. Before each input it gets an empty folder of its own.
        errors: what it may raise.
        tokens: text to insert into inputs.
    """

    name: str
    seeds: Callable[[], Sequence[bytes]]
    read: Callable[[bytes, Path], object]
    errors: tuple[type[Exception], ...]
    tokens: tuple[bytes, ...] = _JSON


@dataclass
class Outcome:
    """The results for a number of inputs.

    Attributes:
        inputs: tried so far.
        refused: how many of them raised one of the target's errors.
        failure: a description of the first failure; empty if there is none.
        example: its input.
    """

    inputs: int = 0
    refused: int = 0
    failure: str = ""
    example: bytes = b""


def past_failures(name: str) -> list[bytes]:
    """Return the corpus of a target."""
    return [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]


def made(make: Callable[[Path], Sequence[bytes]]) -> Callable[[], Sequence[bytes]]:
    """Return seeds that a function writes as files into a folder."""

    def seeds() -> Sequence[bytes]:
        with tempfile.TemporaryDirectory() as folder:
            return make(Path(folder))

    return seeds


def mutations(seeds: Sequence[bytes], tokens: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """Draw a seed with one to six edits, or with one value replaced if it is JSON."""

    @st.composite
    def mutated(draw: st.DrawFn) -> bytes:
        data = bytearray(draw(st.sampled_from(seeds)))
        tree = _json_of(data)
        if isinstance(tree, dict | list) and draw(st.booleans()):
            for _ in range(draw(st.integers(1, 3))):
                _edit_tree(tree, draw)
            return json.dumps(tree).encode("utf-8", "surrogatepass")
        for _ in range(draw(st.integers(1, 6))):
            _edit(data, draw, seeds, tokens)
        return bytes(data)

    return mutated()


def _edit(
    data: bytearray, draw: st.DrawFn, seeds: Sequence[bytes], tokens: Sequence[bytes]
) -> None:
    at = draw(st.integers(0, max(0, len(data) - 1)))
    width = draw(st.sampled_from((1, 2, 4, 8)))
    match draw(st.integers(0, 8)):
        case 0:  # one bit
            if data:
                data[at] ^= 1 << draw(st.integers(0, 7))
        case 1:  # a number at an edge of its range
            number = draw(st.sampled_from(_INTERESTING)) & ((1 << 8 * width) - 1)
            data[at : at + width] = number.to_bytes(width, draw(st.sampled_from(("little", "big"))))
        case 2:  # a part is missing
            del data[at : at + draw(st.integers(1, 64))]
        case 3:  # the end is missing
            del data[at:]
        case 4:  # a part is there twice
            data[at:at] = data[at : at + draw(st.integers(1, 64))]
        case 5:  # something is inserted
            data[at:at] = draw(st.binary(min_size=1, max_size=16))
        case 6:  # a token is inserted
            data[at:at] = draw(st.sampled_from(tokens))
        case 7:  # a word or a number is replaced by a token
            start, end = _word(data, at)
            data[start:end] = draw(st.sampled_from(tokens))
        case 8:  # the end of another input
            other = draw(st.sampled_from(seeds))
            data[at:] = other[draw(st.integers(0, len(other))) :]


def _json_of(data: bytearray) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


_VALUES = (
    *(None, True, -1, 0, 1.5, 1 << 40, 1 << 64, 10**400, float("nan")),
    *("", "\ud800", "\0", "../x"),
)


def _edit_tree(tree: Any, draw: st.DrawFn) -> None:
    """Replace, remove or add a value at a random place of a tree of JSON."""
    while True:
        keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        if not keys:
            return
        key = draw(st.sampled_from(keys))
        if isinstance(tree[key], dict | list) and tree[key] and draw(st.booleans()):
            tree = tree[key]
            continue
        match draw(st.integers(0, 3)):
            case 0:
                del tree[key]
            case 1:  # a part replaced with another
                tree[key] = copy.deepcopy(tree[draw(st.sampled_from(keys))])
            case 2:
                tree[key] = draw(st.sampled_from(([], {}, [tree[key]], {"x": tree[key]})))
            case 3:
                tree[key] = draw(st.sampled_from(_VALUES))
        return


def _word(data: bytearray, at: int) -> tuple[int, int]:
    """Return the run of letters and digits around a position, or the whole string."""
    start = end = at
    while start > 0 and (data[start - 1 : start].isalnum() or data[start - 1] in b'_.-"'):
        start -= 1
    while end < len(data) and (data[end : end + 1].isalnum() or data[end] in b'_.-"'):
        end += 1
    return start, end


def fuzz(target: Target, inputs: int, number: int) -> Outcome:
    """Try past failures, then new mutations.

    Args:
        target: the reader to test.
        inputs: the number of mutations.
        number: the seed of the random choices.
    """
    corpus = past_failures(target.name)
    seeds = [*target.seeds(), *corpus]
    shared = mmap.mmap(-1, 64 << 20)  # count, refused, length and bytes of the current input
    sys.stdout.flush()
    sys.stderr.flush()
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        null = os.open(os.devnull, os.O_WRONLY)  # libraries print their panics
        os.dup2(null, 1)
        os.dup2(null, 2)
        faulthandler.disable()
        with open(write_end, "w") as report:
            try:
                _limit_memory()
                _search(target, seeds, corpus, inputs, number, shared)
            except BaseException:
                report.write(traceback.format_exc())
        os._exit(0)
    os.close(write_end)
    with open(read_end) as report:
        text = report.read()
    _, status = os.waitpid(child, 0)
    count, refused, size = (int.from_bytes(shared[i : i + 8], "little") for i in (0, 8, 16))
    if os.WIFSIGNALED(status):
        ended = signal.Signals(os.WTERMSIG(status))
        slow = {signal.SIGPROF: f"more than {SECONDS} s of work", signal.SIGALRM: "it hangs"}
        text = slow.get(ended, f"ended by {ended.name}")
    return Outcome(count, refused, text, shared[24 : 24 + size] if text else b"")


def _limit_memory() -> None:
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, signal.SIG_DFL)  # ends the process, even in the middle of C code
    sys.setrecursionlimit(1000)


def _search(
    target: Target,
    seeds: Sequence[bytes],
    corpus: Sequence[bytes],
    inputs: int,
    number: int,
    shared: mmap.mmap,
) -> None:
    counts = [0, 0]

    def attempt(data: bytes) -> None:
        counts[0] += 1
        kept = data[: len(shared) - 24]
        shared[16:24] = len(kept).to_bytes(8, "little")
        shared[24 : 24 + len(kept)] = kept
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            signal.alarm(WAIT)
            try:
                target.read(data, Path(folder))
            except target.errors:
                counts[1] += 1
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
                signal.alarm(0)
        for i, count in enumerate(counts):
            shared[8 * i : 8 * i + 8] = count.to_bytes(8, "little")

    for data in (*target.seeds(), *corpus):
        attempt(data)

    @seed(number)
    @settings(
        max_examples=inputs,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(mutations(seeds, target.tokens))
    def run(data: bytes) -> None:
        attempt(data)

    run()


def search(targets: Sequence[Target], inputs: int, number: int) -> bool:
    """Fuzz targets one after another, print the results, and add failures to the corpus."""
    held = True
    for target in targets:
        started = time.monotonic()
        outcome = fuzz(target, inputs, number)
        seconds = time.monotonic() - started
        print(
            f"{target.name}: {outcome.inputs:,} inputs, {outcome.refused:,} refused, "
            f"seed {number}, {seconds:.1f} s{': FAILED' if outcome.failure else ''}",
            flush=True,
        )
        if outcome.failure:
            held = False
            folder = CORPUS / target.name
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"seed-{number}"
            path.write_bytes(outcome.example)
            print(f"{outcome.failure}\nkept as {path.relative_to(CORPUS.parent)}", flush=True)
    return held
