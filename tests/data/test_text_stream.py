"""Training directly from text: each sample depends only on seed, text and sample number."""

from __future__ import annotations

import bz2
import gzip
import itertools
import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from megatron.checkpoint.loading import open_root
from megatron.config.data import DataConfig, TokenizerConfig
from megatron.data import text_stream
from megatron.data.blend import BlendedDataset, build_blend_index, normalize
from megatron.data.datasets import DataRequest
from megatron.data.gpt import build_gpt_datasets
from megatron.data.indexed import IndexedDataset
from megatron.data.loader import SingleSampler, build_loader
from megatron.data.mock import MockDataset
from megatron.data.preprocess import BlockEncoder, EncodingOptions, preprocess
from megatron.data.sample import ROW_POSITION
from megatron.data.text_input import read_blocks
from megatron.data.text_stream import (
    RowPosition,
    TextCorpus,
    TextDataset,
    extract_positions,
    is_text,
    positions_state,
    restore_positions,
    text_members,
)
from megatron.errors import ConfigError, DataError
from megatron.parallel.layout import Layout
from megatron.tokenizer import build_tokenizer
from tests.data.corpus import VOCABULARY, write_vocabulary
from tests.distributed import run_distributed
from tests.files import parquet_table
from tests.training import toy

SEQUENCE = 16


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_vocabulary(tmp_path_factory.mktemp("vocabulary") / "vocab.txt"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write documents of 0 to 30 words, each with a different beginning."""
    random = np.random.RandomState(0)
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    with path.open("w") as file:
        for number in range(600):
            words = [number // 100, number // 10 % 10, number % 10]
            words += random.randint(10, 200, random.randint(0, 28)).tolist() if number % 50 else []
            text = " ".join(f"w{word}" for word in words) if number % 75 else ""
            file.write(json.dumps({"text": text, "n": number}) + "\n" * (1 + number % 2))
    return path


def encoder_of(vocabulary: str) -> BlockEncoder:
    options = TokenizerConfig(tokenizer_type="BertWordPieceLowerCase", vocab_file=vocabulary)
    return BlockEncoder(EncodingOptions(options, append_eod=True))


def dataset_of(name: Path | str, vocabulary: str, **changed) -> TextDataset:
    text = TextCorpus(str(name), "text")
    pieces = changed.pop("pieces", (0, len(text)))
    return TextDataset(text, pieces, 10_000, SEQUENCE, 7, encoder_of(vocabulary), **changed)


def tokens_of(dataset: TextDataset, stream: int, rows: int) -> list[int]:
    """Return the tokens of a stream's first rows, concatenated."""
    samples = [dataset[row * dataset.streams + stream]["text"] for row in range(rows)]
    for one, other in itertools.pairwise(samples):
        assert one[-1] == other[0]
    assert all(len(text) == SEQUENCE + 1 for text in samples)
    return np.concatenate([text[:-1] for text in samples]).tolist()


def test_an_epoch_has_the_documents_of_a_preprocessed_dataset(corpus, vocabulary, tmp_path):
    encoder = encoder_of(vocabulary)
    prefix = tmp_path / "corpus"
    blocks: list = []
    preprocess(
        [str(corpus)],
        [str(prefix)],
        encoder,
        workers=0,
        on_block=lambda *block: blocks.append(block),
        on_bad_line=None,
    )
    data = IndexedDataset(str(prefix))
    expected = sorted(data.get(i).tolist() for i in range(len(data)) if len(data.get(i)))
    dataset = dataset_of(corpus, vocabulary)
    assert dataset.streams == 32
    found = []
    for stream in range(dataset.streams):
        pieces = range(stream, len(dataset.corpus), dataset.streams)
        count = sum(
            len(encoded.columns[0].tokens)
            for turn in pieces
            for encoded in dataset.corpus.read(int(dataset._order(0)[turn]), encoder, first=0)
        )
        tokens = tokens_of(dataset, stream, count // SEQUENCE + 1)[:count]
        end = encoder.tokenizer.eod
        found += [
            [*document, end]
            for is_end, document in ((k, list(g)) for k, g in itertools.groupby(tokens, end.__eq__))
            if not is_end
        ]
    assert sorted(found) == expected
    assert found != expected


def test_the_sizes_of_pieces(corpus, vocabulary, tmp_path):
    lines = corpus.read_bytes()
    (tmp_path / "a.txt").write_bytes(b"w1" * 40)
    (tmp_path / "b.jsonl").write_bytes(lines)
    (tmp_path / "c.jsonl").write_bytes(b'{"text": "w1"}\n')
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(lines))
    text = TextCorpus(str(tmp_path), "text")
    sizes = text.piece_sizes().tolist()
    assert (sizes[0], sizes[-2]) == (80, 15)
    assert sizes[-1] == (tmp_path / "d.jsonl.gz").stat().st_size
    assert set(sizes[1:-3]) == {text.piece_bytes}
    assert sum(sizes[1:-2]) == len(lines)


def test_a_large_file_among_small_pieces_is_reported(corpus, vocabulary, tmp_path, capsys):
    even = dataset_of(corpus, vocabulary)
    sizes = np.array([even.corpus.piece_sizes()[p] for p in even._order(0)])
    totals = [sizes[stream :: even.streams].sum() for stream in range(even.streams)]
    assert even.imbalance == pytest.approx(max(totals) / np.mean(totals))
    for number in range(3):
        path = tmp_path / f"part{number}.jsonl.gz"
        path.write_bytes(gzip.compress(corpus.read_bytes(), 0))
    flags = TokenizerConfig(tokenizer_type="BertWordPieceLowerCase", vocab_file=vocabulary)
    tokenizer = (flags, encoder_of(vocabulary).tokenizer)

    def warnings_of(path: Path) -> str:
        data = DataConfig(data_path=(str(path),), split="100,0,0", seq_length=SEQUENCE)
        request = DataRequest(data, 7, (100, 0, 0))
        build_gpt_datasets(request, seq_length=SEQUENCE, vocab_size=300, tokenizer=tokenizer)
        return capsys.readouterr().err

    assert warnings_of(tmp_path) == warnings_of(corpus) == ""
    shutil.copy(corpus, tmp_path / "plain.jsonl")
    assert re.search(r"read up to about \d+ times before the largest", warnings_of(tmp_path))


def test_a_sample_does_not_depend_on_those_before(corpus, vocabulary):
    dataset = dataset_of(corpus, vocabulary)
    ascending = [dataset[i]["text"].tolist() for i in range(400)]
    assert len({tuple(text) for text in ascending}) == 400
    for i in (399, 7, 8, 300, 299, 0):
        assert dataset_of(corpus, vocabulary)[i]["text"].tolist() == ascending[i]
        assert dataset[i]["text"].tolist() == ascending[i]
    other = dataset_of(corpus, vocabulary)
    other.seed = 8
    assert other[0]["text"].tolist() != ascending[0]


@pytest.mark.parametrize(("processes", "workers"), [(1, 2), (2, 0), (3, 2)])
def test_every_number_of_processes_reads_the_same(corpus, vocabulary, processes, workers):
    expected = [dataset_of(corpus, vocabulary)[i]["text"].tolist() for i in range(24)]
    found = {}
    for rank in range(processes):
        dataset = dataset_of(corpus, vocabulary)
        sampler = SingleSampler(len(dataset), 0, 2, rank, processes)
        for batch in itertools.islice(
            build_loader(dataset, sampler, num_workers=workers, seed=0), 12 // processes
        ):
            assert batch[ROW_POSITION].shape == (2, 7)
            found |= dict(zip(batch["id"].tolist(), batch["text"].tolist(), strict=True))
    assert [found[i] for i in range(24)] == expected


def test_a_run_continues_where_it_stopped_without_reading_again(corpus, vocabulary, monkeypatch):
    dataset = dataset_of(corpus, vocabulary)
    sampler = SingleSampler(len(dataset), 0, 4)
    batches = build_loader(dataset, sampler, num_workers=0, seed=0)
    samples = []
    for _ in range(800):
        samples += extract_positions(next(batches), dataset)["text"].tolist()
    world = Layout.single().world
    saved = positions_state(dataset, 3133, world)  # in the middle of what was loaded
    again = dataset_of(corpus, vocabulary)
    assert restore_positions(again, json.loads(json.dumps(saved)))
    read: list[int] = []
    original = TextCorpus.read

    def counted(self, piece, *arguments, **options):
        read.append(piece)
        return original(self, piece, *arguments, **options)

    monkeypatch.setattr(TextCorpus, "read", counted)
    assert [again[i]["text"].tolist() for i in range(3133, 3200)] == samples[3133:]
    few = len(read)
    fresh = dataset_of(corpus, vocabulary)
    assert [fresh[i]["text"].tolist() for i in range(3133, 3200)] == samples[3133:]
    assert few < (len(read) - few) / 3
    assert positions_state(again, 3133, world) == saved
    # Positions in another text, or in another shuffle, mean nothing here.
    fresh.seed = 8
    assert not restore_positions(fresh, saved)
    assert not restore_positions(fresh, None)
    assert restore_positions(None, None)


@pytest.fixture
def long_lines(tmp_path: Path) -> Path:
    """Write thirteen documents in 49 pieces of 1 KiB; in most pieces no line begins."""
    path = tmp_path / "long.jsonl"
    words = (f"{number % 10} " * 1900 for number in range(13))
    path.write_text("".join(json.dumps({"text": f"w{text}"}) + "\n" for text in words))
    return path


@pytest.mark.parametrize("pieces", [(0, 49), (40, 45)])
def test_lines_longer_than_a_piece_are_read_again_and_again(long_lines, vocabulary, pieces):
    dataset = dataset_of(long_lines, vocabulary, pieces=pieces)
    assert len(dataset.corpus) == 49
    dataset.require_tokens()
    wanted = 300 * dataset.streams
    expected = [dataset[i]["text"].tolist() for i in range(wanted)]
    found = {}
    for rank in range(3):
        part = dataset_of(long_lines, vocabulary, pieces=pieces)
        for i in range(rank, wanted, 3):
            found[i] = part[i]["text"].tolist()
    assert [found[i] for i in range(wanted)] == expected
    world = Layout.single().world
    for i in range(wanted // 2 + 7):
        sample = dataset_of(long_lines, vocabulary, pieces=pieces)[i] if i < 3 else dataset[i]
        dataset.store_position(int(sample[ROW_POSITION][1]), RowPosition(*sample[ROW_POSITION][2:]))
    again = dataset_of(long_lines, vocabulary, pieces=pieces)
    assert restore_positions(again, positions_state(dataset, wanted // 2 + 7, world))
    rest = range(wanted // 2 + 7, wanted)
    assert [again[i]["text"].tolist() for i in rest] == expected[rest.start :]


def test_the_check_for_tokens_reads_only_the_beginning(vocabulary, tmp_path, monkeypatch):
    (tmp_path / "book.txt").write_text(" " * 5000 + "w1 w2 " * 100_000)
    dataset = dataset_of(tmp_path, vocabulary)
    encoded: list[int] = []
    original = dataset.encoder.tokenizer.tokenize
    monkeypatch.setattr(
        dataset.encoder.tokenizer,
        "tokenize",
        lambda text: encoded.append(len(text)) or original(text),
    )
    dataset.require_tokens()  # the first words are blank
    assert encoded == [4096, 605_000]
    (tmp_path / "book.txt").write_text("w1 w2 " * 100_000)
    encoded.clear()
    dataset.require_tokens()
    assert encoded == [4096]


def test_a_split_in_which_no_document_begins_is_refused(long_lines, vocabulary):
    size = long_lines.stat().st_size // 13
    dataset = dataset_of(long_lines, vocabulary, pieces=(1, size // 1024))
    told = r"parts 2 to 3 of 49, which --split assigns to one split, have no tokens: give more text"
    with pytest.raises(DataError, match=told):
        dataset.require_tokens()
    with pytest.raises(DataError, match=told):
        _ = dataset[0]
    with pytest.raises(DataError, match=r": part 2 of 49, .* to one split, has no tokens: give"):
        dataset_of(long_lines, vocabulary, pieces=(1, 2)).require_tokens()


def test_a_small_text_may_leave_no_validation_data(long_lines, vocabulary, capsys):
    """As with a small indexed dataset, the share of --split is too small for a document."""
    options = TokenizerConfig(tokenizer_type="BertWordPieceLowerCase", vocab_file=vocabulary)
    data = DataConfig(seq_length=SEQUENCE, data_path=(str(long_lines),), split="969,30,1")
    tokenizer = options, build_tokenizer(options)
    found = build_gpt_datasets(
        DataRequest(data, 1234, (4, 2, 2)), seq_length=SEQUENCE, vocab_size=500, tokenizer=tokenizer
    )
    assert found.train is not None
    assert found.valid is None
    assert "this run has no validation data: " in capsys.readouterr().err


def test_other_files_hold_the_same_documents(corpus, vocabulary, tmp_path):
    lines = [line for line in corpus.read_text().splitlines() if line]
    (tmp_path / "gz").mkdir()
    for part in range(2):
        text = "\n".join(lines[part::2])
        (tmp_path / "gz" / f"{part}.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    texts = [json.loads(line)["text"] for line in lines]
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "corpus.parquet")
    found = []
    for name, streams in (("gz", 2), ("corpus.parquet", 1)):
        dataset = dataset_of(tmp_path / name, vocabulary)
        assert dataset.streams == streams
        rows = [tokens_of(dataset, stream, 400 // streams) for stream in range(streams)]
        end = dataset.encoder.tokenizer.eod
        documents = [
            tuple(group)
            for tokens in rows
            for is_end, group in itertools.groupby(tokens, end.__eq__)
            if not is_end
        ]
        found.append(set(documents[1:-1]))
    whole = {tuple(encoder_of(vocabulary).tokenizer.tokenize(text)) for text in texts}
    assert all(len(part - whole) <= 3 and len(part) > 300 for part in found)


def test_a_line_cut_by_two_pieces_is_read_once(corpus):
    size = corpus.stat().st_size
    for cut in (1, 777, size // 2, size - 1):
        parts = [
            b"".join(block.read() for block in read_blocks([str(corpus)], ["text"], 500, bounds=b))
            for b in ((0, cut), (cut, size))
        ]
        assert b"".join(parts) == corpus.read_bytes()
        assert all(part.endswith(b"\n") or not part for part in parts)


def test_a_blend_of_text_and_a_preprocessed_dataset(corpus, vocabulary):
    text = dataset_of(corpus, vocabulary)
    mock = MockDataset(50, SEQUENCE, 100, seed=1, split=0)
    blended = BlendedDataset([text, mock], build_blend_index(normalize([1, 1]), 40))
    world = Layout.single().world
    batches = build_loader(blended, SingleSampler(40, 0, 4), num_workers=0, seed=0)
    taken = [extract_positions(next(batches), blended)["id"].tolist() for _ in range(5)]
    assert taken == [list(range(start, start + 4)) for start in range(0, 20, 4)]
    saved = positions_state(blended, 20, world)
    assert saved is not None
    assert sum(min(place) >= 0 for place in saved["places"][0]) == 32
    assert sum(place[0] == 1 for place in saved["places"][0]) == 10


def test_orders_of_the_last_few_epochs_are_kept(corpus, vocabulary):
    dataset = dataset_of(corpus, vocabulary, pieces=(5, 25))
    orders = [dataset._order(epoch).tolist() for epoch in (*range(6), 5, 4)]
    assert all(sorted(order) == list(range(5, 25)) for order in orders)
    assert len(set(map(tuple, orders))) == 6
    assert orders[6:] == orders[5:3:-1]
    assert 0 < len(dataset._orders) <= 3


def test_only_positions_that_are_known_are_restored(corpus, vocabulary):
    dataset = dataset_of(corpus, vocabulary)
    saved = positions_state(dataset, 0, Layout.single().world)
    assert saved["places"][0][:3] == [[0] * 5] * 3
    saved["places"][0][:2] = [[-1] * 5, [4, 3, 0, 2, 1]]
    assert restore_positions(dataset, saved)
    assert dataset.positions_after(6 * dataset.streams)[:3] == [(0,) * 5, (4, 3, 0, 2, 1), (0,) * 5]


def test_checkpoints_name_the_data_as_those_of_earlier_versions_do():
    members = [(SimpleNamespace(description=name), 0) for name in ("Text\na", "Text\nb")]
    assert text_stream._plan_digest(members) == "bf41d480305ad510e91ea8cac6aae6a5"


def _latest(layout: Layout, read: list[list[list[int]]]) -> list[list[list[int]]]:
    positions = read[layout.world.rank]
    member = SimpleNamespace(positions_after=lambda count: [row[:count] for row in positions])
    return text_stream._all_positions([(member, 5)], layout.world)  # type: ignore[list-item]


def test_the_latest_position_of_any_process_counts():
    """Its fields are never mixed with another process's. -1 stands for nothing read yet."""
    read = [
        [[7, 1, 9, 2, 0], [3, 0, 4, 4, 1], [-1] * 5, [-1] * 5],
        [[6, 2, 0, 8, 5], [3, 0, 4, 4, 1], [2, 1, 1, 0, 3], [-1] * 5],
    ]
    expected = [[[7, 1, 9, 2, 0], [3, 0, 4, 4, 1], [2, 1, 1, 0, 3], [-1] * 5]]
    assert run_distributed(2, _latest, read) == [expected, expected]


def test_a_blend_without_text_counts_nothing():
    blended = BlendedDataset([MockDataset(9, SEQUENCE, 100, seed=1, split=0)], None)  # type: ignore[arg-type]
    assert text_members(blended, 1 << 40) == []


def test_no_plain_file_stays_open(corpus, vocabulary):
    dataset = dataset_of(corpus, vocabulary)
    for i in range(dataset.streams):
        _ = dataset[i]
    opened = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    assert os.path.realpath(corpus) not in opened


def test_mistakes_are_reported_in_the_flags_of_training(vocabulary, tmp_path):
    (tmp_path / "x.doc").write_text("text")
    with pytest.raises(DataError, match=r"--data-path .*x\.doc: unknown suffix"):
        dataset_of(tmp_path / "x.doc", vocabulary)
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(
        DataError, match=r"--data-path .*empty\.jsonl: the text is empty: give more"
    ):
        dataset_of(tmp_path / "empty.jsonl", vocabulary)
    parquet.write_table(pyarrow.table({"x": ["w1"]}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match="--text-key text: no such column"):
        _ = dataset_of(tmp_path / "x.parquet", vocabulary)[0]
    path = tmp_path / "shrunk.jsonl"
    path.write_text('{"text": "w1 w2"}\n' * 20)
    dataset = dataset_of(path, vocabulary)
    path.write_text("")
    with pytest.raises(DataError, match=r"--data-path .*shrunk\.jsonl: the file has shrunk"):
        _ = dataset[0]


def test_a_pattern_names_text(corpus):
    assert is_text(str(corpus.parent / "*.jsonl"))
    assert not is_text(str(corpus.parent / "*.parquet"))


def test_a_worker_says_what_is_wrong_in_one_line(vocabulary, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"txt": "w3"}\n')
    dataset = dataset_of(path, vocabulary)
    batches = build_loader(dataset, SingleSampler(100, 0, 4), num_workers=1, seed=0)
    with pytest.raises(DataError, match=r"\A--data-path .*no key 'text'.*--skip-bad-lines\Z"):
        next(batches)


_LINES = b'{"text": "w1 w2"}\n' * 50


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("x.jsonl", b'{"text": "\xff"}\n', r"bad UTF-8 .*\(line starts at byte 0\): fix the line"),
        ("x.jsonl", b'{"text": "\\ud800"}\n', ".*half a surrogate pair.*: fix the line"),
        ("x.jsonl", b"{\n", "broken JSON .*: fix the line"),
        ("x.jsonl", b"[1]\n", "expected a JSON object, found a list.*: fix the line"),
        ("x.jsonl", b'{"text": 1}\n', "'text' is a number, expected a string.*: fix the line"),
        ("x.txt", b"w1 \xff", "not UTF-8 at byte 3: convert the file"),
        ("x.jsonl.gz", gzip.compress(_LINES)[:-9], "unreadable or truncated: .*; copy the file"),
        ("x.jsonl.gz", _LINES, "unreadable or truncated: Not a gzipped file"),
        ("x.jsonl.bz2", bz2.compress(_LINES)[:-9], "unreadable or truncated: .*; copy the file"),
        ("x.jsonl.bz2", _LINES, "unreadable or truncated: .*; copy the file"),
        ("x.jsonl.zst", zstandard.compress(_LINES)[:-5], "unreadable or truncated: .*; copy the"),
        ("x.jsonl.zst", _LINES, "unreadable or truncated: .*; copy the file"),
        (
            "x.parquet",
            parquet_table(text=["w1"])[:-9],
            "not a readable parquet file .*; copy it again",
        ),
        ("x.parquet", _LINES, "not a readable parquet file .*; copy it again"),
        (
            "x.parquet",
            parquet_table(text=[1]),
            "'text' is a number, expected a string.*: fix the line",
        ),
    ],
    ids=range(15),
)
def test_bad_text_is_reported_in_one_line(vocabulary, tmp_path, name, content, told):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        dataset_of(path, vocabulary)[0]
    message = str(caught.value)
    assert re.match(rf"--data-path {path}: {told}", message), message
    assert "\n" not in message


def test_a_line_that_is_too_long_is_reported(vocabulary, tmp_path, monkeypatch):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "' + b"w1 " * (22 << 20) + b'"}\n')
    dataset = dataset_of(path, vocabulary)
    monkeypatch.setattr(TextDataset, "streams", 1)
    with pytest.raises(DataError, match=r"x.jsonl: the line is longer than 64 MiB \(line starts"):
        dataset[0]


def test_blocks_of_a_table_say_where_they_begin(tmp_path):
    path = tmp_path / "x.parquet"
    path.write_bytes(parquet_table(text=[f"w{number}" * 5 for number in range(40)]))
    blocks = list(read_blocks([str(path)], ["text"], 100))
    assert len(blocks) > 3
    ends = itertools.accumulate(block.size for block in blocks)
    assert [block.offset for block in blocks] == [0, *ends][:-1]
    assert all(len(block.read()) == block.size for block in blocks)
    assert blocks[-1].bytes_read == path.stat().st_size


def test_bad_lines_are_refused_or_left_out(vocabulary, tmp_path, capsys):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "w1 w2"}\n{"txt": "w3"}\n' * 20)
    with pytest.raises(DataError, match=r"no key 'text' \(line starts at byte 18\): fix the line"):
        dataset_of(path, vocabulary)[0]
    text = dataset_of(path, vocabulary, skip_bad_lines=True)[0]["text"].tolist()
    first = len(VOCABULARY) + 1
    assert set(text) == {first, first + 1, encoder_of(vocabulary).tokenizer.eod}
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3, lines
    assert "no key 'text' (line starts at byte 18): line skipped" in lines[0] + lines[1]
    assert lines[2].endswith("further bad lines of this file are only counted")
    path.write_text('{"text": ""}\n')
    with pytest.raises(DataError, match="has no tokens: give more text"):
        dataset_of(path, vocabulary)[0]


@pytest.fixture
def _no_mock_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy, "TOY", [word for word in toy.TOY if word != "--mock-data"])


@pytest.mark.usefixtures("_no_mock_data")
@pytest.mark.parametrize("form", ["native", "legacy"])
def test_a_run_resumes_with_another_number_of_processes(form, corpus, vocabulary, tmp_path):
    words = ["--data-path", "1", str(corpus), "3", str(corpus.parent), "--split", "8,1,1"]
    words += ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", vocabulary]
    words += ["--make-vocab-size-divisible-by", "8", "--reset-attention-mask"]
    whole = toy.losses_of(Layout.single(), words)
    saving = [
        *words,
        "--save",
        str(tmp_path),
        "--save-interval",
        "3",
        "--exit-interval",
        "3",
        "--ckpt-format",
        form,
    ]
    ranks = run_distributed(2, toy.losses_of, saving)
    loading = [*words, "--load", str(tmp_path)]
    assert ranks[-1] + toy.losses_of(Layout.single(), loading) == pytest.approx(whole, rel=1e-6)


@pytest.mark.usefixtures("_no_mock_data")
@pytest.mark.parametrize("interval", [4, 6])  # saved between two evaluations, and before one
def test_a_resumed_run_validates_on_the_same_text(
    interval, corpus, vocabulary, tmp_path, monkeypatch
):
    held_out = tmp_path / "valid.jsonl"
    held_out.write_text('{"txt": "w1"}\n'.join(corpus.open()))  # every second line is bad
    words = ["--train-data-path", str(corpus), "--valid-data-path", str(held_out)]
    words += ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", vocabulary]
    words += ["--make-vocab-size-divisible-by", "8", "--eval-iters", "40", "--skip-bad-lines"]
    words += ["--train-iters", "9"]
    read: list[int] = []
    original = TextDataset._blocks

    def counted(self, stream, place):
        if self.corpus.flag == "--valid-data-path":
            read.append(place.row)
        return original(self, stream, place)

    monkeypatch.setattr(TextDataset, "_blocks", counted)
    recorder, run = toy.train_toy(Layout.single(), words)
    losses = recorder.values("lm loss validation")
    assert len(losses) == 3
    saving = [*words, "--save", str(tmp_path / "run"), "--save-interval", str(interval)]
    toy.train_toy(Layout.single(), [*saving, "--exit-interval", str(interval)])
    read.clear()
    resumed, again = toy.train_toy(Layout.single(), [*words, "--load", str(tmp_path / "run")])
    assert resumed.values("lm loss validation") == losses[interval // 3 :]
    assert again.datasets[1].positions_after(480) == run.datasets[1].positions_after(480)
    assert min(read) > 0, "read again from the beginning"
    reader = open_root(tmp_path / "run", layout=Layout.single())
    assert reader is not None
    bad = [place[4] for places in reader.meta["validation_text"]["places"] for place in places]
    assert min(bad) > 0


@pytest.mark.usefixtures("_no_mock_data")
def test_the_end_of_a_run_counts_the_lines_left_out(vocabulary, tmp_path, capfd):
    (tmp_path / "bad.jsonl").write_text('{"text": "w1 w2"}\n{"txt": "w3"}\n' * 20)
    words = ["--data-path", str(tmp_path / "bad.jsonl"), "--split", "1,0,0", "--skip-bad-lines"]
    words += ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", vocabulary]
    toy.train_toy(Layout.single(), words)
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "skip-bad-lines" in line]
    told = re.search(
        r"WARNING: --skip-bad-lines: (\d+) lines without a document were skipped", line
    )
    assert told is not None
    passes, rest = divmod(int(told[1]), 20)
    assert passes > 1
    assert rest == 0, "whole passes over the file"


@pytest.mark.usefixtures("_no_mock_data")
def test_mistakes_name_the_flag_of_the_text(corpus, vocabulary, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "bad.jsonl").write_text('{"txt": "w1"}\n')
    words = ["--vocab-file", vocabulary, "--tokenizer-type", "BertWordPieceLowerCase"]
    good, empty, bad = (str(tmp_path / f"{name}.jsonl") for name in ("good", "empty", "bad"))
    Path(good).write_text(corpus.read_text())
    for train, valid, told in (
        (empty, good, "--train-data-path .*empty.jsonl: the text is empty"),
        (good, empty, "--valid-data-path .*empty.jsonl: the text is empty"),
        (bad, good, "--train-data-path .*bad.jsonl: no key 'text'"),
        (good, bad, "--valid-data-path .*bad.jsonl: no key 'text'"),
    ):
        paths = ["--train-data-path", train, "--valid-data-path", valid]
        with pytest.raises(DataError, match=rf"\A{told}"):
            toy.train_toy(Layout.single(), [*words, *paths])


@pytest.mark.usefixtures("_no_mock_data")
def test_a_split_without_tokens_is_refused_before_training(corpus, vocabulary, tmp_path):
    (tmp_path / "blank.jsonl").write_text('{"text": ""}\n')
    words = ["--vocab-file", vocabulary, "--tokenizer-type", "BertWordPieceLowerCase"]
    words += ["--train-data-path", str(corpus), "--valid-data-path", str(tmp_path / "blank.jsonl")]
    with pytest.raises(DataError, match=r"--valid-data-path .*blank\.jsonl: the text has no tok"):
        toy.build_toy(Layout.single(), words)


@pytest.mark.usefixtures("_no_mock_data")
def test_what_needs_an_index_is_refused(corpus, vocabulary):
    words = ["--data-path", str(corpus), "--vocab-file", vocabulary]
    words += ["--tokenizer-type", "BertWordPieceLowerCase"]
    with pytest.raises(ConfigError, match="--dataloader-type cyclic: --data-path .* is text"):
        toy.build_toy(Layout.single(), [*words, "--dataloader-type", "cyclic"])
    with pytest.raises(ConfigError, match=r"only pretrain_gpt\.py trains on text files"):
        toy.build_toy(Layout.single(), words, "bert")


@pytest.mark.parametrize("name", ["a.parquet", "a.txt"])
def test_a_text_that_does_not_fit_in_memory_as_utf_8_is_a_shortage(name, tmp_path, monkeypatch):
    """If memory runs out, orjson reports surrogates, which such texts cannot contain."""

    def dumps(*_, **__):
        raise TypeError("str is not valid UTF-8: surrogates not allowed")

    parquet.write_table(pyarrow.table({"text": ["é"]}), tmp_path / "a.parquet")
    (tmp_path / "a.txt").write_text("é")
    monkeypatch.setattr("orjson.dumps", dumps)
    with pytest.raises(MemoryError):
        list(read_blocks([str(tmp_path / name)], ["text"]))
