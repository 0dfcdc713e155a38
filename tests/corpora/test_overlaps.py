from __future__ import annotations

import gzip
import json
import random
import re

import numpy as np
import pytest

from megatron.corpora import overlaps as module
from megatron.corpora.overlaps import Overlap, TaskNgrams, cut_out, read_tasks
from megatron.corpora.plan import TasksStep
from megatron.corpora.words import hash_ngrams, split_words
from megatron.errors import DataError

_WORDS = "alpha Beta gamma's delta, épsilon “zeta” 中文 eta. theta! iota".split()


def _naive(text: str, ngrams: set[tuple[str, ...]]) -> set[tuple[int, int]]:
    words = [(m[0].lower(), m.start(), m.end()) for m in re.finditer(r"[^\W一-鿿]+|[一-鿿]", text)]
    return {
        (words[i][1], words[i + len(ngram) - 1][2])
        for ngram in ngrams
        for i in range(len(words) - len(ngram) + 1)
        if tuple(word for word, _, _ in words[i : i + len(ngram)]) == ngram
    }


def test_words_whose_hashes_differ_in_the_last_bits_are_different() -> None:
    (number,) = hash_ngrams(split_words([b"iota"]), 1)[0]
    for near in (number - np.uint64(1), number + np.uint64(1)):  # all are sorted before it, or none
        assert TaskNgrams({1: np.array([near])}).find(["iota"]) == [[]]
    ngrams = TaskNgrams({1: np.array([np.uint64(0), number])})
    assert ngrams.find(["iota"]) == [[Overlap(0, 4, int(number))]]


def test_overlaps_are_those_of_a_plain_search() -> None:
    generator = random.Random(1)
    texts = [" ".join(generator.choices(_WORDS, k=generator.randrange(60))) for _ in range(200)]
    tasks = [" ".join(generator.choices(_WORDS, k=generator.randrange(6))) for _ in range(100)]
    ngrams = set()
    for task in tasks:
        words = [word.lower() for word in re.findall(r"[^\W一-鿿]+|[一-鿿]", task)]
        if len(words) >= 4:
            ngrams |= {tuple(words[i : i + 4]) for i in range(len(words) - 3)}
        elif len(words) >= 3:
            ngrams.add(tuple(words))
    found = TaskNgrams.of_texts(tasks, longest=4, shortest=3).find(texts)
    for text, overlaps in zip(texts, found, strict=True):
        assert {(one.start, one.end) for one in overlaps} == _naive(text, ngrams)
    assert sum(map(len, found)) > 100


def test_no_tasks_overlap_with_nothing() -> None:
    assert TaskNgrams.of_texts([], 13, 8).find(["a b", ""]) == [[], []]
    assert TaskNgrams.of_texts(["", "too short"], 13, 8).find(["too short"]) == [[]]
    found = TaskNgrams.of_texts(["two words", "not three here"], 13, 2).find(
        ["two words not three"]
    )
    assert [(one.start, one.end) for one in found[0]] == [(0, 9)]


def test_a_cut_reaches_to_the_ends_of_sentences() -> None:
    step = TasksStep(margin=5, min_characters=10, max_ngram=3, min_ngram=3)
    ngrams = TaskNgrams.of_texts(["leaked test answer"], 3, 3)
    text = "First sentence stays here. Second goes: leaked test answer, all of it. Third one stays."
    assert cut_out(text, ngrams.find([text])[0], step) == [
        "First sentence stays here.",
        " Third one stays.",
    ]
    # A sentence that ends within the margin is cut too.
    text = "First sentence stays here. Hm. leaked test answer, all of it. Third one stays."
    assert cut_out(text, ngrams.find([text])[0], step) == [
        "First sentence stays here.",
        " Third one stays.",
    ]
    short = "leaked test answer"
    assert cut_out(short, ngrams.find([short])[0], step) == []
    assert cut_out("short", [], step) == ["short"]


def test_cuts_are_those_of_the_rule_for_each_character() -> None:
    """A cut begins after the last sentence end before the margin, and ends with the first after."""
    generator = random.Random(6)
    ends = set(module._SENTENCE_ENDS)
    divided = 0
    for _ in range(600):
        text = "".join(
            generator.choices("ab .", weights=(5, 5, 1, 1), k=generator.randrange(1, 90))
        )
        places = [generator.randrange(len(text)) for _ in range(generator.randrange(4))]
        found = sorted(
            Overlap(start, min(len(text), start + generator.randint(1, 9)), 0) for start in places
        )
        step = TasksStep(
            margin=generator.choice((0, 1, 5)), min_characters=generator.choice((0, 3))
        )
        is_cut = [False] * len(text)
        for one in found:
            before = [i + 1 for i in range(one.start - step.margin + 1) if text[i] in ends]
            after = [i + 1 for i in range(one.end + step.margin, len(text)) if text[i] in ends]
            for i in range(max(before, default=0), min(after, default=len(text))):
                is_cut[i] = True
        kept = "".join("\0" if cut else letter for cut, letter in zip(is_cut, text, strict=True))
        expected = [part for part in kept.split("\0") if len(part) > step.min_characters]
        assert cut_out(text, found, step) == (expected if found else [text])
        divided += len(expected) > 1
    assert divided > 50


