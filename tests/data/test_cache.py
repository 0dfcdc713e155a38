"""The index cache: kept, found, rebuilt when torn or stale, built once in a job."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from megatron.data.cache import ArraySpec, IndexCache, builder_first
from megatron.errors import DataError

SPECS = [
    ArraySpec("a_idx", np.dtype("i4"), (1000,)),
    ArraySpec("b_idx", np.dtype("u4"), (50, 2)),
]
WANT = (np.arange(1000, dtype=np.int32), np.arange(100, dtype=np.uint32).reshape(50, 2))


class Builder:
    """Counts how often the arrays were built."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> tuple[np.ndarray, ...]:
        self.count += 1
        return WANT


def equal(arrays: tuple[np.ndarray, ...]) -> bool:
    return all((got == want).all() for got, want in zip(arrays, WANT, strict=True))


def test_built_once_then_found(tmp_path: Path) -> None:
    build, cache = Builder(), IndexCache((tmp_path / "absent", tmp_path / "cache"))
    for _ in range(3):
        assert equal(cache.load_or_build("text", SPECS, build))
    assert build.count == 1
    names = {path.suffix for path in (tmp_path / "cache").iterdir()}
    assert names == {".dsc", ".npy"}  # nothing temporary is left
    cache.load_or_build("other text", SPECS, build)
    assert build.count == 2


def test_an_index_larger_than_memory_is_refused_with_what_makes_it_smaller(tmp_path: Path) -> None:
    def build() -> tuple[np.ndarray, ...]:
        raise MemoryError

    specs = [ArraySpec("a_idx", np.dtype("i4"), (10**11, 2))]
    with pytest.raises(DataError, match="index of 800.0 GB .* fewer --train-iters"):
        IndexCache((tmp_path,)).load_or_build("text", specs, build)


def test_the_first_folder_that_has_it_is_used(tmp_path: Path) -> None:
    build = Builder()
    IndexCache((tmp_path / "a",)).load_or_build("text", SPECS, build)
    IndexCache((tmp_path / "a", tmp_path / "b")).load_or_build("text", SPECS, build)
    assert build.count == 1
    assert not (tmp_path / "b").exists()


def test_torn_files_are_rebuilt(tmp_path: Path) -> None:
    build, cache = Builder(), IndexCache((tmp_path,))
    cache.load_or_build("text", SPECS, build)
    files = sorted(tmp_path.glob("*.npy"))
    for path in files:
        good = path.read_bytes()
        for cut in (0, 5, 100, len(good) - 1):
            path.write_bytes(good[:cut])
            before = build.count
            assert equal(cache.load_or_build("text", SPECS, build))
            assert build.count == before + 1
            assert path.read_bytes() == good


def test_another_type_or_shape_is_rebuilt(tmp_path: Path) -> None:
    build, cache = Builder(), IndexCache((tmp_path,))
    cache.load_or_build("text", SPECS, build)
    path = next(tmp_path.glob("*_a_idx.npy"))
    good, contents = path.read_bytes(), []
    for other in (WANT[0].astype(np.int64), WANT[0][:-1]):
        np.save(path, other)
        contents.append(path.read_bytes())
    contents.append(good.replace(b"'<i4'", b"'|O' "))  # pickled objects
    for content in contents:
        assert content != good
        path.write_bytes(content)
        before = build.count
        assert equal(cache.load_or_build("text", SPECS, build))
        assert build.count == before + 1


def test_unsound_arrays_are_rebuilt(tmp_path: Path) -> None:
    build, cache = Builder(), IndexCache((tmp_path,))
    np.save(tmp_path / "x.npy", WANT[0])
    cache.load_or_build("text", SPECS, build)
    np.save(next(tmp_path.glob("*_a_idx.npy")), np.zeros_like(WANT[0]))
    assert equal(cache.load_or_build("text", SPECS, build, is_sound=equal))
    assert build.count == 2


def test_older_than_the_source_is_rebuilt(tmp_path: Path) -> None:
    build, cache = Builder(), IndexCache((tmp_path,))
    source = tmp_path / "source"
    source.write_text("")
    cache.load_or_build("text", SPECS, build, source=source)
    cache.load_or_build("text", SPECS, build, source=source)
    assert build.count == 1
    later = source.stat().st_mtime + 100
    os.utime(source, (later, later))
    cache.load_or_build("text", SPECS, build, source=source)
    assert build.count == 2


@pytest.mark.parametrize("warns", [True, False])
def test_a_folder_that_cannot_be_written_to(
    tmp_path: Path, warns: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    cache = IndexCache((tmp_path / "file" / "cache",), warns)
    assert equal(cache.load_or_build("text", SPECS, Builder()))
    messages = capsys.readouterr().err.splitlines()
    assert len(messages) == warns
    assert all(
        message.startswith("WARNING: index cache") and "--data-cache-path" in message
        for message in messages
    )


def test_one_process_builds_and_the_others_find_it(tmp_path: Path) -> None:
    """Eight threads as processes: each calls the barrier once, and only the builder builds."""
    barrier, build = threading.Barrier(8, timeout=20), Builder()
    results = []

    def process(rank: int) -> None:
        with builder_first(rank == 0, lambda: barrier.wait() and None):
            results.append(equal(IndexCache((tmp_path,)).load_or_build("text", SPECS, build)))

    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == [True] * 8
    assert build.count == 1


def test_an_error_of_the_builder_releases_the_others() -> None:
    calls: list[int] = []

    def fail() -> None:
        with builder_first(True, lambda: calls.append(1)):
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        fail()
    assert calls == [1]
