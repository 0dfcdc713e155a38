"""The commands in tools/openwebtext with the command lines of Megatron-LM's README."""

from __future__ import annotations

import importlib
import random
import sys

import pytest

from tests.corpora.planted import sentences
from tests.files import read_lines, write_lines
from tests.repository import ROOT

pytest.importorskip("datatrove", reason="needs the extra: pip install -e '.[corpora]'")


def run(name: str, *words: object) -> int:
    sys.path.insert(0, str(ROOT / "tools" / "openwebtext"))
    try:
        return importlib.import_module(name).main([str(word) for word in words])
    finally:
        sys.path.pop(0)


def document(seed: int, count: int = 12) -> str:
    source = sentences(random.Random(seed))
    return " ".join(next(source) for _ in range(count))


def test_addresses(tmp_path, capsys) -> None:
    folder = tmp_path / "urls"
    folder.mkdir()
    good = ["http://www.example.org/a", "https://news.example.com/story?id=1"]
    bad = ["https://i.imgur.com/x", "http://a.example.org/b.PDF?x", "http://x", "no address"]
    (folder / "b.txt").write_text("\n".join([good[1], *bad]))
    (folder / "a.txt").write_text(f"{good[0]}\n{good[1]}\n")
    assert run("blacklist_urls", folder, tmp_path / "clean.txt") == 0
    assert (tmp_path / "clean.txt").read_text().split() == good
    output = capsys.readouterr().out
    assert all(f"{url}\n" in output for url in bad)
    assert "duplicate" in output
    assert run("blacklist_urls", tmp_path / "none", tmp_path / "clean.txt") == 9


def test_cleaning(tmp_path, capsys) -> None:
    good = {"text": f"It\u2019s schÃ¶n. {document(1)}", "url": "a"}
    french = {"text": "Le marché du village ouvre très tôt le matin. " * 20, "url": "b"}
    data = write_lines(tmp_path / "in.json", [good, french, {"text": "Too short.", "url": "c"}])
    assert run("cleanup_dataset", data, tmp_path / "out.json") == 0
    (kept,) = read_lines(tmp_path / "out.json")
    assert kept["url"] == "a"
    assert kept["text"].startswith("It's schön.")
    output = capsys.readouterr().out
    assert "non-english: 1 " in output
    assert "small docs: 1 " in output
    assert "fixed text: 1 " in output


def test_cleaning_by_tasks(tmp_path) -> None:
    script = {"text": "Please enable JavaScript."}
    french = {"text": "Le marché du village ouvre très tôt le matin."}
    long = {"text": "  spaced   out\n\n" + document(2)}
    data = write_lines(tmp_path / "in.json", [script, french, long])
    words = ["--input-files", data, "--output-path", tmp_path / "out", "--tasks"]
    tasks = ["remove_256_javascript", "remove_512_non_english", "general_cleaning"]
    assert run("cleanup_fix_dataset", *words, *tasks) == 0
    (kept,) = read_lines(tmp_path / "out" / "in_cleaned.json")
    assert kept["text"].startswith(" spaced out ")
    assert read_lines(tmp_path / "out" / "in_filtered.json") == [script, french]
    assert run("cleanup_fix_dataset", *words, "remove_512") == 0
    assert len(read_lines(tmp_path / "out" / "in_filtered.json")) == 2


