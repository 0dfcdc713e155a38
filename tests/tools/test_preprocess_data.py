"""tools/preprocess_data.py from file to file: formats, flags, bad lines, kills, workers."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from megatron.data.indexed import IndexedDataset
from megatron.errors import ShortageError
from megatron.tokenizer.fast_bpe import byte_of_character
from megatron.tools import preprocess_data
from tests.files import write_lines
from tests.repository import ROOT
from tests.tokenizer.t5 import write_t5_tokenizer

TOOL = ROOT / "tools" / "preprocess_data.py"


@pytest.fixture(scope="session")
def tokenizer_flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return flags for a byte-level BPE with 259 entries; <|endoftext|> is 258."""
    folder = tmp_path_factory.mktemp("tokenizer")
    vocab = {character: i for i, character in enumerate(byte_of_character())}
    vocab |= {"he": 256, "ll": 257, "<|endoftext|>": 258}
    (folder / "v.json").write_text(json.dumps(vocab))
    (folder / "m.txt").write_text("#version: 0.2\nh e\nl l\n")
    flags = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab", str(folder / "v.json")]
    return [*flags, "--merge-file", str(folder / "m.txt")]


@pytest.fixture
def run(tmp_path, tokenizer_flags, capfd):
    """Run the tool on `--input`, writing to tmp_path/out; return (exit code, stdout, stderr).

    A later run in the same test replaces the earlier output.
    """

    def call(*flags: object) -> tuple[int, str, str]:
        prefix = ["--output-prefix", str(tmp_path / "out" / "x"), "--overwrite"]
        code = preprocess_data.main([*prefix, *tokenizer_flags, *map(str, flags)])
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return call


def output(tmp_path: Path, name: str = "x_text_document") -> IndexedDataset:
    return IndexedDataset(tmp_path / "out" / name)


def names(tmp_path: Path) -> list[str]:
    folder = tmp_path / "out"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def contents(tmp_path: Path) -> dict[str, bytes]:
    return {name: (tmp_path / "out" / name).read_bytes() for name in names(tmp_path)}


# Megatron's own output


def test_golden_corpus_to_the_byte(golden, tmp_path):
    data = golden / "data"
    flags = ["--vocab-file", data / "gpt2-tiny-vocab.json"]
    flags += ["--merge-file", data / "gpt2-tiny-merges.txt"]
    flags += ["--input", data / "speeches.jsonl", "--output-prefix", tmp_path / "gpt"]
    flags += ["--tokenizer-type", "GPT2BPETokenizer", "--append-eod", "--workers", "2"]
    assert preprocess_data.main([str(flag) for flag in flags]) == 0
    for suffix in (".bin", ".idx"):
        expected = (data / f"gpt_text_document{suffix}").read_bytes()
        assert (tmp_path / f"gpt_text_document{suffix}").read_bytes() == expected


def test_nvidias_numbers_to_the_byte(shared_data, tmp_path):
    folder = shared_data / "binidx" / "nvidia-train"
    flags = ["--input", str(folder / "test.jsonl"), "--output-prefix", str(tmp_path / "test")]
    flags += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "131072", "--append-eod"]
    assert preprocess_data.main(flags) == 0
    for suffix in (".bin", ".idx"):
        expected = (folder / f"test_text_document{suffix}").read_bytes()
        assert (tmp_path / f"test_text_document{suffix}").read_bytes() == expected


# Input and output


def test_documents_and_end_of_document(run, tmp_path):
    records = [{"text": "hello"}, {"text": ""}, {"text": "é"}, {"text": ["hell", "", "o"]}]
    path = write_lines(tmp_path / "in.jsonl", records)
    code, out, _ = run("--input", path, "--append-eod")
    assert code == 0
    dataset = output(tmp_path)
    got = [dataset.get(i).tolist() for i in range(len(dataset))]
    o = list(byte_of_character()).index("o")
    # An empty document remains a document, without even an end; a list consists of sentences.
    e_acute = [list(byte_of_character().values()).index(byte) for byte in "é".encode()]
    assert got == [[256, 257, o, 258], [*e_acute, 258], [256, 257], [o, 258]]
    assert dataset.document_indices.tolist() == [0, 1, 1, 2, 4]
    assert dataset.dtype == np.uint16
    assert "4 documents, 0 bad lines" in out


