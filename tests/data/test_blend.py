"""Blends: Megatron's vector, a plain loop, members' numbers, cache names."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from megatron.data import datasets as datasets_module
from megatron.data.cache import IndexCache
from megatron.data.datasets import (
    BlendedDataset,
    blend,
    build_blend_index,
    normalize,
    samples_of_each,
)
from megatron.data.mock import MockDataset


def loop(weights: np.ndarray, size: int) -> tuple[list[int], list[int]]:
    """One sample after the other."""
    taken = [0] * len(weights)
    datasets, samples = [], []
    for i in range(size):
        lags = [weight * max(i, 1) - count for weight, count in zip(weights, taken, strict=True)]
        choice = lags.index(max(lags))
        datasets.append(choice)
        samples.append(taken[choice])
        taken[choice] += 1
    return datasets, samples


def test_vector() -> None:
    index = build_blend_index(normalize([0.5, 0.3, 0.2]), 12)
    assert index.datasets.tolist() == [0, 1, 2, 0, 1, 0, 2, 0, 1, 0, 0, 1]
    assert index.datasets.dtype == np.uint8
    assert index.samples.dtype == np.int64


@pytest.mark.parametrize("count", [1, 2, 3, 7, 40, 300])
@pytest.mark.parametrize("kind", ["random", "equal", "skewed"])
def test_equals_the_loop(count: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets_module, "_BLEND_BLOCK", 64)  # many blocks also for a small blend
    random = np.random.RandomState(count)
    weights = {
        "random": random.rand(count) + 1e-3,
        "equal": np.ones(count),
        "skewed": random.dirichlet(np.full(count, 0.1)) + 1e-12,
    }[kind]
    shares = normalize(weights.tolist())
    size = 1500
    index = build_blend_index(shares, size)
    datasets, samples = loop(shares, size)
    assert index.datasets.tolist() == datasets
    assert index.samples.tolist() == samples
    assert index.datasets.dtype == (np.uint8 if count < 255 else np.int16)


def test_wrong_guesses_are_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    def bad_guess(weights: np.ndarray, totals: np.ndarray) -> np.ndarray:
        counts = np.zeros((len(totals), len(weights)))
        counts[:, 0] = totals
        return counts

    monkeypatch.setattr(datasets_module, "_BLEND_BLOCK", 16)
    monkeypatch.setattr(datasets_module, "_nearest_counts", bad_guess)
    shares = normalize([0.5, 0.3, 0.2])
    assert build_blend_index(shares, 500).datasets.tolist() == loop(shares, 500)[0]


@pytest.mark.parametrize("num_samples", [1, 12, 1000])
def test_members_hold_what_the_run_takes(num_samples: int) -> None:
    for seed in range(20):
        weights = np.random.RandomState(seed).dirichlet(np.ones(9)).tolist()
        counts = samples_of_each(weights, num_samples)
        index = build_blend_index(normalize(weights), sum(counts))
        used = np.bincount(index.datasets[:num_samples], minlength=9)
        assert (used <= counts).all()


def mock(samples: int, split: int) -> MockDataset:
    return MockDataset(samples, seq_length=8, vocab_size=100, seed=1, split=split)


def test_samples_come_from_the_members() -> None:
    members = [mock(4, 0), mock(2, 1)]
    blended = BlendedDataset(members, build_blend_index(normalize([2, 1]), 7))
    assert len(blended) == 7
    seen = [0, 0]
    for i, which in enumerate([0, 1, 0, 0, 1, 0, 0]):
        sample = blended[i]
        want = members[which][seen[which] % len(members[which])]
        assert (sample["text"] == want["text"]).all()
        assert sample["id"] == i
        seen[which] += 1


def test_cache_only_where_asked_for(tmp_path: Path) -> None:
    members = [mock(4, 0), mock(2, 1)]
    members[0].description, members[1].description = "first\n", "second\n"
    text = (
        "Blendable dataset\n\nDatasets:\nfirst\n\n\nsecond\n\n\n"
        "Weights: [0.66666667 0.33333333]\nSize: 6\n"
    )
    digest = hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()
    blend(members, [2, 1], 6, IndexCache(()))
    assert list(tmp_path.iterdir()) == []
    blended = blend(members, [2, 1], 6, IndexCache((tmp_path,)))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"{digest}.dsc",
        f"{digest}.sha256",
        f"{digest}_index.npy",
        f"{digest}_sample_index.npy",
    ]
    assert (tmp_path / f"{digest}.dsc").read_text() == text
    assert blended.index.datasets.tolist() == [0, 1, 0, 0, 1, 0]
