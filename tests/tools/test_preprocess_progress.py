"""What tools/preprocess_data.py shows while it runs: log lines, a bar, languages, bad flags."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.data.preprocess import Counts, find_punkt
from megatron.data.text_input import TextBlock
from megatron.errors import ConfigError
from megatron.tools import preprocess_data
from megatron.tools.preprocess_data import _Progress


def _block(path: Path, read: int) -> TextBlock:
    return TextBlock(str(path), 0, 1, read)


def test_a_log_line_comes_after_enough_documents_and_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(preprocess_data.time, "monotonic", lambda: now[0])
    progress = _Progress(1000, 10, 100.0)

    def lines_after(seconds: float, documents: int) -> str:
        now[0] = 100 + seconds
        counts = Counts(documents=documents, text_bytes=documents * 300_000)
        progress.update(counts, _block(tmp_path, 0))
        return capsys.readouterr().err

    assert lines_after(6, 9) == ""  # too few documents
    assert lines_after(8, 16) == "16 documents (2 documents/s, 0.6 MB/s)\n"
    assert lines_after(20, 25) == ""  # the next line needs 26
    assert lines_after(20, 26) == "26 documents (1 documents/s, 0.4 MB/s)\n"
    assert lines_after(24, 40) == ""  # too soon
    assert lines_after(26, 49) == ""  # the next line needs 50
    assert lines_after(40, 2000) == "2,000 documents (50 documents/s, 15.0 MB/s)\n"
    assert lines_after(45, 2010) == "2,010 documents (45 documents/s, 13.4 MB/s)\n"
    progress.print_line("bad line")
    progress.close()
    assert capsys.readouterr().err == "bad line\n"


def test_a_bar_counts_the_bytes_of_all_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_bytes(bytes(600))
    second.write_bytes(bytes(400))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress = _Progress(1000, 10, 0.0)
    shown = []
    for block in (_block(first, 100), _block(first, 600), _block(second, 50), _block(second, 400)):
        progress.update(Counts(documents=1), block)
        shown.append(progress._bar.n)
    assert shown == [100, 600, 650, 1000]
    progress.print_line("bad line")
    progress.close()
    printed = capsys.readouterr().err
    assert "bad line\n" in printed
    assert "documents/s, 0.0 MB/s" in printed


_BASE = "--input x --output-prefix y --tokenizer-type NullTokenizer --vocab-size 9"


@pytest.mark.parametrize(
    ("words", "problems"),
    [
        ("--workers 0", ["--workers 0: give at least 1, or omit the flag"]),
        ("--workers 1025", ["--workers 1025: give at most 1024; more workers than cores"]),
        ("--max-line-mb 0 --partitions 0", ["--max-line-mb 0: give at", "--partitions 0: give at"]),
        ("--log-interval 0", ["--log-interval 0: give at least 1"]),
        ("--keep-newlines", ["--keep-newlines has an effect only with --split-sentences"]),
        ("--split-sentences --presplit-sentences", ["--split-sentences and --presplit-sentences:"]),
        ("--json-keys a b a", ["--json-keys a b a: give each key once"]),
        ("--workers 0 --json-keys a a", ["--workers 0: give", "--json-keys a a: give each key"]),
    ],
)
def test_all_bad_flags_are_reported_at_once(words: str, problems: list[str]) -> None:
    options: Any = preprocess_data.build_parser().read(f"{_BASE} {words}".split())
    with pytest.raises(ConfigError) as caught:
        preprocess_data._check(options)
    assert len(caught.value.problems) == len(problems)
    for told, expected in zip(caught.value.problems, problems, strict=True):
        assert told.startswith(expected)


@pytest.mark.parametrize(
    "words",
    ["--workers 1", "--workers 1024", "--max-line-mb 1 --partitions 1 --log-interval 1"]
    + ["--keep-newlines --split-sentences", "--presplit-sentences --json-keys a b"],
)
def test_flags_at_their_limits_are_accepted(words: str) -> None:
    preprocess_data._check(preprocess_data.build_parser().read(f"{_BASE} {words}".split()))


@pytest.mark.parametrize("language", ["klingon", "English", ""])
def test_a_language_that_punkt_does_not_know_is_reported(
    language: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "One is here. Two is there."}\n')
    find_punkt([str(path)], ["text"], language)
    told = capsys.readouterr().err
    assert f"WARNING: --lang {language!r}: NLTK's Punkt exists only for czech, danish, " in told
    assert "turkish: training Punkt on the beginning of the input\n" in told
    monkeypatch.setattr("megatron.data.preprocess.installed_punkt", lambda language: None)
    find_punkt([str(path)], ["text"], "german")
    told = capsys.readouterr().err
    assert told.startswith("NLTK's Punkt for german is not installed: training Punkt on the")