def test_sentences_get_no_special_tokens_of_their_own(tmp_path):
    """The special tokens that a tokenizer.json puts around a text are only added to whole texts."""
    flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model"]
    flags += [str(write_t5_tokenizer(tmp_path / "t5")), "--workers", "1"]
    records = [{"text": "w0 w1"}, {"text": ["w2", "w3 w4"]}, {"text": "w5"}]
    words = ["--input", str(write_lines(tmp_path / "in.jsonl", records)), *flags]
    assert preprocess_data.main([*words, "--output-prefix", str(tmp_path / "out" / "x")]) == 0
    data = output(tmp_path)
    assert [data.get(i).tolist() for i in range(4)] == [[3, 4, 1], [5], [6, 7], [8, 1]]
    assert data.document_indices.tolist() == [0, 1, 3, 4]


def test_a_t5_document_ends_once(tmp_path):
    """With --append-eod too, a document ends once: T5's tokenizer.json already appends its end."""
    flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model"]
    flags += [str(write_t5_tokenizer(tmp_path / "t5")), "--workers", "1", "--append-eod"]
    records = [{"text": "w0 w1"}, {"text": ["w2", "w3 w4"]}, {"text": "w5"}]
    words = ["--input", str(write_lines(tmp_path / "in.jsonl", records)), *flags]
    assert preprocess_data.main([*words, "--output-prefix", str(tmp_path / "out" / "x")]) == 0
    data = output(tmp_path)
    assert [data.get(i).tolist() for i in range(4)] == [[3, 4, 1], [5], [6, 7, 1], [8, 1]]


@pytest.mark.parametrize(
    ("flags", "level"), [([], "document"), (["--split-sentences"], "sentence")]
)
@pytest.mark.parametrize("ending", ["bin", "idx"])
def test_an_existing_dataset_is_not_replaced(
    tmp_path, tokenizer_flags, capsys, flags, level, ending
):
    source = write_lines(tmp_path / "in.jsonl", [{"text": "hello"}, {"text": "hell"}])
    existing = tmp_path / f"x_text_{level}.{ending}"
    existing.write_text("mine")
    words = ["--input", str(source), "--output-prefix", str(tmp_path / "x"), *tokenizer_flags]
    assert preprocess_data.main([*words, *flags]) == 9
    assert capsys.readouterr().err.splitlines() == [
        f"error: --output-prefix: {existing} already exists: choose another name, or give "
        "--overwrite to replace it"
    ]
    assert existing.read_text() == "mine"
    assert preprocess_data.main([*words, *flags, "--overwrite"]) == 0
    assert len(IndexedDataset(tmp_path / f"x_text_{level}")) == 2


def test_every_key_is_written(run, tmp_path):
    records = [{"a": "hello", "b": "he", "c": 1}] * 3
    code, _, _ = run(
        "--input", write_lines(tmp_path / "in.jsonl", records), "--json-keys", "a", "b"
    )
    assert code == 0
    assert names(tmp_path) == [f"x_{key}_document.{end}" for key in "ab" for end in ("bin", "idx")]
    assert output(tmp_path, "x_a_document").num_tokens == 9
    assert output(tmp_path, "x_b_document").num_tokens == 3


