"""Annotation: every line gets a score, and an interrupted run can be continued."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.cli.main import main as megatron
from megatron.data.json_lines import Setting
from megatron.detoxify import annotate as annotation
from megatron.detoxify import evaluate, select_texts
from megatron.detoxify import perspective as module
from megatron.detoxify.annotate import annotate
from megatron.detoxify.scorers import ATTRIBUTES, ClassifierScorer, Scored, build_scorer
from megatron.errors import ConfigError, DataError, StorageError, UserError
from megatron.tools.demo_detoxify import write_classifier
from tests.detoxify.stand_in import KEY, Answer, StandIn, error_body, perspective, toxicity_of
from tests.files import read_lines, write_lines


class ToyScorer:
    """A scorer using `toxicity_of` that records the texts it is given, and fails at one of them."""

    def __init__(self, fails_at: str = "never") -> None:
        self.settings: dict[str, Setting] = {"--classifier": "toy"}
        self.asked: list[str] = []
        self._fails_at = fails_at

    def score(self, texts: Iterable[str]) -> Iterator[Scored]:
        for text in texts:
            if text == self._fails_at:
                raise UserError("out of quota")
            self.asked.append(text)
            yield Scored({"toxicity": toxicity_of(text)})


TEXTS = ["rude 0.9", "", "kind", "  ", "rude 0.25<|endoftext|>", "ünïcode"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "own.jsonl", ({"text": t, "id": i} for i, t in enumerate(TEXTS)))


def test_lines_keep_their_fields_and_get_a_score(source: Path, tmp_path: Path, capsys) -> None:
    target, scorer = tmp_path / "out.jsonl", ToyScorer()
    annotate(source, target, scorer)
    assert scorer.asked == ["rude 0.9", "kind", "rude 0.25", "ünïcode"]
    found = read_lines(target)
    assert [line["id"] for line in found] == list(range(6))
    assert [line["score"] and line["score"]["toxicity"] for line in found] == [
        *(0.9, None, 0.1, None, 0.25, 0.1)
    ]
    assert found[4]["text"] == "rude 0.25"
    assert '"ünïcode"' in target.read_text(encoding="utf-8")  # readable, not escaped
    assert found[1]["score_error"] == "the text is blank"
    said = capsys.readouterr().out
    assert "6 lines written, 2 of them without a score (the last one: the text is blank), 6" in said


@pytest.mark.parametrize("at_a_time", [1, 7, 1 << 20])
@pytest.mark.parametrize("cut", [0, 1, 90, 150, 200, 333])
def test_a_stopped_run_continues(
    source: Path, tmp_path: Path, cut: int, at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(annotation, "_READ_AT_A_TIME", at_a_time)
    whole, target = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    annotate(source, whole, ToyScorer())
    annotate(source, target, ToyScorer(), total=1)
    data = whole.read_bytes()
    assert cut < len(data)
    target.write_bytes(data[:cut])
    scorer = ToyScorer()
    annotate(source, target, scorer)
    assert target.read_bytes() == data
    written = data[:cut].count(b"\n")
    assert scorer.asked == [t.replace("<|endoftext|>", "") for t in TEXTS[written:] if t.strip()]


def test_a_total_ends_the_work_early(source: Path, tmp_path: Path, capsys) -> None:
    target, scorer = tmp_path / "out.jsonl", ToyScorer()
    annotate(source, target, scorer, total=3)
    assert scorer.asked == ["rude 0.9", "kind"]
    annotate(source, target, scorer, total=2)
    assert "0 lines written, 3 in total" in capsys.readouterr().out
    assert len(read_lines(target)) == 3


def test_what_was_scored_before_an_error_is_kept(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    with pytest.raises(UserError, match=r"own\.jsonl, line 5: out of quota"):
        annotate(source, target, ToyScorer(fails_at="rude 0.25"))
    assert len(read_lines(target)) == 4
    scorer = ToyScorer()
    annotate(source, target, scorer)
    assert scorer.asked == ["rude 0.25", "ünïcode"]


def test_a_file_of_something_else_is_left_alone(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    lines = '{"text": "rude 0.9", "id": 0}', '{"text": "x"}', "notes", "{}"
    for content in (*lines, *(f"{line}\n" for line in lines)):
        target.write_text(content)
        with pytest.raises((StorageError, DataError), match="line 1"):
            annotate(source, target, ToyScorer())
        assert target.read_text() == content
    with pytest.raises(ConfigError, match="is also the input"):
        annotate(source, source, ToyScorer())
    for rest in ("notes", '{"text": "x', "{}"):
        target.write_text(content := '{"text": "rude 0.9", "id": 0, "score": null}\n' + rest)
        with pytest.raises(StorageError, match="line 2 does not belong to the input"):
            annotate(source, target, ToyScorer())
        assert target.read_text() == content


def test_lines_are_written_as_soon_as_they_have_a_score(source: Path, tmp_path: Path) -> None:
    target, written = tmp_path / "out.jsonl", list[int]()

    class Watching(ToyScorer):
        def score(self, texts: Iterable[str]) -> Iterator[Scored]:
            for scored in super().score(texts):
                written.append(len(read_lines(target)))
                yield scored

    annotate(source, target, Watching())
    assert written == [0, 1, 3, 5]  # blank texts are written with the next line


def test_the_fields_of_a_line_have_no_order(source: Path, tmp_path: Path) -> None:
    target, scorer = tmp_path / "out.jsonl", ToyScorer()
    annotate(source, target, ToyScorer(), total=1)
    lines = [dict(reversed(line.items())) for line in read_lines(source)]
    annotate(write_lines(source, lines), target, scorer)
    assert scorer.asked == ["kind", "rude 0.25", "ünïcode"]


def test_other_settings_are_refused(source: Path, tmp_path: Path) -> None:
    target, other = tmp_path / "out.jsonl", ToyScorer()
    annotate(source, target, ToyScorer(), total=2)
    other.settings["--classifier"] = "another"
    with pytest.raises(StorageError, match="--classifier was toy, now another"):
        annotate(source, target, other)
    assert not other.asked


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[1]", "line 2 is not a JSON object"),
        ('{"text": 3}', "line 2 has no text in 'text'"),
        ('{"words": "a"}', "line 2 has no text in 'text'.*--text-key"),
        ('{"text": "\\ud800"}', "line 2 is not a JSON object"),
        ("[" * 100000, "line 2 is not a JSON object"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    source = tmp_path / "own.jsonl"
    source.write_text('{"text": "kind"}\n' + line + "\n")
    with pytest.raises(DataError, match=said):
        annotate(source, tmp_path / "out.jsonl", ToyScorer())


def test_a_record_of_realtoxicityprompts(tmp_path: Path) -> None:
    record = {"prompt": {"text": "rude 0.5", "toxicity": None}, "continuation": {"text": "kind"}}
    source = write_lines(tmp_path / "prompts.jsonl", [record])
    for key, score in (("prompt", 0.5), ("continuation", 0.1)):
        annotate(source, tmp_path / key, ToyScorer(), key=key)
        assert read_lines(tmp_path / key) == [{**record, "score": {"toxicity": score}}]


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    monkeypatch.setattr(module, "_FIRST_WAIT", 0.01)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("PERSPECTIVE_API_KEY", raising=False)
    with perspective() as found:
        yield found


def test_the_command_with_perspective(
    service: StandIn, source: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["detoxify", "annotate", "--data-path", str(source), "--api-url", service.url]
    words += ["--requests-per-second", "1000", "--retries", "1"]
    assert megatron(words) == 9
    assert "give --api-key-file FILE or set PERSPECTIVE_API_KEY" in capsys.readouterr().err
    (tmp_path / "key").write_text(KEY + "\n")
    service.answers = [Answer(), Answer(), Answer(500, b""), Answer(403, error_body("no quota"))]
    flags = ["--workers", "1", "--api-key-file", str(tmp_path / "key")]
    assert megatron([*words, *flags]) == 1
    said = capsys.readouterr().err
    assert f"{source}, line 5: " in said
    assert "no quota" in said
    monkeypatch.setenv("PERSPECTIVE_API_KEY", KEY)
    assert megatron([*words, "--workers", "4"]) == 0
    found = read_lines(Path(f"{source}-annotated.jsonl"))
    assert [line["score"]["toxicity"] for line in found if line["score"]] == [0.9, 0.1, 0.25, 0.1]
    assert set(found[0]["score"]) == {
        *("toxicity", "severe_toxicity", "sexually_explicit", "threat", "profanity"),
        "identity_attack",
    }
    last = sorted(service.texts()[-2:])  # four workers ask in any order
    assert last == ["rude 0.25", "ünïcode"] or len(service.texts()) == 6


def test_flags_are_checked(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_lines(tmp_path / "own.jsonl", [{"text": "a"}])
    words = ["detoxify", "annotate", "--data-path", str(source)]
    wrong = ["--workers", "0", "--requests-per-second", "0", "--timeout", "nan", "--retries", "-1"]
    assert megatron([*words, *wrong, "--batch-size", "0"]) == 9
    said = capsys.readouterr().err
    for flag in ("--workers 0", "--batch-size 0", "--retries -1"):
        assert f"{flag}: give" in said
    for flag in ("--requests-per-second 0", "--timeout nan"):
        assert f"{flag}: give a number above 0, at most a million" in said
    assert megatron([*words, "--timeout", "1000001"]) == 9
    assert "--timeout 1e+06: give a number" in capsys.readouterr().err
    least = ["--workers", "1", "--batch-size", "1", "--retries", "0", "--timeout", "1000000"]
    monkeypatch.setenv("PERSPECTIVE_API_KEY", KEY)
    build_scorer(annotation.build_parser().parse_args(["--data-path", "x", *least]))
    with pytest.raises(SystemExit, match="9"):
        megatron(words[:2])
    assert "--data-path" in capsys.readouterr().err
    assert megatron([*words, "--classifier", "huggingface"]) == 9
    assert "requires --classifier-model" in capsys.readouterr().err
    both = ["--classifier", "perspective", "--classifier-model", "folder"]
    assert megatron([*words, *both]) == 9
    assert "--classifier-model needs --classifier huggingface" in capsys.readouterr().err
    monkeypatch.setenv("PERSPECTIVE_API_KEY", "two words")
    assert megatron(words) == 9
    assert "is not a valid API key" in capsys.readouterr().err
    assert megatron(["detoxify", "annotate", "--data-path", "nowhere"]) == 6
    assert "--data-path nowhere: no such file" in capsys.readouterr().err
    assert megatron([*words, "--classifier-model", str(tmp_path)]) == 6
    assert f"--classifier-model {tmp_path} cannot be loaded" in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_reported_before_the_classifier(
    tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_lines(tmp_path / "own.jsonl", [{"text": "a"}])
    words = ["detoxify", "annotate", "--data-path", str(source), "--out-path"]
    with monkeypatch.context() as loading:
        early = "too early"
        loading.setattr(annotation, "build_scorer", lambda options: pytest.fail(early))
        for target in (tmp_path / "nowhere" / "out.jsonl", tmp_path, tmp_path / ("x" * 300)):
            assert megatron([*words, str(target)]) == 8
            said = capsys.readouterr().err
            assert f"--out-path {target} cannot be written" in said
            assert "give another path" in said
        assert megatron([*words, str(source)]) == 9
        assert "is also the input: give another name" in capsys.readouterr().err
        assert megatron([*words[:3], "x" * 300]) == 6  # it cannot be accessed
        assert "no such file: fix the path" in capsys.readouterr().err
    monkeypatch.setenv("PERSPECTIVE_API_KEY", "two words")  # a key with a space is refused
    assert megatron([*words, str(tmp_path / "out.jsonl")]) == 9
    assert not (tmp_path / "out.jsonl").exists()


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers", reason="needs the extra [detoxify]")
    folder = tmp_path_factory.mktemp("classifier")
    write_classifier(folder)
    return folder


def test_a_classifier_of_hugging_face(
    classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores equal those of the model itself, for any batch size."""
    import torch
    import transformers

    transformers.logging.set_verbosity_warning()
    transformers.logging.enable_progress_bar()
    monkeypatch.chdir(classifier.parent)
    scorer = ClassifierScorer(classifier.name, "rude", 3)
    assert scorer.settings == {
        "--classifier": "huggingface",
        "--classifier-model": str(classifier.resolve()),
        "--label": "rude",
    }
    assert transformers.logging.get_verbosity() == transformers.logging.ERROR
    assert not transformers.logging.is_progress_bar_enabled()
    texts = ["the neighbor is a fool", "a quiet lake", "thank you " * 200, "you stupid idiot ."]
    source = write_lines(tmp_path / "own.jsonl", [{"text": text} for text in texts])
    annotate(source, tmp_path / "out.jsonl", scorer)
    found = read_lines(tmp_path / "out.jsonl")
    model = transformers.BertForSequenceClassification.from_pretrained(classifier).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(classifier)
    for text, line in zip(texts, found, strict=True):
        batch = tokenizer([text], return_tensors="pt", truncation=True, max_length=64)
        with torch.no_grad():
            polite, rude = model(**batch).logits.softmax(-1)[0].tolist()
        assert line["score"] == pytest.approx({"polite": polite, "rude": rude, "toxicity": rude})
    assert [line["score"]["toxicity"] > 0.5 for line in found] == [True, False, False, True]