def test_duplicates_from_finding_to_removing(tmp_path, capsys) -> None:
    texts = [document(number, 30) for number in range(20)]
    copies = [text.replace(" the ", " a ", 2) for text in texts[:5]]
    first = [{"text": text, "url": f"u{i}"} for i, text in enumerate(texts)]
    second = [{"text": text, "url": f"c{i}"} for i, text in enumerate(copies)]
    one, two = write_lines(tmp_path / "one.json", first), write_lines(tmp_path / "two.json", second)
    pairs, prints = tmp_path / "pairs.json", tmp_path / "prints.npz"
    assert run("find_duplicates", "--inputs", one, "url", two, "url", "--output", pairs) == 0
    expected = {f"u{i}": f"c{i}" for i in range(5)}
    assert {
        a: next(iter(b[0])) for record in read_lines(pairs) for a, b in record.items()
    } == expected
    # The same with saved fingerprints.
    assert run("find_duplicates", "--inputs", one, "url", "--save-fingerprints", prints) == 0
    words = ["--load-fingerprints", prints, "--inputs", two, "url", "--jaccard-parallel"]
    assert run("find_duplicates", *words, "--output", tmp_path / "again.json") == 0
    assert (tmp_path / "again.json").read_bytes() == pairs.read_bytes()
    assert run("find_duplicates", *words, "--num-seeds", 50) == 6
    assert "give these flags" in capsys.readouterr().err

    groups, result = tmp_path / "groups.json", tmp_path / "result.json"
    assert run("group_duplicate_url", pairs, groups, "0.6") == 0
    assert sorted(sum((m for r in read_lines(groups) for m in r.values()), [])) == sorted(
        [*expected, *expected.values()]
    )
    assert "only 5 are unique and 5 should be removed" in capsys.readouterr().out
    both = write_lines(tmp_path / "both.json", first + second)
    assert run("remove_group_duplicates", groups, both, result) == 0
    assert read_lines(result) == first


