"""Datasets in object storage: copied once, completely or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path

import fsspec
import numpy as np
import pytest

from megatron.data.indexed import IndexedDataset
from megatron.data.remote import local_copy
from megatron.data.text_stream import TextCorpus
from megatron.errors import ConfigError, DataError, StorageError
from megatron.parallel.layout import Layout
from tests.data.corpus import write_corpus
from tests.distributed import run_distributed
from tests.training import toy

ADDRESS = "memory://bucket/data"


@pytest.fixture(autouse=True)
def storage():
    """Return an object store in this process, empty at first."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    return system


def put(storage, path: str, data: bytes) -> None:
    with storage.open(f"/bucket/data/{path}", "wb") as file:
        file.write(data)


def files_below(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_an_indexed_dataset_is_copied_once(storage, tmp_path, monkeypatch):
    prefix = write_corpus(tmp_path / "corpus")
    for kind in ("bin", "idx"):
        put(storage, f"c.{kind}", Path(f"{prefix}.{kind}").read_bytes())
    copy = local_copy(f"{ADDRESS}/c", "--data-path", str(tmp_path / "cache"))
    ours, theirs = IndexedDataset(str(prefix)), IndexedDataset(copy)
    assert all((ours.get(i) == theirs.get(i)).all() for i in range(len(ours)))

    def no_second_time(*arguments, **options):
        raise AssertionError("a file is read again")

    with monkeypatch.context() as patch:
        patch.setattr(type(storage), "open", no_second_time)
        assert local_copy(f"{ADDRESS}/c", "--data-path", str(tmp_path / "cache")) == copy
    put(storage, "c.bin", b"")  # another version
    put(storage, "c.idx", b"")
    assert local_copy(f"{ADDRESS}/c", "--data-path", str(tmp_path / "cache")) != copy


@pytest.mark.parametrize("kind", ["bin", "idx"])
def test_half_a_dataset_is_none(kind, storage, tmp_path):
    put(storage, f"c.{kind}", b"x")
    with pytest.raises(DataError, match="c: nothing was found at this URL: give the prefix"):
        local_copy(f"{ADDRESS}/c", "--data-path", str(tmp_path))


@pytest.mark.parametrize("name", ["", "/*.jsonl", "/one.jsonl"])
def test_text_is_a_file_a_folder_or_a_pattern(name, storage, tmp_path):
    put(storage, "one.jsonl", b'{"text": "a"}\n')
    put(storage, "sub/two.jsonl", b'{"text": "b"}\n')
    place = local_copy(ADDRESS + name, "--data-path", str(tmp_path))
    files = [os.path.relpath(path, place) for path in TextCorpus(place, "text").files]
    assert files == {"": ["one.jsonl", "sub/two.jsonl"], "/*.jsonl": ["."]}.get(name, ["."])


@pytest.mark.parametrize("pattern", ["/*/part.jsonl", "/[ab]/*", "/**", "/**/part.jsonl", "/?/p*"])
def test_files_of_the_same_name_in_different_folders(pattern, storage, tmp_path):
    put(storage, "a/part.jsonl", b'{"text": "a"}\n')
    put(storage, "b/part.jsonl", b'{"text": "b"}\n')
    place = local_copy(ADDRESS + pattern, "--data-path", str(tmp_path))
    files = TextCorpus(place, "text").files
    assert [os.path.relpath(path, place) for path in files] == ["a/part.jsonl", "b/part.jsonl"]
    assert [Path(path).read_bytes()[-4:-3] for path in files] == [b"a", b"b"]


def test_a_pattern_may_match_folders_too(storage, tmp_path):
    put(storage, "one.jsonl", b'{"text": "a"}\n')
    put(storage, "sub/two.jsonl", b'{"text": "b"}\n')
    place = local_copy(f"{ADDRESS}/*", "--data-path", str(tmp_path))
    assert Path(place).read_bytes() == b'{"text": "a"}\n'
    with pytest.raises(DataError, match="nothing was found"):
        local_copy("memory://bucket/da*", "--data-path", str(tmp_path))


def test_a_server_need_not_tell_sizes(storage, tmp_path, monkeypatch):
    put(storage, "one.jsonl", b'{"text": "a"}\n')
    info = type(storage).info
    monkeypatch.setattr(type(storage), "info", lambda *a, **k: {**info(*a, **k), "size": None})
    place = local_copy(f"{ADDRESS}/one.jsonl", "--data-path", str(tmp_path))
    assert Path(place).read_bytes() == b'{"text": "a"}\n'


def test_a_copy_that_breaks_off_leaves_nothing(storage, tmp_path, monkeypatch):
    put(storage, "one.jsonl", b'{"text": "a"}\n' * 99)
    address = f"{ADDRESS}/one.jsonl"
    with monkeypatch.context() as patch:

        class Broken:
            def __enter__(self):
                return self

            def __exit__(self, *_):
                pass

            def read(self, size):
                raise ConnectionResetError("reset by peer")

        patch.setattr(type(storage), "open", lambda *a, **k: Broken())
        with pytest.raises(DataError, match=r"one.jsonl: cannot be read .ConnectionResetError: re"):
            local_copy(address, "--data-path", str(tmp_path))
    assert files_below(tmp_path) == [".one.jsonl.lock"]
    with monkeypatch.context() as patch:
        info = type(storage).info
        patch.setattr(type(storage), "info", lambda *a, **k: {**info(*a, **k), "size": 5000})
        with pytest.raises(DataError, match="1386 of 5000 bytes were received: start again"):
            local_copy(address, "--data-path", str(tmp_path))
    assert set(files_below(tmp_path)) == {".one.jsonl.lock"}


def test_several_processes_copy_once(storage, tmp_path, monkeypatch):
    put(storage, "one.jsonl", b"x" * 100_000)
    opened = []
    original = type(storage).open

    def counted(self, path, mode="rb", **options):
        opened.append(path)
        return original(self, path, mode, **options)

    monkeypatch.setattr(type(storage), "open", counted)
    paths = []

    def copy() -> None:
        paths.append(local_copy(f"{ADDRESS}/one.jsonl", "--data-path", str(tmp_path)))

    threads = [threading.Thread(target=copy) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(paths)) == 1
    assert len(opened) == 1


@pytest.mark.parametrize(
    ("name", "folder", "kind", "told"),
    [
        (f"{ADDRESS}/x", None, ConfigError, f"--data-path {ADDRESS}/x: give --data-cache-path"),
        (f"{ADDRESS}/x", "cache", DataError, "nothing was found at this URL: give the prefix"),
        ("nothing://x", "cache", ConfigError, "--data-path nothing://x: Protocol not known"),
        ("http://127.0.0.1:9/x", "cache", (DataError, ConfigError), "--data-path http://127.0"),
    ],
)
def test_mistakes_are_reported_in_one_line(name, folder, kind, told, tmp_path):
    with pytest.raises(kind, match=told) as caught:
        local_copy(name, "--data-path", folder and str(tmp_path / folder))
    assert "\n" not in str(caught.value)


def test_a_folder_that_cannot_be_written(storage, tmp_path):
    put(storage, "one.jsonl", b"x")
    (tmp_path / "file").touch()
    with pytest.raises((StorageError, DataError), match="--data-cache-path"):
        local_copy(f"{ADDRESS}/one.jsonl", "--data-path", str(tmp_path / "file"))


def test_a_full_disk_has_no_room_for_the_lock(storage, tmp_path, monkeypatch):
    put(storage, "one.jsonl", b'{"text": "a"}\n')
    whole = Path.open

    def full(path, *arguments, **options):
        if path.name == ".one.jsonl.lock":
            raise OSError(errno.ENOSPC, "No space left on device")
        return whole(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", full)
    message = r"--data-cache-path: .*one.jsonl cannot be written \(No space left on device\): give"
    with pytest.raises(StorageError, match=message):
        local_copy(f"{ADDRESS}/one.jsonl", "--data-path", str(tmp_path))


def test_a_run_reads_them(tmp_path, monkeypatch):
    monkeypatch.setattr(toy, "TOY", [word for word in toy.TOY if word != "--mock-data"])
    prefix = write_corpus(tmp_path / "corpus", vocab_size=100)
    expected = toy.losses_of(Layout.single(), ["--data-path", str(prefix)])
    words = ["--data-path", f"file://{prefix}", "--data-cache-path", str(tmp_path / "cache")]
    assert toy.losses_of(Layout.single(), words) == expected
    shutil.rmtree(tmp_path / "cache")
    ranks = run_distributed(2, toy.losses_of, words)
    assert np.allclose(ranks[-1], expected, rtol=1e-6)
