"""The whole pipeline: what it finds, and that only its input and settings matter."""

from __future__ import annotations

import bz2
import errno
import gzip
import importlib.util
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("datatrove", reason="needs the extra: pip install -e '.[corpora]'")

import pyarrow
from datatrove.data import Document
from datatrove.utils.stats import PipelineStats
from pyarrow import parquet

from megatron.config.data import TokenizerConfig
from megatron.corpora import blocks, cleaning, sources
from megatron.corpora.cleaning import judge_quality
from megatron.corpora.plan import (
    LANGUAGES,
    CorpusPlan,
    LanguageStep,
    QualityStep,
    TasksStep,
    TokenizeStep,
    default_steps,
    plan_from_dict,
)
from megatron.corpora.run import DATASET, Cluster, build_corpus
from megatron.data.indexed import IndexedDataset
from megatron.data.text_input import TextBlock
from megatron.errors import ConfigError, DataError
from megatron.tools import build_corpus as command
from tests.corpora.planted import SMALL, Planted, plant, score
from tests.files import parquet_table
from tests.repository import ROOT
from tests.tokenizer.test_gpt2 import GOOD, write_pair


@pytest.fixture(scope="module", autouse=True)
def small_pieces():
    """Cut even the small corpus into several pieces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "_SMALLEST_PIECE", 100_000)
        yield


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> Planted:
    return plant(tmp_path_factory.mktemp("planted") / "corpus", SMALL, seed=1, shared=False)


@pytest.fixture(scope="module")
def plan(planted, tmp_path_factory) -> CorpusPlan:
    tokenizer = write_pair(tmp_path_factory.mktemp("tokenizer"), GOOD, "a b\n")
    steps = {
        **default_steps(),
        "tasks": TasksStep(tuple(map(str, planted.tasks)), ("text",)),
        "tokenize": TokenizeStep(tokenizer),
    }
    return CorpusPlan((str(planted.folder),), steps)


def _result(folder: Path) -> dict[str, bytes]:
    """Return every file that a pipeline leaves for its user."""
    files = [*folder.glob("text/*"), *folder.glob("dropped/*/*"), *folder.glob(f"{DATASET}.*")]
    files += [folder / "report.json", folder / "report.png", folder / "plan.json"]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


@pytest.fixture(scope="module")
def expected(plan, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("one") / "corpus"
    build_corpus(plan, folder, Cluster(workers=1), overwrite=False)
    assert len(list(folder.glob("text/*"))) >= 3
    return folder


def test_planted_documents_are_found(planted, expected) -> None:
    for name, found in score(planted, expected).items():
        assert found.precision >= 0.97, name
        assert found.recall >= 0.97, name


def test_the_report_accounts_for_every_document(planted, expected) -> None:
    report = json.loads((expected / "report.json").read_bytes())
    dropped = sum(one["documents"] for one in report["dropped"])
    texts = [json.loads(line) for f in expected.glob("text/*") for line in f.open()]
    parts = {record["id"].partition("#")[0] for record in texts}
    assert report["read"] == len(planted.texts) == dropped + len(parts)
    assert report["kept"]["documents"] == len(texts)
    assert report["kept"]["bytes"] == sum(len(record["text"].encode()) for record in texts)
    assert all(one["samples"] for one in report["dropped"])
    assert (expected / "report.png").read_bytes().startswith(b"\x89PNG")


def test_the_dataset_holds_the_text(expected) -> None:
    dataset = IndexedDataset(expected / DATASET)
    assert len(dataset) == json.loads((expected / "report.json").read_bytes())["kept"]["documents"]


@pytest.mark.parametrize("workers", [2, 4])
def test_output_does_not_depend_on_the_number_of_processes(
    plan, expected, tmp_path, workers
) -> None:
    build_corpus(plan, tmp_path / "corpus", Cluster(workers=workers), overwrite=False)
    assert _result(tmp_path / "corpus") == _result(expected)


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_output_does_not_depend_on_the_executor(plan, expected, tmp_path) -> None:
    build_corpus(plan, tmp_path / "corpus", Cluster("ray", workers=2), overwrite=False)
    assert _result(tmp_path / "corpus") == _result(expected)


def _run_killed(plan: CorpusPlan, folder: Path, at: str) -> None:
    """Run in a child that is killed just before the file `at` gets its final name."""
    child = os.fork()
    if child == 0:
        original = blocks.output

        @contextmanager
        def output(path: Path):
            with original(path) as file:
                yield file
                if str(path).endswith(at):
                    os.kill(os.getpid(), signal.SIGKILL)

        blocks.output = output
        encode = blocks.ShardEncoder.run

        def run(self, data, rank=0, world_size=1):
            encode(self, data, rank, world_size)
            if at == f"tokens/{rank:05d}":
                os.kill(os.getpid(), signal.SIGKILL)
            return []

        blocks.ShardEncoder.run = run
        from megatron.corpora import report

        report.output = output
        try:
            build_corpus(plan, folder, Cluster(workers=1), overwrite=False)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"the child was not killed at {at}"


def test_a_run_that_is_killed_in_every_stage_ends_with_the_same_bytes(
    plan, expected, tmp_path
) -> None:
    folder = tmp_path / "corpus"
    places = ("clean/00000.jsonl", "signatures/00001.npy", "dropped/clean/00002.json")
    places += ("groups/00001.npy", "text/00000.jsonl", "dropped/select/00001.json")
    for place in (*places, "tokens/00001", "report.json"):
        _run_killed(plan, folder, place)
    build_corpus(plan, folder, Cluster(workers=2), overwrite=False)
    assert _result(folder) == _result(expected)
    left = [str(path) for path in folder.rglob("*.tmp-*")]
    assert not left


def test_finished_tasks_are_not_repeated(plan, expected) -> None:
    before = {path: path.stat().st_mtime_ns for path in expected.rglob("text/*")}
    build_corpus(plan, expected, Cluster(workers=1), overwrite=False)
    assert {path: path.stat().st_mtime_ns for path in expected.rglob("text/*")} == before


def test_a_folder_with_another_corpus_is_refused(plan, expected, tmp_path) -> None:
    other = CorpusPlan(plan.input, {**plan.steps, "fix": type(plan.steps["fix"])(newlines=False)})
    with pytest.raises(ConfigError, match=r"steps.fix.newlines was True, now False.*--overwrite"):
        build_corpus(other, expected, Cluster(), overwrite=False)
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="contains other files"):
        build_corpus(plan, tmp_path, Cluster(), overwrite=True)
    assert (tmp_path / "mine.txt").exists()


def test_starting_again_leaves_nothing_of_the_corpus_before(tmp_path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(_GOOD)
    folder = tmp_path / "out"
    tokenizer = write_pair(tmp_path, GOOD, "a b\n")
    plan = CorpusPlan((str(source),), {"tokenize": TokenizeStep(tokenizer)})
    build_corpus(plan, folder, Cluster(), overwrite=False)
    assert (folder / f"{DATASET}.idx").exists()
    build_corpus(CorpusPlan(plan.input, {}), folder, Cluster(), overwrite=True)
    assert sorted(_result(folder)) == [
        "dropped/clean/00000.json",
        "dropped/clean/00000.jsonl",
        "plan.json",
        "report.json",
        "report.png",
        "text/00000.jsonl",
    ]


def test_a_kill_while_starting_again_is_not_taken_for_a_finished_run(tmp_path, monkeypatch) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(_GOOD)
    plan, folder = CorpusPlan((str(source),), {}), tmp_path / "out"
    build_corpus(plan, folder, Cluster(), overwrite=False)
    expected = _result(folder)
    remove = shutil.rmtree
    removed = []

    def killed(path: Path) -> None:
        if removed:
            raise KeyboardInterrupt
        removed.append(path)
        remove(path)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            build_corpus(plan, folder, Cluster(), overwrite=True)
    build_corpus(plan, folder, Cluster(), overwrite=False)
    assert _result(folder) == expected


def test_leftovers_of_killed_tasks_are_removed(tmp_path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "tokens").mkdir()
    (tmp_path / "text" / "00000.jsonl").write_bytes(_GOOD)
    leftovers = [tmp_path / f"{name}.bin.tmp-1" for name in ("tokens/00000", DATASET)]
    others = [tmp_path / f"{name}.bin.tmp-1" for name in ("tokens/00001", "mine")]
    for path in (*leftovers, *others):
        path.touch()
    step = TokenizeStep(write_pair(tmp_path, GOOD, "a b\n"))
    blocks.ShardEncoder(tmp_path / "text", tmp_path / "tokens", step).run(None, 0, 1)
    blocks.DatasetJoiner(tmp_path / "tokens", tmp_path / DATASET, 1).run(None, 0, 1)
    assert len(IndexedDataset(tmp_path / DATASET)) == 1
    assert [path.exists() for path in (*leftovers, *others)] == [False, False, True, True]


def test_a_run_does_not_continue_with_another_tokenizer_under_the_same_name(tmp_path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(_GOOD)
    tokenizer = write_pair(tmp_path, GOOD, "a b\n")
    plan = CorpusPlan((str(source),), {"tokenize": TokenizeStep(tokenizer)})
    build_corpus(plan, tmp_path / "out", Cluster(), overwrite=False)
    assert tokenizer.merge_file is not None
    Path(tokenizer.merge_file).write_text("#version: 0.2\na b\n\n")
    with pytest.raises(ConfigError, match=r"the input files have changed.*--overwrite"):
        build_corpus(plan, tmp_path / "out", Cluster(), overwrite=False)


def _build_from(tmp_path: Path, capsys, data: bytes, name: str, *more: str) -> list[dict]:
    """Return the documents that remain without the quality and language rules."""
    out = tmp_path / "out"
    words = ["--input", _write(tmp_path / name, data), "--output", str(out), "--workers", "1"]
    assert command.main([*words, "--skip-steps", "quality", "language", *more]) == 0
    capsys.readouterr()
    return [json.loads(line) for file in sorted(out.glob("text/*")) for line in file.open()]


_ALL_BUT_EXTRACT = ("urls", "fix", "language", "quality", "duplicates")


def test_fields_of_the_input_are_only_fields(tmp_path, capsys) -> None:
    fields = {"_dropped": 1, "_changed": 2, "_cut": 3, "_html": True}
    data = json.dumps({"text": "<b>some</b> words", "id": 0, **fields}).encode()
    assert _build_from(tmp_path, capsys, data, "a.jsonl") == [
        {"text": "<b>some</b> words", "id": "0", **fields}
    ]


def test_an_address_that_is_also_the_name_is_still_judged(tmp_path, capsys) -> None:
    data = b'{"text": "some words", "url": "https://facebook.com/x"}\n'
    assert _build_from(tmp_path, capsys, data, "a.jsonl", "--id-key", "url") == []


def test_documents_without_an_address_are_not_judged_by_it(tmp_path, capsys) -> None:
    given = [{"text": f"some words {number}", "id": str(number)} for number in range(4)]
    for one, url in zip(given, ("", None, 7), strict=False):
        one["url"] = url
    data = "".join(f"{json.dumps(one)}\n" for one in given).encode()
    assert _build_from(tmp_path, capsys, data, "a.jsonl") == given


def test_large_strings_and_numbers_of_parquet_are_read(tmp_path, capsys) -> None:
    large = pyarrow.large_string()
    columns = {"text": pyarrow.array(["some words"], large), "id": pyarrow.array([7])}
    data = parquet_table(**columns, url=pyarrow.array(["https://a.example.org/b"], large))
    assert _build_from(tmp_path, capsys, data, "a.parquet") == [
        {"text": "some words", "id": "7", "url": "https://a.example.org/b"}
    ]


def _record(
    body: bytes, uri: str = "http://example.com/a", kind: str = "application/http"
) -> bytes:
    head = f"WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: {uri}\r\nContent-Type: {kind}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body + b"\r\n\r\n"


@pytest.mark.parametrize("charset", ["utf-8", "none-such", "hex", "undefined", "idna"])
def test_a_page_may_name_any_encoding(tmp_path, capsys, charset) -> None:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset={charset}\r\n\r\n"
    page = head.encode() + "<html><body><p>Ein schöner Morgen</p></body></html>".encode()
    answer = _record(b"20260101\nexample.com. 300 IN A 10.0.0.1\n", kind="text/dns")
    about = _record(b"software: wget\r\n").replace(b"response", b"warcinfo")
    page = _record(page, "<http://example.com/a>")  # wget's brackets
    data = about + answer + page + answer  # only one of these is a page
    (found,) = _build_from(tmp_path, capsys, data, "a.warc")
    assert (found["text"], found["url"]) == ("Ein schöner Morgen", "http://example.com/a")


@pytest.mark.parametrize("name", ["a.warc", "a.warc.gz"])
def test_bodies_are_decoded_and_no_page_is_lost(tmp_path, capsys, name) -> None:
    """FastWARC's own decoder ends the file at the second page and fails on the others."""
    chunked = b"Transfer-Encoding: chunked\r\n"
    pages = []
    for number, headers in enumerate(
        (b"", chunked + b"Content-Encoding: gzip\r\n", b"Content-Encoding: x-gzip\r\n", chunked)
    ):
        body = b"<html><body><p>page %d</p></body></html>" % number
        body = gzip.compress(body, mtime=0) if b"gzip" in headers else body
        if number == 1:  # the last page is already decoded
            body = b"9\r\n%s\r\n%X\r\n%s\r\n0\r\n\r\n" % (body[:9], len(body) - 9, body[9:])
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n"
        pages.append(_record(head + headers + b"\r\n" + body))
    if name.endswith(".gz"):
        pages = [gzip.compress(page, mtime=0) for page in pages]
    found = _build_from(tmp_path, capsys, b"".join(pages), name, "--skip-steps", *_ALL_BUT_EXTRACT)
    assert [one["text"] for one in found] == ["page 0", "page 1", "page 2", "page 3"]


