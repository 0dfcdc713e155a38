"""What --input accepts: files without an extension, folders of them, corpus names; and speed."""

from __future__ import annotations

import gzip
import os
import random

import pytest

from megatron.config.data import DataConfig
from megatron.data.datasets import DataRequest, parse_weighted_paths
from megatron.data.gpt import build_gpt_datasets
from megatron.data.text_input import find_inputs, parse_block, read_blocks
from megatron.errors import ConfigError, DataError
from tests.data.test_indexed import write_random


def texts(*patterns: object) -> list[str]:
    paths = find_inputs([str(pattern) for pattern in patterns])
    blocks = read_blocks(paths, ["text"])
    return [values[0] for block in blocks for values in parse_block(block, ["text"]).values]


@pytest.fixture
def wiki(tmp_path):
    """Write a folder in the form of a Wikipedia extractor's output, with unrelated files in it."""
    for folder, names in (("AA", ("wiki_00", "wiki_01")), ("AB", ("wiki_00",))):
        (tmp_path / "wiki" / folder).mkdir(parents=True)
        for name in names:
            (tmp_path / "wiki" / folder / name).write_text(f'{{"text": "{folder}/{name}"}}\n')
    (tmp_path / "wiki" / "AB" / "wiki_01.gz").write_bytes(gzip.compress(b'\n {"text": "packed"}\n'))
    (tmp_path / "wiki" / "README").write_text("words")
    (tmp_path / "wiki" / "empty").write_text("")
    (tmp_path / "wiki" / "binary").write_bytes(bytes(range(128, 228)))
    return tmp_path / "wiki"


def test_files_without_an_ending_are_recognized_by_their_content(wiki):
    every = ["AA/wiki_00", "AA/wiki_01", "AB/wiki_00", "packed"]
    assert texts(wiki) == every
    assert texts(wiki / "A*" / "wiki_*") == every
    (wiki / "all").write_bytes(b'\xef\xbb\xbf{"text": "one"}\n{"text": "two"}')
    assert texts(wiki / "all") == ["one", "two"]


def test_generated_samples_are_read_if_they_are_named(wiki):
    (wiki / "AA" / "prompts.txt.out").write_text('{"text": "generated"}\n')
    assert texts(wiki / "AA") == ["AA/wiki_00", "AA/wiki_01"]
    assert texts(wiki / "AA" / "prompts.txt.out") == ["generated"]
    (wiki / "log.out").write_text("step 1\n")
    with pytest.raises(DataError, match="log.out: unknown suffix"):
        texts(wiki / "log.out")


@pytest.mark.parametrize("name", ["README", "empty", "binary"])
def test_other_files_without_an_ending_are_refused(wiki, name):
    with pytest.raises(DataError, match=f"{name}: unknown suffix; expected .jsonl"):
        texts(wiki / name)


def test_a_truncated_packed_file_without_an_ending_is_refused(wiki):
    packed = wiki / "AB" / "wiki_01.gz"
    packed.write_bytes(gzip.compress(random.Random(1).randbytes(9000) + b"{")[:-20])
    with pytest.raises(DataError, match="unknown suffix"):
        texts(packed)


def test_a_pipe_is_not_touched(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe: unknown suffix"):
        find_inputs([str(tmp_path / "pipe")])


@pytest.fixture
def corpora(tmp_path, wiki, monkeypatch):
    file = tmp_path / "corpora.yaml"
    file.write_text("wikipedia: wiki/A*/wiki_0?\nBooksCorpus: [a.jsonl, b.jsonl]\nroberta: gpt\n")
    monkeypatch.setenv("MEGATRON_CORPORA", str(file))
    monkeypatch.chdir(wiki)  # paths are relative to the file
    return file


def test_named_corpora(corpora, tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "{name}"}}\n')
    assert texts("BooksCorpus", "wikipedia") == ["a", "b", "AA/wiki_00", "AA/wiki_01", "AB/wiki_00"]
    (corpora.parent / "wiki" / "roberta").write_text('{"text": "a file goes first"}\n')
    assert texts("roberta") == ["a file goes first"]


def test_a_named_dataset_trains(corpora, tmp_path):
    write_random(tmp_path / "gpt")
    request = DataRequest(DataConfig(seq_length=16, data_path=("roberta",)), 1234, (5, 0, 0))
    assert len(build_gpt_datasets(request, seq_length=16, vocab_size=50257).train) >= 5
    with pytest.raises(ConfigError, match="--data-path BooksCorpus: this name stands for 2 paths"):
        parse_weighted_paths(["BooksCorpus"], "--data-path")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file or directory: give a readable YAML file"),
        (b"a: [", r"not a YAML file \(.*\): fix the file"),
        (b"\xff", r"not a YAML file \(.*\): fix the file"),
        (b"- a", "expected corpus names with their paths"),
        (b"wikipedia: 3", "'wikipedia' is not a path or a list of paths"),
        (b"wikipedia: []", "'wikipedia' is not a path or a list of paths"),
        (b"other: x", "--input wikipedia: no such file or folder"),
    ],
)
def test_mistakes_in_the_file_of_names(corpora, content, message):
    corpora.unlink()
    if content is not None:
        corpora.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        texts("wikipedia")
    assert "\n" not in str(caught.value)
