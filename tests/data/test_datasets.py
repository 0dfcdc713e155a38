"""From flags to datasets: members, splits, mistakes, fingerprints."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from megatron.config.data import DataConfig
from megatron.data import gpt as gpt_module
from megatron.data.blend import BlendedDataset
from megatron.data.datasets import (
    DataRequest,
    DatasetPart,
    Datasets,
    build_datasets,
    corpus_fingerprint,
    parse_split,
    parse_weighted_paths,
    split_bounds,
)
from megatron.data.gpt import GPTDataset, build_gpt_datasets
from megatron.data.indexed import IndexedDataset
from megatron.data.mock import MockDataset
from megatron.errors import ConfigError, DataError
from megatron.parallel.layout import Layout
from tests.data.corpus import request_for, write_corpus
from tests.distributed import run_distributed


def build(config: DataConfig, **changes: object) -> Datasets:
    arguments: dict = {
        "seed": 1234,
        "seq_length": 16,
        "samples": (50, 20, 10),
        "vocab_size": 1000,
        **changes,
    }
    return build_gpt_datasets(request_for(config, arguments), **arguments)


def documents_of(dataset: object) -> set[int]:
    assert isinstance(dataset, GPTDataset)
    return set(dataset.index.documents.tolist())


@pytest.mark.parametrize("warmup", [False, True])
def test_a_dataset_that_is_not_there_is_named(tmp_path: Path, *, warmup: bool) -> None:
    write_corpus(tmp_path / "corpus")
    data = DataConfig(seq_length=16, data_path=(str(tmp_path / "corpse"),), mmap_warmup=warmup)
    with pytest.raises(DataError, match=r"corpse.idx.*corpus"):
        build(data)


def test_one_path_is_split(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "x")
    train, valid, test = build(DataConfig(seq_length=16, data_path=(str(prefix),), split="80,15,5"))
    assert documents_of(train) == set(range(80))
    assert documents_of(valid) == set(range(80, 95))
    assert documents_of(test) == set(range(95, 100))


def test_a_path_a_split(tmp_path: Path) -> None:
    a, b = (str(write_corpus(tmp_path / name)) for name in "ab")
    train, valid, test = build(
        DataConfig(seq_length=16, train_data_path=(a,), valid_data_path=(b,))
    )
    assert documents_of(train) == documents_of(valid) == set(range(100))
    assert isinstance(train, GPTDataset)
    assert isinstance(valid, GPTDataset)
    assert (train.data.prefix, valid.data.prefix, test) == (a, b, None)


def test_a_blend(tmp_path: Path) -> None:
    a, b = (str(write_corpus(tmp_path / name, seed=seed)) for seed, name in enumerate("ab"))
    train, valid, test = build(DataConfig(seq_length=16, data_path=("3", a, "1", b)))
    assert train is not None
    assert valid is not None
    assert len(train) == 38 + 13  # ceil(50 * 3/4 * 1.005) and ceil(50 * 1/4 * 1.005)
    single = build(DataConfig(seq_length=16, data_path=(a,)), samples=(38, 0, 0)).train
    assert single is not None
    assert train[0]["text"].tolist() == single[0]["text"].tolist()
    assert [train[i]["id"] for i in range(50)] == [*range(50)]


def test_a_blend_without_weights_has_the_samples_of_one_epoch(tmp_path: Path) -> None:
    """As in Megatron Core: datasets in proportion to their samples, each read once."""
    paths = tuple(
        str(write_corpus(tmp_path / name, documents=20 * (4 - seed), seed=seed))
        for seed, name in enumerate("abc")
    )
    config = DataConfig(seq_length=16, data_path=paths, split="1")
    tokens = [int(IndexedDataset(path).sequence_lengths.sum()) for path in paths]
    sizes = [(count - 1) // 16 for count in tokens]
    total = sum(sizes)
    shares = [size / total for size in sizes]
    train = build(config, samples=(total, 0, 0)).train
    assert isinstance(train, BlendedDataset)
    drawn = [0, 0, 0]
    for i in range(total):
        lag = [share * max(i, 1) - taken for share, taken in zip(shares, drawn, strict=True)]
        drawn[lag.index(max(lag))] += 1
        assert train.index.datasets[i] == lag.index(max(lag))
    assert drawn == [len(part) for part in train.datasets] == sizes  # type: ignore[arg-type]
    single = build(dataclasses.replace(config, data_path=paths[:1]), samples=(sizes[0], 0, 0))
    assert isinstance(single.train, GPTDataset)
    assert isinstance(train.datasets[0], GPTDataset)
    assert (train.datasets[0].index.shuffle == single.train.index.shuffle).all()
    longer = build(config, samples=(total + 1, 0, 0)).train
    assert isinstance(longer, BlendedDataset)
    assert len(longer) == total + 1
    assert sum(len(part) for part in longer.datasets) > total + 1  # type: ignore[arg-type]


def test_a_blend_member_without_documents_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = str(write_corpus(tmp_path / "a"))
    b = str(write_corpus(tmp_path / "b", documents=2, longest=90))
    config = DataConfig(seq_length=16, data_path=("3", a, "1", b), split="90,10")
    _, valid, test = build(config)
    assert f"no valid documents in {b}" in capsys.readouterr().err
    assert valid is not None
    assert len(valid) == 21  # all of the samples, not three quarters
    assert test is None


def test_no_samples_or_no_documents_give_no_dataset(tmp_path: Path) -> None:
    prefix = str(write_corpus(tmp_path / "x"))
    assert build(DataConfig(seq_length=16, data_path=(prefix,), split="1"))[1:] == (None, None)
    assert build(DataConfig(seq_length=16, data_path=(prefix,)), samples=(5, 0, 0))[1:] == (
        None,
        None,
    )
    with pytest.raises(DataError, match=r"50 training samples .*x: 100; --split '0,1'"):
        build(DataConfig(seq_length=16, data_path=(prefix,), split="0,1"))


def test_missing_validation_data_is_reported_if_the_split_asks_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = str(write_corpus(tmp_path / "x", documents=5))
    config = DataConfig(seq_length=16, data_path=(prefix,), split="969,30,1")
    assert build(config)[1:] == (None, None)
    said = capsys.readouterr().err
    assert said.startswith("WARNING: this run has no validation data: --split '969,30,1' leaves no")
    assert f"documents in {prefix}: 5; " in said
    assert said.count("\n") == 1  # none for the test data
    for silent in (
        dataclasses.replace(config, split="1"),
        dataclasses.replace(config, split="5,0,1"),
    ):
        assert build(silent).valid is None
    assert build(config, samples=(5, 0, 0)).valid is None
    assert not capsys.readouterr().err


def test_mock_data() -> None:
    train, valid, test = build(DataConfig(seq_length=16, mock_data=True), samples=(5, 3, 0))
    assert train is not None
    assert valid is not None
    assert (len(train), len(valid), test) == (5, 3, None)
    assert train[0]["text"].shape == (17,)
    assert train[0]["text"].tolist() == train[0]["text"].tolist()
    assert train[0]["text"].tolist() != train[1]["text"].tolist()
    assert train[0]["text"].tolist() != valid[0]["text"].tolist()
    other = build(DataConfig(seq_length=16, mock_data=True), seed=2).train
    assert other is not None
    assert train[0]["text"].tolist() != other[0]["text"].tolist()
    for i in range(5):
        assert len(set((np.diff(train[i]["text"]) % 256).tolist())) == 1  # can be learned
    small = build(DataConfig(seq_length=16, mock_data=True), vocab_size=10).train
    assert small is not None
    assert max(small[i]["text"].max() for i in range(20)) < 10


def test_no_data_is_refused() -> None:
    with pytest.raises(ConfigError, match="--mock-data"):
        build(DataConfig(seq_length=16))


def test_a_missing_path_is_named_with_its_neighbors(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus_text_document")
    with pytest.raises(DataError, match=r"corpus does not|corpus_text_document"):
        build(DataConfig(seq_length=16, data_path=(str(tmp_path / "corpus"),)))


def test_megatrons_cache_is_reproduced_to_the_byte(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The golden run's flags: 40 iterations of 16, evaluated three times for 5 iterations each."""
    monkeypatch.chdir(golden)  # names depend on how the path is spelled
    config = DataConfig(
        seq_length=16,
        data_path=("data/gpt_text_document",),
        split="949,50,1",
        data_cache_path=str(tmp_path),
    )
    _, _, test = build(config, seq_length=128, samples=(640, 240, 80), vocab_size=5000)
    assert test is None
    recorded = list((golden / "gpt_fp32" / "index-cache").glob("*.dsc"))
    assert len(recorded) == len(list(tmp_path.glob("*.dsc"))) == 2
    for description in recorded:
        # The paths in the recorded texts were shortened afterwards: their md5 is ours, but no
        # longer matches the recorded name.
        digest = hashlib.md5(description.read_bytes(), usedforsecurity=False).hexdigest()
        assert (tmp_path / f"{digest}.dsc").read_bytes() == description.read_bytes()
        for suffix in ("doc_idx", "sample_idx", "shuffle_idx"):
            want = description.with_name(f"{description.stem}_{suffix}.npy").read_bytes()
            assert (tmp_path / f"{digest}_{suffix}.npy").read_bytes() == want