def test_all_formats_give_the_same(run, tmp_path):
    import pyarrow
    from pyarrow import parquet

    records = [{"text": f"hello {i} " + "wörld\n" * (i % 7)} for i in range(2500)]
    plain = write_lines(tmp_path / "a.jsonl", records)
    data = plain.read_bytes()
    middle = data.index(b"\n", len(data) // 2) + 1
    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf" + data.replace(b"\n", b"\r\n").rstrip())
    (tmp_path / "a.jsonl.gz").write_bytes(
        gzip.compress(b"\xef\xbb\xbf" + data[:middle]) + gzip.compress(data[middle:])
    )
    (tmp_path / "a.jsonl.bz2").write_bytes(
        bz2.compress(data[:middle]) + bz2.compress(data[middle:])
    )
    pack = zstandard.ZstdCompressor().compress
    (tmp_path / "a.jsonl.zst").write_bytes(pack(data[:middle]) + pack(data[middle:]))
    table = pyarrow.table({"id": range(2500), "text": [record["text"] for record in records]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=700)
    results = set()
    for name in ("a.jsonl", "a.json", "a.jsonl.gz", "a.jsonl.bz2", "a.jsonl.zst", "a.parquet"):
        for workers in (1, 2):
            code, _, err = run("--input", tmp_path / name, "--append-eod", "--workers", workers)
            assert code == 0, err
            results.add(tuple(contents(tmp_path).values()))
    assert len(results) == 1
    assert len(output(tmp_path)) == 2500


def test_small_blocks_cut_only_at_lines(tmp_path, monkeypatch):
    from megatron.data.text_input import read_blocks

    lines = [json.dumps({"text": "x" * (i * 37 % 500)}) for i in range(300)]
    data = ("\n".join(lines) + "\n\n" + "y" * 5000).encode()
    (tmp_path / "a.jsonl").write_bytes(data)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(data))
    for name in ("a.jsonl", "a.jsonl.gz"):
        for size in (1, 64, 1000, 10**6):
            blocks = list(read_blocks([str(tmp_path / name)], ["text"], size))
            read = [block.read() for block in blocks]
            assert b"".join(read) == data
            assert all(block.endswith(b"\n") for block in read[:-1])
            assert [b.offset for b in blocks] == [sum(map(len, read[:i])) for i in range(len(read))]


def test_files_globs_and_directories_in_order(run, tmp_path):
    folder = tmp_path / "corpus"
    (folder / "deep").mkdir(parents=True)
    write_lines(folder / "b.jsonl", [{"text": "b"}])
    write_lines(folder / "a.json", [{"text": "a"}])
    write_lines(folder / "deep" / "c.jsonl", [{"text": "c"}])
    (folder / "deep" / "d.txt").write_text("d")
    (folder / "readme.md").write_text("left out")
    first = write_lines(tmp_path / "z.jsonl", [{"text": "z"}])
    letters = dict(enumerate(byte_of_character()))

    def text() -> str:
        dataset = output(tmp_path)
        return "".join(letters[int(dataset.get(i)[0])] for i in range(len(dataset)))

    assert run("--input", first, folder)[0] == 0
    assert text() == "zabcd"
    assert run("--input", folder / "*.json*")[0] == 0
    assert text() == "ab"
    for again in (first, f"{tmp_path}/corpus/../z.jsonl", f"{tmp_path}/*.jsonl"):
        code, _, err = run("--input", first, folder, again)
        assert code == 6
        assert re.fullmatch(
            r"error: --input .*z\.jsonl: this file is given twice: give it once\n", err
        )
    assert run("--input", folder / "deep", folder)[0] == 6
    assert text() == "ab"  # nothing was written
    (tmp_path / "again.jsonl").symlink_to(first)  # twice on purpose
    assert run("--input", first, tmp_path / "again.jsonl")[0] == 0
    assert text() == "zz"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.jsonl", "nowhere.jsonl: no such file"),
        ("*.xz", "no file matches this pattern"),
        ("link.jso*", "link.jsonl: this is a link to a file that does not exist"),
        ("empty", r"contains no file with a known suffix \(.jsonl, .*.txt\)"),
        ("readme.md", "unknown suffix; expected .jsonl"),
        ("cut.jsonl.gz", "cut.jsonl.gz.*unreadable or truncated"),
        ("cut.jsonl.bz2", "cut.jsonl.bz2.*unreadable or truncated"),
        ("parts.jsonl.bz2", "parts.jsonl.bz2.*unreadable or truncated"),
        ("false.jsonl.bz2", "false.jsonl.bz2.*unreadable or truncated"),
        ("cut.jsonl.zst", "cut.jsonl.zst.*unreadable or truncated"),
        ("false.jsonl.zst", "false.jsonl.zst.*unreadable or truncated"),
        ("false.parquet", "false.parquet: not a readable parquet file"),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_unreadable_input_is_named(run, tmp_path, name, message, workers):
    noise = "".join(random.Random(1).choices("abcdef", k=400_000))
    lines = b'{"text": "%b"}\n' % noise.encode()
    (tmp_path / "empty").mkdir()
    (tmp_path / "readme.md").write_text("x")
    (tmp_path / "link.jsonl").symlink_to("nowhere")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(lines)[:-2000])
    packed = bz2.compress(lines)
    (tmp_path / "cut.jsonl.bz2").write_bytes(packed[:-2000])
    (tmp_path / "parts.jsonl.bz2").write_bytes(packed + packed[:50] + packed[60:])
    (tmp_path / "false.jsonl.bz2").write_bytes(lines)
    (tmp_path / "cut.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(lines)[:-2000])
    (tmp_path / "false.jsonl.zst").write_bytes(lines)
    (tmp_path / "false.parquet").write_bytes(lines)
    target = tmp_path / name
    code, _, err = run("--input", target, "--workers", workers)
    assert code == 6
    assert re.search(message, err), err
    assert names(tmp_path) == []


def test_sentences_without_nltks_data(run, tmp_path, monkeypatch):
    monkeypatch.setattr("megatron.data.preprocess.installed_punkt", lambda language: None)
    text = "Dr. Smith said hello. He left at 5 p.m.\nWas it late? Yes!  It was."
    path = write_lines(tmp_path / "in.jsonl", [{"text": text}] * 50)
    code, _, err = run("--input", path, "--split-sentences", "--append-eod")
    assert code == 0
    assert "training Punkt" in err
    dataset = output(tmp_path, "x_text_sentence")
    assert len(dataset.document_indices) == 51
    letters = {i: chr(b) for i, b in enumerate(byte_of_character().values())}
    letters |= {256: "he", 257: "ll", 258: "|"}
    first = [dataset.get(i).tolist() for i in range(dataset.document_indices[1])]
    sentences = ["".join(letters[i] for i in ids) for ids in first]
    assert sentences[-3:] == ["Was it late?", "Yes!", "It was.|"]
    assert sum(s.count("|") for s in sentences) == 1
    code, _, _ = run("--input", path, "--split-sentences", "--keep-newlines", "--workers", 2)
    assert code == 0
    dataset = output(tmp_path, "x_text_sentence")
    ids = np.concatenate([dataset.get(i) for i in range(dataset.document_indices[1])])
    assert "".join(letters[int(i)] for i in ids) == text


# Flags


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--workers", "0"], "--workers 0: give at least 1"),
        (["--workers", "5000"], "--workers 5000: give at most 1024"),
        (["--partitions", "0"], "--partitions 0: give at least 1"),
        (["--log-interval", "0"], "--log-interval 0: give at least 1"),
        (["--keep-newlines"], "add --split-sentences"),
        (["--json-keys", "a", "a"], "--json-keys a a: give each key once"),
        (["--output-prefix", ""], '--output-prefix "": give the beginning of the names of the'),
    ],
)
def test_bad_flags_are_named(run, tmp_path, flags, message):
    path = write_lines(tmp_path / "in.jsonl", [{"text": "x"}])
    code, _, err = run("--input", path, *flags)
    assert code == 9
    assert message in err
    assert names(tmp_path) == []