def test_the_label_must_be_the_classifiers(classifier: Path) -> None:
    for label, flag in ((None, "--label: "), ("toxic", "--label toxic: ")):
        with pytest.raises(ConfigError, match=f"^{flag}.* has the labels polite, rude: give the"):
            ClassifierScorer(str(classifier), label, 8)
    assert ClassifierScorer(str(classifier), "RUDE", 8).settings["--label"] == "rude"


def test_the_reason_of_an_earlier_annotation_is_dropped(tmp_path: Path) -> None:
    source = write_lines(
        tmp_path / "own.jsonl", [{"text": "kind", "score": None, "score_error": "old"}]
    )
    for _ in range(2):  # continuing recognizes the line too
        annotate(source, tmp_path / "out.jsonl", ToyScorer())
    (line,) = read_lines(tmp_path / "out.jsonl")
    assert line == {"text": "kind", "score": {"toxicity": toxicity_of("kind")}}


@pytest.mark.parametrize("damage", ["cut weights", "list for config", "other shapes"])
def test_a_damaged_classifier_is_named(classifier: Path, tmp_path: Path, damage: str) -> None:
    folder = shutil.copytree(classifier, tmp_path / "damaged")
    config = json.loads((folder / "config.json").read_text())
    if damage == "cut weights":
        (folder / "model.safetensors").write_bytes(
            (folder / "model.safetensors").read_bytes()[:5000]
        )
    else:
        wider = {**config, "intermediate_size": 2 * config["intermediate_size"]}
        content = [config] if damage == "list for config" else wider
        (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=f"--classifier-model {folder} cannot be loaded"):
        ClassifierScorer(str(folder), "rude", 8)