def test_weighted_paths() -> None:
    assert parse_weighted_paths(["x"], "--data-path") == [(None, "x")]
    assert parse_weighted_paths(["x", "y"], "--data-path") == [(None, "x"), (None, "y")]
    assert parse_weighted_paths(["0.3", "x", "7", " y"], "--data-path") == [(0.3, "x"), (7.0, "y")]


@pytest.mark.parametrize(
    "paths",
    [["1", "x", "y", "z"], ["1", "x", "2"], ["0", "x", "1", "y"], ["-1", "x"], ["inf", "x"]],
)
def test_weights_are_checked(paths: list[str]) -> None:
    with pytest.raises(ConfigError, match="--valid-data-path: value"):
        parse_weighted_paths(paths, "--valid-data-path")


def _build_in_a_job(layout: Layout, config: DataConfig, node_local: bool) -> tuple[int, list]:
    """Return how many indices this rank built, and the first sample of each split."""
    built = 0
    plain = gpt_module.build_gpt_index

    def counted(*args: object) -> object:
        nonlocal built
        built += 1
        return plain(*args)  # type: ignore[arg-type]

    gpt_module.build_gpt_index = counted  # type: ignore[assignment]
    rank = dist.get_rank()
    if node_local:
        config = dataclasses.replace(config, data_cache_path=f"{config.data_cache_path}-{rank}")
    barrier: Callable[[], None] = dist.barrier
    datasets = build(config, is_builder=rank == 0, barrier=barrier)
    return built, [dataset[0]["text"].tolist() for dataset in datasets if dataset is not None]