def test_a_page_that_is_too_long_only_when_decoded_is_counted(
    tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(sources, "_MAX_PAGE", 5000)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Encoding: gzip\r\n\r\n"
    data = b"".join(_record(head + gzip.compress(b"word " * size)) for size in (2000, 9))
    (found,) = _build_from(tmp_path, capsys, data, "a.warc")
    assert len(found["text"]) < 50
    dropped = (tmp_path / "out" / "dropped" / "clean" / "00000.jsonl").read_text()
    assert '"reason":"page too long","detail":"more than 5,000 bytes"' in dropped


@pytest.mark.parametrize("inner", ["<div>", "<div></x>", "<div a='</div>'>", "<div><!--</div>-->"])
def test_a_page_that_is_nested_too_deeply_is_left_out(tmp_path, capsys, inner) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<html><body>"
    deep = _record(head + inner.encode() * 100_000 + b"text")  # would take minutes
    wide = _record(head + b"<p>text<br><svg><path/></svg><div><b>more</b></div>" * 2000)
    (found,) = _build_from(tmp_path, capsys, deep + wide, "a.warc")
    assert found["text"].startswith("text")
    dropped = (tmp_path / "out" / "dropped" / "clean" / "00000.jsonl").read_text()
    assert '"step":"extract","reason":"nested too deeply"' in dropped


@pytest.mark.parametrize("name", ["a.warc", "a.warc.gz", "a.wet"])
def test_a_page_that_is_too_long_is_counted(tmp_path, capsys, monkeypatch, name) -> None:
    monkeypatch.setattr(sources, "_MAX_PAGE", 500)
    is_page = "warc" in name
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n" if is_page else b""
    kind = "application/http" if is_page else "text/plain"
    data = b"".join(
        _record(head + b"some text " * count, f"http://example.com/{count}", kind)
        for count in (10, 500, 49)
    )
    data = data if is_page else data.replace(b"response", b"conversion")
    data = gzip.compress(data) if name.endswith(".gz") else data
    steps = ("--skip-steps", "quality", "language", "duplicates")
    found = _build_from(tmp_path, capsys, data, name, *steps)
    assert [one["url"] for one in found] == ["http://example.com/10", "http://example.com/49"]
    (dropped,) = json.loads((tmp_path / "out" / "report.json").read_bytes())["dropped"]
    assert (dropped["step"], dropped["reason"], dropped["documents"]) == (
        "read",
        "page too long",
        1,
    )
    (sample,) = dropped["samples"]
    assert sample["detail"] == "5,000 bytes"


def test_a_plan_survives_yaml(plan, tmp_path, capsys) -> None:
    assert plan_from_dict(plan.to_dict(), "plan") == plan
    assert command.main(["--input", "a", "--language", "zh", "--print-plan"]) == 0
    file = tmp_path / "plan.yaml"
    file.write_text(capsys.readouterr().out)
    assert command.main(["--plan", str(file), "--print-plan"]) == 0
    assert capsys.readouterr().out == file.read_text()


def _fails(capsys, *words: str) -> str:
    code = command.main(list(words))
    message = capsys.readouterr().err
    assert code in (6, 8, 9)
    assert message.startswith("error: ")
    assert message.count("\n") == 1
    return message


def _write(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)


def _damaged(data: bytes) -> bytes:
    return data[:40] + b"\xff\x55\xff" + data[43:]


_GOOD = b'{"text": "some words"}\n'
_BAD_INPUTS = {
    "broken.jsonl": (_GOOD + b"{broken\n", "broken.jsonl:byte 23: broken JSON"),
    "utf8.jsonl": (_GOOD + b'{"text": "\xff"}\n', "utf8.jsonl:byte 23: bad UTF-8"),
    "key.jsonl": (b'{"body": "x"}\n', "no text under the key 'text'"),
    "list.jsonl": (b"[1]\n", "no text under the key 'text'"),
    "deep.jsonl": (b"[" * 99999, "broken JSON (nested too deeply)"),
    "half.jsonl": (b'{"text": "\\ud800"}', "half a surrogate pair"),
    "null.jsonl": (b'{"text": null}', "no text under the key 'text'"),
    "long.jsonl": (b'{"text": "' + b"1" * (65 << 20), "the line is longer than 64 MiB: fix"),
    "bytes.txt": (b"1 \xff", "not UTF-8 at byte 2: convert the file"),
    "plain.jsonl.gz": (_GOOD, "unreadable or truncated: Not a gzipped file"),
    "plain.jsonl.bz2": (_GOOD, "unreadable or truncated"),
    "plain.jsonl.zst": (_GOOD, "unreadable or truncated"),
    "other.parquet": (parquet_table(body=["x"]), "no such column"),
    "numbers.parquet": (parquet_table(text=[1]), "no text under the key 'text'"),
    "cut.parquet": (parquet_table(text=["x"])[:-9], "not a readable parquet file"),
    "cut.jsonl.gz": (gzip.compress(_GOOD * 100)[:-20], "unreadable or truncated"),
    "cut.jsonl.bz2": (bz2.compress(_GOOD * 100)[:-20], "unreadable or truncated"),
    "cut.jsonl.zst": (b"\x28\xb5\x2f\xfdxx", "unreadable or truncated"),
    "bad.parquet": (b"PAR1", "not a readable parquet file"),
    "bad.warc": (b"garbage\r\n\r\n", "damaged or truncated"),
    "cut.warc": (b"WARC/1.0\r\nContent-Length: 100\r\n\r\nabc", "ends in the middle of a record"),
    "bad.warc.gz": (_damaged(gzip.compress(bytes(range(256)) * 9)), "damaged or truncated"),
    "cut.warc.gz": (gzip.compress(b"WARC/1.0\r\n")[:-3], "damaged or truncated"),
    "empty.jsonl": (b"", "all files are empty"),
    "unknown.pdf": (b"x", "unknown suffix"),
}


@pytest.mark.parametrize("name", _BAD_INPUTS)
@pytest.mark.parametrize("workers", ["1", "2"])
def test_bad_input_ends_in_one_line(tmp_path, capsys, name, workers) -> None:
    data, expected = _BAD_INPUTS[name]
    path = _write(tmp_path / name, data)
    out = tmp_path / "out"
    words = ["--input", path, _write(tmp_path / "good.jsonl", _GOOD), "--output", str(out)]
    if name == "empty.jsonl":
        words.remove(str(tmp_path / "good.jsonl"))
    message = _fails(capsys, *words, "--workers", workers)
    assert name in message
    assert expected in message
    assert not list(out.glob("text/*"))


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize(
    "place", ["save_executor_as_json", "save_task_stats", "mark_rank_as_completed"]
)
def test_a_disk_that_fills_at_datatrove_s_files_is_one_line(
    tmp_path, capsys, monkeypatch, place, workers
) -> None:
    from megatron.corpora.local import LocalExecutor

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "a file")

    target = PipelineStats if place == "save_task_stats" else LocalExecutor
    monkeypatch.setattr(target, "save_to_disk" if target is PipelineStats else place, full)
    words = ["--input", _write(tmp_path / "good.jsonl", _GOOD), "--output", str(tmp_path / "out")]
    message = _fails(capsys, *words, "--workers", workers)
    assert message.startswith("error: --output ")
    assert "logs/clean cannot be written (a file: No space left on device)" in message