@pytest.mark.parametrize("kind", ["lazy", "cached"])
def test_old_formats_are_written_as_today_s(run, tmp_path, kind):
    path = write_lines(tmp_path / "in.jsonl", [{"text": "hello"}])
    assert run("--input", path)[0] == 0
    want = contents(tmp_path)
    code, _, err = run("--input", path, "--dataset-impl", kind)
    assert code == 0
    assert f"--dataset-impl {kind}: written as mmap" in err
    assert contents(tmp_path) == want


def test_input_without_a_document_is_reported(run, tmp_path):
    path = write_lines(tmp_path / "in.jsonl", [])
    code, _, err = run("--input", path)
    assert code == 0
    assert err == f"WARNING: --input {path}: no documents found; the output is empty\n"


def test_flags_of_old_scripts(run, tmp_path):
    path = write_lines(tmp_path / "in.jsonl", [{"text": "hello"}] * 10)
    old = ["--json-key", "text", "--dataset-impl", "mmap", "--partitions", 2, "--workers", 2]
    old += ["--keep-sequential-samples", "--log-interval", 1, "--lang", "english"]
    assert run("--input", path, *old)[0] == 0
    assert len(output(tmp_path)) == 10


def test_a_language_without_effect_is_reported(run, tmp_path):
    path = write_lines(tmp_path / "in.jsonl", [{"text": "hello"}])
    code, _, err = run("--input", path, "--lang", "german")
    assert code == 0
    assert err == (
        "WARNING: --lang german: no effect without --split-sentences: add it, or drop --lang\n"
    )


def test_missing_tokenizer_flag_is_named(tmp_path, capsys):
    path = write_lines(tmp_path / "in.jsonl", [{"text": "x"}])
    flags = ["--input", str(path), "--output-prefix", str(tmp_path / "x")]
    assert preprocess_data.main([*flags, "--tokenizer-type", "BertWordPieceCase"]) == 9
    assert "requires --vocab-file: add it" in capsys.readouterr().err


# Bad lines


