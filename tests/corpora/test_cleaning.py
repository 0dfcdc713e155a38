"""Rules for a single page at their limits, and the report in a small case."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from megatron.corpora import cleaning
from megatron.corpora.cleaning import fix_text, judge_nesting, judge_quality, judge_url
from megatron.corpora.plan import QualityStep, UrlStep

_OFF = {
    **dict.fromkeys(("min_words", "max_words", "min_word_length", "max_word_length"), 0),
    **dict.fromkeys(("max_symbols", "min_letters", "stop_words", "max_bullets"), 0),
    **dict.fromkeys(("max_ellipses", "max_repeated"), 0),
}


@pytest.mark.parametrize(
    ("rule", "good", "bad", "reason"),
    [
        ({"min_words": 3}, "a b c", "a b", "too few words"),
        ({"max_words": 3}, "a b c", "a b c d", "too many words"),
        ({"min_word_length": 2.5}, "ab abc", "ab ab abc", "short words"),
        ({"max_word_length": 2.5}, "ab abc", "ab abc abc", "long words"),
        ({"max_symbols": 0.5}, "# a b ...c d\u2026 e", "# a #... b\u2026 c", "symbols"),
        ({"min_letters": 0.5}, "a 1 _ \u00e9", "a 1 _", "words without letters"),
        ({"stop_words": 2}, "The end OF", "the the end", "no sentences"),
        ({"max_bullets": 0.5}, "- a\n\n b", "- a\nb\n * c", "bullet points"),
        ({"max_ellipses": 0.5}, "a...\nb", "a\u2026\nb ... \nc", "cut lines"),
        ({"max_repeated": 0.5}, "a\nb\nb\na", "a\nb\n b\nb\nb", "repeated lines"),
    ],
)
def test_a_text_at_the_limit_of_a_rule_is_kept(
    rule: dict[str, float], good: str, bad: str, reason: str
) -> None:
    step = QualityStep(**{**_OFF, **rule})  # type: ignore[arg-type]
    assert judge_quality(good, step) == ""
    assert judge_quality(bad, step) == reason
    without = QualityStep(**_OFF)  # type: ignore[arg-type]
    assert judge_quality(good, without) == judge_quality(bad, without) == ""


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("https://example.org/a", ""),
        ("http://a.io", ""),
        ("http://1.2.3.4:80/x?y", ""),
        ("https://news.bbc.co.uk/", ""),
        ("https://www.reddit.com/r/x", "domain"),
        ("https://old.mine.org/x", "domain"),
        ("https://example.org/a.PDF", "file extension"),
        ("https://example.org/a.tar.gz?x=1", "file extension"),
        ("https://example.org/?f=a.pdf", ""),
        ("ftp://a.b", "malformed address"),
        ("a://b.cc", "short address"),
        ("https://exa_mple.org/a", "malformed address"),
        ("https://example.org/a b", "malformed address"),
        ("https://1.2.3/", "malformed address"),
    ],
)
def test_addresses(url: str, reason: str) -> None:
    pytest.importorskip("tldextract")
    assert judge_url(url, UrlStep(also_domains=("mine",))) == reason


@pytest.mark.parametrize(("depth", "reason"), [(500, ""), (520, "nested too deeply")])
@pytest.mark.parametrize("after", ["", "<p>" * 6000])
def test_the_depth_of_a_page(depth: int, reason: str, after: str) -> None:
    """Only pages with more than 5,000 open tags are measured."""
    pytest.importorskip("resiliparse")
    many = "<br>" * 6000
    page = f"<body><p>b</p>{'<div>' * depth}{many}<p>a</p>{'</div>' * depth}{after}</body>"
    assert judge_nesting(page) == reason
    few = page.replace(many, "<br>" * (4997 - depth)).replace(after or "-", "")
    assert judge_nesting(few) == ""
    assert judge_nesting(f"{few}<br>") == reason


def test_the_windows_of_a_long_text() -> None:
    text = "".join(chr(0x4E00 + i) for i in range(1000))
    assert cleaning._sample(text[:300], 100) == text[:300]
    short = cleaning._sample(text[:301], 100)
    assert short == f"{text[:100]} {text[100:200]} {text[201:301]}"
    assert cleaning._sample(text, 100) == " ".join((text[:100], text[450:550], text[900:]))
    assert cleaning._sample(" \n".join("abc"), 100) == "a b c"


def test_a_text_is_fixed_as_ftfy_does() -> None:
    ftfy = pytest.importorskip("ftfy")
    draw = random.Random(3)
    pieces = ["plain % words ", "\tA-Z", "‘one’ “two”", "dash — end…", "schÃ¶n ", "naïve "]
    pieces += ["&eacute;", "&amp; ", "<b>", "ﬁ", "a\r\n", "\n", "\n", "\x1b[1m", "â€œsoâ€\x9d"]
    for _ in range(300):
        text = "".join(draw.choices(pieces, k=draw.randint(0, 9)))
        assert fix_text(text) == ftfy.fix_text(text)


def _summary() -> dict[str, Any]:
    def dropped(step: str, reason: str, documents: int, size: int) -> dict[str, Any]:
        return {"step": step, "reason": reason, "documents": documents, "bytes": size}

    return {
        "read": 2000,
        "kept": {"documents": 1490, "bytes": 7_654_321},
        "changed": {"fix": 1234, "tasks": 5},
        "dropped": [dropped("urls", "domain", 10, 4000), dropped("quality", "symbols", 500, 10**7)],
    }


def test_a_report_as_text() -> None:
    pytest.importorskip("datatrove")
    from megatron.corpora.report import as_text

    assert as_text(_summary()).splitlines() == [
        "read                      2,000",
        "  urls: domain              -10       -0.00 MB",
        "  quality: symbols         -500      -10.00 MB",
        "kept                      1,490        7.65 MB",
        "fix changed 1,234",
        "tasks changed 5",
    ]


def test_a_report_as_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datatrove")
    from matplotlib.figure import Figure

    from megatron.corpora.report import draw

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    draw(_summary())
    draw({"read": 0, "kept": {"documents": 0}, "dropped": []})
    (axes,), (empty,) = (figure.axes for figure in figures)
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        *("urls: domain", "quality: symbols", "kept")
    ]
    assert [bar.get_width() for bar in axes.patches] == [0.5, 25, 74.5]
    assert len({bar.get_facecolor() for bar in axes.patches[:2]}) == 1
    assert axes.patches[2].get_facecolor() != axes.patches[0].get_facecolor()
    assert [text.get_text() for text in axes.texts] == [" 10", " 500", " 1,490"]
    assert axes.yaxis_inverted()
    assert axes.get_xlabel() == "% of 2,000 documents"
    assert axes.get_xlim() == (0, 115)
    assert figures[0].get_size_inches().tolist() == pytest.approx([9, 1.9])
    assert [bar.get_width() for bar in empty.patches] == [0]


def test_ledgers_are_added_up(tmp_path: Path) -> None:
    pytest.importorskip("datatrove")
    from megatron.corpora.blocks import shard
    from megatron.corpora.report import summarize

    def ledger(stage: str, piece: int, **content: Any) -> None:
        path = shard(tmp_path / stage, piece, ".json")
        path.parent.mkdir(exist_ok=True)
        empty: dict[str, Any] = {
            "read": {},
            "kept": {},
            "changed": {},
            "dropped": [],
            "samples": [],
        }
        path.write_text(json.dumps({**empty, **content}))

    def drop(step: str, reason: str, documents: int) -> dict[str, Any]:
        return {"step": step, "reason": reason, "documents": documents, "bytes": 2 * documents}

    def samples(*numbers: int) -> list[dict[str, Any]]:
        return [{"step": "urls", "reason": "domain", "text": str(number)} for number in numbers]

    ledger(
        *("clean", 0),
        read={"documents": 9},
        kept={"documents": 5, "bytes": 50},
        changed={"fix": 2},
        dropped=[drop("quality", "symbols", 1), drop("urls", "domain", 3)],
        samples=[*samples(1, 2, 3, 4), {"step": "quality", "reason": "symbols", "text": "x"}],
    )
    ledger(
        *("clean", 1),
        read={"documents": 4},
        kept={"documents": 1, "bytes": 10},
        changed={"fix": 1, "extract": 1},
        dropped=[drop("urls", "domain", 2), drop("urls", "short address", 6)],
        samples=[*samples(5, 6), {"step": "urls", "reason": "short address", "text": "y"}],
    )
    ledger("select", 0, read={"documents": 5}, kept={"documents": 4, "bytes": 40})
    ledger("select", 1, read={"documents": 1}, kept={"documents": 1, "bytes": 9})
    assert summarize([tmp_path / "clean", tmp_path / "select"], 2) == {
        "read": 13,
        "kept": {"documents": 5, "bytes": 49},
        "changed": {"extract": 1, "fix": 3},
        "dropped": [
            {
                **drop("urls", "short address", 6),
                "samples": [{"step": "urls", "reason": "short address", "text": "y"}],
            },
            {**drop("urls", "domain", 5), "samples": samples(1, 2, 3, 4, 5)},
            {
                **drop("quality", "symbols", 1),
                "samples": [{"step": "quality", "reason": "symbols", "text": "x"}],
            },
        ],
    }


def test_seconds_are_added_up_by_block(tmp_path: Path) -> None:
    pytest.importorskip("datatrove")
    from megatron.corpora.report import measured_seconds

    for stage, blocks in (
        ("a", [{"name": "x: fix", "time_stats": 1.5}, {"name": "y: urls", "time_stats": 2}]),
        ("b", [{"name": "x: fix", "time_stats": {"total": 3.0, "n": 2}}]),
    ):
        folder = tmp_path / stage / "stats"
        folder.mkdir(parents=True)
        (folder / "00000.json").write_text(json.dumps(blocks))
    assert measured_seconds(tmp_path) == {"fix": 4.5, "urls": 2.0}