def test_a_disk_that_fills_is_one_line_and_leaves_no_corpus(tmp_path) -> None:
    path = _write(tmp_path / "a.jsonl", b"".join(b'{"text": "%d"}\n' % i for i in range(9999)))
    words = [str(ROOT / "tools" / "build_corpus.py"), "--input", path, "--workers", "2"]
    words += ["--output", str(tmp_path / "out"), "--skip-steps", "quality", "language"]
    finished = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)),
    )
    assert finished.returncode == 8
    (line,) = finished.stderr.splitlines()
    assert line.startswith("error: --output ")
    assert line.endswith("File too large): free space, or give another path")
    assert not list((tmp_path / "out").glob("text/*"))


def test_bad_lines_can_be_left_out(tmp_path, capsys) -> None:
    path = _write(tmp_path / "a.jsonl", _GOOD + b"{broken\n" + _GOOD)
    words = ["--input", path, "--output", str(tmp_path / "out"), "--skip-steps", "quality"]
    assert command.main([*words, "language", "--on-error", "skip", "--workers", "1"]) == 0
    output = capsys.readouterr().out
    assert "read: bad line" in output
    assert "duplicates: near-duplicate" in output


def test_lines_after_one_that_is_too_long_are_read(tmp_path, monkeypatch) -> None:
    good = [TextBlock("f", 0, 9, 9, _GOOD), TextBlock("f", 99, 9, 108, b"\n" + _GOOD)]
    long = TextBlock("f", 23, 76, 99, b"", "the line is too long")
    monkeypatch.setattr(sources, "read_blocks", lambda *_: iter([good[0], long, good[1]]))
    found = list(sources.read_piece((sources.FilePart("f", 0, -1),), CorpusPlan(("f",), {})))
    texts = [(one.location, one.text, one.problem) for one in found]
    assert texts == [
        ("f:byte 0", "some words", ""),
        ("f:byte 23", "", "the line is too long"),
        ("f:byte 100", "some words", ""),
    ]


