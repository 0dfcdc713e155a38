"""Results as tables, lines and files, progress, and samples from the texts of tasks."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.config.tasks import LanguageModelTaskConfig, TaskConfig
from megatron.errors import ConfigError, DataError, StorageError
from megatron.inference.score import Sample, Score
from megatron.tasks.language_model import last_window, prepare_lambada, prepare_wikitext
from megatron.tasks.passages import (
    PassageVectors,
    ids_of_passage,
    pad_texts,
    read_passages,
    read_questions,
)
from megatron.tasks.results import (
    TaskProgress,
    check_results,
    format_table,
    megatron_line,
    read_results,
    report_results,
    results_path,
)
from megatron.tasks.target import Predictions, Target
from megatron.tasks.texts import detokenizer_for, ptb, read_documents, wikitext


def test_text_is_aligned_to_the_left_and_numbers_to_the_right() -> None:
    rows = [("a", 1234567, 0.5, "x"), ("long name", 3, 1 / 3, 2)]
    assert format_table(("name", "count", "share", "any"), rows) == (
        "name           count     share  any\n"
        "---------  ---------  --------  ---\n"
        "a          1,234,567       0.5    x\n"
        "long name          3  0.333333    2"
    )


def test_the_line_of_megatron() -> None:
    headline = {"loss": "avg loss", "ratio": "token ratio"}
    line = megatron_line("TASK", headline, {"loss": 12.5, "ratio": 1.25, "words": 3})
    assert line == " validation results on TASK | avg loss: 1.2500E+01 | token ratio: 1.25 |"


def test_where_results_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = results_path(None, str(tmp_path), "LAMBADA", 20)
    assert path == tmp_path / "evaluation" / "lambada-iter_0000020.json"
    assert results_path("mine", str(tmp_path), "LAMBADA", 20) == Path("mine")
    for single in ("iter_0000020", "release"):  # a folder that later saves delete
        assert results_path(None, str(tmp_path / single), "LAMBADA", 20) == path
    values = {"n": [1, (math.nan, {"x": -math.inf})], "loss": 0.5}
    for note in ("", ", replacing earlier ones"):
        report_results(path, values)
        assert capsys.readouterr().out == f"results written to {path}{note}\n"
    assert read_results(path) == {"n": [1, [None, {"x": None}]], "loss": 0.5}
    for damaged in ("[1]", "{", "[" * 100_000):
        path.write_text(damaged)
        assert read_results(path) == {}


def test_results_replace_no_other_file(tmp_path: Path) -> None:
    data, path, own = tmp_path / "data", tmp_path / "new" / "results.json", tmp_path / "save"
    data.touch()

    def check(name: Path, *, overwrite: bool = False, resumed: Path | None = None) -> None:
        options = TaskConfig(results=str(name), overwrite=overwrite)
        check_results(options, [str(data), str(tmp_path)], resumed)

    check_results(TaskConfig(), [str(data)])
    with pytest.raises(ConfigError, match="this file is also read as data"):
        check(data, overwrite=True)
    check(path)
    assert path.parent.is_dir()
    assert not list(path.parent.iterdir())
    with pytest.raises(StorageError, match="--results .* cannot be written"):
        check(path.parent)
    path.write_text(json.dumps({"save": str(own)}))
    with pytest.raises(ConfigError, match="results.json already exists"):
        check(path)
    check(path, overwrite=True)
    check(path, resumed=own)  # these are the run's own
    with pytest.raises(ConfigError, match="results.json already exists"):
        check(path, resumed=tmp_path / "other")


def test_progress_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    for enabled in (False, True):
        progress = TaskProgress(enabled=enabled, log_interval=400)
        for batch in range(1, 1002):
            progress(batch, 1001)
    assert capsys.readouterr().out.splitlines() == [
        "> batch 400 of 1,001",
        "> batch 800 of 1,001",
        "> batch 1,001 of 1,001",
    ]


def test_progress_on_a_terminal_is_a_bar_for_each_task(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = TaskProgress(enabled=True, log_interval=1)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    for total in (3, 2):
        for batch in range(1, total + 1):
            progress(batch, total)
        shown = capsys.readouterr()
        assert shown.out == ""
        assert re.search(rf"evaluating: 100%.* {total}/{total} ", shown.err)
        assert shown.err.endswith("\n")  # the bar is closed


@pytest.mark.parametrize(
    ("text", "original"),
    [
        (" = = = Cast = = = \n", " === Cast ===\n"),
        (" = = = = Deep = = = = \n = = A = = \n", " ==== Deep ====\n== A ==\n"),
        ("at 5 ° C ; it 's : no ! ", "at 5°C; it's: no! "),
        ("[ a ] { b } ' c ' ( d", "[a] {b} 'c' ( d"),
        ("the cats ' food", "the cats' food"),
        (" N goals", " 1 goals"),
    ],
)
def test_more_of_wikitext(text: str, original: str) -> None:
    assert wikitext(text) == original


def test_more_of_ptb() -> None:
    assert ptb("he 's # N big \n yes") == "he's #1 big\nyes"


@pytest.mark.parametrize(
    ("path", "asked", "name"),
    [
        ("data/ptb/test", None, "ptb"),
        ("wiki.test.tokens", None, "wikitext"),
        ("lambada.jsonl", None, "none"),
        ("other", None, "none"),
        ("wiki.test.tokens", "ptb", "ptb"),
    ],
)
def test_the_path_suggests_a_detokenizer(path: str, asked: str | None, name: str) -> None:
    assert detokenizer_for(path, asked) == name


def test_empty_lines_count_in_messages_only(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('\n{"text": "a"}\n  \n{"text": ""}\n{"body": "b"}\n')
    texts = read_documents([str(path)])
    assert [next(texts), next(texts)] == ["a", ""]
    with pytest.raises(DataError, match=r'x.jsonl, line 5: no text under "text"'):
        next(texts)


class _Letters:
    """A tokenizer with an id for each character."""

    cls, sep, pad = 1, 2, 0

    def tokenize_unterminated(self, text: str) -> list[int]:
        return list(map(ord, text))

    tokenize_with_special = tokenize_unterminated


def _prepare(prepare: Any, tmp_path: Path, text: str, window: int, **options: Any) -> Any:
    path = tmp_path / "data"
    path.write_text(text)
    return prepare([str(path)], LanguageModelTaskConfig(**options), _Letters(), window)


@pytest.mark.parametrize(("loss", "perplexity"), [(2.0, math.exp(2)), (699.0, math.exp(699.0))])
def test_perplexity_per_token_and_per_word(tmp_path: Path, loss: float, perplexity: float) -> None:
    prepared = _prepare(prepare_wikitext, tmp_path, "ab c\nd", 16)  # 3 words and a line end
    metrics = prepared.summarize([Score(-5 * loss, False)])
    assert metrics["loss"] == loss
    assert metrics["perplexity"] == pytest.approx(perplexity)
    assert metrics["adjusted perplexity"] == (
        pytest.approx(math.exp(10 / 3)) if loss == 2.0 else math.inf
    )
    assert (metrics["words"], metrics["tokens"], metrics["token ratio"]) == (4, 6, 5 / 3)


def test_a_text_needs_a_token_to_predict(tmp_path: Path) -> None:
    (sample,) = _prepare(prepare_wikitext, tmp_path, "a\n", 16).samples
    assert sample.scored == 1
    for text in ("a", "ab", " \t"):  # one token, one word, no word
        with pytest.raises(DataError, match="has no text to predict"):
            _prepare(prepare_wikitext, tmp_path, text, 16)


@pytest.mark.parametrize(("window", "cut"), [(7, 0), (6, 1)])
def test_the_last_word_is_predicted_from_what_the_window_holds(
    tmp_path: Path, window: int, cut: int
) -> None:
    text = '{"text": "an old  cat"}\n'
    prepared = _prepare(prepare_lambada, tmp_path, text, window, strict_lambada=True)
    assert prepared.samples == [Sample([*map(ord, "an old cat")][-window - 1 :], 4)]
    numbers = prepared.summarize([Score(-4.0, True)])
    assert numbers["passages cut to the window"] == 1
    assert (numbers["accuracy"], numbers["target tokens"]) == (1, 4)
    # Without the flag, the last of 8 tokens is predicted from 7.
    plain = _prepare(prepare_lambada, tmp_path, '{"text": "12345678"}', window)
    assert plain.samples[0].scored == 1
    assert plain.summarize([Score(-1.0, False)])["passages cut to the window"] == cut


def test_the_accuracy_is_over_all_passages(tmp_path: Path) -> None:
    prepared = _prepare(prepare_lambada, tmp_path, '{"text": "1 2"}\n' * 4, 8)
    metrics = prepared.summarize([Score(-1.0, True), *[Score(-3.0, False)] * 3])
    assert (metrics["number correct"], metrics["total examples"]) == (1, 4)
    assert metrics["accuracy"] == 0.25
    assert metrics["perplexity of the target"] == pytest.approx(math.exp(2.5))


def test_a_passage_of_one_word_has_no_context(tmp_path: Path) -> None:
    for options in ({}, {"strict_lambada": True}):
        text = '{"text": "1 2"}\n{"text": "%s"}\n' % ("cat" if options else "c")
        with pytest.raises(DataError, match="passage 2 has no context: 'c"):
            _prepare(prepare_lambada, tmp_path, text, 8, **options)


@pytest.mark.parametrize(
    ("context", "target", "tokens", "scored"),
    [
        ("abc", "de", "abcde", 2),
        ("abcd", "de", "bcdde", 2),
        ("ab", "defg", "bdefg", 4),
        ("ab", "defgh", "befgh", 4),
        ("", "abcd", "abcd", 3),
    ],
)
def test_a_target_with_the_context_that_fits(
    context: str, target: str, tokens: str, scored: int
) -> None:
    assert last_window([*context], [*target], 4) == Sample([*tokens], scored)


def test_passages_have_any_number_of_64_bits(tmp_path: Path) -> None:
    path = tmp_path / "p.tsv"
    path.write_text(f"id\ttext\ttitle\n{2**63 - 1}\ta\tb\n{1 - 2**63}\tc\td\n")
    assert [one.id for one in read_passages(str(path))] == [2**63 - 1, 1 - 2**63]
    path.write_text("id\ttext\ttitle\n7\ta\tb\n")
    assert [one.id for one in read_passages(str(path))] == [7]
    for text in ("", "id\ttext\ttitle\n"):
        path.write_text(text)
        with pytest.raises(DataError, match="there are no passages after the header line"):
            list(read_passages(str(path)))
        with pytest.raises(DataError, match="there are no questions|expected a question"):
            read_questions(str(path), "--qa-data-dev")


def test_texts_are_cut_and_padded() -> None:
    tokenizer: Any = _Letters()
    ids = ids_of_passage("ab", "c", tokenizer)
    assert ids == [97, 98, 2, 99]
    tokens, padding = pad_texts([ids, [5], []], tokenizer, 5)
    assert tokens.tolist() == [[1, 97, 98, 2, 2], [1, 5, 2, 0, 0], [1, 2, 0, 0, 0]]
    assert padding.sum(1).tolist() == [5, 3, 2]


def test_passages_of_all_ranks_are_sorted() -> None:
    parts = [
        PassageVectors(np.array(ids), np.array(ids, np.float16)[:, None]) for ids in ([7, 2], [5])
    ]
    ids, vectors = PassageVectors.joined(parts)
    assert ids.tolist() == vectors[:, 0].tolist() == [2, 5, 7]


def test_the_score_of_two_metrics_is_their_mean() -> None:
    target = Target("MRPC", ("no", "yes"), scores=("accuracy", "F1"))
    assert target.score_name == "mean of accuracy and F1"
    assert target.score({"accuracy": 0.5, "F1": 1.0, "matthews": 9.0}) == 0.75
    assert (target.head.outputs, target.head_name) == (2, "classification_head")
    choice = Target("RACE", tuple("ABCD"), texts=4)
    assert choice.score_name == "accuracy"
    assert (choice.head.outputs, choice.head.sequences) == (1, 4)
    assert choice.head_name == "multichoice_head"
    assert Target("STS-B", span=(0, 5)).head.outputs == 1


def test_predictions_of_all_ranks_are_counted() -> None:
    target = Target("X", ("no", "yes"))
    joined = Predictions.joined([Predictions((0, 1), (0, 0)), Predictions((1,), (1,))])
    assert target.details(joined) == {"classes": ["no", "yes"], "counts": [[1, 0], [1, 1]]}
    assert target.metrics(joined)["accuracy"] == pytest.approx(2 / 3)
    assert Target("STS-B", span=(0, 5)).details(joined) == {}
