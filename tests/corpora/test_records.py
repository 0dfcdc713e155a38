"""Records of JSON lines: what is read and written, and the place of a bad line."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megatron.corpora import records, sources
from megatron.corpora.records import (
    dump_record,
    map_records,
    parse_records,
    read_records,
    transform_records,
    write_records,
)
from megatron.corpora.sources import FilePart, cut_pieces
from megatron.data.text_input import TextBlock
from megatron.errors import ConfigError, DataError, StorageError


def test_lines_of_a_block_are_read_with_their_place() -> None:
    lines = [b'{"a": "x", "b": 1}', b"", b" \t", b'{"a": "\xc3\xa9"}']
    block = TextBlock("f", 100, 0, 0, b"\n".join(lines) + b"\n")
    assert parse_records(block, ("a",)) == [{"a": "x", "b": 1}, {"a": "é"}]
    offset = 100 + sum(len(line) + 1 for line in lines)
    for line, message in (
        (b"[1]", "expected a JSON object: fix or remove the line"),
        (b"{", "broken JSON"),
        (b'{"a": 1}', "no text under the key 'a': fix the line or key"),
        (b'{"b": "x"}', "no text under the key 'a'"),
    ):
        bad = TextBlock("f", 100, 0, 0, b"\n".join([*lines, line]))
        with pytest.raises(DataError, match=f"f: line at byte {offset}: .*{message}"):
            parse_records(bad, ("a",))
    assert parse_records(TextBlock("f", 0, 0, 0, b'{"a": 1}')) == [{"a": 1}]


def _sort(found: list[dict[str, Any]]) -> tuple[list[list[dict[str, Any]]], Counter[str]]:
    """Divide records by whether their number is even, and count both."""
    even = [one for one in found if one["n"] % 2 == 0]
    odd = [one for one in found if one["n"] % 2]
    return [even, odd], Counter(even=len(even), odd=len(odd))


@pytest.mark.parametrize("workers", [0, 2])
def test_records_are_divided_in_order(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_SMALL", 1)  # worker processes even for a small file
    source = tmp_path / "in.jsonl"
    written = ({"n": n, "text": "é" * n} for n in range(50))
    assert write_records(str(source), written) == 50
    assert [one["n"] for one in read_records(str(source), ("text",))] == list(range(50))
    outputs = [str(tmp_path / name) for name in ("even", "odd")]
    counts = transform_records(str(source), outputs, _sort, ("text",), workers)
    assert counts == Counter(even=25, odd=25)
    for path, first in zip(outputs, (0, 1), strict=True):
        lines = Path(path).read_text().splitlines()
        assert [json.loads(line)["n"] for line in lines] == list(range(first, 50, 2))
    (results,) = map_records(str(source), _sort, (), workers)
    assert [len(part) for part in results[0]] == [25, 25]


def test_a_bad_line_leaves_no_output(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"n": 1}\n{"m": 1}\n')
    outputs = [str(tmp_path / name) for name in ("even", "odd")]
    with pytest.raises(DataError, match=r"in.jsonl: line at byte 0: no text under the key 'text'"):
        transform_records(str(source), outputs, _sort, ("text",), 0)
    assert list(tmp_path.iterdir()) == [source]
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"output .*file/even"):
        transform_records(str(source), [str(tmp_path / "file" / "even")], _sort, (), 0)
    for name in ("a.txt", "a.PARQUET"):
        (tmp_path / name).touch()
        with pytest.raises(ConfigError, match=f"{name}: expected JSON lines: give a .json or"):
            list(read_records(str(tmp_path / name)))
    with pytest.raises(ConfigError, match=r"none.jsonl: no such file: fix the name"):
        list(read_records(str(tmp_path / "none.jsonl")))


def test_numbers_of_any_size_are_written() -> None:
    assert (
        dump_record({"n": 2**70, "a": "é"}) == b'{"n": 1180591620717411303424, "a": "\xc3\xa9"}\n'
    )
    assert dump_record({"n": 1, "a": "é"}) == b'{"n":1,"a":"\xc3\xa9"}\n'


@pytest.mark.parametrize(
    ("total_mib", "piece_mib"), [(1, 1), (64, 1), (640, 10), (16 << 10, 256), (1 << 20, 256)]
)
def test_pieces_grow_with_the_input(
    total_mib: int, piece_mib: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small files share a piece, and packed files and tables are never split."""
    asked = []

    def blocks(paths: list[str], keys: list[str], size: int) -> list[TextBlock]:
        asked.append(size)
        return [TextBlock(paths[0], at * size // 2, size // 2, 0) for at in range(3)]

    monkeypatch.setattr(sources, "read_blocks", blocks)
    names = [str(tmp_path / name) for name in ("a.jsonl", "b.JSONL.GZ", "c.parquet", "d.warc")]
    for name in names:
        Path(name).touch()
    piece = piece_mib << 20
    sizes = {names[0]: (total_mib << 20) - piece, names[1]: piece // 4, names[2]: piece // 4}
    monkeypatch.setattr(sources.os.path, "getsize", lambda path: sizes.get(path, piece // 2))
    assert cut_pieces(names) == [
        (FilePart(names[0], 0, piece // 2), FilePart(names[0], piece // 2, piece // 2)),
        (FilePart(names[0], piece, piece // 2), *(FilePart(name, 0, -1) for name in names[1:3])),
        (FilePart(names[3], 0, -1),),
    ]
    assert asked == [piece]