def test_bad_flags_end_in_one_line(tmp_path, capsys) -> None:
    good = _write(tmp_path / "good.jsonl", _GOOD)
    out = ["--output", str(tmp_path / "out")]
    assert "--input" in _fails(capsys, *out)
    assert "--output" in _fails(capsys, "--input", good)
    for code in ("en-US", "xx"):
        assert f"--language {code}: not one of the 176 languages that can" in _fails(
            capsys, "--input", good, *out, "--language", code
        )
    assert "--workers 0" in _fails(capsys, "--input", good, *out, "--workers", "0")
    assert "--slurm-partition" in _fails(capsys, "--input", good, *out, "--executor", "slurm")
    missing = _fails(capsys, "--input", good, *out, "--tasks", str(tmp_path / "no.jsonl"))
    assert "no.jsonl: cannot be read" in missing
    short = _write(tmp_path / "task.jsonl", b'{"text": "too short"}')
    assert "at least 8 words" in _fails(capsys, "--input", good, *out, "--tasks", short)
    plan = _write(tmp_path / "plan.yaml", b"input: [a]\nsteps: {languages: {}}\n")
    assert "did you mean language?" in _fails(capsys, "--plan", plan, *out)
    plan = _write(tmp_path / "plan.yaml", b"input: [a]\nsteps: {duplicates: {bands: 0}}\n")
    assert "duplicates.bands 0: give at least 1" in _fails(capsys, "--plan", plan, *out)
    name = os.fsdecode(bytes(tmp_path) + b"/\xff.jsonl")
    assert "the name is not UTF-8" in _fails(capsys, "--input", _write(Path(name), _GOOD), *out)
    plan = _write(tmp_path / "plan.yaml", b"input: [a]\nsteps: {quality: {min_words: -1}}\n")
    assert "steps.quality.min_words: -1 is negative" in _fails(capsys, "--plan", plan, *out)