@pytest.mark.parametrize("jaccard", ["min", "max", "union"])
def test_similarity_of_a_part(tmp_path, jaccard) -> None:
    text = document(5, 60)
    part = text[: len(text) * 2 // 3]
    data = write_lines(tmp_path / "in.json", [{"text": text, "id": "a"}, {"text": part, "id": "b"}])
    words = ["--inputs", data, "id", "--output", tmp_path / "out.json", "--jaccard", jaccard]
    assert run("find_duplicates", *words, "--num-seeds", 800, "--num-bands", 200) == 0
    (pair,) = read_lines(tmp_path / "out.json")
    expected = 1.0 if jaccard == "min" else 2 / 3
    assert pair["a"][0]["b"] == pytest.approx(expected, abs=0.06)


def test_merging_and_numbering(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    write_lines(folder / "b.json", [{"text": "2"}])
    write_lines(folder / "a.json", [{"text": "1"}, {"text": "é"}])
    merged = tmp_path / "merged.json"
    assert run("merge_jsons", "--json_path", folder, "--output_file", merged) == 0
    assert [record["text"] for record in read_lines(merged)] == ["1", "é", "2"]
    words = ["--input-file", merged, "--output-file", tmp_path / "ids.json", "--id-prefix", "cc"]
    assert run("add_id", *words, "--log-interval", "1") == 0
    ids = [record["adlr_id"] for record in read_lines(tmp_path / "ids.json")]
    assert ids == ["cc-0000000001", "cc-0000000002", "cc-0000000003"]
    monkeypatch.chdir(folder)  # an output in the folder itself is not an input
    assert run("merge_jsons") == 0
    assert run("merge_jsons") == 0
    assert len(read_lines(folder / "merged_output.json")) == 3


def test_overlaps_with_tasks(tmp_path, capsys) -> None:
    passage = document(100, 2)
    text = f"{document(1, 10)} {passage} {document(2, 10)}"
    clean = document(3, 10)
    records = [{"body": clean, "k": 1}, {"body": text}, {"body": passage}]
    data = write_lines(tmp_path / "data.json", records)
    task = write_lines(tmp_path / "lambada_test.jsonl", [{"text": passage}])
    out, table = tmp_path / "out.json", tmp_path / "ngrams.npz"
    words = ["--dedup-dataset", data, "body", "--output", out, "--num-threads", "2", "--tasks"]
    assert run("filter_ngrams", *words, "lambada") == 9
    assert "--lambada-path" in capsys.readouterr().err
    assert run("filter_ngrams", *words, "squad") == 9
    assert "give the task's file" in capsys.readouterr().err
    words = [*words, "lambada", "--lambada-path", task]
    assert run("filter_ngrams", *words, "--save-dictionary", table) == 0
    found = read_lines(out)
    assert [record["split_id"] for record in found] == [
        "lambada-0000000001-0000",
        "lambada-0000000002-0000",
        "lambada-0000000002-0001",
    ]
    assert found[0] == {"body": clean, "k": 1, "split_id": found[0]["split_id"]}
    assert all(passage[20:80] not in record["body"] for record in found)
    assert text.startswith(found[1]["body"])
    assert text.endswith(found[2]["body"])
    assert "docs 3 splitted 1 ignored 1" in capsys.readouterr().out
    before = out.read_bytes()
    assert run("filter_ngrams", *words, "--load-dictionary", table) == 0
    assert out.read_bytes() == before
    # A run of words that is frequent in the corpus is not considered an overlap.
    assert run("filter_ngrams", *words, "--key-threshold", "2") == 0
    assert len(read_lines(out)) == 3
    assert {record["body"] for record in read_lines(out)} == {clean, text, passage}


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04cut", b"\x93NUMPY"])
def test_damaged_fingerprints_are_one_line(tmp_path, capsys, data) -> None:
    stored = tmp_path / "stored.npz"
    stored.write_bytes(data)
    texts = write_lines(tmp_path / "a.json", [{"text": "x"}])
    assert run("find_duplicates", "--load-fingerprints", stored) == 6
    words = ("--tasks", texts, "--dedup-dataset", texts, "text")
    assert run("filter_ngrams", *words, "--load-dictionary", stored) == 6
    assert capsys.readouterr().err.count("\n") == 2


def test_the_input_is_never_the_output(tmp_path, capsys) -> None:
    data = write_lines(tmp_path / "a.jsonl", [{"text": document(1), "url": "u"}])
    (tmp_path / "link.jsonl").symlink_to(data)
    kept = data.read_bytes()
    groups = write_lines(tmp_path / "groups.jsonl", [{"0": ["v", "u"]}])
    for name, words in (
        ("cleanup_dataset", (data, tmp_path / "link.jsonl")),
        ("remove_group_duplicates", (groups, data, data)),
        ("filter_ngrams", ("--tasks", "x", "--dedup-dataset", data, "text", "--output", data)),
    ):
        assert run(name, *words) == 9, name
        assert "this is also the input: give another name" in capsys.readouterr().err
        assert data.read_bytes() == kept


def test_two_inputs_do_not_write_the_same_file(tmp_path, capsys) -> None:
    files = []
    for name in "ab":
        (tmp_path / name).mkdir()
        files.append(write_lines(tmp_path / name / "x.json", [{"text": name}]))
    words = ("--tasks", "remove_512", "--output-path", tmp_path / "out")
    assert run("cleanup_fix_dataset", "--input-files", *files, *words) == 9
    assert "two have the same name" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("add_id", ["--input-file", "IN", "--output-file", "OUT", "--id-prefix", "x"]),
        ("cleanup_dataset", ["IN", "OUT"]),
        ("find_duplicates", ["--inputs", "IN", "url", "--output", "OUT"]),
        ("group_duplicate_url", ["IN", "OUT"]),
        ("remove_group_duplicates", ["IN", "IN", "OUT"]),
    ],
)
@pytest.mark.parametrize("data", [b'{"text": "x"}\n{broken', b"[1]\n", b'{"text": "\xff"}'])
def test_a_bad_line_is_one_line_and_leaves_no_output(tmp_path, capsys, name, words, data) -> None:
    source = tmp_path / "in.json"
    source.write_bytes(data)
    place = {"IN": source, "OUT": tmp_path / "out.json"}
    assert run(name, *(place.get(word, word) for word in words)) == 6
    message = capsys.readouterr().err
    assert "in.json" in message
    assert message.count("\n") == 1
    assert [file.name for file in tmp_path.iterdir()] == ["in.json"]
