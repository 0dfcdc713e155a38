"""Blends: Megatron's vector, a plain loop, members' sample numbers, cache names."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from megatron.data import blend as blend_module
from megatron.data.blend import (
    BlendedDataset,
    BlendPhase,
    blend,
    build_blend_index,
    build_phases,
    normalize,
    parse_blend_schedule,
    samples_per_dataset,
)
from megatron.data.cache import IndexCache
from megatron.data.mock import MockDataset
from megatron.errors import ConfigError
from megatron.parallel.layout import Layout
from tests.data.corpus import write_corpus
from tests.training import toy


def loop(weights: np.ndarray, size: int) -> tuple[list[int], list[int]]:
    """Choose samples one after another."""
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


def test_weights_are_divided_by_their_sum_twice() -> None:
    """The last bit of each share is that of Megatron's two divisions."""
    assert [share.hex() for share in normalize([0.9, 0.6, 0.7, 0.1]).tolist()] == [
        "0x1.90b21642c8592p-2",
        "0x1.0b21642c8590bp-2",
        "0x1.37a6f4de9bd38p-2",
        "0x1.642c8590b2165p-5",
    ]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 40, 300])
@pytest.mark.parametrize("kind", ["random", "equal", "skewed"])
def test_equals_the_loop(count: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blend_module, "_BLOCK", 64)  # many blocks even for a small blend
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


def test_wrong_guesses_are_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    def bad_guess(weights: np.ndarray, totals: np.ndarray) -> np.ndarray:
        counts = np.zeros((len(totals), len(weights)))
        counts[:, 0] = totals
        return counts

    monkeypatch.setattr(blend_module, "_BLOCK", 16)
    monkeypatch.setattr(blend_module, "_nearest_counts", bad_guess)
    shares = normalize([0.5, 0.3, 0.2])
    assert build_blend_index(shares, 500).datasets.tolist() == loop(shares, 500)[0]


@pytest.mark.parametrize("num_samples", [1, 12, 1000])
def test_members_hold_what_the_run_takes(num_samples: int) -> None:
    for seed in range(20):
        weights = np.random.RandomState(seed).dirichlet(np.ones(9)).tolist()
        counts = samples_per_dataset([BlendPhase(0, tuple(weights))], num_samples)
        index = build_blend_index(normalize(weights), sum(counts))
        used = np.bincount(index.datasets[:num_samples], minlength=9)
        assert (used <= counts).all()


def test_each_dataset_has_its_share_and_half_a_percent() -> None:
    for phases, num_samples, expected in (
        ([BlendPhase(0, (1.0, 1.0))], 1000, [503, 503]),
        ([BlendPhase(0, (3.0, 1.0))], 4, [4, 2]),
        ([BlendPhase(0, (1.0, 99.0))], 10, [1, 10]),
        ([BlendPhase(0, (3.0, 1.0)), BlendPhase(10, (0.0, 2.0))], 30, [8, 23]),
        ([BlendPhase(0, (0.0, 1.0))], 5, [1, 6]),
    ):
        assert samples_per_dataset(phases, num_samples) == expected


def test_phases_are_blends_that_continue_in_each_dataset() -> None:
    phases = [BlendPhase(0, (3, 1, 0)), BlendPhase(40, (0, 1, 1)), BlendPhase(70, (1, 0, 0))]
    index = build_phases(phases, 100)
    found = [index.datasets[a:b].tolist() for a, b in ((0, 40), (40, 70), (70, 100))]
    first, second = (
        build_blend_index(normalize([3, 1]), 40),
        build_blend_index(normalize([1, 1]), 30),
    )
    assert found == [first.datasets.tolist(), (second.datasets + 1).tolist(), [0] * 30]
    for member in range(3):
        own = index.samples[index.datasets == member]
        assert own.tolist() == list(range(len(own)))
    assert samples_per_dataset(phases, 100) == [61, 26, 16]  # 60, 25 and 15, and half a percent
    assert build_phases(phases[:1], 50).datasets.tolist() == (
        build_blend_index(normalize([3, 1, 0]), 50).datasets.tolist()
    )