def test_a_document_is_divided_at_its_cuts_or_dropped(tmp_path) -> None:
    """Only the parts of a divided document are numbered."""
    pytest.importorskip("datatrove")
    from datatrove.data import Document

    from megatron.corpora.blocks import Mark, OverlapCutter

    ngrams = TaskNgrams.of_texts(["leaked test answer"], 3, 3)
    np.savez(tmp_path / "ngrams.npz", **{str(n): found for n, found in ngrams.hashes.items()})
    step = TasksStep(margin=5, min_characters=10, max_ngram=3, min_ngram=3, max_parts=2)
    leak, around = "Second goes: leaked test answer, all of it.", "A sentence that stays here."
    texts = {
        "none": around,
        "end": f"{around} {leak}",
        "middle": f"{around} {leak} {around}",
        "only": leak,
        "often": f"{around} {leak} {around} {leak} {around}",
    }
    documents = [Document(text, name, metadata={"n": 1}) for name, text in texts.items()]
    documents[1].metadata[Mark.CHANGED] = ["fix"]
    documents.insert(1, Document(leak, "earlier", metadata={Mark.DROPPED: "x"}))
    found = list(OverlapCutter(tmp_path / "ngrams.npz", step).run(documents, 0, 1))
    cut = "leaked test answer"
    assert [(one.id, one.text.strip(), one.metadata) for one in found] == [
        ("none", around, {"n": 1}),
        ("earlier", leak, {Mark.DROPPED: "x"}),
        ("end", around, {"n": 1, Mark.CHANGED: ["fix", "tasks"], Mark.CUT: ("end", cut)}),
        ("middle#0", around, {"n": 1, Mark.CHANGED: ["tasks"], Mark.CUT: ("middle", cut)}),
        ("middle#1", around, {"n": 1}),
        ("only", leak, {"n": 1, Mark.DROPPED: ("tasks", "overlap, nothing left", cut)}),
        ("often", texts["often"], {"n": 1, Mark.DROPPED: ("tasks", "too many overlaps", cut)}),
    ]


def test_a_run_across_the_end_of_a_cut_is_cut_whole() -> None:
    step = TasksStep(margin=5, min_characters=10, max_ngram=3, min_ngram=3)
    words = [f"word{number}" for number in range(6)]
    ngrams = TaskNgrams.of_texts([" ".join(words)], 3, 3)
    leaked = " ".join(words).replace("word4", "word4.")  # the first run is cut up to here
    text = f"First sentence stays here. Second goes: {leaked}, all of it. Third one stays."
    parts = cut_out(text, ngrams.find([text])[0], step)
    assert parts == ["First sentence stays here.", " Third one stays."]


@pytest.mark.parametrize("letter", ["a", "é"])
def test_offsets_of_many_overlaps_are_those_of_characters(letter) -> None:
    task = " ".join(f"{letter}{number}" for number in range(13))
    ngrams = TaskNgrams.of_texts([task], 13, 8)
    text = f"{task} " * 20_000
    found = ngrams.find([text])[0]
    assert len(found) == 20_000
    assert all(text[one.start : one.end] == task for one in found[:: len(found) // 10])
    assert cut_out(text, found, TasksStep(margin=0)) == []


def test_task_files_of_each_kind(tmp_path) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_text(json.dumps({"question": {"text": "why"}, "answers": ["so", "be"]}) + "\n\n")
    table = tmp_path / "b.tsv"
    table.write_text('one\ttwo\nfirst "\tsecond\n')
    plain = tmp_path / "c.txt"
    plain.write_text("a\nb")
    files = [str(lines), str(table), str(plain)]
    assert read_tasks(files, ()) == ["why", "so", "be", 'first "', "second", "a", "b"]
    assert read_tasks([str(lines)], ("answers",)) == ["so", "be"]
    assert read_tasks([str(table)], ("two",)) == ["second"]
    table.write_text("one\ttwo\r\nfirst\t" + "long " * 40_000 + "\r\n")
    assert read_tasks([str(table)], ("two",)) == ["long " * 40_000]
    table.write_text("")
    assert read_tasks([str(table)], ()) == []
    packed = tmp_path / "d.txt.gz"
    packed.write_bytes(gzip.compress(b"a\nb")[:10] + b"\xff" * 30)
    with pytest.raises(DataError, match=r"d.txt.gz: cannot be read"):
        read_tasks([str(packed)], ())
    lines.write_text('[{"question": "why"}]\n7\n')
    assert read_tasks([str(lines)], ("question",)) == ["why"]
    with pytest.raises(DataError, match=r"a.jsonl: no line has answer"):
        read_tasks([str(lines)], ("answer",))
    with pytest.raises(DataError, match=r"missing.txt: cannot be read"):
        read_tasks([str(tmp_path / "missing.txt")], ())
    lines.write_text("{")
    with pytest.raises(DataError, match=r"a.jsonl:1: broken JSON"):
        read_tasks([str(lines)], ())
