"""Document, sample and shuffle index: a test vector, a plain loop, and Megatron's own arrays."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from megatron.data import gpt
from megatron.data.datasets import split_bounds
from megatron.data.gpt import (
    GPTIndexPlan,
    build_gpt_index,
    build_sample_index,
    plan_gpt_index,
)
from megatron.data.indexed import IndexedDataset
from megatron.errors import DataError


def loop_sample_index(
    lengths: np.ndarray, documents: np.ndarray, num_samples: int, seq_length: int
) -> np.ndarray:
    """Return where each row starts, found token by token."""
    rows = [(0, 0)]
    token = 0
    for place, document in enumerate(documents):
        for offset in range(lengths[document]):
            if token % seq_length == 0 and token > 0 and len(rows) <= num_samples:
                rows.append((place, offset))
            token += 1
    return np.array(rows, np.int32)


def test_vector() -> None:
    lengths = np.array([5, 3, 9, 1, 7, 4], np.int32)
    plan = plan_gpt_index(6, int(lengths.sum()), num_samples=14, seq_length=4)
    assert (plan.epochs, plan.samples, plan.separate_last_epoch) == (2, 14, False)
    index = build_gpt_index(plan, lengths, 0, seed=1234)
    assert index.documents.tolist() == [1, 2, 5, 2, 3, 4, 1, 0, 4, 5, 0, 3]
    assert [tuple(row) for row in index.samples.tolist()] == [
        *((0, 0), (1, 1), (1, 5), (2, 0), (3, 0), (3, 4), (3, 8), (5, 2)),
        *((5, 6), (7, 0), (7, 4), (8, 3), (9, 0), (10, 0), (10, 4)),
    ]
    assert index.shuffle.tolist() == [7, 11, 2, 3, 1, 9, 5, 4, 0, 8, 6, 10, 13, 12]


@pytest.mark.parametrize("seed", range(30))
def test_sample_index_equals_the_loop(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.RandomState(seed)
    monkeypatch.setattr(gpt, "_CHUNK", int(random.choice([1, 7, 1 << 16])))
    longest = random.choice([2, 5, 40])
    lengths = random.randint(0, longest, 60).astype(np.int32)  # with empty documents
    lengths[0] = 0
    documents = random.randint(0, 60, 200).astype(np.int32)
    documents[0] = 0  # an empty one first
    seq_length = int(random.choice([1, 3, 16, 100]))
    num_samples = (int(lengths[documents].sum()) - 1) // seq_length
    got = build_sample_index(lengths, documents, num_samples, seq_length)
    want = loop_sample_index(lengths, documents, num_samples, seq_length)
    assert got.dtype == np.int32
    assert (got == want).all()


@pytest.mark.parametrize("num_samples", [1, 9, 10, 11, 19, 20, 100, 108, 109, 1000])
def test_plan_takes_the_fewest_epochs(num_samples: int) -> None:
    tokens, seq_length = 93, 10
    plan = plan_gpt_index(5, tokens, num_samples, seq_length)
    fewest = next(e for e in range(1, 9999) if (e * tokens - 1) // seq_length >= num_samples)
    assert plan.epochs == fewest
    before = ((fewest - 1) * tokens - 1) // seq_length
    separate = fewest > 1 and num_samples - before < int(0.80 * ((tokens - 1) // seq_length))
    assert plan.separate_last_epoch == separate
    assert plan.samples_before_last_epoch == (before if separate else plan.samples)


@pytest.mark.parametrize(
    ("samples", "epochs", "total", "together"),
    [(10, 1, 10, 10), (11, 2, 20, 10), (17, 2, 20, 10), (18, 2, 20, 20), (20, 2, 20, 20)],
)
def test_less_than_four_fifths_of_an_epoch_are_shuffled_separately(
    samples: int, epochs: int, total: int, together: int
) -> None:
    """An epoch of 81 tokens has 10 samples of 8 tokens."""
    plan = plan_gpt_index(4, 81, samples, 8)
    assert plan == GPTIndexPlan(4, 8, epochs, total, together)
    assert plan.separate_last_epoch == (total > together)


def test_the_largest_numbers_of_documents_and_of_samples() -> None:
    assert plan_gpt_index(2**31 - 1, 9, 1, 8).epochs == 1
    with pytest.raises(DataError, match="need 1 epochs of the split's 2147483648 documents"):
        plan_gpt_index(2**31, 9, 1, 8)
    with pytest.raises(DataError, match="need 2 epochs of the split's 1073741824 documents"):
        plan_gpt_index(2**30, 9, 2, 8)
    for samples, kind in ((2**32 - 3, "u4"), (2**32 - 2, "i8")):
        plan = GPTIndexPlan(3, 8, 2, samples, samples)
        assert [(one.suffix, one.dtype.str[1:], one.shape) for one in plan.specs] == [
            ("doc_idx", "i4", (6,)),
            ("sample_idx", "i4", (samples + 1, 2)),
            ("shuffle_idx", kind, (samples,)),
        ]


def test_a_separate_last_epoch_stays_last() -> None:
    lengths = np.full(50, 10, np.int32)
    plan = plan_gpt_index(20, 200, num_samples=45, seq_length=10)
    assert plan.epochs == 3
    assert plan.separate_last_epoch
    index = build_gpt_index(plan, lengths, first_document=30, seed=1)
    assert sorted(index.documents[40:]) == list(range(30, 50))
    assert index.documents[:40].tolist() != sorted(index.documents[:40])
    assert set(index.shuffle[: plan.samples_before_last_epoch]) == set(range(39))
    assert set(index.shuffle) == set(range(59))


def test_too_many_documents_are_refused() -> None:
    with pytest.raises(DataError, match="request fewer samples, give more data"):
        plan_gpt_index(1000, 1000, num_samples=10**7, seq_length=1024)


def test_shapes_and_dtypes_are_known_before() -> None:
    lengths = np.full(7, 10, np.int32)
    plan = plan_gpt_index(7, 70, num_samples=20, seq_length=8)
    index = build_gpt_index(plan, lengths, 0, seed=1)
    assert [(a.dtype, a.shape) for a in index] == [(s.dtype, s.shape) for s in plan.specs]


def test_a_billion_tokens_take_a_tenth_of_a_second() -> None:
    random = np.random.RandomState(0)
    cuts = np.sort(random.randint(0, 10**9, 10**6 - 1))
    lengths = np.diff(cuts, prepend=0, append=10**9).astype(np.int32)
    documents = random.permutation(10**6).astype(np.int32)
    seconds = []
    for _ in range(5):
        start = time.process_time()  # CPU time of this process, independent of the machine's load
        build_sample_index(lengths, documents, (10**9 - 1) // 1024, 1024)
        seconds.append(time.process_time() - start)
    assert min(seconds) <= 0.3  # twice what a core at half its speed takes; loops take seconds


@pytest.mark.parametrize(("part", "name", "num_samples"), [(0, "train", 640), (1, "valid", 240)])
def test_megatrons_arrays_to_the_byte(
    part: int, name: str, num_samples: int, golden: Path, tmp_path: Path
) -> None:
    text = (
        f"GPT Dataset\n\nData prefix data/gpt_text_document\nDataset name {name}\n"
        f"Number of samples {num_samples}\nSequence length 128\nRandom seed 1234\n"
        "Split 949,50,1\n"
    )
    # The paths in the recorded texts were shortened afterwards, so their md5 no longer matches the
    # name.
    recorded = {path.read_text(): path for path in (golden / "gpt_fp32/index-cache").glob("*.dsc")}
    stem = recorded[text].with_suffix("")
    lengths = IndexedDataset(golden / "data" / "gpt_text_document").sequence_lengths
    start, end = split_bounds("949,50,1", len(lengths))[part : part + 2]
    plan = plan_gpt_index(end - start, int(lengths[start:end].sum()), num_samples, 128)
    arrays = build_gpt_index(plan, lengths, start, 1234)
    for suffix, array in zip(("doc", "sample", "shuffle"), arrays, strict=True):
        np.save(tmp_path / "array.npy", array)
        assert (tmp_path / "array.npy").read_bytes() == Path(
            f"{stem}_{suffix}_idx.npy"
        ).read_bytes()
