"""Selecting the texts with the lowest scores."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from megatron.cli.main import main as megatron
from megatron.detoxify import select_texts


def write(path: Path, scores: list[float | None]) -> Path:
    lines = [
        {"text": f"t{i}", "score": None if score is None else {"toxicity": score, "threat": 1.0}}
        for i, score in enumerate(scores)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines).removesuffix("\n"))
    return path


def test_half_of_all_lines_is_kept_in_random_order(tmp_path: Path, capsys) -> None:
    generator = random.Random(0)
    scores: list[float | None] = [generator.random() for _ in range(100)]
    scores[::10] = [None] * 10
    source, target = write(tmp_path / "in.jsonl", scores), tmp_path / "out.jsonl"
    words = ["detoxify", "select", "--data-path", str(source), "--out-path", str(target)]
    assert megatron([*words, "--workers", "70"]) == 0  # a flag of Megatron's script
    kept = [json.loads(line) for line in target.read_text().splitlines()]
    numbers = [int(line["text"][1:]) for line in kept]
    known = sorted((score, i) for i, score in enumerate(scores) if score is not None)
    assert sorted(numbers) == sorted(i for _, i in known[:50])
    assert numbers != sorted(numbers)
    assert all(line["score"]["toxicity"] == scores[int(line["text"][1:])] for line in kept)
    said = capsys.readouterr().out
    assert f"all   mean toxicity {sum(s for s, _ in known) / 90:.4f}" in said
    assert "100 lines, 90 of them with a score" in said
    assert f"kept  mean toxicity {sum(s for s, _ in known[:50]) / 50:.4f}" in said
    content = target.read_bytes()
    assert megatron(words) == 9
    assert "already exists" in capsys.readouterr().err
    assert megatron([*words, "--overwrite"]) == 0
    assert target.read_bytes() == content
    assert megatron([*words, "--overwrite", "--keep", "0.07", "--seed", "5"]) == 0
    assert len(target.read_text().splitlines()) == 7


def test_a_share_that_is_a_whole_number_of_lines_is_that_number(tmp_path: Path) -> None:
    source, target = write(tmp_path / "in.jsonl", [0.1] * 100), tmp_path / "out.jsonl"
    words = ["detoxify", "select", "--data-path", str(source), "--out-path", str(target)]
    assert megatron([*words, "--keep", "0.29"]) == 0  # 0.29 * 100 is below 29
    assert len(target.read_text().splitlines()) == 29
    write(source, [0.1] * 3)
    assert megatron([*words, "--overwrite", "--keep", "0.3333333"]) == 0
    assert len(target.read_text().splitlines()) == 1


def test_what_is_said_of_all_texts_and_of_those_that_are_kept(
    tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = [0.5, 0.25, None, 0.5, 1.0, 0.75]
    source, target = write(tmp_path / "in.jsonl", scores), tmp_path / "out.jsonl"
    words = ["detoxify", "select", "--data-path", str(source), "--out-path", str(target)]
    flushed: list[Path] = []
    monkeypatch.setattr(select_texts, "sync_folder", flushed.append)
    assert megatron(words) == 0
    assert flushed == [tmp_path]
    assert sorted(json.loads(line)["text"] for line in target.read_text().splitlines()) == [
        *("t0", "t1", "t3")
    ]
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert said == [
        "  all   mean toxicity 0.6000 (standard deviation 0.2550), from 0.2500 to 1.0000; 80.0% "
        "are at least 0.5",
        "  kept  mean toxicity 0.4167 (standard deviation 0.1179), from 0.2500 to 0.5000; 66.7% "
        "are at least 0.5",
    ]


@pytest.mark.parametrize(
    ("content", "code", "said"),
    [
        ('{"text": "a"}\n', 6, 'line 1 has no "score"'),
        ('{"text": "a", "score": {"threat": 1}}\n', 6, 'line 1 has no "score" with a "toxicity"'),
        ('{"text": "a", "score": {"toxicity": 1.5}}\n', 6, "line 1 has no"),
        ('{"text": "a", "score": {"toxicity": NaN}}\n', 6, "line 1 has no"),
        ('{"text": "a", "score": {"toxicity": true}}\n', 6, "line 1 has no"),
        ('{"score": null}\n{"score": null}\n', 6, "none of its 2 lines can be kept"),
        ("\n", 6, "line 1 is not a JSON object"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, capsys, content: str, code: int, said: str) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(content)
    assert megatron(["detoxify", "select", "--data-path", str(source)]) == code
    error = capsys.readouterr().err
    assert said in error
    assert str(source) in error
    assert list(tmp_path.iterdir()) == [source]


def test_a_share_is_checked_and_the_input_is_not_replaced(tmp_path: Path, capsys) -> None:
    source = write(tmp_path / "in.jsonl", [0.1, 0.2])
    words = ["detoxify", "select", "--data-path", str(source)]
    for share in ("0", "1.5"):
        assert megatron([*words, "--keep", share]) == 9
        assert f"--keep {share}: give a fraction" in capsys.readouterr().err
    assert megatron([*words, "--out-path", str(source), "--overwrite"]) == 9
    assert "is also the input" in capsys.readouterr().err
    assert megatron([*words, "--out-path", "x" * 300]) == 8
    assert "File name too long): give another path" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="9"):
        megatron(words[:2])
    assert "--data-path" in capsys.readouterr().err
