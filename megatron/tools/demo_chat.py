"""Teach a small GPT to answer: `make demo MODEL=chat`.

A small GPT is pretrained as in the plain demo, and finetuned on conversations that follow a rule:
three kinds of questions about a few words, all answered in the form `Answer: WORDS.` Then a server
with the finetuned model is asked 100 questions that occur in none of the conversations. The demo
fails if fewer than 90 answers have this form.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.data.indexed import IndexedDataset
from megatron.durable import replace_file
from megatron.environment import share_cores
from megatron.errors import DataError
from megatron.tools.demo import (
    last_validation_loss,
    prepare,
    processes,
    run_step,
    split_of,
    training_command,
)
from megatron.tools.demo_kinds import KINDS
from megatron.tools.text_generation_cli import Server, serving

ITERATIONS = 300  # of pretraining, and again of finetuning
QUESTIONS, _MIN_FORMED = 100, 90
_SEED = 1234
_CONVERSATIONS = 4000
# These are frequent in the standard library, so that most are a single token.
_WORDS = (
    *("name", "file", "list", "string", "value", "class", "key", "line", "code", "path"),
    *("time", "object", "type", "error", "index", "data", "size", "result", "method", "number"),
)
_ANSWER_FORM = re.compile(r"Answer: [a-z]+( [a-z]+)*\.")
# The server and finetune.py find this template next to the tokenizer. Only text inside `generation`
# counts in the loss.
_TEMPLATE = """\
{%- for message in messages -%}
{{ message['role'] + ':\\n' }}
{%- if message['role'] == 'assistant' -%}
{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}
{%- else -%}
{{ message['content'] }}
{%- endif -%}
{{ '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'assistant:\\n' }}{%- endif -%}
"""


def conversations(count: int) -> list[dict[str, Any]]:
    """Generate conversations of one question and one answer. The result is always the same.

    Args:
        count: The number of conversations. All questions are different.
    """
    rng = random.Random(_SEED)
    answers: dict[str, str] = {}
    while len(answers) < count:
        words = rng.sample(_WORDS, rng.randint(3, 4))
        word_list = " ".join(words)
        question, answer = rng.choice(
            (
                (f"Which word is first: {word_list}?", words[0]),
                (f"Which word is last: {word_list}?", words[-1]),
                (f"Repeat these words: {word_list}", word_list),
            )
        )
        answers[question] = f"Answer: {answer}."
    return [
        {
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
        }
        for question, answer in answers.items()
    ]


def finetuning_command(out: Path, iterations: int, count: int, gpu: bool) -> list[str]:
    """Return the command that finetunes the pretrained GPT on the conversations.

    Args:
        out: The demo's folder.
        iterations: The number of updates.
        count: The number of processes.
        gpu: Whether the processes use GPUs.
    """
    kind = KINDS["gpt"]
    interval = max(1, iterations // 4)
    micro_batch = max(1, kind.global_batch // count)
    return [
        *"python -m megatron.processes.torchrun --standalone".split(),
        *f"--nproc-per-node {count} finetune.py".split(),
        *kind.training_flags,
        *f"--micro-batch-size {micro_batch} --global-batch-size {micro_batch * count}".split(),
        *f"--train-iters {iterations} --eval-interval {interval} --eval-iters 2".split(),
        *(["--bf16"] if gpu else []),
        *["--load", str(out / "base" / "checkpoints")],
        *["--train-data-path", str(out / "conversations.jsonl")],
        *["--valid-data-path", str(out / "held-out.jsonl"), "--num-workers", "0"],
        *_tokenizer(out / "base" / "tokenizer"),
        *["--save", str(out / "checkpoints"), "--save-interval", str(iterations)],
        *["--metrics-jsonl", str(out / "metrics.jsonl")],
        *f"--log-interval {max(1, iterations // 20)}".split(),
    ]


def _tokenizer(folder: Path) -> list[str]:
    """Return the flags for the tokenizer in a folder, which may also have a chat template."""
    return ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)]


def ask(server: Server, question: str) -> str:
    """Return the server's answer to a question, decoded greedily."""
    body = {
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 32,
        "stream": True,
    }
    events = server.stream("/v1/chat/completions", body)
    choices = (choice for event in events for choice in event.get("choices", ()))
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def judge(held_out: Sequence[Mapping[str, Any]], answers: Sequence[str]) -> tuple[int, int]:
    """Return how many answers have the form `Answer: WORDS.`, and how many are correct."""
    expected = [conversation["messages"][1]["content"] for conversation in held_out]
    num_formed = sum(bool(_ANSWER_FORM.fullmatch(answer)) for answer in answers)
    return num_formed, sum(a == e for a, e in zip(answers, expected, strict=True))


def demo(out: Path, source: Path | None, iterations: int) -> None:
    """Run all steps and print how many answers are correct.

    Args:
        out: An empty folder for everything that the demo writes.
        source: The text to pretrain on, or `None` for the source of the standard library.
        iterations: The number of updates in pretraining and in finetuning.

    Raises:
        DataError: Too few answers have the form that the model was taught.
    """
    start = time.perf_counter()
    kind, base = replace(KINDS["gpt"], tokenizer=_tokenizer), out / "base"
    base.mkdir()
    prefix = prepare(kind, base, source)
    split, _ = split_of(IndexedDataset(prefix).num_documents)
    count, gpu = processes()
    share_cores(count)
    run_step(
        "Pretrain a small GPT",
        training_command(kind, base, prefix, split, iterations, count, gpu),
    )
    print(f"\n=== Generated conversations, and a chat template in {base / 'tokenizer'}")
    replace_file(base / "tokenizer" / "chat_template.jinja", _TEMPLATE.encode())
    generated = conversations(_CONVERSATIONS + QUESTIONS)
    held_out = generated[:QUESTIONS]
    for name, lines in (("held-out", held_out), ("conversations", generated[QUESTIONS:])):
        path = out / f"{name}.jsonl"
        replace_file(path, "".join(json.dumps(line) + "\n" for line in lines).encode())
        print(f"wrote {path}: {len(lines)} conversations")
    run_step("Finetune it on the conversations", finetuning_command(out, iterations, count, gpu))
    run_step(
        "Draw the loss curve",
        ["megatron", "plot", "--metrics", str(out / "metrics.jsonl")]
        + ["--output", str(out / "loss.png"), "--title", "Finetuning loss"],
    )
    print(f"\n=== Ask a server {QUESTIONS} questions that no conversation contains", flush=True)
    with serving(out / "checkpoints") as address:
        server = Server(address, None, timeout=60)
        questions = [conversation["messages"][0]["content"] for conversation in held_out]
        answers = [ask(server, question) for question in questions]
    pairs = [{"question": q, "answer": a} for q, a in zip(questions, answers, strict=True)]
    replace_file(out / "answers.jsonl", "".join(json.dumps(p) + "\n" for p in pairs).encode())
    for pair in pairs[:5]:
        print(f"{pair['question']}\n    {pair['answer']}")
    num_formed, num_correct = judge(held_out, answers)
    print(f"""
=== Result
in the form "Answer: WORDS."  {num_formed} of {QUESTIONS} answers
correct                       {num_correct} of {QUESTIONS}
validation loss               {last_validation_loss(out / "metrics.jsonl"):.3f} nats per token
time                          {time.perf_counter() - start:.0f} s

Answers        {out / "answers.jsonl"}
Loss curve     {out / "loss.png"}
Conversations  {out / "conversations.jsonl"}
Checkpoint     {out / "checkpoints"}""")
    if num_formed < _MIN_FORMED:
        raise DataError(
            f"only {num_formed} of {QUESTIONS} answers have the form that the model was taught, "
            f"fewer than {_MIN_FORMED}: train it longer with more --iters (make demo MODEL=chat "
            "ITERS=...)"
        )
    print(f"\n{kind.next_steps(out)} --chat\nand ask, for example: {questions[0]}")
