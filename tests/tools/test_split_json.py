"""tools/split_json.py and presplit_sentences_json.py, with command lines from 2019."""

from __future__ import annotations

import json

import pytest

from megatron.data.indexed import IndexedDataset
from megatron.tools import preprocess_data, split_json
from tools import presplit_sentences_json


def split(*words: object) -> int:
    return split_json.main([str(word) for word in words])


def test_every_line_is_in_one_file_and_its_origin_beside_it(tmp_path):
    lines = [[f'{{"text": "{file}.{i}"}}' for i in range(30 + file)] for file in range(2)]
    for file in range(2):
        (tmp_path / f"{file}.json").write_text("\n".join(lines[file]))  # the last has no newline
    inputs = (tmp_path / "0.json", tmp_path / "1.json")
    words = ("--input_files", *inputs, "--test_percent", 0.1, 0.05)
    found = []
    for out in (tmp_path / "a", tmp_path / "b"):
        assert split(*words, "--output_dir", out) == 0
        found.append({path.name: path.read_text() for path in out.iterdir()})
    assert found[0] == found[1]
    counts, seen = [], []
    for name in ("train.json", "dev.json", "test.json"):
        written = found[0][name].splitlines()
        head, *origins = found[0][f"{name}.map"].splitlines()
        assert head == "file\tline #"
        places = [tuple(map(int, origin.split("\t"))) for origin in origins]
        assert written == [lines[file][line] for file, line in places]
        counts.append(len(written))
        seen += places
    assert counts == [50, 7, 4]  # of 61 lines; shares are rounded up
    assert sorted(seen) == [(file, i) for file in range(2) for i in range(30 + file)]
    assert seen != sorted(seen)


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        ("--test_percent 0.9 0.2", 9, "--test_percent 0.9 0.2: give the shares of dev.json"),
        ("--test_percent -1", 9, "--test_percent -1.0: give the shares"),
        ("--input_files none.json", 6, "--input_files none.json: No such file or directory"),
        ("--input_files empty.json", 6, "--input_files empty.json: this file is empty"),
        ("--input_files a.gz", 6, "a.gz: this file is compressed: decompress it first"),
        ("--output_dir old", 9, "already exists"),
    ],
)
def test_mistakes_are_named_and_write_nothing(tmp_path, monkeypatch, capsys, flags, code, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.json").write_text("{}\n")
    (tmp_path / "empty.json").write_text("")
    (tmp_path / "a.gz").write_bytes(b"\x1f\x8b123")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "train.json.map").write_text("")
    assert split("--input_files", "a.json", "--output_dir", "out", *flags.split()) == code
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_presplit_sentences_train_as_split_ones_do(tmp_path, capsys):
    """Line ends also end sentences; "1." before a lowercase letter does not."""
    texts = ["One two. Three four!\n\nFive six.", "Seven.", ""]
    source = tmp_path / "all"  # a file without an extension
    source.write_text("".join(json.dumps({"text": t, "id": i}) + "\n" for i, t in enumerate(texts)))
    presplit = tmp_path / "presplit.json"
    assert presplit_sentences_json.main([str(source), str(presplit)]) == 0
    written = [json.loads(line) for line in presplit.read_text().splitlines()]
    assert written == [
        {"text": "One two.\nThree four!\nFive six.", "id": 0},
        {"text": "Seven.", "id": 1},
        {"text": "", "id": 2},
    ]
    numbers = tmp_path / "numbers.json"
    numbers.write_text('{"text": "1 2\\n3\\n \\n4 5 6"}\n{"text": ["7", "8 9"]}\n')
    words = ["--input", str(numbers), "--output-prefix", str(tmp_path / "x")]
    words += ["--presplit-sentences", "--tokenizer-type", "NullTokenizer", "--vocab-size", "99"]
    assert preprocess_data.main(words) == 0
    data = IndexedDataset(tmp_path / "x_text_sentence")
    assert [data.get(i).tolist() for i in range(5)] == [[1, 2], [3], [4, 5, 6], [7], [8, 9]]
    assert data.document_indices.tolist() == [0, 3, 5]
    assert preprocess_data.main([*words, "--overwrite", "--split-sentences"]) == 9
    assert "give --presplit-sentences if the text is already split" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"}\n{"text": 1}\n', "x.json:2: 'text' is a number, expected a string"),
        (b'{"text": "a"}\n\n{"x": "a"}\n', "x.json:3: no key 'text'"),
        (b'{"text": "a"}\n{"text": "\xff"}\n', "x.json:2: bad UTF-8 (byte 10 of the line)"),
        (b'{"text": "a"}\n{"text": "a"\n', "x.json:2: broken JSON"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_written(tmp_path, capsys, monkeypatch, line, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.json").write_bytes(line)
    assert presplit_sentences_json.main(["x.json", "out.json"]) == 6
    error = capsys.readouterr().err.splitlines()[-1]
    assert message in error
    assert error.endswith("; fix or remove the line")
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    ("shares", "counts"), [((0.5, 0.5), [0, 2, 1]), ((0.5, 0.34), [0, 2, 1]), ((1,), [0, 3, 0])]
)
def test_shares_that_are_rounded_up_leave_no_more_than_there_is(tmp_path, shares, counts):
    (tmp_path / "in.json").write_text('{"text": "a"}\n{"text": "b"}\n{"text": "c"}\n')
    words = ("--input_files", tmp_path / "in.json", "--test_percent", *shares)
    assert split(*words, "--output_dir", tmp_path / "out") == 0
    names = ("train.json", "dev.json", "test.json")
    assert [len((tmp_path / "out" / name).read_text().splitlines()) for name in names] == counts
