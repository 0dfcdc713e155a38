"""Labelled texts: what is read from files, and the samples that they become."""

import json

import pytest

from megatron.errors import DataError
from megatron.tasks.classify import Epochs, Example, TextSamples, read_glue, read_race


class _Numbers:
    """Ten samples that are their own numbers."""

    def __len__(self):
        return 10

    def __getitem__(self, i):
        return {"id": i}


@pytest.mark.parametrize("used", [None, 8])
def test_epochs_are_shuffled_anew(used):
    epochs = Epochs(_Numbers(), seed=5, length=3 * (used or 10), samples_per_epoch=used)
    ids = [epochs[i]["id"] for i in range(len(epochs))]
    size = used or 10
    parts = [ids[start : start + size] for start in range(0, len(ids), size)]
    assert all(len(set(part)) == size for part in parts)
    assert parts[0] != parts[1] != parts[2]
    assert [epochs[i]["id"] for i in reversed(range(len(epochs)))] == ids[::-1]


class _Letters:
    cls, sep, pad = 1, 2, 0

    def tokenize_with_special(self, text):
        return [ord(letter) for letter in text]


def test_samples_are_laid_out_and_cut_as_in_megatron():
    def rows(first, second, length):
        sample = TextSamples([Example(((first, second),), 0)], _Letters(), length)[0]
        return [sample[name][0].tolist() for name in ("text", "types", "padding_mask")]

    a, b = ord("a"), ord("b")
    assert rows("aa", "b", 7) == [
        [1, a, a, 2, b, 2, 0],
        [0, 0, 0, 0, 1, 1, 0],
        [1, 1, 1, 1, 1, 1, 0],
    ]
    assert rows("aaa", "bbb", 6)[:2] == [[1, a, a, a, 2, 2], [0, 0, 0, 0, 0, 1]]
    assert rows("aaaa", None, 4) == [[1, a, a, 2], [0] * 4, [1] * 4]


def test_a_question_with_choices_is_cut_to_128_tokens():
    texts = (("a" * 130, "b"), ("a" * 128, "b"))
    for choices, lengths in ((texts, [132, 132]), (texts[:1], [134])):
        sample = TextSamples([Example(choices, 0)], _Letters(), 140)[0]
        assert sample["padding_mask"].sum(1).tolist() == lengths
        assert sample["text"][0, lengths[0] - 2 : lengths[0]].tolist() == [ord("b"), 2]


_TITLES = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"


@pytest.mark.parametrize(
    ("task", "content", "message"),
    [
        ("SST-2", "good film\n", r"bad.tsv, line 1: 1 tab-separated columns, expected 2"),
        ("SST-2", "good\t1\nbad\t7\n", r"bad.tsv, line 2: label '7', expected one of 0, 1"),
        ("SST-2", "\nsentence\tlabel\n \nfine\t1\n\nbad\t7\n", "line 6: label '7'"),
        ("SST-2", "sentence\tlabel\n\nsentence\tlabel\n", "line 3: label 'label'"),
        ("SST-2", "sentence\tlabel\n", "has no examples"),
        ("MRPC", "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n", "has no examples"),
        ("QQP", "1\t2\t3\tfirst\t\t0\n" * 2, "an empty text"),
        ("STS-B", "0\t" * 9 + "5.2\n", "line 1: label '5.2', expected a number from 0 to 5"),
        (
            "STS-B",
            _TITLES + "0\t" * 9 + "nan\n",
            "line 2: label 'nan', expected a number from 0 to 5",
        ),
        ("CoLA", "x\t1\t*\tIt is.\nx\t1\n", "line 2: 2 tab-separated columns"),
    ],
)
def test_wrong_lines_are_named(tmp_path, task, content, message):
    path = tmp_path / "bad.tsv"
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        read_glue(task, str(path))


@pytest.mark.parametrize(
    ("task", "line", "label"),
    [
        ("MNLI", "0|31193|31193n|gov|( a )|( b )|( A )|( B )|One.|Two.|neutral|neutral", 2),
        ("MNLI", "0|3|3n|gov|(a)|(b)|(A)|(B)|One.|Two.|x|x|x|x|x|entailment", 1),
        ("QQP", "404289|789800|789801|One.|Two.|1", 1),
        ("SST-2", "One.|1", 1),
        ("CoLA", "gj04|0|*|One.", 0),
        ("MRPC", "1|1089874|1089925|One.|Two.", 1),
        ("QNLI", "0|One.|Two.|not_entailment", 1),
        ("RTE", "0|One.|Two.|entailment", 0),
        ("WNLI", "0|One.|Two.|1", 1),
    ],
)
def test_the_columns_of_each_task(tmp_path, task, line, label):
    path = tmp_path / "dev.tsv"
    path.write_text(line.replace("|", "\t") + "\n")
    (example,) = read_glue(task, str(path))
    second = "Two." if "Two." in line else None
    assert (example.texts, example.label) == ((("One.", second),), label)


@pytest.mark.parametrize("titles", ["", _TITLES])
def test_numbers_with_and_without_titles(tmp_path, titles):
    path = tmp_path / "dev.tsv"
    start = "\t".join("1234567")
    path.write_text(f"{titles}{start}\tA plane.\tAn air plane .\t5.000\n{start}\ta\tb\t0\n")
    first, second = read_glue("STS-B", str(path))
    assert (first.texts, first.label) == ((("A plane.", "An air plane ."),), 5.0)
    assert second.label == 0.0


def test_one_broken_line_in_a_hundred_is_left_out(tmp_path, capsys):
    path = tmp_path / "some.tsv"
    path.write_text("fine\t1\n" * 100 + "broken\n")
    assert len(read_glue("SST-2", str(path))) == 100
    assert "1 broken lines are skipped" in capsys.readouterr().out
    path.write_text("fine\t1\n" * 99 + "broken\n")
    with pytest.raises(DataError, match=r"line 100: 1 tab-sep.* \(1 broken lines in total\): give"):
        read_glue("SST-2", str(path))


def test_a_race_file_that_is_none_is_named(tmp_path):
    (tmp_path / "7.txt").write_text('\n\n{"article": "x", "questions": ["y"], "options": [["a"]]}')
    with pytest.raises(
        DataError, match=r"7.txt, line 3: not an article in RACE.s format \(KeyError"
    ):
        read_race(str(tmp_path))


def test_an_option_fills_the_blank_of_a_question_or_follows_it(tmp_path):
    article = {
        "article": "Long ago,\n it  rained.",
        "questions": ["It _ long ago.", "What happened?"],
        "options": [["rained", "snowed", "was", "is"]] * 2,
        "answers": ["A", "B"],
    }
    (tmp_path / "1.txt").write_text(json.dumps(article))
    filled, followed = read_race(str(tmp_path))
    assert filled.texts[1] == ("It snowed long ago.", "Long ago, it rained.")
    assert followed.texts[1] == ("What happened? snowed", "Long ago, it rained.")
    assert (len(filled.texts), filled.label, followed.label) == (4, 0, 1)
