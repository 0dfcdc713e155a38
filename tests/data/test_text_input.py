"""Blocks of text files: every line once, whatever the sizes of lines, blocks and shares."""

from __future__ import annotations

import bz2
import gzip
import json
import os
import random
import re
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from megatron.data import text_input
from megatron.data.text_input import (
    BadLine,
    Documents,
    TextBlock,
    find_inputs,
    is_splittable,
    load_line,
    parquet_columns,
    parse_block,
    parse_lines,
    read_blocks,
)
from megatron.errors import DataError

_MARK = text_input.BYTE_ORDER_MARK


def _lines(seed: int) -> list[bytes]:
    """Return lines of 1 to 30 bytes; the last one may lack its line end."""
    draw = random.Random(seed)
    lines = [draw.randbytes(draw.choice((0, 0, 1, 3, 9, 29))).hex()[:29] for _ in range(12)]
    whole, last = [f"{line}\n".encode() for line in lines[:-1]], lines[-1].encode()
    return [*whole, last] if seed % 2 and last else whole


def _pieces(
    blocks: list[TextBlock], data: bytes, longest: int, least: int, most: int
) -> list[bytes]:
    """Check each block, and return the lines of the file that they hold.

    Args:
        blocks: The blocks.
        data: The content of the file.
        longest: The size of the longest line to read.
        least: The minimum size of a block, except for the last one.
        most: The maximum size of a block without its last line.
    """
    found: list[bytes] = []
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        content = data[block.offset : block.offset + block.size]
        if block.problem:
            assert block.problem == "the line is longer than 0 MiB"
            assert block.data == b""
            end = data.find(b"\n", block.offset) + 1 or len(data)
            assert end - block.offset > longest
            found.append(data[block.offset : end])
            continue
        assert block.read() == content
        assert block.size > 0
        assert content.endswith(b"\n") or following is None
        lines = content.splitlines(keepends=True)
        assert max(map(len, lines)) <= longest
        # The last line of a block that would be larger than the longest line is on its own.
        is_last = following is None or block.size + following.size > longest
        assert block.size >= least or is_last
        assert block.size - len(lines[-1]) <= most
        found += lines
    return found


@pytest.mark.parametrize("mark", [b"", _MARK])
@pytest.mark.parametrize("longest", [5, 20, 100])
def test_a_file_s_lines_are_read_once_in_blocks(longest: int, mark: bytes, tmp_path: Path) -> None:
    for seed in range(12):
        lines = _lines(seed)
        data = mark + b"".join(lines)
        plain, packed = tmp_path / f"{seed}.jsonl", tmp_path / f"{seed}.jsonl.gz"
        plain.write_bytes(data)
        packed.write_bytes(gzip.compress(data))
        for least in (4, min(longest, 9)):
            in_place = [*text_input._plain_blocks(str(plain), longest, least)]
            streamed = [*text_input._streamed_blocks(str(packed), longest, least)]
            smallest = least if 2 * least <= longest else 1  # larger ones are divided
            assert _pieces(in_place, data, longest, smallest, least - 1) == lines
            # The byte order mark counts in the size of the first block.
            unmarked = smallest - len(mark)
            assert _pieces(streamed, data, longest, unmarked, least) == lines
            assert in_place[0].offset == streamed[0].offset == len(mark)
            assert all(block.bytes_read >= block.offset + block.size for block in in_place)
            assert in_place[-1].bytes_read == len(data) or in_place[-1].problem
            assert streamed[-1].bytes_read == packed.stat().st_size


def test_shares_of_a_file_hold_each_line_once(tmp_path: Path) -> None:
    for seed in range(6):
        data = _MARK * (seed % 3 == 0) + b"".join(_lines(seed))
        path = tmp_path / "a.jsonl"
        path.write_bytes(data)
        for cut in range(len(data) + 1):
            shares = [
                b"".join(block.read() for block in read_blocks([str(path)], ["text"], 4, bounds=b))
                for b in ((0, cut), (cut, len(data)))
            ]
            assert b"".join(shares) == data.removeprefix(_MARK)
            # A line belongs to the share in which it begins.
            start = len(data) - len(shares[1])
            assert start >= cut or not shares[1]
            assert not shares[0] or data.rfind(b"\n", 0, start - 1) + 1 < cut
    with pytest.raises(DataError, match=r"a.jsonl: the file has shrunk: run again when no"):
        list(read_blocks([str(path)], ["text"], bounds=(0, len(data) + 1)))