BAD_LINES = {
    b'{"text": "cut': "broken JSON",
    b"[1, 2]": "expected a JSON object, found a list",
    b'{"txt": "no key"}': "no key 'text'",
    b'{"text": null}': "'text' is null, expected a string",
    b'{"text": 5}': "'text' is a number, expected a string",
    b'{"text": ["a", 1]}': "'text' is a list, expected a string",
    b'{"text": "bad \xff"}': "bad UTF-8 (byte 14 of the line)",
    b'{"text": "\\ud800"}': "half a surrogate pair",
    b'{"text": ' + b"[" * 100_000: "broken JSON",
}


@pytest.mark.parametrize(("line", "message"), BAD_LINES.items())
def test_bad_line_stops_with_its_place(run, tmp_path, line, message):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"text": "hello"}\n\n' + line + b'\n{"text": "hello"}\n')
    code, _, err = run("--input", path)
    assert code == 6
    assert err.startswith(f"error: {path}:3: ")
    assert message in err
    assert "(line starts at byte 19)" in err
    assert "--on-error skip" in err
    assert names(tmp_path) == []


def test_nan_beside_the_text_is_no_harm(run, tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"score": NaN, "text": "hello"}\n')
    assert run("--input", path)[0] == 0
    assert output(tmp_path).num_tokens == 3


def test_text_the_tokenizer_refuses_is_a_bad_line(tmp_path, capsys):
    path = write_lines(tmp_path / "in.jsonl", [{"text": "1 2"}, {"text": "1 x"}, {"text": "3"}])
    flags = ["--input", str(path), "--output-prefix", str(tmp_path / "out" / "x")]
    flags += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "10", "--on-error", "skip"]
    assert preprocess_data.main(flags) == 0
    assert f"{path}:2: NullTokenizer reads numbers" in capsys.readouterr().err
    assert output(tmp_path).num_tokens == 3


def make_fuzzed(path: Path, lines: int, share: float) -> tuple[list[int], Path]:
    """Write a corpus with a `share` of bad lines; return their numbers and a clean corpus."""
    generator = random.Random(24)
    bad, good_data, data = [], [], []
    for number in range(1, lines + 1):
        if generator.random() < share:
            data.append(generator.choice(list(BAD_LINES)))
            bad.append(number)
            continue
        text = "".join(generator.choices('hello wörld\n\t"\\世', k=generator.randint(0, 400)))
        line = json.dumps({"text": text}, ensure_ascii=generator.random() < 0.5).encode()
        data.append(line)
        good_data.append(line)
    path.write_bytes(b"\n".join(data) + b"\n")
    clean = path.with_name("clean.jsonl")
    clean.write_bytes(b"\n".join(good_data) + b"\n")
    return bad, clean


def test_fuzz_skips_exactly_the_bad_lines(run, tmp_path, monkeypatch):
    monkeypatch.setattr("megatron.data.text_input.read_blocks.__defaults__", (20_000,))
    path = tmp_path / "in.jsonl"
    bad, clean = make_fuzzed(path, lines=2000, share=0.01)
    assert len(bad) > 10
    assert run("--input", clean, "--append-eod", "--workers", 1)[0] == 0
    expected = contents(tmp_path)
    for workers in (1, 2, 4):
        code, out, err = run(
            "--input", path, "--append-eod", "--workers", workers, "--on-error", "skip"
        )
        assert code == 0
        assert f"{2000 - len(bad):,} documents, {len(bad)} bad lines skipped" in out
        reported = [int(line.split(":")[1]) for line in err.splitlines()]
        assert reported == bad
        assert contents(tmp_path) == expected
        code, _, err = run("--input", path, "--workers", workers)
        assert code == 6
        assert f"{path}:{bad[0]}: " in err
        assert contents(tmp_path) == expected, "a failed run leaves an earlier output alone"


# Kills


