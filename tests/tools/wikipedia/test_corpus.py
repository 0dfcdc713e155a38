"""From a mirror's dump, or a local dump, to a dataset."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

from megatron.data.indexed import IndexedDataset
from megatron.errors import ConfigError, DataError
from tests.repository import ROOT
from tests.tools.wikipedia.toy import articles, dump, mirror_of, page, serving, write_dump
from tools.wikipedia import corpus, extract

pytest.importorskip("mwparserfromhell", reason="mwparserfromhell is not installed (corpora)")


def _make(out: Path, url: str, *more: str) -> int:
    words = ["--wiki", "eo", "--out", str(out), "--url", url, "--workers", "1"]
    return corpus.main([*words, "--vocab-size", "300", *more])


def test_from_a_mirror_to_a_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import bz2

    out = tmp_path / "eo"
    with serving(mirror_of("eo", "20261101", bz2.compress(dump(articles(20))))) as url:
        assert _make(out, url) == 0
        made = {file: file.stat().st_mtime_ns for file in out.rglob("*")}
        dataset = IndexedDataset(out / "wikipedia_text_document")
        assert len(dataset.document_indices) - 1 == 20
        assert not (out / "articles").exists()
        assert _make(out, url) == 0
        assert {file: file.stat().st_mtime_ns for file in out.rglob("*")} == made
    assert "are complete" in capsys.readouterr().out


def test_without_a_network_there_is_one_line_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert _make(tmp_path / "out", f"http://127.0.0.1:{port}") == DataError.exit_code
    said = capsys.readouterr()
    (line,) = (said.out + said.err).splitlines()
    assert "check the network and run the same command again" in line
    assert "or give --url with a mirror or a file" in line
    assert line.count("--url") == 1
    assert not list(tmp_path.iterdir())


def test_a_dump_on_this_machine_and_a_kill_before_each_step(tmp_path: Path) -> None:
    source = write_dump(tmp_path / "eowiki.xml.bz2", articles(20))
    out = tmp_path / "out"
    assert _make(out, str(source)) == 0
    names = ["wikipedia.jsonl", "wikipedia_text_document.bin", "wikipedia_text_document.idx"]
    expected = {name: (out / name).read_bytes() for name in names}
    tokenizer = str(out / "tokenizer" / "tokenizer.json")
    for lost in (names[2:], names[1:], names):
        for name in lost:
            (out / name).unlink()
        if lost == names:  # killed between writing the parts and the joined file
            extract.extract(source, out / "articles", 0)
        assert _make(out, str(source), "--tokenizer-model", tokenizer) == 0
        assert {name: (out / name).read_bytes() for name in names} == expected


def test_a_folder_is_not_continued_with_other_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(write_dump(tmp_path / "eowiki.xml.bz2", articles(20)))
    out = tmp_path / "out"
    assert _make(out, source) == 0
    assert _make(out, source, "--vocab-size", "310") == ConfigError.exit_code
    assert "was started with --vocab-size 300" in capsys.readouterr().err
    assert _make(out, source, "--wiki", "de") == ConfigError.exit_code
    assert "--wiki de: --out" in capsys.readouterr().err
    other = str(shutil.copy(out / "tokenizer" / "tokenizer.json", tmp_path))
    assert _make(out, source, "--tokenizer-model", other) == ConfigError.exit_code
    assert "was started with --tokenizer-model" in capsys.readouterr().err
    assert _make(out, source) == 0


def test_a_folder_is_of_one_dump(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "dump.txt").write_text("/gone/eowiki-20260101-pages-articles.xml.bz2\n")
    source = write_dump(tmp_path / "a.xml.bz2", [page(1, "A", "a")])
    assert _make(out, str(source)) == ConfigError.exit_code
    assert "was made from a different dump, which no longer" in capsys.readouterr().err
    assert _make(out, str(source), "--tokenizer-model", "none.json") == ConfigError.exit_code
    assert "--tokenizer-model none.json: there is no such file" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_runs_it() -> None:
    def words(*more: str) -> list[str]:
        command = ["make", "-n", "corpus", *more]
        shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        (line,) = re.findall(r"\S+ (tools/wikipedia/corpus.py .*)", shown.stdout)
        return str(line).split()

    assert words()[1:] == ["--wiki", '"simple"', "--out", '"corpora/simplewiki"']
    more = words("WIKI=eo", "OUT=a", "URL=b.xml.bz2", "TOKENIZER=t.json")
    assert more[1:] == ["--wiki", '"eo"', "--out", '"a"', "--url", '"b.xml.bz2"'] + [
        "--tokenizer-model",
        '"t.json"',
    ]
