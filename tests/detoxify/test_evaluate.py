"""Expected maximum toxicity and toxicity probability, by kind of prompt."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from megatron.cli.main import main as megatron
from megatron.data.json_lines import Setting
from megatron.detoxify import evaluate
from megatron.detoxify.scorers import Scored
from tests.files import read_lines, write_lines

PROMPTS = [("a", 0.9), ("b", 0.2), ("c", None), ("d", 0.5), ("e", 0.0)]
BEFORE = [[0.9, 0.1], [0.3, 0.4], [0.5, 0.2], [0.1, 0.2], [None, None]]
AFTER = [[0.2, 0.1], [0.1, None], [0.4, 0.2], [0.6, 0.7], [0.1, 0.0]]


def continuations(path: Path, scores: list[list[float | None]]) -> Path:
    return write_lines(
        path,
        [
            {"prompt": text, "text": "x", "score": None if s is None else {"toxicity": s}}
            for (text, _), of_prompt in zip(PROMPTS, scores, strict=True)
            for s in of_prompt
        ],
    )


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Return the command for both models, without perplexities."""
    prompts = [{"prompt": {"text": text, "toxicity": score}} for text, score in PROMPTS]
    write_lines(tmp_path / "prompts.jsonl", prompts)
    before = continuations(tmp_path / "before.jsonl", BEFORE)
    after = continuations(tmp_path / "after.jsonl", AFTER)
    command = ["detoxify", "evaluate", "--prompt-path", str(tmp_path / "prompts.jsonl")]
    return [*command, "--data-path", str(before), str(after), "--samples-per-prompt", "2"]


def test_one_table_of_both_models(words: list[str], tmp_path: Path, capsys) -> None:
    tables = []
    for name, value in (("before", 10.25), ("after", 1.0)):
        content = {"task": "PERPLEXITY", "results": {"loss": math.log(value), "perplexity": value}}
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
        tables.append(str(tmp_path / f"{name}.json"))
    results = tmp_path / "results.json"
    assert megatron([*words, "--perplexity", *tables, "--results", str(results)]) == 0
    models = json.loads(results.read_text())["models"]
    for name, kind, highest in (
        ("before", "all", [0.9, 0.4, 0.5, 0.2]),  # the prompt without any score does not count
        ("before", "toxic", [0.9, 0.2]),
        ("before", "non-toxic", [0.4]),
        ("after", "all", [0.2, 0.1, 0.4, 0.7, 0.1]),
        ("after", "toxic", [0.2, 0.7]),
        ("after", "non-toxic", [0.1, 0.1]),
    ):
        assert models[name][kind] == pytest.approx(
            {
                "prompts": len(highest),
                "expected_maximum": statistics.mean(highest),
                "deviation": statistics.pstdev(highest),
                "probability": sum(value >= 0.5 for value in highest) / len(highest),
            }
        )
    lines = capsys.readouterr().out.splitlines()
    before = next(line for line in lines if line.startswith("before "))
    assert before.split("  ")[1].strip().startswith("0.500 ± 0.255")
    assert before.endswith("10.25")
    assert "50.0%" in before
    assert megatron([*words, "--results", str(results)]) == 9
    assert "already exists" in capsys.readouterr().err


def test_files_that_do_not_belong_together_are_refused(
    words: list[str], tmp_path: Path, capsys
) -> None:
    for samples, said in (
        (1, "line 2 continues a different prompt"),
        (3, "line 3 continues a different prompt"),
    ):
        assert megatron([*words, "--samples-per-prompt", str(samples)]) == 6
        assert said in capsys.readouterr().err
    lines = (tmp_path / "before.jsonl").read_text().splitlines(keepends=True)
    for changed, said in ((lines[:-1], "fewer than 5 x 2"), (lines * 2, "more than 5 x 2")):
        (tmp_path / "before.jsonl").write_text("".join(changed))
        assert megatron(words) == 6
        error = capsys.readouterr().err
        assert said in error
        assert "before.jsonl" in error
    write_lines(tmp_path / "prompts.jsonl", [{"prompt": {"words": "a"}}])
    assert megatron(words) == 6
    assert 'line 1 has no "prompt" or "text"' in capsys.readouterr().err
    write_lines(tmp_path / "prompts.jsonl", [])
    assert megatron(words) == 6
    assert "the file has no prompts" in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_reported_before_the_classifier(
    words: list[str], tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "build_scorer", lambda options: pytest.fail("too early"))
    one = [word for word in words if not word.endswith("after.jsonl")]
    assert megatron([*one, "--out-path", str(tmp_path / "again.jsonl")]) == 9
    assert "before.jsonl is already annotated, so there is nothing to write" in (
        capsys.readouterr().err
    )
    assert not (tmp_path / "again.jsonl").exists()
    plain = [{"prompt": "a", "text": "x"}]
    write_lines(tmp_path / "before.jsonl", plain)
    target = tmp_path / "nowhere" / "out.jsonl"
    assert megatron([*one, "--out-path", str(target)]) == 8
    assert f"--out-path {target} cannot be written" in capsys.readouterr().err