def start_long_run(tmp_path: Path, flags: list[str], workers: int) -> subprocess.Popen[str]:
    """Start a run that waits for input from a pipe that never ends."""
    pipe = tmp_path / "pipe.jsonl.gz"
    os.mkfifo(pipe)
    command = [sys.executable, str(TOOL), "--input", str(pipe), *flags]
    command += ["--output-prefix", str(tmp_path / "out" / "x"), "--workers", str(workers)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def feed(tmp_path: Path) -> object:
    """Write some blocks of good lines into the pipe, which stays open."""
    writer = open(tmp_path / "pipe.jsonl.gz", "wb", buffering=0)  # noqa: SIM115
    noise = random.Random(1)
    lines = b"".join(
        json.dumps({"text": "".join(noise.choices("abcdefgh ", k=4000))}).encode() + b"\n"
        for _ in range(2500)
    )
    writer.write(gzip.compress(lines, 1))
    return writer


def wait_for_output(tmp_path: Path) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        sizes = [path.stat().st_size for path in (tmp_path / "out").glob("*.bin.tmp*")]
        if sizes and max(sizes) > 0:
            return
        time.sleep(0.02)
    pytest.fail("the run did not begin to write")


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_killed_run_leaves_nothing_under_the_final_names(tmp_path, tokenizer_flags, how):
    process = start_long_run(tmp_path, tokenizer_flags, workers=2)
    writer = feed(tmp_path)
    wait_for_output(tmp_path)
    workers = children(process.pid)
    assert len(workers) == 3  # including the reader
    process.send_signal(how)
    _, err = process.communicate(timeout=240)
    writer.close()
    assert process.returncode == (-9 if how == signal.SIGKILL else 128 + how)
    assert "Traceback" not in err
    left = names(tmp_path)
    if how == signal.SIGKILL:
        assert all(".tmp-" in name for name in left)
    else:
        assert left == []
    deadline = time.monotonic() + 60
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, workers)), "workers must not outlive the run"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_killed_worker_ends_the_run(tmp_path, tokenizer_flags):
    process = start_long_run(tmp_path, tokenizer_flags, workers=2)
    writer = feed(tmp_path)
    wait_for_output(tmp_path)
    for worker in children(process.pid):
        with contextlib.suppress(ProcessLookupError):  # the run has seen that another one ended
            os.kill(worker, signal.SIGKILL)
    # The run may end, and close its end of the pipe, before reading everything.
    with contextlib.suppress(BrokenPipeError):
        writer.write(gzip.compress(b'{"text": "more"}\n' * 10**6, 1))
    writer.close()
    _, err = process.communicate(timeout=240)
    assert process.returncode == ShortageError.exit_code
    assert "Traceback" not in err
    assert "a worker process ended with exit code -9" in err
    assert names(tmp_path) == []


# Input that is merely large


def _write_as(path: Path, texts: list[str]) -> Path:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines, 1))
    elif path.suffix == ".bz2":
        path.write_bytes(bz2.compress(lines))
    elif path.suffix == ".zst":
        path.write_bytes(zstandard.compress(lines))
    elif path.suffix == ".parquet":
        parquet.write_table(pyarrow.table({"text": texts}), path)
    else:
        path.write_bytes(lines)
    return path


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.bz2", "a.jsonl.zst", "a.parquet"]
)
def test_a_line_that_is_too_long_is_named_or_left_out(run, tmp_path, name):
    path = _write_as(tmp_path / name, ["he", "x" * (3 << 20), "ll", "y" * (1 << 20), "hell"])
    code, _, err = run("--input", path, "--max-line-mb", 1)
    assert code == 6
    assert f"error: {path}:2: the line is longer than 1 MiB" in err
    assert "raise --max-line-mb, or skip bad lines with --on-error skip" in err
    assert (err.count("\n"), names(tmp_path)) == (1, [])
    code, out, err = run("--input", path, "--max-line-mb", 1, "--on-error", "skip")
    assert (code, err.count("\n")) == (0, 2)
    assert f"{path}:4: the line is longer than 1 MiB" in err
    assert "3 documents, 2 bad lines skipped" in out
    documents = output(tmp_path)
    assert [documents.get(i).tolist() for i in range(3)] == [[256], [257], [256, 257]]


def _damaged_text(data: bytes) -> pyarrow.Array:
    """Return an array with one text of these bytes, which pyarrow does not validate."""
    ends = np.array([0, len(data)], np.int32)
    buffers = [None, pyarrow.py_buffer(ends), pyarrow.py_buffer(data)]
    return pyarrow.Array.from_buffers(pyarrow.string(), 1, buffers)


