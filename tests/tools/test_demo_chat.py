"""The chat demo: its conversations, how answers are judged, and all steps at toy size."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import DataError
from megatron.tools import demo, demo_chat
from tests.launch import fork_steps


def test_conversations_repeat_no_question_and_have_the_form() -> None:
    written = demo_chat.conversations(500)
    assert written == demo_chat.conversations(500)
    questions = [conversation["messages"][0]["content"] for conversation in written]
    assert len(set(questions)) == 500
    answers = [conversation["messages"][1]["content"] for conversation in written]
    assert demo_chat.judge(written, answers) == (500, 500)


@pytest.mark.parametrize(
    ("answer", "counts"),
    [("Answer: nothing.", (1, 0)), ("Answer:", (0, 0)), ("The word is name.", (0, 0))],
)
def test_judgement(answer: str, counts: tuple[int, int]) -> None:
    assert demo_chat.judge(demo_chat.conversations(1), [answer]) == counts


def test_all_steps_in_small(tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fork_steps(monkeypatch, {**os.environ, "OMP_NUM_THREADS": "1"})
    monkeypatch.setattr(demo_chat, "QUESTIONS", 2)
    monkeypatch.setattr(demo_chat, "_CONVERSATIONS", 40)
    text, out = tmp_path / "text.jsonl", tmp_path / "demo"
    text.write_text((json.dumps({"text": "the name of a file " * 50}) + "\n") * 40)
    words = ["--model", "chat", "--iters", "2", "--input", str(text), "--out", str(out)]
    assert demo.main(words) == DataError.exit_code  # nothing is learned in two updates
    printed = capfd.readouterr()
    assert "0 of 2 answers" in printed.out
    assert "ITERS=" in printed.err
    held_out = [json.loads(line) for line in (out / "held-out.jsonl").read_text().splitlines()]
    taught = (out / "conversations.jsonl").read_text().splitlines()
    assert len(held_out) == 2
    assert len(taught) == 40
    assert not {json.dumps(conversation) for conversation in held_out} & set(taught)
    answers = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
    assert [a["question"] for a in answers] == [h["messages"][0]["content"] for h in held_out]
    assert (out / "loss.png").stat().st_size > 10_000
