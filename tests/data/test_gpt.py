"""GPT samples: their tokens, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from megatron.config.data import DataConfig
from megatron.data.datasets import DataRequest, DatasetPart
from megatron.data.gpt import GPTDataset, build_gpt_part
from megatron.data.indexed import IndexedDataset, IndexedDatasetBuilder, bin_path, idx_path
from megatron.errors import DataError
from tests.data.corpus import write_corpus


def build(prefix: Path, **changes: object) -> GPTDataset:
    data = IndexedDataset(prefix)
    wanted: dict = {"num_samples": 300, "bounds": (0, len(data)), "vocab_size": 1000, **changes}
    part = DatasetPart("train", data, wanted["bounds"], wanted["num_samples"])
    request = DataRequest(DataConfig(seq_length=16, split="1"), seed=5, samples=(0, 0, 0))
    return build_gpt_part(part, request, seq_length=16, vocab_size=wanted["vocab_size"])


def test_samples_are_windows_of_the_documents_laid_end_to_end(tmp_path: Path) -> None:
    dataset = build(write_corpus(tmp_path / "x"))
    stream = np.concatenate([dataset.data.get(i) for i in dataset.index.documents.tolist()])
    assert len(dataset) >= 300
    for i in range(len(dataset)):
        sample, row = dataset[i], int(dataset.index.shuffle[i])
        assert sample["text"].dtype == np.int64
        assert sample["text"].tolist() == stream[row * 16 : row * 16 + 17].tolist()
        assert sample["id"] == i


def test_a_split_holds_its_own_documents_only(tmp_path: Path) -> None:
    dataset = build(write_corpus(tmp_path / "x"), bounds=(30, 60))
    assert set(dataset.index.documents.tolist()) == set(range(30, 60))


def test_the_index_is_kept_beside_the_data_and_found_again(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "x")
    first = build(prefix)
    files = sorted((tmp_path / "index-cache").iterdir())
    assert len(files) == 5
    times = [path.stat().st_mtime_ns for path in files]
    again = build(prefix)
    assert [path.stat().st_mtime_ns for path in files] == times
    assert all((a == b).all() for a, b in zip(first.index, again.index, strict=True))


@pytest.mark.parametrize("suffix", ["doc", "sample", "shuffle"])
def test_a_cache_of_zeros_is_rebuilt(tmp_path: Path, suffix: str) -> None:
    prefix = write_corpus(tmp_path / "x")
    want = [array.copy() for array in build(prefix).index]
    path = next((tmp_path / "index-cache").glob(f"*_{suffix}_idx.npy"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
    path.write_bytes(content)
    assert all((a == b).all() for a, b in zip(build(prefix).index, want, strict=True))


@pytest.mark.parametrize("suffix", ["doc", "sample", "shuffle"])
def test_a_cache_with_two_entries_swapped_is_rebuilt(tmp_path: Path, suffix: str) -> None:
    """All sums and bounds are unchanged, and a swapped permutation is still a permutation."""
    prefix = write_corpus(tmp_path / "x", longest=80)
    want = [array.copy() for array in build(prefix).index]
    path = next((tmp_path / "index-cache").glob(f"*_{suffix}_idx.npy"))
    swapped = np.load(path)
    step = np.flatnonzero(np.diff(swapped[:, 0]) == 0)[0] if suffix == "sample" else 0
    swapped[[step, step + 1]] = swapped[[step + 1, step]]
    np.save(path, swapped)
    assert all((a == b).all() for a, b in zip(build(prefix).index, want, strict=True))
    assert (np.load(path) == want[["doc", "sample", "shuffle"].index(suffix)]).all()


def test_an_older_dataset_under_the_old_name_is_noticed(tmp_path: Path) -> None:
    """`cp -p` does this: the index is newer than the data."""
    prefix = write_corpus(tmp_path / "x")
    build(prefix)
    lengths = IndexedDataset(prefix).sequence_lengths
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:  # same counts of documents and tokens
        builder.add_documents(np.zeros(lengths.sum(), int), lengths[::-1], np.ones(100, int))
    for path in (idx_path(prefix), bin_path(prefix)):
        os.utime(path, (0, 0))
    found = build(prefix).index
    (tmp_path / "index-cache").rename(tmp_path / "old")
    assert all((a == b).all() for a, b in zip(found, build(prefix).index, strict=True))


def test_another_dataset_under_the_old_name_is_noticed(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "x")
    old = build(prefix)
    write_corpus(prefix, seed=1)
    new = build(prefix)
    stream = np.concatenate([new.data.get(i) for i in new.index.documents.tolist()])
    row = int(new.index.shuffle[0])
    assert new[0]["text"].tolist() == stream[row * 16 : row * 16 + 17].tolist()
    assert old.index.samples.tolist() != new.index.samples.tolist()


def test_an_index_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    dataset = build(write_corpus(tmp_path / "x"))
    other = build(write_corpus(tmp_path / "y", seed=1))
    dataset.data = other.data

    def read_all() -> None:
        for i in range(len(dataset)):
            _ = dataset[i]

    with pytest.raises(DataError, match="delete the index cache"):
        read_all()


def test_ids_outside_the_vocabulary_are_refused_at_the_start(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "x", vocab_size=60000)
    with pytest.raises(DataError, match=r"x\.bin: document \d+ holds the token id \d+, but .* 500"):
        build(prefix, vocab_size=500)


def test_the_largest_id_of_a_vocabulary_is_its_last(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "x", np.uint16) as builder:
        tokens = np.array([*[3, 7] * 20, *[7] * 40])
        builder.add_documents(tokens, np.array([40, 40]), np.ones(2, int))
    dataset = build(tmp_path / "x", vocab_size=8, num_samples=4)
    assert max(int(dataset[i]["text"].max()) for i in range(len(dataset))) == 7
    with pytest.raises(DataError, match=r"x\.bin: document \d holds the token id 7, but .* 7"):
        build(tmp_path / "x", vocab_size=7, num_samples=4)


def test_a_split_without_tokens_is_refused_with_numbers(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "x", longest=1)
    with pytest.raises(DataError, match="train split consists of documents 0 to 99 of 100"):
        build(prefix)


def test_a_split_shorter_than_a_sample_repeats(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "x", documents=3, longest=5)
    dataset = build(prefix, num_samples=2)
    assert len(dataset) >= 2
    assert len(dataset[1]["text"]) == 17
