"""Articles from a dump: their text, resuming, and damaged files."""

from __future__ import annotations

import bz2
import errno
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.errors import ConfigError, DataError, StorageError
from tests.repository import ROOT
from tests.tools.wikipedia.toy import ROOT_TAG, SITE, articles, dump, page, write_dump
from tools.wikipedia import dump as reading
from tools.wikipedia import extract, merge
from tools.wikipedia.dump import Site, read_pages

pytest.importorskip("mwparserfromhell", reason="mwparserfromhell is not installed (corpora)")
from tools.wikipedia.plain import plain_text

TOY = Site("https://eo.wikipedia.org/wiki/", frozenset({"file", "image", "dosiero", "kategorio"}))


@pytest.mark.parametrize(
    ("wikitext", "expected"),
    [
        ("'''Pomo''' estas [[frukto]] de [[arbo (planto)|arboj]].", "Pomo estas frukto de arboj."),
        ("A{{ŝablono|x={{y}}}} b<ref name=x>c [[d]]</ref><ref name=x/>.", "A b."),
        ("[[Dosiero:A.jpg|eta|Ruĝa [[pomo]]]]Teksto", "Teksto"),
        ("[[File:A.jpg|thumb|B]][[Image:C.png]]Teksto [[Kategorio:Fruktoj]]", "Teksto"),
        ("Teksto\n[[en:Apple]]\n[[zh-yue:蘋果]]", "Teksto"),
        ("[[:Kategorio:Fruktoj]] kaj [[Vikipedio:Pri]]", "Kategorio:Fruktoj kaj Vikipedio:Pri"),
        ("== Historio ==\nTeksto", "Historio\n\nTeksto"),
        ("A\n\n\n\n\nB", "A\n\nB"),
        ("A\n{| class=x\n! B !! C\n|-\n| D || E\n|}\nF", "A\n\nF"),
        ("* unu\n* du &amp; tri&nbsp;kvar", "unu\ndu & tri kvar"),
        ("[https://example.org retejo] kaj https://example.org", "retejo kaj"),
        ("A <!-- ne --> B<br>C <nowiki>[[kruda]]</nowiki>", "A B\nC [[kruda]]"),
        ("Ĉefo ({{lang|x}}) estas", "Ĉefo estas"),
        ("La ''{{lang|fr|x}}'' , aŭ (''{{lang|y}}'', '''z''') .", "La, aŭ (z)."),
        ("{{a|{{b|{{c}}}}|d=[[e]]}}f l''''arbo''' '''''g'''''", "f l'arbo g"),
        ("A<ref>x<ref name='y' />z</ref>B<!-- <ref> -->C<REF>d</REF >", "ABC"),
        ("A<ref>ne fermita", "A<ref>ne fermita"),
        ("__NOTOC__\n<math>x^2</math><gallery>\nA.jpg|b\n</gallery>", ""),
        ("{{{{{{ [[ ''' <ref> {| nefermita", "{{{{{{ [["),
    ],
)
def test_what_remains_is_prose(wikitext: str, expected: str) -> None:
    found = plain_text(wikitext, TOY)
    assert found.startswith(expected) if "nefermita" in wikitext else found == expected


@pytest.mark.parametrize("bit", ["[[", "<b>", "<ref>", "{|\n|", "{{"])
def test_a_page_that_would_take_for_ever_is_not_read(bit: str) -> None:
    with pytest.raises(ValueError, match="more than 100 links, tables or tags are not closed"):
        plain_text(bit * 100_000, TOY)


@pytest.mark.parametrize("bit", ["<ref ", "'''''", "<!--", "<br>", "{{a}}", "]] [[", "\n== a"])
def test_long_pages_take_seconds(bit: str) -> None:
    begin = time.process_time()
    plain_text(bit * 20_000, TOY)
    assert time.process_time() - begin < 20


def _lines(folder: Path) -> list[dict[str, str]]:
    files = sorted(folder.glob("part-*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_an_article_is_a_line_and_nothing_else_is(tmp_path: Path) -> None:
    pages = articles(5)
    pages.append(page(70, 'Ĉu "A/B" & C?', "Jes."))
    counts = extract.extract(write_dump(tmp_path / "a.xml.bz2", pages), tmp_path / "out", 1)
    found = _lines(tmp_path / "out")
    assert [line["title"] for line in found[:5]] == [f"Artikolo {i}" for i in range(5)]
    assert found[5] == {
        "id": "70",
        "url": "https://eo.wikipedia.org/wiki/%C4%88u_%22A/B%22_%26_C%3F",
        "title": 'Ĉu "A/B" & C?',
        "text": "Jes.",
    }
    assert counts == {"articles": 6, "empty": 1}
    assert extract.report(counts) == "6 articles; dropped: 1 empty"


def test_a_page_that_is_too_long_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "LONGEST", 200)
    pages = [page(1, "A", "a" * 200), page(2, "B", "b" * 201)]
    counts = extract.extract(write_dump(tmp_path / "a.xml.bz2", pages), tmp_path / "out", 0)
    assert counts == {"articles": 1, "too long": 1}


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extract, "_BATCH", 1500)
    monkeypatch.setattr(extract, "_BATCHES", 3)


@pytest.mark.usefixtures("small_parts")
def test_any_number_of_workers_writes_the_same(tmp_path: Path) -> None:
    source = write_dump(tmp_path / "a.xml.bz2", articles(60))
    found = []
    for workers in (0, 1, 2, 5):
        out = tmp_path / str(workers)
        extract.extract(source, out, workers)
        found.append({file.name: file.read_bytes() for file in out.iterdir()})
    assert found[1:] == found[:1] * 3
    assert len(found[0]) > 4


