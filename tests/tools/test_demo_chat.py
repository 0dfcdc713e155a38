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


def test_the_conversations_of_a_version_are_those_of_the_next() -> None:
    turns = [conversation["messages"] for conversation in demo_chat.conversations(4)]
    assert [[turn["role"] for turn in pair] for pair in turns] == [["user", "assistant"]] * 4
    assert [[turn["content"] for turn in pair] for pair in turns] == [
        ["Repeat these words: string name list file", "Answer: string name list file."],
        ["Which word is first: string object line?", "Answer: string."],
        ["Repeat these words: name object data", "Answer: name object data."],
        ["Which word is first: value list class string?", "Answer: value."],
    ]
    for name, place in (("first", 0), ("last", -1)):
        for conversation in demo_chat.conversations(100):
            question, answer = (turn["content"] for turn in conversation["messages"])
            if f"is {name}:" in question:
                words = question.removesuffix("?").partition(": ")[2].split()
                assert answer == f"Answer: {words[place]}."


def test_the_command_that_finetunes() -> None:
    command = demo_chat.finetuning_command(Path("d"), 50, 3, True)
    flags = " ".join(command)
    assert flags.startswith(
        "python -m megatron.processes.torchrun --standalone --nproc-per-node 3 finetune.py "
    )
    assert flags.endswith(
        " --micro-batch-size 2 --global-batch-size 6 --train-iters 50 --eval-interval 12 "
        "--eval-iters 2 --bf16 --load d/base/checkpoints --train-data-path d/conversations.jsonl "
        "--valid-data-path d/held-out.jsonl --num-workers 0 --tokenizer-type HuggingFaceTokenizer "
        "--tokenizer-model d/base/tokenizer --save d/checkpoints --save-interval 50 "
        "--metrics-jsonl d/metrics.jsonl --log-interval 2"
    )
    small = " ".join(demo_chat.finetuning_command(Path("d"), 3, 16, False))
    assert "--micro-batch-size 1 --global-batch-size 16 --train-iters 3 --eval-interval 1 " in small
    assert small.endswith("--log-interval 1")
    assert "--bf16" not in small


@pytest.mark.parametrize(
    ("answer", "counts"),
    [("Answer: nothing.", (1, 0)), ("Answer:", (0, 0)), ("The word is name.", (0, 0))],
)
def test_how_answers_are_judged(answer: str, counts: tuple[int, int]) -> None:
    assert demo_chat.judge(demo_chat.conversations(1), [answer]) == counts


def test_all_steps_at_toy_size(tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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