@pytest.mark.parametrize("count", [3, 300])
def test_phases_number_as_many_datasets_as_blends_do(count: int) -> None:
    phases = [BlendPhase(start, (1.0,) * count) for start in (0, count)]
    found, blended = build_phases(phases, 2 * count), build_blend_index([1 / count] * count, count)
    assert found.datasets.dtype == blended.datasets.dtype
    assert found.datasets.tolist() == 2 * blended.datasets.tolist()


@pytest.mark.parametrize(("count", "dtype"), [(254, np.uint8), (255, np.int16)])
def test_a_byte_holds_the_dataset_of_a_sample_for_up_to_254(count: int, dtype: type) -> None:
    """As in Megatron, although 255 would fit, too."""
    assert build_blend_index(normalize([1.0] * count), count).datasets.dtype == dtype
    phases = [BlendPhase(start, (1.0,) * count) for start in (0, 5)]
    assert build_phases(phases, 10).datasets.dtype == dtype
    members = [mock(1, 0)] * count
    blended = blend(members, [BlendPhase(0, (1.0,) * count)], count, IndexCache(()))
    assert blended.index.datasets.dtype == dtype


def test_many_phases_leave_no_dataset_short() -> None:
    random = np.random.RandomState(0)
    for _ in range(100):
        weights = [tuple(random.randint(1, 5, 3).tolist()) for _ in range(6)]
        phases = [BlendPhase(7 * i, shares) for i, shares in enumerate(weights)]
        counts = samples_per_dataset(phases, 45)
        used = np.bincount(build_phases(phases, sum(counts)).datasets[:45], minlength=3)
        assert (used <= counts).all()


def test_a_schedule_is_parsed_and_checked() -> None:
    words = ["0:1,0", "20:0.5,0.5"]
    assert parse_blend_schedule(words, 2, 8) == [
        BlendPhase(0, (1.0, 0.0)),
        BlendPhase(160, (0.5, 0.5)),
    ]
    for wrong in ("1:1,1", "0:1", "0:1,1,1", "0:-1,2", "0:0,0", "0:inf,1", "0:nan,1", "0", "x:1,1"):
        with pytest.raises(ConfigError, match=f"--blend-schedule: '{wrong}' is not a phase for 2"):
            parse_blend_schedule([wrong], 2, 8)
    with pytest.raises(ConfigError, match="'20:1,1' is not a phase"):
        parse_blend_schedule(["0:1,1", "20:2,1", "20:1,1"], 2, 8)


def sources(layout: Layout, words: list[str]) -> list[int]:
    """Return the dataset that each training sample comes from."""
    train = toy.build_toy(layout, words).datasets[0]
    assert isinstance(train, BlendedDataset)
    return train.index.datasets.tolist()


def test_flags_change_a_blend_during_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy, "TOY", [word for word in toy.TOY if word != "--mock-data"])
    prefixes = [
        str(write_corpus(tmp_path / f"c{i}", documents=100 + 200 * i, vocab_size=100, seed=i))
        for i in range(2)
    ]
    words = ["--data-path", *prefixes, "--split", "1,0,0", "--eval-iters", "0"]
    by_size = sources(Layout.single(), words)
    assert 0.18 < by_size.count(0) / len(by_size) < 0.32
    words += ["--blend-schedule", "0:1,0", "4:0,1"]
    assert sources(Layout.single(), words)[:24] == [0] * 16 + [1] * 8  # 6 iterations of 4 samples
    by_samples = [*words[:-3], "--blend-schedule", "0:1,0", "4:0,1", "--train-samples", "24"]
    assert sources(Layout.single(), by_samples)[:24] == [0] * 4 + [1] * 20
    with pytest.raises(ConfigError, match="--blend-schedule: '0:1' is not a phase for 2 datasets"):
        sources(Layout.single(), [*words[:-3], "--blend-schedule", "0:1"])


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
    phases = [BlendPhase(0, (2, 1))]
    blend(members, phases, 6, IndexCache(()))
    assert list(tmp_path.iterdir()) == []
    blended = blend(members, phases, 6, IndexCache((tmp_path,)))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"{digest}.dsc",
        f"{digest}.sha256",
        f"{digest}_index.npy",
        f"{digest}_sample_index.npy",
    ]
    assert (tmp_path / f"{digest}.dsc").read_text() == text
    assert blended.index.datasets.tolist() == [0, 1, 0, 0, 1, 0]
