"""A corpus is told from another by a part of its bytes."""

from __future__ import annotations

import shutil

import pytest

from megatron.config.data import DataConfig
from megatron.data.fingerprint import corpus_fingerprint
from megatron.errors import DataError
from tests.data.corpus import write_corpus


def _of(*prefixes: object) -> str | None:
    return corpus_fingerprint(DataConfig(data_path=tuple(map(str, prefixes))))


def test_it_follows_content_and_order_not_names(tmp_path):
    one, other = (write_corpus(tmp_path / f"{seed}", seed=seed) for seed in (0, 1))
    fingerprint = _of(one)
    assert fingerprint not in (None, _of(other))
    for kind in ("bin", "idx"):
        shutil.copy(f"{one}.{kind}", tmp_path / f"copy.{kind}")
    assert _of(tmp_path / "copy") == fingerprint
    blended = _of(0.5, one, 0.5, other)
    assert blended not in (fingerprint, _of(0.5, other, 0.5, one))
    assert corpus_fingerprint(DataConfig(train_data_path=(str(one),))) == fingerprint


@pytest.mark.parametrize("place", [0, 2000, -1])
def test_small_files_are_read_whole(tmp_path, place):
    prefix = write_corpus(tmp_path / "corpus")
    before, file = _of(prefix), tmp_path / "corpus.bin"
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)
    assert _of(prefix) != before


def test_generated_tokens_have_none_and_a_missing_file_is_named(tmp_path):
    assert corpus_fingerprint(DataConfig(mock_data=True)) is None
    with pytest.raises(DataError, match=r"absent\.idx: cannot be read: No such file"):
        _of(tmp_path / "absent")
