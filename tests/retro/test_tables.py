"""Tables of neighbors, queries and batches of texts, in small cases computed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megatron.config.data import DataConfig, TokenizerConfig
from megatron.data.datasets import DataRequest
from megatron.device import Device
from megatron.errors import ConfigError, DataError
from megatron.retro import blocks, neighbors
from megatron.retro.blocks import evenly_spaced, on_first, plan_blocks, write_block
from megatron.retro.dataset import NeighborArray, NeighborTable, NeighborTexts, RetroDataset
from megatron.retro.embedding import Embedder, _mean
from megatron.retro.estimate import _time
from megatron.retro.neighbors import QueryOptions, Searcher, query_chunks
from megatron.tokenizer.build import NullTokenizer
from tests.retro.corpus import VOCAB, write_dataset

_EOD = 99


@pytest.mark.parametrize(
    ("count", "limit", "ranges"),
    [
        (10, 100, [(0, 4), (4, 8), (8, 10)]),
        (12, 12, [(0, 4), (4, 8), (8, 12)]),
        (13, 12, [(0, 4), (8, 12)]),
        (25, 12, [(0, 4), (12, 16), (24, 25)]),
        (0, 5, []),
    ],
)
def test_rows_that_are_checked_are_evenly_spaced(
    count: int, limit: int, ranges: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "_RUN", 4)
    assert [(one.start, one.stop) for one in evenly_spaced(count, limit)] == ranges


def test_the_only_process_does_the_work_itself() -> None:
    done: list[int] = []
    on_first(lambda: done.append(1), SimpleNamespace(size=1, is_first=True))  # type: ignore[arg-type]
    assert done == [1]


class _Chunks:
    """A database of chunks of two tokens: chunk i holds 2 i and 2 i + 1."""

    path, eod = Path("db"), _EOD

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def tokens(self, chunk_ids: Any) -> NDArray[np.int64]:
        return 2 * np.asarray(chunk_ids)[:, None] + np.arange(2)


def _texts(count: int = 5, **changes: Any) -> NeighborTexts:
    return NeighborTexts(_Chunks(count), 2, **changes)  # type: ignore[arg-type]


def test_a_neighbor_is_a_chunk_and_the_next_one() -> None:
    """The first chunk follows the last one. Megatron-LM reads a missing neighbor in this way."""
    rows = np.array([[1, 4], [-1, 0]])
    wrapped = [8, 9, 0, 1]
    assert _texts().tokens(rows).tolist() == [
        [[2, 3, 4, 5], wrapped],
        [[_EOD] * 4, [0, 1, 2, 3]],
    ]
    assert _texts(compatible=True).tokens(rows)[1, 0].tolist() == wrapped


@pytest.mark.parametrize("rows", [[-2, 0], [0, 5]])
def test_a_neighbor_outside_of_the_database_is_refused(rows: list[int]) -> None:
    _texts().check(np.array([-1, 4]))
    _texts().check(np.zeros((0, 2), np.int64))
    with pytest.raises(DataError, match=f"file: the neighbors are chunks {min(rows)} to"):
        _texts().check(np.array(rows), "file: ")


@pytest.fixture
def table_blocks(tmp_path: Path) -> list[blocks.TableBlock]:
    """Return blocks of 4, 4 and 2 rows with 3 neighbors each."""
    planned = plan_blocks(tmp_path, 10, 4)
    rows = np.arange(30).reshape(10, 3) % 5
    for block in planned:
        write_block(block, {"neighbors": rows[block.start : block.stop]})
    return planned


@pytest.mark.parametrize(("start", "stop"), [(0, 10), (0, 4), (3, 5), (4, 8), (2, 9), (8, 10)])
def test_neighbors_are_read_across_blocks(
    table_blocks: list[blocks.TableBlock], start: int, stop: int
) -> None:
    table = NeighborTable(table_blocks, 2)
    assert len(table) == 10
    expected = (np.arange(30).reshape(10, 3) % 5)[start:stop, :2]
    assert table.rows(start, stop).tolist() == expected.tolist()


def test_neighbors_are_checked_when_a_table_is_opened(
    table_blocks: list[blocks.TableBlock],
) -> None:
    NeighborTable(table_blocks, 3).check(_texts(5))
    with pytest.raises(DataError, match=r"00-04\.hdf5: the neighbors are chunks 0 to 4"):
        NeighborTable(table_blocks, 3).check(_texts(4))
    with pytest.raises(DataError, match="has 3 neighbors per chunk, but --retro-num-neighbors 4"):
        NeighborTable(table_blocks, 4)


def test_a_sample_has_the_neighbors_of_its_chunks() -> None:
    samples = [{"text": np.arange(4)}, {"text": np.arange(10, 14)}]
    table = NeighborArray(np.array([[0], [1], [2], [3]]))
    dataset = RetroDataset(samples, table, _texts(), 2)  # type: ignore[arg-type]
    assert len(dataset) == 2
    sample = dataset[1]
    assert sample["text"].tolist() == [10, 11, 12, 13]
    assert sample["neighbors"].tolist() == [[[4, 5, 6, 7]], [[6, 7, 8, 9]]]


class _Origins:
    """A database whose chunk i is of dataset i // 10 and document i % 10."""

    def __init__(self, count: int = 20) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def documents(self, chunk_ids: Any) -> NDArray[np.int64]:
        assert (np.asarray(chunk_ids) < self._count).all()
        return np.stack([np.asarray(chunk_ids) // 10, np.asarray(chunk_ids) % 10], 1)


class _Queries:
    """Samples of two chunks: sample s has documents s and s + 1 of dataset 1."""

    chunks_per_sample = 2

    def documents(self, sample: int) -> tuple[int, NDArray[np.int64]]:
        return 1, np.array([sample, sample + 1])


def _searcher(found: NDArray[np.int64] | None = None, **options: Any) -> Searcher:
    index = SimpleNamespace(search=lambda vectors, k: (None, found[vectors[:, 0].astype(int), :k]))
    return Searcher(index, _Origins(), QueryOptions(**options), threads=1)  # type: ignore[arg-type]


_CANDIDATES = np.array(
    [
        [10, 0, 11, 12],  # chunk 0 of sample 0: documents 0 and 1 of dataset 1 are its own
        [1, 2, 3, 4],
        [11, 12, 10, 13],  # chunk 2 of sample 1
        [12, 11, -1, -1],
    ]
)
_KEPT = [[0, 12, -1], [1, 2, 3], [10, 13, -1], [-1, -1, -1]]


def test_chunks_of_the_sample_s_own_documents_are_no_neighbors() -> None:
    searcher, queries = _searcher(saved=3), _Queries()
    assert searcher.filtered(_CANDIDATES, queries, 0).tolist() == _KEPT  # type: ignore[arg-type]
    later = searcher.filtered(_CANDIDATES[2:], queries, 2)  # type: ignore[arg-type]
    assert later.tolist() == _KEPT[2:]
    single = Searcher(None, _Origins(1), QueryOptions(saved=1))  # type: ignore[arg-type]
    found = np.array([[0, -1], [-1, -1]])
    assert single.filtered(found, queries, 0).tolist() == [[0], [-1]]  # type: ignore[arg-type]


@pytest.mark.parametrize("at_once", [1, 2, 3, 4, 5])
def test_searches_of_any_size_find_the_same(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbors, "_SEARCHED_AT_ONCE", at_once)
    searcher = _searcher(_CANDIDATES, queried=4, saved=3)
    vectors = np.arange(4, dtype=np.float32)[:, None]
    assert searcher.neighbors(vectors, _Queries(), 0).tolist() == _KEPT  # type: ignore[arg-type]


@pytest.mark.parametrize(("largest", "fits"), [(19, True), (20, False)])
def test_an_index_of_other_data_is_refused(largest: int, fits: bool) -> None:
    searcher = _searcher(np.array([[3, largest]]), queried=2)
    vectors = np.zeros((1, 1), np.float32)
    if fits:
        assert searcher.search(vectors).tolist() == [[3, 19]]
    else:
        with pytest.raises(DataError, match="chunk 20, but the database has only 20 chunks"):
            searcher.search(vectors)


def test_chunks_of_samples_and_their_documents(tmp_path: Path) -> None:
    """Document i consists of the token i, so a sample shows its documents."""
    prefixes = []
    for name, first in (("a", 0), ("b", 40)):
        documents = [[first + i] * (5 + i % 3) + [VOCAB] for i in range(30)]
        prefixes.append(write_dataset(tmp_path / name, documents))
    config = DataConfig(
        data_path=("0.5", prefixes[0], "0.5", prefixes[1]), split="90,10,0", seq_length=12
    )
    tokenizer = NullTokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCAB))
    request = DataRequest(config, 1234, (20, 0, 0))
    with pytest.raises(ConfigError, match="12 is not a multiple of --retro-gpt-chunk-length 5"):
        query_chunks(request, seq_length=12, chunk_length=5, tokenizer=tokenizer)
    splits = query_chunks(request, seq_length=12, chunk_length=4, tokenizer=tokenizer)
    chunks = splits["train"]
    assert chunks.chunks_per_sample == 3
    assert len(chunks) == 3 * len(chunks.dataset)
    for sample in range(20):
        text = chunks.dataset[sample]["text"]
        assert len(text) == 13  # the last one is only a label
        rows = chunks.tokens(np.arange(3 * sample, 3 * sample + 3))
        assert rows.ravel().tolist() == text[:12].tolist()
        corpus, documents = chunks.documents(sample)
        shown = sorted({token % 40 for token in text.tolist() if token != VOCAB})
        assert corpus == text.min() // 40
        assert set(shown) <= set(documents.tolist())
        assert len(documents) <= len(shown) + 1  # a document may end where the sample begins
    last = chunks.tokens(np.array([len(chunks) - 1]))
    assert last.tolist() == [chunks.dataset[len(chunks.dataset) - 1]["text"][8:12].tolist()]
    across = chunks.tokens(np.arange(2, 7))
    texts = [chunks.dataset[sample]["text"][:12] for sample in range(3)]
    assert across.ravel().tolist() == np.concatenate(texts)[8:28].tolist()
    assert chunks.texts(0, 1)[0] == " ".join(
        str(token) for token in texts[0][:4].tolist() if token != VOCAB
    )