def test_the_longest_line_is_given_in_mib(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [b"1" * size + b"\n" for size in (5, (1 << 20) - 1, 1 << 20, 7)]
    path.write_bytes(b"".join(lines))
    packed = tmp_path / "b.jsonl.bz2"
    packed.write_bytes(bz2.compress(b"".join(lines)))
    for name in (path, packed):
        blocks = [*read_blocks([str(name)], ["text"], max_line_mb=1)]
        assert [block.problem for block in blocks if block.problem] == [
            "the line is longer than 1 MiB"
        ]
        good = b"".join(block.read() for block in blocks if not block.problem)
        assert good == b"".join(lines[:2] + lines[3:])
        (long,) = (block for block in blocks if block.problem)
        offset = len(lines[0]) + len(lines[1])
        assert long.offset == offset
        assert parse_block(long, ["text"]) == Documents([], [], 1, [BadLine(0, 0, long.problem)])
        message = rf"{name}: the line is longer than 1 MiB \(it starts at byte {offset}\): shorten"
        with pytest.raises(DataError, match=message):
            long.read()
        whole = [*read_blocks([str(name)], ["text"], max_line_mb=2)]
        assert b"".join(block.read() for block in whole) == b"".join(lines)


def test_a_pipe_is_read_as_a_stream(tmp_path: Path) -> None:
    path = tmp_path / "pipe.jsonl"
    os.mkfifo(path)
    writer = threading.Thread(target=lambda: path.write_bytes(b"one\ntwo\nthree\n"))
    writer.start()
    blocks = [*read_blocks([str(path)], ["text"], 4)]
    writer.join()
    assert [(block.offset, block.data, block.bytes_read) for block in blocks] == [
        (0, b"one\ntwo\n", 0),
        (8, b"three\n", 0),
    ]


def test_a_file_that_shrinks_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"12345\n12345\n")
    first, second = read_blocks([str(path)], ["text"], 4)
    path.write_bytes(b"12345\n1234")
    assert first.read() == b"12345\n"
    with pytest.raises(DataError, match="a.jsonl: the file has shrunk: run again when no program"):
        second.read()
    path.unlink()
    message = r"--input .*a.jsonl: cannot be read \(No such file or directory\): restore the file"
    with pytest.raises(DataError, match=message):
        parse_block(first, ["text"])