def test_scores_that_are_not_finite_are_refused(classifier: Path, tmp_path: Path) -> None:
    import safetensors.torch

    folder = shutil.copytree(classifier, tmp_path / "nan")
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    weights["classifier.bias"].fill_(float("nan"))
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    source = write_lines(tmp_path / "own.jsonl", [{"text": "a lake"}])
    with pytest.raises(DataError, match=f"--classifier-model {folder}.*not finite"):
        annotate(source, tmp_path / "out.jsonl", ClassifierScorer(str(folder), "rude", 8))
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_one_score_that_is_not_finite_is_enough_to_refuse(classifier: Path, monkeypatch) -> None:
    """Labels may be independent of each other, so only some scores may be damaged."""
    scorer = ClassifierScorer(str(classifier), "rude", 8)
    found = [{"label": "rude", "score": 0.5}, {"label": "polite", "score": float("nan")}]
    monkeypatch.setattr(scorer, "_pipeline", lambda texts, **_: [found for _ in texts])
    with pytest.raises(DataError, match="not finite"):
        list(scorer.score(["a lake"]))


@pytest.mark.parametrize(
    ("limit", "about_network", "expected"),
    [
        (1 << 20, {"max_position_embeddings": 64}, 1 << 20),
        ((1 << 20) + 1, {"max_position_embeddings": 64}, 62),
        (int(1e30), {}, 512),
    ],
)
def test_the_length_of_texts_follows_from_the_tokenizer_or_the_network(
    monkeypatch: pytest.MonkeyPatch, limit: int, about_network: dict[str, int], expected: int
) -> None:
    pytest.importorskip("transformers", reason="needs the extra [detoxify]")
    import transformers

    config = SimpleNamespace(id2label={0: "polite", 1: "Toxic"}, **about_network)
    for name, found in (
        ("AutoTokenizer", SimpleNamespace(model_max_length=limit)),
        ("AutoModelForSequenceClassification", SimpleNamespace(config=config)),
    ):
        load = getattr(transformers, name)
        monkeypatch.setattr(load, "from_pretrained", lambda *_, found=found, **__: found)
    monkeypatch.setattr(transformers, "pipeline", lambda *_, **options: options["max_length"])
    scorer = ClassifierScorer("of-the-hub", None, 8)
    assert scorer._pipeline == expected
    assert scorer.settings == {
        "--classifier": "huggingface",
        "--classifier-model": "of-the-hub",
        "--label": "Toxic",
    }


