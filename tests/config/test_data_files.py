"""Corpora named in a file: what it may contain, how it is read, and how mistakes are reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.config.data import DataConfig
from megatron.config.parser import Program, parse_config
from megatron.config.yaml_file import dump
from megatron.inference.load import SAVED_MODEL_READS
from tests.config.command import command, parse, problems

_EACH = '{"train": ["0.3", "A", "0.7", "B"], "valid": "C", "test": null}'
_TEXT_REMEDY = "give a text file with the values of --data-path, separated by whitespace"
_JSON_REMEDY = (
    'give a JSON file such as {"train": ["0.3", "A", "0.7", "B"], "valid": "C", "test": null}, '
    "where null means no data"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, which relative paths start from."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _data(*words: str) -> DataConfig:
    return parse(*words, without=["--mock-data"]).config.data


def test_a_text_file_is_as_its_words_on_the_command_line(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "blend.txt").write_text("0.3 a/x_text_document\n\n\t0.7\r\nb/y\n")
    expected = _data("--data-path 0.3 a/x_text_document 0.7 b/y")
    assert _data("--data-args-path sub/blend.txt") == expected
    assert expected.data_path == ("0.3", "a/x_text_document", "0.7", "b/y")


def test_a_byte_order_mark_is_no_part_of_the_words(folder: Path) -> None:
    (folder / "blend.txt").write_bytes(b"\xef\xbb\xbfa")
    (folder / "each.json").write_bytes(b"\xef\xbb\xbf" + _EACH.encode())
    assert _data("--data-args-path blend.txt").data_path == ("a",)
    assert _data("--per-split-data-args-path each.json").valid_data_path == ("C",)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            {"train": ["0.3", "a", "0.7", "b"], "valid": ["c"], "test": ["1", "d", "3", "e"]},
            "--train-data-path 0.3 a 0.7 b --valid-data-path c --test-data-path 1 d 3 e",
        ),
        ({"train": "2 a  1\nb", "valid": "c", "test": None},
         "--train-data-path 2 a 1 b --valid-data-path c"),
        ({"train": [0.25, "a", 3, "b"], "valid": None, "test": ["with space"]},
         "--train-data-path 0.25 a 3 b --test-data-path 'with space'"),
    ],
)  # fmt: skip
def test_a_json_file_is_as_the_flags_of_each_split(
    folder: Path, content: dict[str, Any], words: str
) -> None:
    (folder / "each.json").write_text(json.dumps(content))
    assert _data("--per-split-data-args-path each.json") == _data(words)


def test_other_keys_are_reported(folder: Path) -> None:
    (folder / "each.json").write_text('{"train": "a", "valid": "b", "test": "c", "notes": 1}')
    parsed = parse("--per-split-data-args-path each.json", without=["--mock-data"])
    assert parsed.notices == ("--per-split-data-args-path each.json: 'notes' has no effect",)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read (No such file or directory)"),
        (b" \n\t", "contains no words"),
        (b"0.3 \xff\x00", "is not UTF-8 text"),
    ],
)
def test_a_text_file_that_cannot_be_taken(folder: Path, content: bytes | None, said: str) -> None:
    if content is not None:
        (folder / "blend.txt").write_bytes(content)
    assert problems("--data-args-path blend.txt", without=["--mock-data"]) == [
        f"--data-args-path blend.txt: {said}: {_TEXT_REMEDY}"
    ]


def test_a_folder_is_no_file(folder: Path) -> None:
    (line,) = problems("--data-args-path .", without=["--mock-data"])
    assert line == f"--data-args-path .: cannot be read (Is a directory): {_TEXT_REMEDY}"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("0.3 a 0.7 b", "is not JSON (Extra data: line 1 column 5 (char 4))"),
        ("", "is not JSON (Expecting value: line 1 column 1 (char 0))"),
        ("[" * 100_000, "is nested too deeply"),
        ('["a"]', "is not a JSON object"),
        ('{"train": "a", "validation": "b"}', "lacks 'valid', 'test'"),
        ('{"train": "a", "valid": "b", "test": "c", "train": "d"}', "has 'train' twice"),
        ('{"train": [], "valid": "b", "test": "c"}', "'train' contains no words"),
        ('{"train": "a", "valid": " ", "test": "c"}', "'valid' contains no words"),
        (
            '{"train": [[0.3, "a"]], "valid": "b", "test": "c"}',
            "'train' contains [0.3, \"a\"], which is neither a string nor a list of words",
        ),
        (
            '{"train": "a", "valid": 7, "test": "c"}',
            "'valid' contains 7, which is neither a string nor a list of words",
        ),
        (
            '{"train": "a", "valid": ["b", true], "test": "c"}',
            "'valid' contains true, which is neither a string nor a list of words",
        ),
    ],
)
def test_a_json_file_that_cannot_be_taken(folder: Path, content: str, said: str) -> None:
    (folder / "each.json").write_text(content)
    assert problems("--per-split-data-args-path each.json", without=["--mock-data"]) == [
        f"--per-split-data-args-path each.json: {said}: {_JSON_REMEDY}"
    ]


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (
            "--data-args-path t --data-path a",
            ["--data-args-path t cannot be combined with --data-path: use one of them"],
        ),
        (
            "--per-split-data-args-path j --train-data-path a --test-data-path b",
            [
                "--per-split-data-args-path j cannot be combined with --train-data-path, "
                "--test-data-path: use one of them",
            ],
        ),
        (
            "--data-args-path t --per-split-data-args-path j",
            [
                "--data-args-path t is split by --split and cannot be combined with "
                "--per-split-data-args-path j: use one kind of path",
            ],
        ),
        (
            "--data-args-path t --valid-data-path a",
            [
                "--data-args-path t is split by --split and cannot be combined with "
                "--valid-data-path: use one kind of path",
             "--valid-data-path without --train-data-path leaves nothing to train on: add it"],
        ),
        (
            "--per-split-data-args-path j --data-path a",
            [
                "--data-path is split by --split and cannot be combined with "
                "--per-split-data-args-path j: use one kind of path",
            ],
        ),
        (
            "--data-args-path t --mock-data",
            ["--mock-data and --data-args-path t cannot be combined: use one of them"],
        ),
        (
            "--per-split-data-args-path untrained",
            [
                "--per-split-data-args-path untrained without 'train' leaves nothing to train "
                "on: add it",
            ],
        ),
        (
            "--data-args-path odd",
            ["--data-args-path odd has 3 words: give one prefix, or pairs WEIGHT PREFIX WEIGHT "
             "PREFIX ..."],
        ),
        (
            "--per-split-data-args-path unweighted",
            [
                "--per-split-data-args-path unweighted: 'valid': 'x' must be a weight above 0: "
                "give pairs WEIGHT PREFIX WEIGHT PREFIX ...",
            ],
        ),
    ],
)  # fmt: skip
def test_what_goes_with_a_file(folder: Path, words: str, lines: list[str]) -> None:
    (folder / "t").write_text("0.3 a 0.7 b")
    (folder / "odd").write_text("1 b 2")
    (folder / "j").write_text(_EACH)
    (folder / "untrained").write_text('{"train": null, "valid": "a", "test": null}')
    (folder / "unweighted").write_text('{"train": "a", "valid": "x 1", "test": null}')
    assert problems(words, without=["--mock-data"]) == lines


def test_flags_win_over_the_yaml_file_and_it_keeps_the_words(folder: Path) -> None:
    (folder / "t").write_text("0.3 a 0.7 b")
    parsed = parse("--data-args-path t", without=["--mock-data"])
    (folder / "saved.yaml").write_text(dump(parsed.config))
    (folder / "t").write_text("c")
    again = parse_config(["--config", "saved.yaml"], world_size=1).config
    assert again == parsed.config
    words = ["--config", "saved.yaml", "--data-args-path", "t"]
    assert parse_config(words, world_size=1).config.data.data_path == ("c",)
    (folder / "named.yaml").write_text("data: {data_args_path: t}\n")
    assert _data("--config named.yaml").data_path == ("c",)
    assert _data("--config named.yaml --data-path d").data_path == ("d",)
    (folder / "two.yaml").write_text(
        "data: {data_args_path: t, per_split_data_args_path: nowhere}\n"
    )
    assert problems("--config two.yaml --data-path d", without=["--mock-data"]) == [
        "--per-split-data-args-path nowhere: cannot be read (No such file or directory): "
        f"{_JSON_REMEDY}"
    ]
    (folder / "both.yaml").write_text("data: {data_args_path: t, data_path: d}\n")
    assert problems("--config both.yaml", without=["--mock-data"]) == [
        "--data-args-path t cannot be combined with --data-path: use one of them"
    ]


def test_a_program_that_reads_no_corpus_reads_no_file() -> None:
    sizes = {"training.micro_batch_size", "data.seq_length"}
    program = Program(rules=(), reads=lambda given: SAVED_MODEL_READS | sizes)
    parsed = parse_config(command("--data-args-path nowhere"), world_size=1, program=program)
    assert "--data-args-path" in parsed.notices[0]
    assert parsed.config.data.data_args_path is None
