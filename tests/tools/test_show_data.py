"""show_data.py prints what a run reads."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest

from megatron.config.data import DataConfig
from megatron.data.datasets import DataRequest
from megatron.data.gpt import build_gpt_datasets
from megatron.data.indexed import IndexedDataset, IndexedDatasetBuilder
from megatron.errors import ConfigError, UserError
from megatron.retro.database import ChunkDatabase
from megatron.tools import show_data
from tests.data.corpus import write_sentences, write_vocabulary
from tests.data.tfrecords import example, write
from tests.training.test_retro import toy_workdir


@pytest.fixture
def vocabulary(tmp_path: Path) -> list[str]:
    path = write_vocabulary(tmp_path / "vocab.txt")
    return ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", str(path)]


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    show_data.run(show_data.build_parser().parse_args(words))
    return capsys.readouterr().out


END = 406  # [EOS], which the tokenizer adds to the vocabulary


def write_gpt(prefix: Path) -> str:
    """Write documents of 1, 4, 4 and 9 tokens, each ending with the end-of-document token."""
    random = np.random.RandomState(0)
    lengths = np.array([1, 4, 4, 9], np.int32)
    tokens = random.randint(5, 205, lengths.sum()).astype(np.uint16)
    tokens[np.cumsum(lengths) - 1] = END
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        builder.add_documents(tokens, lengths, np.ones(4, np.int64))
    return str(prefix)


def test_statistics_and_documents(vocabulary, tmp_path, capsys):
    prefix = write_gpt(tmp_path / "gpt")
    words = ["--data-path", prefix, "--seq-length", "8", *vocabulary]
    text = shown(capsys, *words, "--show", "statistics", "documents", "--first", "1")
    assert "4 documents, 4 sequences, 18 tokens of uint16\n" in text
    assert "shortest 1, 1% 1, median 4, 99% 9, longest 9\n" in text
    assert "4 to 7   2          ########################################\n" in text
    assert "2 to 3   0\n" in text
    assert f"{END}  '[EOS]'  22.22%\n" in text
    first = IndexedDataset(prefix).get(1)
    assert f"document 1, 4 tokens\n'w{first[0] - 5} w{first[1] - 5} " in text
    assert "document 2, 4 tokens\n" in text
    assert "document 3" not in text


def test_statistics_of_data_at_a_url(vocabulary, tmp_path, capsys):
    address = f"file://{write_gpt(tmp_path / 'gpt')}"
    words = ["--data-path", address, "--data-cache-path", str(tmp_path / "cache")]
    text = shown(capsys, *words, "--seq-length", "8", *vocabulary, "--show", "statistics")
    assert text.startswith(f"{address}: statistics\n4 documents, 4 sequences, 18 tokens")


def test_a_first_document_or_sample_beyond_the_data_is_reported(vocabulary, tmp_path, capsys):
    prefix = write_gpt(tmp_path / "gpt")
    words = ["--data-path", prefix, "--seq-length", "8", *vocabulary, "--show", "documents"]
    assert "document 3, 9 tokens" in shown(capsys, *words, "--first", "3")
    missing = shown(capsys, *words, "--first", "4")
    assert missing == f"{prefix}: there is no document 4 (it has 4 documents)\n"
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "w1 w2"}\n')
    words[1] = str(text)
    assert shown(capsys, *words, "--first", "1") == f"{text}: there is no document 1\n"


def test_a_gpt_s_sample_shows_where_documents_end(vocabulary, tmp_path, capsys):
    words = ["--data-path", write_gpt(tmp_path / "gpt"), "--seq-length", "10", "--split", "1,0,0"]
    words += [*vocabulary, "--show", "samples", "--count", "1", "--reset-position-ids"]
    lines = shown(capsys, *words, "--eod-mask-loss").splitlines()
    assert lines[0] == "sample 0"
    headings = ["index", "text", "labels", "loss_mask", "position", "document"]
    assert lines[1].split() == headings
    rows = [line.split() for line in lines[2:]]
    assert len(rows) == 10
    document = position = 0
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        place, token, text, label, _, mask, at, number = row
        assert (int(at), int(number)) == (position, document), place
        assert following is None or label == following[1]
        assert mask == ("0" if text == "'[EOS]'" else "1")
        position += 1
        if text == "'[EOS]'":
            document, position = document + 1, 0
    assert document > 0


def test_only_the_split_that_is_shown_is_built(vocabulary, tmp_path, capsys):
    words = ["--data-path", write_gpt(tmp_path / "gpt"), "--seq-length", "2", "--split", "2,1,1"]
    text = shown(capsys, *words, *vocabulary, "--show", "samples", "--count", "1")
    assert text.startswith("sample 0")
    (index,) = (tmp_path / "index-cache").glob("*.dsc")
    assert "train" in index.read_text()


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_samples_of_sentences(kind, vocabulary, tmp_path, capsys):
    prefix = str(write_sentences(tmp_path / "sentences"))
    words = ["--kind", kind, "--data-path", prefix, "--seq-length", "32", *vocabulary]
    words += ["--show", "samples", "--vocab-extra-ids", "20", "--split", "1,0,0"]
    if kind == "t5":
        with pytest.raises(ConfigError, match="--decoder-seq-length is required"):
            shown(capsys, *words)
        words += ["--decoder-seq-length", "16"]
    text = shown(capsys, *words)
    expected = {"bert": ["text", "types", "labels"], "t5": ["text_enc", "text_dec", "labels"]}[kind]
    for name in expected:
        assert f" {name} " in text
    assert text.count("sample 1\n") == (2 if kind == "t5" else 1)  # encoder and decoder


def test_statistics_have_a_row_for_each_power_of_two(vocabulary, tmp_path, capsys, monkeypatch):
    (tmp_path / "a.jsonl").write_text(
        '{"text": "w1 w2 w3"}\n{"text": ""}\n{"text": "w5"}\n{"text": "w6 w7 w8 w9"}\n'
    )
    words = ["--seq-length", "8", *vocabulary, "--show", "statistics", "--data-path"]
    lines = shown(capsys, *words, str(tmp_path / "a.jsonl")).splitlines()
    assert lines[:8] == [
        f"{tmp_path}/a.jsonl: statistics",
        "4 documents, 11 tokens",
        "tokens of a document: shortest 0, 1% 0, median 4, 99% 5, longest 5",
        "tokens  documents",
        f"0       1          {'#' * 20}",
        "1 to 1  0",
        f"2 to 3  1          {'#' * 20}",
        f"4 to 7  2          {'#' * 40}",
    ]
    assert lines[8:12] == [
        "",
        f"{tmp_path}/a.jsonl: most frequent of the first 11 tokens",
        "id   token    share",
        f"{END}  '[EOS]'  27.27%",
    ]
    assert all(line.endswith("9.09%") for line in lines[12:])
    monkeypatch.setattr(show_data, "_MAX_COUNTED_TOKENS", 4)
    text = shown(capsys, *words, str(tmp_path / "a.jsonl"))
    assert "1 documents, 4 tokens at the beginning; the statistics cover only these\n" in text
    prefix = write_gpt(tmp_path / "gpt")
    with pytest.raises(ConfigError, match="--train-data-path: value 1, "):
        shown(capsys, *words[:-1], "--train-data-path", prefix, "0.5")


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_statistics_and_documents_of_text(name, vocabulary, tmp_path, capsys):
    lines = [b'{"text": "w1 w2 w3"}', b'{"txt": "w4"}', b'{"text": ""}', b'{"text": "w5"}', b"{"]
    data = b"\n".join([*lines, b'{"text": "w6 w7 w8 w9"}', b""])
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    words = ["--data-path", str(tmp_path / name), "--seq-length", "8", *vocabulary]
    words += ["--show", "statistics", "documents", "--first", "1", "--count", "2"]
    text = shown(capsys, *words)
    assert "4 documents, 11 tokens\n2 lines without a document; the first:\n" in text
    assert f"{name}: no key 'text' (line starts at byte {len(lines[0]) + 1})\n" in text
    assert "shortest 0, 1% 0, median 4, 99% 5, longest 5\n" in text
    assert f"{END}  '[EOS]'  27.27%\n" in text
    assert f"{name}: document 1, 0 tokens\n" in text
    assert f"{name}: document 2, 2 tokens\n'w5 [EOS]'" in text
    assert "document 3" not in text


def test_statistics_and_documents_of_tfrecords(vocabulary, tmp_path, capsys):
    path = str(write(tmp_path / "x.tfrecord", map(example, range(4))))  # 16, 15, 14 and 13 tokens
    words = ["--data-path", path, "--seq-length", "16", "--kind", "bert", *vocabulary]
    words += ["--show", "statistics", "documents", "--first", "2", "--count", "1"]
    text = shown(capsys, *words)
    assert "4 documents, 58 tokens\n" in text
    assert "shortest 13, 1% 13, median 15, 99% 16, longest 16\n" in text
    assert f"{path}: document 2, 14 tokens\n" in text


def test_the_order_is_that_of_a_run_of_several_passes(vocabulary, tmp_path, capsys):
    prefix = write_gpt(tmp_path / "gpt")
    words = ["--data-path", prefix, "--seq-length", "4", "--split", "1,0,0", "--show", "samples"]
    words += ["--first", "6", "--count", "2", *vocabulary]
    request = DataRequest(
        DataConfig(data_path=(prefix,), split="1,0,0", seq_length=4), 1234, (30, 0, 0)
    )
    run = build_gpt_datasets(request, seq_length=4, vocab_size=END + 1).train
    assert run is not None
    found = shown(capsys, *words, "--train-samples", "30").splitlines()
    rows = [line.split() for line in found if line[:1].isdigit()]
    expected = [run[i]["text"][:4].tolist() for i in (6, 7)]
    assert [int(row[1]) for row in rows] == [token for sample in expected for token in sample]
    assert found != shown(capsys, *words).splitlines()  # a shorter run has a different order


def test_a_page_escapes_what_it_shows(vocabulary, tmp_path, capsys):
    corpus = tmp_path / "a<b>.jsonl"
    corpus.write_text('{"text": "w1 w2 w3 w4"}\n' * 9)
    words = ["--data-path", str(corpus), "--seq-length", "4", *vocabulary]
    page = tmp_path / "page.html"
    assert shown(capsys, *words, "--html", str(page)) == f"wrote {page}\n"
    text = page.read_text()
    assert "a&lt;b&gt;.jsonl" in text
    assert "<b>" not in text
    assert "<th>labels</th>" in text
    assert "&#39;w1&#39;" in text


def test_a_page_replaces_no_file_unasked_and_names_a_folder_that_is_missing(
    vocabulary, tmp_path, capsys
):
    corpus, page = tmp_path / "a.jsonl", tmp_path / "page.html"
    corpus.write_text('{"text": "w1 w2 w3 w4"}\n' * 9)
    page.write_text("mine")
    words = ["--data-path", str(corpus), "--seq-length", "4", *vocabulary, "--html"]
    assert show_data.main([*words, str(page)]) == 9
    assert f"--html: {page} already exists" in capsys.readouterr().err
    assert page.read_text() == "mine"
    assert shown(capsys, *words, str(page), "--overwrite") == f"wrote {page}\n"
    missing = tmp_path / "none" / "page.html"
    assert show_data.main([*words, str(missing)]) == 8
    assert f"error: --html {missing} cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--data-path", "x"], "--seq-length is required"),
        (["--data-path", "x", "--seq-length", "4", "--count", "0"], "--count 0"),
        (
            ["--data-path", "x", "--seq-length", "4", "--train-samples", "0"],
            "does not reach --first 0",
        ),
        (["--mock-data", "--seq-length", "4"], "--show statistics: give --data-path"),
    ],
)
def test_mistakes_are_reported(words, told, vocabulary, capsys):
    with pytest.raises(ConfigError, match=told):
        shown(capsys, *words, *vocabulary)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the toy Retro's working folder: samples of 4 chunks of 4 tokens, 6 updates of 4."""
    return Path(toy_workdir(tmp_path_factory.mktemp("retro")))


NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "100"]


def test_a_retro_s_chunks_are_shown_with_their_neighbors(workdir, tmp_path, capsys):
    folder = shutil.copytree(workdir, tmp_path / "work")
    (path,) = folder.glob("query/train_*/*.hdf5")
    with h5py.File(path, "r+") as file:
        file["neighbors"][1] = [3, -1, 0, 0]
    words = ["--retro-workdir", str(folder), *NULL, "--show", "samples", "--count", "1"]
    with pytest.raises(ConfigError, match="--train-samples is required: .* does not say"):
        shown(capsys, *words)
    text = shown(capsys, *words, "--train-samples", "24")
    assert text.count("sample 0, chunk ") == 4
    assert text.count("neighbor 1, document ") == 4
    told = json.loads((folder / "args.json").read_text())
    told |= {"train_iters": 6, "global_batch_size": 4}
    (folder / "args.json").write_text(json.dumps(told))
    assert shown(capsys, *words) == text
    with pytest.raises(ConfigError, match="--first 24: there are only 24 training samples: give"):
        shown(capsys, *words, "--first", "24")
    chunk = text.split("\n\n")[1].splitlines()
    assert [len(chunk), len(chunk[1].split()), chunk[3]] == [4, 4, "neighbor 2: none"]
    database = ChunkDatabase(folder, 4, 100)
    (document,) = database.documents([3])[:, 1].tolist()
    expected = " ".join(map(str, database.tokens([3, 4]).ravel().tolist()))
    expected = expected.removesuffix(" 100 100")  # padding of the short chunk
    assert chunk[2] == f"neighbor 1, document {document} of corpus: {expected!r}"
    single = shown(capsys, *words, "--retro-num-neighbors", "1")
    assert (single.count("neighbor 1"), single.count("neighbor 2")) == (4, 0)
    all_parts = shown(capsys, *words[:-4], "--count", "1")
    assert "60 documents, 60 sequences" in all_parts
    assert all_parts.endswith(text)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--kind", "gpt"], "--kind gpt: give --retro-workdir with --kind retro, and only then"),
        (
            ["--seq-length", "8"],
            "--seq-length 8: --retro-workdir .* was created with --seq-length 16",
        ),
        (["--retro-num-neighbors", "9"], "has 4 neighbors per chunk, but"),
        (["--retro-num-retrieved-chunks", "0"], "--retro-num-retrieved-chunks 0: must be at least"),
        (["--train-samples", "1"], "no neighbors for the .* samples of the train split"),
        (["--train-samples", "2000"], "no neighbors for the .* samples of the train split"),
    ],
)
def test_a_retro_s_flags_fit_its_folder(workdir, capsys, words, message):
    base = ["--retro-workdir", str(workdir), *NULL, "--show", "samples", "--train-samples", "24"]
    with pytest.raises(UserError, match=message):
        shown(capsys, *base, *words)
    with pytest.raises(ConfigError, match="--kind retro: give --retro-workdir"):
        shown(capsys, "--kind", "retro", "--seq-length", "8", *NULL)
