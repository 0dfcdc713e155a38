"""Numbers on the benchmark pages that follow from others: they must agree."""

from __future__ import annotations

import itertools
import re

import pytest

from tests.repository import ROOT

FOLDER = ROOT / "docs" / "benchmarks"
FIRST = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
KERNELS = (FOLDER / "kernels.md").read_text(encoding="utf-8")
_CODE = re.compile(r"`[^`]*`")
_NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?%?")


def tables(text: str) -> list[list[list[str]]]:
    """Return every table of a page as rows of cells, the header first."""
    found = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    return [[cells(line) for line in table.splitlines()] for table in found]


def cells(line: str) -> list[str]:
    """Return the cells between a line's bars, ignoring bars in code and after a backslash."""
    bars = [
        bar.start() for bar in re.finditer(r"(?<!\\)\|", _CODE.sub(lambda x: "-" * len(x[0]), line))
    ]
    return [line[a + 1 : b].strip() for a, b in itertools.pairwise(bars)]


def table(text: str, *names: str) -> list[dict[str, str]]:
    """Return the rows of the only table with these columns, as dictionaries by column."""
    (found,) = [rows for rows in tables(text) if set(names) <= set(rows[0])]
    return [dict(zip(found[0], row, strict=True)) for row in found[2:]]


def kernel_rows() -> list[list[dict[str, str]]]:
    """Return the rows of the three kernel tables: ours, generation and chunks, attention."""
    return [
        [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]
        for rows in tables(KERNELS)
        if "of floor" in rows[0]
    ]


def number(text: str) -> float:
    found = _NUMBER.match(text)
    assert found, text
    return float(found[0].rstrip("%").replace(",", ""))


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda x: x.name)
def test_rows_have_as_many_cells_as_their_header(page) -> None:
    for rows in tables(page.read_text(encoding="utf-8")):
        for row in rows:
            assert len(row) == len(rows[0]), row


def test_shares_of_the_floor_follow_from_the_times() -> None:
    rows = [row for part in kernel_rows() for row in part]
    assert len(rows) > 80
    for row in rows:
        floor, ours, share = (number(row[name]) for name in ("floor", "ours", "of floor"))
        lowest, highest = (floor - 0.05) / (ours + 0.05), (floor + 0.05) / (ours - 0.05)
        assert 100 * lowest - 0.5 <= share <= 100 * highest + 0.5, row


def test_the_first_page_counts_the_rows_that_reach_the_goal() -> None:
    shares = [number(row["of floor"]) for row in kernel_rows()[0]]
    reached = sum(share >= 85 for share in shares)
    assert f"| {reached} of {len(shares)} rows reach it |" in FIRST


def test_parts_of_a_step_add_up() -> None:
    rows = table(FIRST, "ms", "S bf16")
    names = [row["ms"] for row in rows]
    parts = rows[: names.index("step (under the profiler)")]
    step = rows[len(parts)]
    for column in list(step)[1:]:
        values = [number(row[column]) for row in parts if row[column] != "-"]
        assert sum(values) == pytest.approx(number(step[column]), abs=0.05 * (len(values) + 1))


def test_packed_documents_take_what_their_rows_say() -> None:
    passes: dict[tuple[str, str], list[float]] = {}
    for row in kernel_rows()[2]:
        named = re.fullmatch(r"packed attention, documents of (\d+)", row["operation"])
        shape = re.match(r"\[4096, (\d), 16, 128\]", row["shape"])
        if not named or not shape:
            continue
        others = dict(re.findall(r"([\d.]+) \(([a-z ]+)\)", row["alternatives"]))
        by_name = {name: float(time) for time, name in others.items()}
        times = [number(row["ours"]), by_name["mask"], by_name["no documents"]]
        key = shape[1], named[1]
        passes[key] = [a + b for a, b in zip(passes.get(key, [0, 0, 0]), times, strict=True)]
    rows = table(KERNELS, "samples", "tokens per document")
    assert len(rows) == len(passes) == 6
    for row in rows:
        samples, document, *milliseconds = row.values()
        expected = [microseconds / 1000 for microseconds in passes[samples, document]]
        assert [number(x) for x in milliseconds] == pytest.approx(expected, abs=0.0052)


@pytest.mark.parametrize("first", ["training", "what"])
def test_results_are_on_the_page_that_their_row_links(first) -> None:
    """Each number in the column is on the page that its row links, or further down this page."""
    opening, further = FIRST.split("## Missed goals and missing measurements", 1)
    for row in table(opening, first, "measured"):
        link = re.search(r"\]\(((?:benchmarks/)?\w+\.md)", row[first])
        if link:
            last = (ROOT / "docs" / link[1]).read_text(encoding="utf-8")
        elif not row[first].startswith("the same"):
            last = further
        if "rows reach it" in row["measured"]:
            continue  # counted above
        there = set(_NUMBER.findall(last))
        for value in _NUMBER.findall(row["measured"]):
            assert value in there, (row[first], value)