@pytest.mark.parametrize("node_local", [False, True])
def test_one_rank_builds_unless_disks_are_local(tmp_path: Path, node_local: bool) -> None:
    prefix = str(write_corpus(tmp_path / "x"))
    config = DataConfig(
        seq_length=16, data_path=(prefix,), split="80,15,5", data_cache_path=str(tmp_path / "cache")
    )
    results = run_distributed(3, _build_in_a_job, config, node_local)
    assert [built for built, _ in results] == ([3, 3, 3] if node_local else [3, 0, 0])
    assert results[0][1] == results[1][1] == results[2][1]
    assert len(results[0][1]) == 3


@pytest.mark.parametrize(
    ("text", "documents", "bounds"),
    [
        ("969, 30, 1", 1000, (0, 969, 999, 1000)),
        ("949,50,1", 100, (0, 95, 100, 100)),
        ("90/5/5", 1000, (0, 900, 950, 1000)),
        ("969,30,1", 1500, (0, 1453, 1498, 1500)),
        ("1", 7, (0, 7, 7, 7)),
        ("0,1", 7, (0, 0, 7, 7)),
        ("1,1,1", 8, (0, 2, 5, 8)),  # rounds to 3, 6, 9: one too many, subtracted from each bound
        ("1,1", 5, (0, 3, 5, 5)),  # 2.5 rounds to even: 2, 4, 4, one too few
        ("0,1,1", 3, (0, 0, 1, 3)),  # 0, 0, 2, 4, one too many; the first cannot go below zero
        ("1,1,1", 0, (0, 0, 0, 0)),
    ],
)
def test_bounds(text: str, documents: int, bounds: tuple[int, ...]) -> None:
    assert split_bounds(text, documents) == bounds


@pytest.mark.parametrize(
    ("text", "documents", "bounds"),
    [
        ("969, 30, 1", 500, (0, 484, 500, 500)),  # 484.5, 499.5 and 500; sizes: 485, 500, 500
        ("969,30,1", 1500, (0, 1454, 1498, 1500)),
        ("1,1,1", 8, (0, 3, 5, 8)),
        ("1,1", 5, (0, 2, 5, 5)),
        ("0,1", 7, (0, 0, 7, 7)),
        ("1,1,1", 0, (0, 0, 0, 0)),
    ],
)
def test_bounds_as_megatron_core_rounds_them(
    text: str, documents: int, bounds: tuple[int, ...]
) -> None:
    assert split_bounds(text, documents, "bounds") == bounds


def test_the_rounding_is_chosen_by_a_flag(tmp_path: Path) -> None:
    prefix = str(write_corpus(tmp_path / "x", documents=5))
    config = DataConfig(seq_length=16, data_path=(prefix,), split="1,1")
    for rounding, documents in ((None, 3), ("sizes", 3), ("bounds", 2)):
        train = build(dataclasses.replace(config, split_rounding=rounding))[0]
        assert isinstance(train, GPTDataset)
        assert set(train.index.documents.tolist()) == set(range(documents))


