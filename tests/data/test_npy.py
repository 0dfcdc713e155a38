"""Shards of token ids in numpy's format: their documents, their names, and mistakes."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data import npy
from megatron.data.npy import find_shards, open_shard
from megatron.errors import DataError


@pytest.mark.parametrize(
    ("array", "eod", "documents"),
    [
        ([[5, 0], [0, 8]], 0, [[5, 0], [0, 8]]),
        ([1, 2, 0, 3, 0, 0, 4], 0, [[1, 2, 0], [3, 0], [0], [4]]),
        ([0, 1, 0], 0, [[0], [1, 0]]),
        ([3, 0, 1, 3, 3, 1, 1], 3, [[3], [0, 1, 3], [3], [1, 1]]),
        ([0, 1, 0, 2], None, [[0, 1, 0, 2]]),
        ([5], 0, [[5]]),
        ([], 0, []),
        ([], None, []),
    ],
)
def test_documents_do_not_depend_on_how_much_is_searched_at_a_time(
    array: list[Any],
    eod: int | None,
    documents: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    np.save(tmp_path / "a.npy", np.array(array, np.uint16))
    for count in (1, 2, 3, 100):
        monkeypatch.setattr(npy, "_SEARCH_CHUNK", count)
        shard = open_shard(tmp_path / "a.npy")
        assert [document.tolist() for document in shard.documents(eod)] == documents
        assert type(shard.ids) is np.ndarray
        assert isinstance(shard.ids.base, np.memmap)


def test_files_that_a_name_stands_for(tmp_path: Path) -> None:
    for name in ("b1.npy", "a[12].npy", "a1.npy", "a2.npy", "a.bin"):
        (tmp_path / name).touch()

    def found(name: str) -> list[str]:
        return [path.name for path in find_shards(str(tmp_path / name))]

    assert found(".") == ["a1.npy", "a2.npy", "a[12].npy", "b1.npy"]
    assert found("a?.npy") == ["a1.npy", "a2.npy"]
    assert found("b[12].npy") == ["b1.npy"]
    assert found("a[12].npy") == ["a[12].npy"]  # a file comes before a pattern
    assert found("c.npy") == found("a.bin") == found("a.*") == []


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(3), r"an array \[3\] of float64, expected token ids of an integer type"),
        (np.ones((2, 3), bool), r"an array \[2, 3\] of bool, expected"),
        (np.int64(3), r"an array \[\] of int64, expected"),
        (np.ones((2, 3, 4), int), r"an array \[2, 3, 4\] of int64, expected"),
        (np.array([[4, 0], [2, -1]]), "negative token id -1 at position 3: write it again without"),
        (None, "No such file or directory: copy it again"),
        (b"words", r"not a .npy file of numbers, or truncated \(\w.*\): copy or write it again"),
        (np.array([{}]), r"not a .npy file of numbers, or truncated \(\w.*\): copy or write it"),
    ],
)
def test_other_files_are_refused(array: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    if isinstance(array, bytes):
        path.write_bytes(array)
    elif array is not None:
        np.save(path, array)
    with pytest.raises(DataError, match=f"--input .*a.npy: {message}") as caught:
        open_shard(path)
    assert "\n" not in str(caught.value)


class _Program:
    """An object whose pickle creates a file when it is read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


def test_a_pickle_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(pickle.dumps(_Program(tmp_path / "made")))
    with pytest.raises(DataError, match="not a .npy file of numbers"):
        open_shard(tmp_path / "a.npy")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("kind", ["u1", "i1", "<u2", ">i4", "u8"])
def test_any_type_of_integer_may_hold_ids(kind: str, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([0, 1, 127], kind))
    assert open_shard(tmp_path / "a.npy").ids.tolist() == [0, 1, 127]