def test_formats_of_compression_give_the_same(tmp_path: Path) -> None:
    data = dump(articles(9))
    for name, content in (
        ("a.xml.gz", gzip.compress(data)),
        ("a.xml", data),
        ("a.xml.bz2", bz2.compress(data[:900]) + bz2.compress(data[900:])),  # several streams
    ):
        (tmp_path / name).write_bytes(content)
        assert len(list(read_pages(tmp_path / name))) == 10, name


_KILLED = """
import os, signal, sys
from pathlib import Path
from tools.wikipedia import extract

def replace_or_die(path, data):
    if (path.parent / "part-00002.jsonl").exists():  # it is complete, but not recorded
        os.kill(os.getpid(), signal.SIGKILL)
    replace(path, data)

replace, extract.durable.replace_file = extract.durable.replace_file, replace_or_die
extract._BATCH, extract._BATCHES = 1500, 3
extract.extract(Path(sys.argv[1]), Path(sys.argv[2]), 2)
"""


@pytest.mark.usefixtures("small_parts")
def test_a_kill_loses_at_most_a_part(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = write_dump(tmp_path / "a.xml.bz2", articles(400))
    out, unfinished = tmp_path / "out", tmp_path / "out.unfinished"
    words = [sys.executable, "-c", _KILLED, str(source), str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=ROOT, env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    assert not out.exists()
    kept = {file: file.stat().st_mtime_ns for file in unfinished.glob("part-0000[01].jsonl")}
    extract.extract(source, out, 1)
    assert "continuing after" in capfd.readouterr().out
    for file, changed in kept.items():
        assert (out / file.name).stat().st_mtime_ns == changed
    extract.extract(source, tmp_path / "whole", 1)
    assert _lines(out) == _lines(tmp_path / "whole")
    assert len(_lines(out)) == 400


def test_another_dump_does_not_continue_there(tmp_path: Path) -> None:
    (tmp_path / "out.unfinished").mkdir()
    (tmp_path / "out.unfinished" / "extraction.json").write_text('{"dump": "b", "parts": [{}]}')
    source = write_dump(tmp_path / "a.xml.bz2", articles(2))
    with pytest.raises(ConfigError, match=r"out.unfinished is an unfinished .* dump \(b\): remove"):
        extract.extract(source, tmp_path / "out", 0)


BOMB = '<!DOCTYPE m [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]>\n'
GOOD = dump(articles(30, words=400))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.xml.bz2", bz2.compress(GOOD)[:-40], "the file is truncated: download it again"),
        ("a.xml.gz", gzip.compress(GOOD)[:-9], "the file is truncated"),
        ("a.xml.bz2", b"not compressed", r"cannot be read \(Invalid data stream\): download"),
        ("a.xml.gz", b"not compressed", r"cannot be read \(Not a gzipped file"),
        ("a.xml", GOOD[:-20], r"line \d+: broken XML \((no element|unclosed token)"),
        ("a.xml", GOOD.replace(b"</text>", b"</txt>", 1), r"broken XML \(mismatched tag\)"),
        ("a.xml", b"", r"broken XML \(no element found\)"),
        ("a.xml", b"<html></html>", "the first element is <html>: expected a dump"),
        ("a.xml", (BOMB + "<mediawiki>&b;</mediawiki>").encode(), "document type definition"),
        ("a.xml", (ROOT_TAG + page(1, "A", "a")).encode(), "<siteinfo> is missing"),
        ("a.xml", (ROOT_TAG + SITE).encode() + b"\xff", r"broken XML \(not well-formed"),
        ("a.7z", GOOD, r"expected a dump whose name ends in \.bz2"),
    ],
    ids=range(12),  # otherwise the bytes would be the names
)
def test_bad_dumps_end_in_one_line(
    name: str, data: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=message) as caught:
        extract.extract(tmp_path / name, tmp_path / "out", 1)
    assert str(caught.value).startswith(str(tmp_path / name))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_full_disk_leaves_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    source = write_dump(tmp_path / "a.xml.bz2", articles(3))
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match=r"--output .*No space left on device.*free space"):
            extract.extract(source, tmp_path / "out", 0)
    assert not list((tmp_path / "out.unfinished").iterdir())
    extract.extract(source, tmp_path / "out", 0)
    assert len(_lines(tmp_path / "out")) == 3


def test_parts_are_joined_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = tmp_path / "old"
    (old / "AA").mkdir(parents=True)
    (old / "AB").mkdir()
    for name, number in (("AA/wiki_00", 1), ("AA/wiki_01", 2), ("AB/wiki_00", 3)):
        (old / name).write_text(json.dumps({"text": str(number)}) + "\n")
    out = tmp_path / "all.jsonl"
    assert merge.main([str(old), "--output", str(out)]) == 0
    assert [json.loads(line)["text"] for line in out.read_text().splitlines()] == ["1", "2", "3"]
    assert merge.main([str(old), "--output", str(out)]) != 0
    assert "already exists" in capsys.readouterr().err
    (old / "AA" / "wiki_01").write_text('<doc id="1">')
    assert merge.main([str(old), "--output", str(tmp_path / "b.jsonl")]) == DataError.exit_code
    assert "not JSON lines: WikiExtractor writes them with --json" in capsys.readouterr().err
    assert not (tmp_path / "b.jsonl").exists()
    assert merge.main([str(tmp_path / "AA"), "--output", str(out) + "2"]) == DataError.exit_code


def test_a_joined_file_that_does_not_fit_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "part-00000.jsonl").write_text("{}\n")
    monkeypatch.setattr(merge.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1}))
    with pytest.raises(StorageError, match="3 bytes are needed, but only 1 are free"):
        merge.merge(tmp_path, tmp_path / "out" / "all.jsonl")
    assert not list((tmp_path / "out").iterdir())