def test_shares_add_up_to_one() -> None:
    assert parse_split("3,1") == (0.75, 0.25, 0.0)


@pytest.mark.parametrize("text", ["", "a,b", "0,0,0", "-1,2", "1,2,3,4", "nan", "inf,1"])
def test_mistakes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--split"):
        parse_split(text)


def _of(*prefixes: object) -> str | None:
    return corpus_fingerprint(DataConfig(seq_length=16, data_path=tuple(map(str, prefixes))))


def test_it_follows_content_and_order_not_names(tmp_path):
    one, other = (write_corpus(tmp_path / f"{seed}", seed=seed) for seed in (0, 1))
    fingerprint = _of(one)
    assert fingerprint not in (None, _of(other))
    for kind in ("bin", "idx"):
        shutil.copy(f"{one}.{kind}", tmp_path / f"copy.{kind}")
    assert _of(tmp_path / "copy") == fingerprint
    blended = _of(0.5, one, 0.5, other)
    assert blended not in (fingerprint, _of(0.5, other, 0.5, one))
    assert corpus_fingerprint(DataConfig(seq_length=16, train_data_path=(str(one),))) == fingerprint


@pytest.mark.parametrize("place", [0, 2000, -1])
def test_small_files_are_read_whole(tmp_path, place):
    prefix = write_corpus(tmp_path / "corpus")
    before, file = _of(prefix), tmp_path / "corpus.bin"
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)
    assert _of(prefix) != before


def test_a_mistake_names_the_flag_of_its_value() -> None:
    for name, flag in (("data_path", "--data-path"), ("train_data_path", "--train-data-path")):
        with pytest.raises(ConfigError, match=f"^{flag}: value 1, 'x', is not a positive weight"):
            corpus_fingerprint(DataConfig(seq_length=16, **{name: ("x", "0.5")}))  # type: ignore[arg-type]


def test_splits_that_are_missing_stay_so() -> None:
    wrapped = Datasets([1], None, [2, 3]).map(lambda split: [*split, 4])  # type: ignore[arg-type]
    assert wrapped == Datasets([1, 4], None, [2, 3, 4])  # type: ignore[arg-type]


def test_a_corpus_keeps_its_fingerprint(tmp_path):
    """The fingerprint is stored in checkpoints, so it must not change between versions."""
    for name, size in (("a.bin", 700_000), ("a.idx", 4097), ("b.bin", 10), ("b.idx", 0)):
        (tmp_path / name).write_bytes(bytes(i * i % 251 for i in range(size)))
    a, b = (tmp_path / name for name in "ab")
    found = _of(a, b)
    assert found == "cbc3e9627e729f45d069ceaabe9030ef"
    data = (tmp_path / "a.bin").read_bytes()
    last = 700_000 - 4096
    for place in (0, 4095, last // 63, last // 63 + 4095, last * 62 // 63, last, 699_999):
        (tmp_path / "a.bin").write_bytes(data[:place] + b"\xff" + data[place + 1 :])
        assert _of(a, b) != found, place
    (tmp_path / "a.bin").write_bytes(data[:4096] + b"\xff" + data[4097:])  # between two blocks
    assert _of(a, b) == found
    split = {"train_data_path": (str(a),), "valid_data_path": (str(b),)}
    assert corpus_fingerprint(DataConfig(seq_length=16, **split)) == _of(a)


def test_generated_tokens_have_none_and_a_missing_file_is_named(tmp_path):
    assert corpus_fingerprint(DataConfig(seq_length=16, mock_data=True)) is None
    with pytest.raises(DataError, match=r"absent\.idx: cannot be read: No such file"):
        _of(tmp_path / "absent")


def test_only_validation_on_everything_needs_the_number_of_its_samples(tmp_path: Path) -> None:
    prefix = str(write_corpus(tmp_path / "c", documents=20))
    config = DataConfig(data_path=(prefix,), seq_length=16, split="8,1,1")
    parts: list[DatasetPart] = []

    def build_part(part: DatasetPart) -> MockDataset:
        parts.append(part)
        return MockDataset(part.num_samples, 16, 100, 1, 0)

    with pytest.raises(ConfigError, match="--full-validation: the number of validation samples"):
        build_datasets(DataRequest(config, 1, (4, None, 2)), build_part)
    assert parts == []
    build_datasets(DataRequest(config, 1, (4, 3, 2)), build_part)
    assert [(part.split, part.num_samples) for part in parts] == [
        ("train", 4), ("valid", 3), ("test", 2)
    ]  # fmt: skip