def test_lines_and_their_documents() -> None:
    data = b'{"a": "x", "b": ["y", "z"]}\n\n \t\n{"a": "", "b": []}\n[1]\n{"b": "x"}\n'
    data += b'{"a": 1, "b": ""}\n{"a": NaN, "b": ""}\n{"a": "q", "b": ["1", 2], "c": NaN}\n'
    assert parse_lines(data, ["a", "b"]) == Documents(
        values=[["x", ["y", "z"]], ["", []]],
        locations=[(0, 0), (3, 32)],
        lines=9,
        bad=[
            BadLine(4, 51, "expected a JSON object, found a list"),
            BadLine(5, 55, "no key 'a'"),
            BadLine(6, 66, "'a' is a number, expected a string"),
            BadLine(7, 84, "'a' is a number, expected a string"),
            BadLine(8, 104, "'b' is a list, expected a string"),
        ],
    )
    assert parse_lines(data[:-1], ["a", "b"]) == parse_lines(data, ["a", "b"])
    assert parse_lines(b"", ["a"]) == parse_lines(b"\n", ["a"]) == Documents([], [], 1, [])
    kinds = ["true", "1", "0.5", "null", "{}"]
    bad = parse_lines(b"\n".join(f'{{"a": {kind}}}'.encode() for kind in kinds), ["a"]).bad
    assert [line.reason.split(" is ")[1].split(",")[0] for line in bad] == [
        "true or false",
        "a number",
        "a number",
        "null",
        "an object",
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"a": "\xff"}', "bad UTF-8 (byte 7 of the line)"),
        (b'{"a": "\\ud800"}', "broken JSON (half a surrogate pair in a string)"),
        (b'{"a": "b}', "broken JSON (Unterminated string starting at character 6)"),
        (b'{"a": }', "broken JSON (Expecting value at character 6)"),
        (b"[" * 100_000, "broken JSON (nested too deeply)"),
        (b"1" * 5000, "a number of more than 4,300 digits: write it as a string"),
    ],
)
def test_broken_lines_are_described(line: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        load_line(line)


def test_numbers_that_json_lacks_are_read() -> None:
    found = load_line(b'{"a": "x", "b": Infinity, "c": [NaN], "d": 1e999}')
    assert (found["a"], found["b"], found["d"]) == ("x", float("inf"), float("inf"))


def _rows(path: Path, values: list[object], **columns: list[object]) -> None:
    table = pa.table({"text": values, **columns})
    parquet.write_table(table, path, row_group_size=7)


def test_rows_of_parquet_become_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    texts = ["x" * (i % 5) for i in range(40)]
    _rows(path, list(texts), id=list(range(40)))
    assert parquet_columns(str(path)) == ["text", "id"]
    for least in (1, 30, 10_000):
        blocks = [*read_blocks([str(path)], ["text", "id"], least)]
        lines = b"".join(block.read() for block in blocks)
        assert [json.loads(line) for line in lines.splitlines()] == [
            {"text": text, "id": i} for i, text in enumerate(texts)
        ]
        position = 0
        for block in blocks:
            assert (block.offset, block.size, block.path) == (
                position,
                len(block.read()),
                str(path),
            )
            position += block.size
        read = [block.bytes_read for block in blocks]
        assert read == sorted(read)
        assert read[-1] == path.stat().st_size
        assert len(blocks) == (40 if least == 1 else 1 if least == 10_000 else len(blocks))
        assert all(block.size >= least for block in blocks[:-1])
    with pytest.raises(DataError, match=r"--json-keys x: no such column in .*: choose one of text"):
        list(read_blocks([str(path)], ["text", "x"]))
    path.write_bytes(path.read_bytes()[:-9])
    for read_it in (
        lambda: list(read_blocks([str(path)], ["text"])),
        lambda: parquet_columns(path),
    ):
        with pytest.raises(DataError, match="a.parquet: not a readable parquet file .*copy it"):
            read_it()


def test_a_row_that_is_too_long_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    _rows(path, ["a", "b" * (1 << 20), "c", "d" * (3 << 20), "e"])
    blocks = [*read_blocks([str(path)], ["text"], max_line_mb=1)]
    assert [(block.problem, block.data) for block in blocks] == [
        ("", b'{"text":"a"}\n'),
        ("the line is longer than 1 MiB", b""),
        ("", b'{"text":"c"}\n'),
        ("the line is longer than 1 MiB", b""),
        ("", b'{"text":"e"}\n'),
    ]
    assert [block.bytes_read for block in blocks] == [
        path.stat().st_size * rows // 5 for rows in (1, 2, 3, 4, 5)
    ]


def test_rows_that_are_not_utf_8_are_bad_lines(tmp_path: Path) -> None:
    ends, text = np.array([0, 3, 5], np.int32), b"a\n\xffok"
    values = pa.StringArray.from_buffers(2, pa.py_buffer(ends), pa.py_buffer(text))
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": values}), path)
    (block,) = read_blocks([str(path)], ["text"])
    found = parse_block(block, ["text"])
    assert found.bad == [BadLine(0, 0, "bad UTF-8 (byte 2 of the line)")]
    assert found.values == [["ok"]]


def test_text_may_be_declared_as_binary(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    columns = {"text": ["é".encode(), b"x\xff", b""], "image": [b"\x89PNG", None, b"\xff"]}
    types = pa.schema([("text", pa.binary()), ("image", pa.large_binary())])
    parquet.write_table(pa.table(columns, types), path)
    (block,) = read_blocks([str(path)], ["text", "image"])
    assert [json.loads(line) for line in block.read().splitlines()] == [
        {"text": "é", "image": None},
        {"text": None, "image": None},
        {"text": "", "image": None},
    ]


def test_too_little_memory_is_not_taken_for_a_bad_text(monkeypatch: pytest.MonkeyPatch) -> None:
    for message, error in (("surrogates not allowed", MemoryError), ("no such type", TypeError)):

        def dumps(*_: object, message: str = message, **__: object) -> bytes:
            raise TypeError(message)

        monkeypatch.setattr(text_input.orjson, "dumps", dumps)
        with pytest.raises(error, match=message):
            text_input._dump_line({"text": "a"})


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(_MARK + 'é "x"\n'.encode())
    data = b'{"body":"\xc3\xa9 \\"x\\"\\n"}\n'
    (block,) = read_blocks([str(path)], ["body", "other"])
    assert block == TextBlock(str(path), 0, len(data), 10, data)
    path.write_bytes(b"abc\xffd")
    with pytest.raises(DataError, match=r"a.txt: not UTF-8 at byte 3: convert the file"):
        list(read_blocks([str(path)], ["text"]))
    for size, problem in ((1 << 20, ""), ((1 << 20) + 1, "the line is longer than 1 MiB")):
        path.write_bytes(b"a" * size)
        (block,) = read_blocks([str(path)], ["text"], max_line_mb=1)
        assert (block.problem, block.bytes_read) == (problem, size)


def test_formats_are_known_by_their_suffix(tmp_path: Path) -> None:
    names = "a.jsonl b.json.gz c.NDJSON d.txt e.parquet f.txt.zst g.bin"
    for name in names.split():
        (tmp_path / name).write_bytes(b"x")
    found = [Path(path).name for path in find_inputs([str(tmp_path)], (".bin",))]
    assert found == names.split()
    assert [Path(path).name for path in find_inputs([str(tmp_path)])] == names.split()[:-1]
    splittable = [name for name in names.split() if is_splittable(str(tmp_path / name))]
    assert splittable == ["a.jsonl", "c.NDJSON", "g.bin"]
    assert not is_splittable(str(tmp_path))


def test_only_a_suffix_or_the_first_bytes_tell_a_format(tmp_path: Path) -> None:
    line = b'{"text": "a"}\n'
    (tmp_path / "a.txt").write_bytes(line)
    (block,) = read_blocks(find_inputs([str(tmp_path / "a.txt")]), ["text"])
    assert json.loads(block.read()) == {"text": line.decode()}
    for name, data in (
        ("late", b" " * 4095 + line),
        ("marked", _MARK + line),
        ("samples.out", line),
        ("SAMPLES.OUT", line),
    ):
        (tmp_path / name).write_bytes(data)
        assert find_inputs([str(tmp_path / name)]) == [str(tmp_path / name)]
        assert is_splittable(str(tmp_path / name))
    for name, data in (("later", b" " * 4096 + line), ("b.bin", line), ("list", b"[1]\n")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match=f"{name}: unknown suffix"):
            find_inputs([str(tmp_path / name)])


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["a.jsonl", "./a.jsonl"], "--input ./a.jsonl: this file is given twice: give it once"),
        (["*.jsonl", "a.jsonl"], "--input a.jsonl: this file is given twice"),
        (["none*"], r"--input none\*: no such file or folder, and no file matches this pattern"),
        (["empty"], "--input empty: this folder contains no file with a known suffix"),
        (["b.link"], "--input b.link: this is a link to a file that does not exist: fix the link"),
        (["c.bin"], "--input c.bin: unknown suffix; expected .jsonl, .json, .ndjson, each also"),
    ],
)
def test_inputs_that_cannot_be_read(
    patterns: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for name in ("a.jsonl", "c.bin", "empty/x.out"):
        (tmp_path / name).write_text("x")
    (tmp_path / "b.link").symlink_to("nowhere")
    with pytest.raises(DataError, match=message):
        find_inputs(patterns)


def test_only_a_last_line_that_may_be_too_long_has_its_own_block() -> None:
    block = TextBlock("x", 5, 6, 9, b"ab\ncd\n")
    assert list(text_input._split_off_last_line(block, 6)) == [block]
    first, last = TextBlock("x", 5, 3, 9, b"ab\n"), TextBlock("x", 8, 3, 9, b"cd\n")
    for longest in (5, 3):
        assert list(text_input._split_off_last_line(block, longest)) == [first, last]
    told = text_input._without_text(last, 2)
    assert list(text_input._split_off_last_line(block, 2)) == [first, told]
    assert list(text_input._split_off_last_line(last, 2)) == [told]


@pytest.mark.parametrize("block_bytes", [1, 1 << 19, 1 << 21])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_line_of_just_the_longest_size_is_read_whole(
    block_bytes: int, suffix: str, tmp_path: Path
) -> None:
    path, last = tmp_path / f"a.jsonl{suffix}", b'{"text":"b"}\n'
    for size in ((1 << 20) - 1, 1 << 20, (1 << 20) + 1):
        line = b'{"text":"' + b"x" * (size - 12) + b'"}\n'
        assert len(line) == size
        path.write_bytes(gzip.compress(line + last, 1) if suffix else line + last)
        blocks = [*read_blocks([str(path)], ["text"], block_bytes, max_line_mb=1)]
        data = b"".join(block.read() for block in blocks if not block.problem)
        problems = [block.problem for block in blocks if block.problem]
        fits = size <= 1 << 20
        assert problems == ([] if fits else ["the line is longer than 1 MiB"])
        assert data == (line + last if fits else last)


def test_two_stars_stand_for_folders_at_any_depth(tmp_path: Path) -> None:
    names = ["a.jsonl", "b/c.jsonl", "b/d/e/f.jsonl"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"text": "x"}\n')
    found = find_inputs([str(tmp_path / "**" / "*.jsonl")])
    assert [str(Path(path).relative_to(tmp_path)) for path in found] == names
