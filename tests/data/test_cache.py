"""The index cache: kept, found, rebuilt if torn or stale, and built once per job."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron import durable
from megatron.data import cache as cache_module
from megatron.data.cache import ArraySpec, IndexCache, builder_first, digest_of, open_array
from megatron.errors import DataError
from tests.test_durable import ATTACKS

SPECS = [
    ArraySpec("a_idx", np.dtype("i4"), (1000,)),
    ArraySpec("b_idx", np.dtype("u4"), (50, 2)),
]
WANT = (np.arange(1000, dtype=np.int32), np.arange(100, dtype=np.uint32).reshape(50, 2))


class Builder:
    """A builder that counts how often it has built the arrays."""

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
    assert names == {".dsc", ".npy", ".sha256"}  # no temporary files are left
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
    cache.load_or_build("text", SPECS, build)
    path, swapped = next(tmp_path.glob("*_a_idx.npy")), WANT[0].copy()
    swapped[[3, 7]] = swapped[[7, 3]]  # still a permutation
    for unsound in (np.zeros_like(WANT[0]), swapped):
        np.save(path, unsound)
        before = build.count
        assert equal(cache.load_or_build("text", SPECS, build))
        assert build.count == before + 1


def test_arrays_without_a_digest_are_rebuilt(tmp_path: Path) -> None:
    """Megatron-LM writes no digests. It can read our files unchanged."""
    build, cache = Builder(), IndexCache((tmp_path,))
    cache.load_or_build("text", SPECS, build)
    (digest,) = tmp_path.glob("*.sha256")
    digest.unlink()
    content = {path: path.read_bytes() for path in tmp_path.glob("*.npy")}
    assert equal(cache.load_or_build("text", SPECS, build))
    assert build.count == 2
    assert content == {path: path.read_bytes() for path in tmp_path.glob("*.npy")}
    for path, want in zip(sorted(content), WANT, strict=True):
        assert (np.load(path) == want).all()
        np.save(tmp_path / "numpy.npy", want)
        assert path.read_bytes() == (tmp_path / "numpy.npy").read_bytes()


def test_arrays_of_another_description_or_input_are_not_used(tmp_path: Path) -> None:
    """The files have a correct digest, but the names of other arrays."""
    build, cache = Builder(), IndexCache((tmp_path,))
    cache.load_or_build("text", SPECS, build)
    name = hashlib.md5(b"other", usedforsecurity=False).hexdigest()
    for path in list(tmp_path.iterdir()):
        path.rename(tmp_path / f"{name}{path.name[32:]}")
    cache.load_or_build("other", SPECS, build)
    assert build.count == 2
    cache.load_or_build("other", SPECS, build, inputs=(np.arange(3),))
    assert build.count == 3
    cache.load_or_build("other", SPECS, build, inputs=(np.arange(3),))
    assert build.count == 3
    for others in ((np.array([0, 2, 1]),), (np.arange(3, dtype=np.int32),), (np.arange(3),) * 2):
        before = build.count
        cache.load_or_build("other", SPECS, build, inputs=others)
        assert build.count == before + 1


@pytest.mark.parametrize("end", ["_a_idx.npy", "_b_idx.npy", ".sha256"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_files_that_others_may_have_written_are_rebuilt(
    tmp_path: Path, end: str, attack: Callable[[Path], None]
) -> None:
    build, cache = Builder(), IndexCache((tmp_path / "cache",))
    cache.load_or_build("text", SPECS, build)
    (path,) = (tmp_path / "cache").glob(f"*{end}")
    attack(path)
    assert equal(cache.load_or_build("text", SPECS, build))
    assert build.count == 2
    if not path.is_dir():
        cache.load_or_build("text", SPECS, build)
        assert build.count == 2


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_the_owner_of_the_data_is_trusted_with_its_index(tmp_path: Path) -> None:
    build, cache, source = Builder(), IndexCache((tmp_path / "cache",)), tmp_path / "x.idx"
    source.touch()
    cache.load_or_build("text", SPECS, build, source=source)
    for path in (tmp_path / "cache").iterdir():
        os.chown(path, 4321, 4321)
    os.chown(source, 4321, 4321)
    cache.load_or_build("text", SPECS, build, source=source)
    assert build.count == 1
    os.chown(source, 4322, 4322)
    cache.load_or_build("text", SPECS, build, source=source)
    assert build.count == 2


def test_an_index_is_written_for_this_user_under_any_umask(tmp_path: Path) -> None:
    build, cache = Builder(), IndexCache((tmp_path,))
    before = os.umask(0)
    try:
        cache.load_or_build("text", SPECS, build)
    finally:
        os.umask(before)
    cache.load_or_build("text", SPECS, build)
    assert build.count == 1


def test_a_file_system_without_owners_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """There, all files belong to somebody else, or anybody may write to them."""
    monkeypatch.setattr(cache_module, "open_trusted", lambda *_: durable.open_trusted(Path("/")))
    assert equal(IndexCache((tmp_path,)).load_or_build("text", SPECS, Builder()))
    assert "other users can write to its files" in capsys.readouterr().err


def test_a_digest_does_not_depend_on_the_number_of_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "_HASH_BLOCK", 1000)
    arrays = (np.arange(12345, dtype=np.int32), np.empty((0, 2)))
    found = set()
    for cores in (1, 2, 7):
        monkeypatch.setattr(cache_module, "cores_per_process", lambda cores=cores: cores)
        found.add(digest_of("text", arrays))
    assert len(found) == 1
    assert digest_of("text", arrays[:1]) not in found
    assert digest_of("texts", arrays) not in found


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
    """Eight threads act as processes: each calls the barrier once, and only the builder builds."""
    barrier, build = threading.Barrier(8, timeout=240), Builder()
    results = []

    def process(rank: int) -> None:
        with builder_first(rank == 0, lambda: barrier.wait() and None):
            results.append(equal(IndexCache((tmp_path,)).load_or_build("text", SPECS, build)))

    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
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


@pytest.mark.parametrize(("age", "is_used"), [(-1, True), (0, True), (1, False)])
def test_an_array_that_is_older_than_its_source_is_not_used(
    age: int, is_used: bool, tmp_path: Path
) -> None:
    source, array = tmp_path / "source", tmp_path / "array.npy"
    source.touch()
    np.save(array, np.arange(3))
    os.utime(source, (1000, 1000))
    os.utime(array, (1000 - age, 1000 - age))
    assert (open_array(array, source) is not None) == is_used