def test_an_unusable_tokenizer_is_found_before_any_work(planted, tmp_path) -> None:
    steps = {"tokenize": TokenizeStep(TokenizerConfig(tokenizer_type="GPT2BPETokenizer"))}
    with pytest.raises((ConfigError, DataError), match="vocab-file"):
        build_corpus(
            CorpusPlan((str(planted.folder),), steps), tmp_path / "out", Cluster(), overwrite=False
        )
    assert not (tmp_path / "out").exists()


def test_the_languages_are_those_of_the_identifier() -> None:
    identifier = cleaning._identifier()
    found = identifier.detect("text", model="lite", k=1_000, threshold=-1.0)
    assert {entry["lang"] for entry in found} == LANGUAGES


def test_a_language_of_the_minimum_probability_is_kept(monkeypatch) -> None:
    step = LanguageStep(("en",), probability=0.5)
    for found, reason in (
        (("en", 0.5), ""),
        (("en", 0.49), "language unsure"),
        (("de", 1), "language de"),
    ):
        monkeypatch.setattr(cleaning, "language_of", lambda text, found=found: found)
        assert cleaning.judge_language("", step) == reason


@pytest.mark.parametrize("length", [250, 300, 301, 350, 899, 900, 901, 5000])
def test_the_language_of_a_long_text_is_that_of_three_windows(length, monkeypatch) -> None:
    seen = []

    def detect(text, **_):
        seen.append(text)
        return [{"lang": "en", "score": 1.0}]

    monkeypatch.setattr(cleaning, "_identifier", lambda: SimpleNamespace(detect=detect))
    text = "".join(chr(0x4E00 + i) for i in range(length))
    assert cleaning.language_of(text) == ("en", 1.0)
    middle = text[(length - 100) // 2 :][:100]
    expected = text if length <= 300 else f"{text[:100]} {middle} {text[-100:]}"
    assert seen == [expected]


def test_a_batch_of_documents_is_limited_in_characters(monkeypatch) -> None:
    monkeypatch.setattr(blocks, "_BATCH_CHARACTERS", 10)
    documents = [Document("x" * size, str(size)) for size in (4, 5, 1, 2, 12, 3)]
    documents[1].metadata[blocks.Mark.DROPPED] = "short"
    found = [[len(one.text) for one in whole] for whole, _ in blocks._batched(documents)]
    assert found == [[4, 5, 1], [2, 12], [3]]
    assert [len(kept) for _, kept in blocks._batched(documents)] == [2, 2, 1]


def test_a_single_word_is_measured_by_its_letters() -> None:
    step = QualityStep(min_words=1, min_word_length=4.0, max_word_length=6.0, stop_words=0)
    texts = {"four": "", "sixsix": "", "the": "short words", "sevenxx": "long words", "": "too few"}
    for text, reason in texts.items():
        assert judge_quality(text, step).startswith(reason)
        assert bool(judge_quality(text, step)) == bool(reason)


def test_texts_for_pictures_are_not_part_of_a_page() -> None:
    picture = '<img src="a.png" alt="A cat on a mat.">'
    page = f"<html><body><main><p>It sat there all day.{picture}</p></main></body></html>"
    assert cleaning.extract_page(page) == "It sat there all day."


def test_only_changed_documents_are_marked_as_changed() -> None:
    def change(document: Document) -> str:
        document.text = document.text.replace("bad", "good")
        return "is spam" if "spam" in document.text else ""

    documents = [Document(text, text) for text in ("bad", "good", "spam")]
    documents.append(Document("bad", "dropped earlier", metadata={blocks.Mark.DROPPED: "x"}))
    found = {one.id: one for one in blocks.PerDocument("fix", change).run(documents, 0, 1)}
    assert found["bad"].text == "good"
    assert found["bad"].metadata[blocks.Mark.CHANGED] == ["fix"]
    assert blocks.Mark.CHANGED not in found["good"].metadata
    assert blocks.Mark.DROPPED in found["spam"].metadata
    assert found["dropped earlier"].text == "bad"


def test_lengths_of_words_mean_nothing_where_no_spaces_separate_them() -> None:
    chosen = {languages: default_steps(languages)["quality"] for languages in
              (("en",), ("de",), ("en", "de"), ("zh",), ("en", "ja"))}  # fmt: skip
    assert [step.stop_words for step in chosen.values()] == [2, 0, 0, 0, 0]
    unspaced = QualityStep(min_words=0, max_word_length=0.0, stop_words=0)
    assert [step == unspaced for step in chosen.values()] == [False, False, False, True, True]


def test_whole_numbers_are_numbers_of_a_plan() -> None:
    def quality(**values: object) -> QualityStep:
        steps = {"quality": values}
        data = {"input": ["a"], "steps": steps}
        return plan_from_dict(data, "plan.yaml").steps["quality"]

    found = quality(max_word_length=9, min_words=3)
    assert (found.max_word_length, type(found.max_word_length)) == (9.0, float)
    assert (found.min_words, type(found.min_words)) == (3, int)
    for wrong in ({"max_word_length": "9"}, {"max_word_length": True}, {"min_words": 3.5}):
        with pytest.raises(ConfigError, match="plan.yaml: steps.quality.*: expected (float|int)"):
            quality(**wrong)


def test_only_texts_and_whole_numbers_of_parquet_are_read(tmp_path) -> None:
    columns = {"url": ["a"], "text": ["b"], "id": [3], "score": [0.5], "list": [[1]]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    assert sources._columns(str(tmp_path / "a.parquet"), "text") == ["text", "url", "id"]