@pytest.mark.parametrize(("compatible", "number"), [(True, 0), (False, 1)])
def test_a_corpus_has_its_number_in_the_database(
    tmp_path: Path, compatible: bool, number: int
) -> None:
    """The first corpus has no validation documents. Megatron-LM does not count it then."""
    prefixes = [
        write_dataset(tmp_path / "a", [[1] * 30 + [VOCAB]]),
        write_dataset(tmp_path / "b", [[2] * 30 + [VOCAB]] * 30),
    ]
    words = ("0.5", prefixes[0], "0.5", prefixes[1])
    config = DataConfig(data_path=words, split="90,10,0", seq_length=12)
    tokenizer = NullTokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCAB))
    splits = query_chunks(
        DataRequest(config, 1234, (4, 4, 0)),
        seq_length=12,
        chunk_length=4,
        tokenizer=tokenizer,
        compatible=compatible,
    )
    assert set(splits) == {"train", "valid"}
    assert splits["valid"].documents(0)[0] == number


class _Counting(Embedder):
    """A text's number of tokens is its own number; its vector is that and the sum of its tokens."""

    width, max_length, _pad_id = 2, 8, 0

    def __init__(self, batch_size: int) -> None:
        super().__init__(Device.cpu(), batch_size)
        self.shapes: list[tuple[int, ...]] = []

    def _tokenize(self, texts: Sequence[str], first: int) -> list[NDArray[np.int64]]:
        return [np.full(int(text), first + i + 1) for i, text in enumerate(texts)]

    def _vectors(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        self.shapes.append(tuple(tokens.shape))
        return torch.stack([lengths, tokens.sum(1)], 1).float()


@pytest.mark.parametrize(
    ("lengths", "shapes"),
    [
        ([4, 4, 4, 4], [(4, 4)]),  # 16 tokens, as many as 2 texts of 8
        ([4, 4, 4, 5], [(3, 4), (1, 5)]),
        ([8, 1, 8, 1, 8], [(2, 1), (2, 8), (1, 8)]),
        ([1] * 17, [(16, 1), (1, 1)]),
        ([], []),
    ],
)
def test_batches_have_as_many_tokens_as_their_longest_texts_allow(
    lengths: list[int], shapes: list[tuple[int, int]]
) -> None:
    embedder = _Counting(2)
    vectors = embedder.embed([str(length) for length in lengths])
    expected = [[length, length * (1 + i)] for i, length in enumerate(lengths)]
    assert vectors.tolist() == expected
    assert embedder.shapes == shapes


def test_a_mean_is_over_the_tokens_that_count() -> None:
    hidden = torch.tensor([[[1.0, 2.0]], [[3.0, 6.0]], [[float("nan")] * 2]])
    counts = torch.tensor([[True, True, False]])
    assert _mean(hidden, counts).tolist() == [[2.0, 4.0]]
    assert _mean(hidden, torch.zeros(1, 3, dtype=torch.bool)).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "1 s"),
        (119.4, "119 s"),
        (120, "2.0 minutes"),
        (7199, "120.0 minutes"),
        (7200, "2.0 hours"),
        (172_799, "48.0 hours"),
        (172_800, "2.0 days"),
    ],
)
def test_times_are_readable(seconds: float, text: str) -> None:
    assert _time(seconds) == text