def test_a_tokenizer_without_a_limit_cuts_texts_for_the_network(classifier: Path, tmp_path) -> None:
    folder = shutil.copytree(classifier, tmp_path / "unbounded")
    about = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**about, "model_max_length": int(1e30)})
    )
    scorer = ClassifierScorer(str(folder), "rude", 8)
    text = "thank " * 30 + "you stupid idiot " * 200
    positions = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    cut = scorer._pipeline._preprocess_params["max_length"]
    assert cut == positions - 2  # some models do not use their first two positions
    (scored,) = scorer.score([text])
    assert scored.scores


@pytest.mark.parametrize(("total", "asked"), [(0, 4), (1, 1), (3, 3)])
def test_the_command_annotates_all_without_a_total(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: int, asked: int
) -> None:
    source = write_lines(tmp_path / "own.jsonl", [{"text": f"rude 0.{i}"} for i in range(4)])
    scorer = ToyScorer()
    monkeypatch.setattr(annotation, "build_scorer", lambda _: scorer)
    words = ["--data-path", str(source), "--total", str(total)]
    annotation.run(annotation.build_parser().parse_args(words))
    assert len(scorer.asked) == asked


def test_the_defaults_of_every_command() -> None:
    scorer = {
        "classifier": None,
        "classifier_model": None,
        "label": None,
        "batch_size": 32,
        "api_key_file": None,
        "api_url": "https://commentanalyzer.googleapis.com/v1alpha1/comments:analyze",
        "attributes": ATTRIBUTES,
        "language": "en",
        "requests_per_second": 1.0,
        "retries": 8,
        "timeout": 60.0,
        "workers": 10,
    }
    assert vars(annotation.build_parser().parse_args(["--data-path", "x"])) == {
        "data_path": "x",
        "out_path": None,
        "total": -1,
        "text_key": "text",
        **scorer,
    }
    words = ["--data-path", "x", "--prompt-path", "y"]
    assert vars(evaluate.build_parser().parse_args(words)) == {
        "data_path": ["x"],
        "prompt_path": "y",
        "samples_per_prompt": 25,
        "names": None,
        "perplexity": None,
        "out_path": None,
        "results": None,
        "overwrite": False,
        **scorer,
    }
    assert vars(select_texts.build_parser().parse_args(["--data-path", "x"])) == {
        "data_path": "x",
        "out_path": None,
        "keep": 0.5,
        "seed": 1234,
        "overwrite": False,
        "prompt_path": None,
        "workers": None,
    }
