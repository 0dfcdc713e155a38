"""What preprocessing will take: disk space and time, with a clock that stands still or ticks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron.config.retro_preprocessing import RetroPreprocessing
from megatron.data.indexed import IndexedDataset
from megatron.retro import estimate
from megatron.retro.estimate import Amount, describe_work, plan_amounts
from tests.retro.corpus import cutter, options, write_dataset


@pytest.fixture(name="datasets")
def write_datasets(tmp_path: Path) -> list[IndexedDataset]:
    """Write datasets of 3 and 4 documents; the second has more tokens, and 5 full chunks of 8."""
    one = write_dataset(tmp_path / "one", [range(1, 17), range(1, 9), range(1, 4)])
    two = write_dataset(tmp_path / "two", [range(1, 3), range(1, 3), range(1, 42), range(1, 3)])
    return [IndexedDataset(one), IndexedDataset(two)]


def _asked(workdir: Path, tasks: str = "build", **index: Any) -> RetroPreprocessing:
    asked = options(workdir, "unused", ntrain=3)
    index = {"retro_index_nfeats": 4, "retro_index_str": "Flat", **index}
    return replace(
        asked,
        index=replace(asked.index, **index),
        stages=replace(asked.stages, retro_tasks=tasks),
        embedding=replace(asked.embedding, retro_bert_batch_size=2),
    )


def test_vectors_and_codes_that_are_kept_count_as_size(
    tmp_path: Path, datasets: list[IndexedDataset]
) -> None:
    chunks, documents = 13, 7
    kept = {
        "retro_index_delete_training_embeddings": False,
        "retro_index_delete_added_codes": False,
        "retro_query_num_neighbors_save": 6,
    }
    assert plan_amounts(_asked(tmp_path, **kept), datasets, 5) == {
        "db-build": Amount(chunks, 36 * chunks + 40 * documents + 20 * 3),
        "index-train": Amount(3, 2 * 3 * 16),
        "index-add": Amount(chunks, 16 * chunks + 8 * chunks + 16 * chunks),
        "query-pretraining-neighbors": Amount(5, 5 * 6 * 8),
    }
    # Without a description of the index, or with an invalid one, codes count as 0 or as vectors.
    for factory, code in ((None, 0), ("nonsense", 16)):
        amounts = plan_amounts(_asked(tmp_path, retro_index_str=factory), datasets, 5)
        assert amounts["index-add"] == Amount(chunks, (code + 8) * chunks, code * chunks)


class _Embedder:
    def __init__(self) -> None:
        self.texts: list[int] = []

    def embed(self, texts: Any) -> np.ndarray:
        self.texts.append(len(texts))
        return np.zeros((len(texts), 4), np.float32)


def test_the_panel_of_a_whole_run(
    tmp_path: Path,
    datasets: list[IndexedDataset],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seconds = iter(np.arange(0, 100, 0.5).tolist())
    monkeypatch.setattr(estimate.time, "perf_counter", lambda: next(seconds))
    monkeypatch.setattr(estimate, "_MEASURED_BATCHES", 2)
    free = [10**9]
    seen: list[Path] = []

    def usage(path: Path) -> SimpleNamespace:
        seen.append(path)
        return SimpleNamespace(free=free[0])

    monkeypatch.setattr(estimate.shutil, "disk_usage", usage)
    embedder = _Embedder()

    def described(asked: RetroPreprocessing, queries: dict[str, int]) -> list[tuple[str, str]]:
        return list(
            describe_work(
                asked, datasets, queries, cutter=cutter(), embedder=lambda: embedder, processes=2
            )
        )

    new = tmp_path / "new" / "folder"  # a folder that does not exist yet
    saved = {"retro_query_num_neighbors_save": 10**4}
    # In half a second, a process cuts the 7 chunks from the middle of the larger dataset onward,
    # and embeds 4 chunks after a first batch.
    assert described(_asked(new, **saved), {"train": 30, "valid": 1200}) == [
        ("data", "7 documents, 74 tokens"),
        ("chunks", "at most 13"),
        ("chunks of samples", "30 train, 1,200 valid"),
        ("disk", "98.4 MB, temporarily 98.4 MB; 1.0 GB free"),
        ("db-build", "about 1 s for 13 chunks, at 28 chunks/s"),
        ("embedding", "about 78 s for 1,246 chunks, at 16 chunks/s"),
    ]
    assert seen == [tmp_path]
    assert embedder.texts == [2, 4]
    assert capsys.readouterr().err == ""
    assert described(_asked(tmp_path, "db-build"), {})[2:] == [
        ("disk", "0.0 MB, temporarily 0.0 MB; 1.0 GB free"),
        ("db-build", "about 1 s for 13 chunks, at 28 chunks/s"),
    ]
    size = 36 * 13 + 40 * 7 + 20 * 3
    for free[0], warns in ((size, False), (size - 1, True)):
        described(_asked(tmp_path, "db-build"), {})
        assert ("the stages need up to 0.0 MB, but 0.0 MB are free" in capsys.readouterr().err) == (
            warns
        )
    # The peak is the size of all stages, and the temporary files of the one with the most.
    size = 24 * 13 + max(2 * 3 * 16, 16 * 13)
    for free[0], warns in ((size, False), (size - 1, True)):
        described(_asked(tmp_path, "index-train,index-add"), {})
        assert bool(capsys.readouterr().err) == warns