def _twins() -> pyarrow.Array:
    """Return an array of one record with two fields of the same name."""
    return pyarrow.StructArray.from_arrays([pyarrow.array([1])] * 2, names=["a", "a"])


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (_damaged_text(b"a\n\xff\xfe"), "bad UTF-8 (byte 2 of the line)"),
        (pyarrow.array([1 << 60], pyarrow.timestamp("ms")), "'text' is null"),
        (pyarrow.array([1 << 30], pyarrow.date32()), "'text' is null"),
        (pyarrow.array([1], pyarrow.duration("ns")), "'text' is null"),
        (pyarrow.array([0], pyarrow.timestamp("us", tz="Nowhere")), "'text' is null"),
        (pyarrow.array([b"\xff"]), "'text' is null"),
        (_twins(), "'text' is null"),
    ],
    ids=["bad UTF-8", "a late time", "a late day", "nanoseconds", "no such zone", "bytes", "twins"],
)
def test_a_parquet_value_that_is_not_text_is_a_bad_line(tmp_path, value, reason):
    from megatron.data.text_input import parse_block, read_blocks

    parquet.write_table(pyarrow.table({"text": value}), tmp_path / "a.parquet")
    (block,) = read_blocks([str(tmp_path / "a.parquet")], ["text"])
    documents = parse_block(block, ["text"])
    assert (documents.values, documents.lines) == ([], 1)
    assert reason in documents.bad[0].reason


def test_a_text_file_that_is_too_long_is_named(run, tmp_path):
    for name, pack in (
        ("a.txt", bytes),
        ("b.txt.gz", gzip.compress),
        ("b.txt.bz2", bz2.compress),
        ("c.txt.zst", zstandard.compress),
    ):
        (tmp_path / name).write_bytes(pack(b"x" * ((1 << 20) + 1)))
        code, _, err = run("--input", tmp_path / name, "--max-line-mb", 1)
        assert (code, err.count("\n")) == (6, 1)
        assert f"{name}:1: the line is longer than 1 MiB" in err


def test_lines_around_the_longest_are_read_whole(tmp_path):
    """Blocks contain every line once, except exactly those that are too long."""
    from megatron.data.text_input import read_blocks

    longest, random_ = 1 << 20, random.Random(5)
    for trial in range(20):
        sizes = [
            random_.choice([0, 5, 70_000, longest - 2, longest - 1, longest, 2 * longest + 1])
            for _ in range(random_.randrange(1, 12))
        ]
        lines = [bytes([97 + index]) * size for index, size in enumerate(sizes)]
        data = b"\n".join(lines) + b"\n" * (trial % 2)
        (tmp_path / "a.jsonl").write_bytes(data)
        (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(data, 1))
        for name in ("a.jsonl", "a.jsonl.gz"):
            size = random_.choice([10, 100_000, 4 << 20])
            blocks = list(read_blocks([str(tmp_path / name)], ["text"], size, max_line_mb=1))
            for block in blocks:
                if not block.problem:
                    assert data[block.offset : block.offset + block.size] == block.read()
            read = b"".join(block.read() for block in blocks if not block.problem)
            whole = data.splitlines(keepends=True)
            assert read == b"".join(line for line in whole if len(line) <= longest)
            starts = [block.offset for block in blocks if block.problem]
            assert [data[start : start + 1] for start in starts] == [
                line[:1] for line in whole if len(line) > longest
            ]


def test_a_gzip_of_gigabytes_takes_little_memory(tmp_path, tokenizer_flags):
    """Read 1 GB in one line with a limit of 2 GB on the total address space."""
    path = tmp_path / "a.jsonl.gz"
    with gzip.open(path, "wb", 1) as file:
        file.write(b'{"text": "')
        for _ in range(1000):
            file.write(b"a" * (1 << 20))
        file.write(b'"}\n{"text": "hell"}\n')
    flags = ["--input", str(path), "--output-prefix", str(tmp_path / "out"), *tokenizer_flags]
    limit = (2_000_000_000, 2_000_000_000)
    done = subprocess.run(
        [sys.executable, str(TOOL), *flags, "--on-error", "skip"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, limit),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "1 documents, 1 bad lines skipped" in done.stdout


def test_a_worker_without_memory_is_one_line(tmp_path, tokenizer_flags):
    path = _write_as(tmp_path / "a.jsonl", ["x" * (30 << 20)])
    flags = ["--input", str(path), "--output-prefix", str(tmp_path / "out" / "x"), *tokenizer_flags]
    done = subprocess.run(
        [sys.executable, str(TOOL), *flags],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (800_000_000, 800_000_000)),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == ShortageError.exit_code, done.stderr
    assert "Traceback" not in done.stderr
    assert "--max-line-mb" in done.stderr.splitlines()[-1]
    assert names(tmp_path) == []