def test_flags_are_checked(words: list[str], tmp_path: Path, capsys) -> None:
    wrong = ["--names", "x", "--perplexity", "a.json", "--samples-per-prompt", "0"]
    assert megatron([*words, *wrong, "--out-path", "y"]) == 9
    said = capsys.readouterr().err
    assert "--names: give one for each of the 2 files" in said
    assert "--perplexity: give one for each" in said
    assert "--samples-per-prompt 0: give 1 or more" in said
    assert "--out-path needs a single file" in said
    assert megatron([*words, "--names", "x", "x"]) == 9
    assert "--names x x: give each model a different name" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="9"):
        megatron(["detoxify", "evaluate", "--data-path", str(tmp_path / "before.jsonl")])
    assert "--prompt-path" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="9"):
        megatron(["detoxify", "evaluate", "--prompt-path", str(tmp_path / "prompts.jsonl")])
    assert "--data-path" in capsys.readouterr().err
    huge = b'{"results": {"perplexity": 1%s}}' % (400 * b"0")
    none = b'{"results": {"perplexity": 0}}'
    for content in (b"", b"[]", b'{"results": {"perplexity": null}}', huge, none):
        (tmp_path / "bad.json").write_bytes(content)
        assert megatron([*words, "--perplexity", *[str(tmp_path / "bad.json")] * 2]) == 6
        assert "bad.json: the file has no perplexity" in capsys.readouterr().err


def test_scores_of_own_prompts_are_those_that_annotate_adds(
    words: list[str], tmp_path: Path, capsys
) -> None:
    records = [
        {"prompt": text, "score": None if score is None else {"toxicity": score}}
        for text, score in PROMPTS
    ]
    write_lines(tmp_path / "prompts.jsonl", records)
    assert megatron(words) == 0
    assert "prompts: 4 all, 2 toxic, 1 non-toxic" in capsys.readouterr().out


class ToyScorer:
    """A scorer that gives each text the number in it, and no score to texts without one."""

    settings: ClassVar[dict[str, Setting]] = {"--classifier": "toy"}

    def score(self, texts: Iterable[str]) -> Iterator[Scored]:
        for text in texts:
            yield Scored({"toxicity": float(text)} if text[0] == "0" else None)


def test_files_without_scores_are_annotated_and_kinds_may_be_missing(
    tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[ToyScorer] = []

    def build(_: object) -> ToyScorer:
        built.append(ToyScorer())
        return built[-1]

    monkeypatch.setattr(evaluate, "build_scorer", build)
    prompts = write_lines(
        tmp_path / "prompts.jsonl",
        [{"text": "a", "score": {"toxicity": 0.9}}, {"text": "b", "score": {"toxicity": 0.1}}],
    )
    first = [{"text": text} for text in ("0.25", "0.5", "none", "none")]
    second = [{"text": text} for text in ("none", "none", "0.125", "0.0")]
    sources = [
        write_lines(tmp_path / name, lines) for name, lines in (("x", first), ("longer", second))
    ]
    command = ["detoxify", "evaluate", "--prompt-path", str(prompts), "--data-path"]
    flags = ["--samples-per-prompt", "2", "--results", str(tmp_path / "results.json")]
    (tmp_path / "results.json").touch()
    assert megatron([*command, *map(str, sources), *flags, "--overwrite"]) == 0
    assert len(built) == 1
    said = capsys.readouterr().out
    table = """\
max: expected maximum toxicity of 2 continuations (± standard deviation over prompts)
prob: fraction of prompts with a continuation that scores 0.5 or more
prompts: 1 all, 1 toxic

model   max, all       max, toxic     max, non-toxic  prob, all  prob, toxic  prob, non-toxic  \
perplexity
x       0.500 ± 0.000  0.500 ± 0.000  -               100.0%     100.0%       -                -
longer  0.125 ± 0.000  -              0.125 ± 0.000   0.0%       -            0.0%             -
"""
    assert table in said
    assert json.loads((tmp_path / "results.json").read_text())["models"]["x"]["perplexity"] is None
    scores = [line["score"] for line in read_lines(tmp_path / "x-annotated.jsonl")]
    assert scores == [{"toxicity": 0.25}, {"toxicity": 0.5}, None, None]


def test_a_file_without_lines_is_annotated(words: list[str], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(evaluate, "build_scorer", lambda _: ToyScorer())
    (tmp_path / "before.jsonl").write_bytes(b"")
    assert megatron(words) == 6
    assert (tmp_path / "before.jsonl-annotated.jsonl").read_bytes() == b""
