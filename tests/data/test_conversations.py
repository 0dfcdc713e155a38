"""Conversations as ids: what is trained, what is refused, what is cached."""

from __future__ import annotations

import base64
import errno
import gzip
import json
import random
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow.parquet
import pytest

from megatron.config.data import TokenizerConfig
from megatron.data import conversations
from megatron.data.cache import IndexCache
from megatron.data.conversations import (
    ConversationEncoder,
    ConversationOptions,
    TokenizedExamples,
    load_examples,
)
from megatron.data.text_input import BadLine, TextBlock
from megatron.errors import ConfigError, DataError
from tests.inference.server.live import write_tokenizer
from tests.inference.server.test_texts import HOSTILE_TEMPLATES

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
USER = {"role": "user", "content": "Hello"}
ANSWER = {"role": "assistant", "content": "Hi there."}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(found)
    return found


def _encoder(folder: Path, template: str | None = CHATML, **changes: Any) -> ConversationEncoder:
    tokenizer = TokenizerConfig(
        tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder / "tokenizer.json")
    )
    return ConversationEncoder(
        ConversationOptions(tokenizer, template, **{"max_length": 256, **changes})
    )


def _load(
    path: Path, encoder: ConversationEncoder, records: list[Any], **options: Any
) -> TokenizedExamples:
    lines = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in records]
    file = path / "chats.jsonl"
    file.write_bytes(b"".join(line + b"\n" for line in lines))
    return load_examples(str(file), encoder, IndexCache((path / "cache",)), **options)


def _trained(encoder: ConversationEncoder, examples: TokenizedExamples) -> list[str]:
    found = [examples[index] for index in range(len(examples))]
    return [encoder.tokenizer.detokenize(ids[on].tolist()) for ids, on in found]


@pytest.mark.parametrize(
    ("record", "trained"),
    [
        ({"messages": [USER, ANSWER]}, ["Hi there.<|endoftext|>"]),
        (
            {"conversations": [{"from": "human", "value": "A"}, {"from": "gpt", "value": "B"}]},
            ["B<|endoftext|>"],
        ),
        ({"prompt": [USER], "completion": [ANSWER]}, ["Hi there.<|endoftext|>"]),
        ({"prompt": "Hello", "completion": " there."}, [" there.<|endoftext|>"]),
        ({"text": "Hello there."}, ["Hello there.<|endoftext|>"]),
    ],
)
def test_every_format_gives_what_is_trained(
    record: dict[str, Any], trained: list[str], folder: Path, tmp_path: Path
) -> None:
    encoder = _encoder(folder)
    assert _trained(encoder, _load(tmp_path, encoder, [record])) == trained


def test_ids_come_from_the_cache_until_something_changes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [{"messages": [USER, ANSWER]}]
    first = _load(tmp_path, _encoder(folder), records)
    path = str(tmp_path / "chats.jsonl")
    cache = IndexCache((tmp_path / "cache",))
    with monkeypatch.context() as patch:
        patch.setattr("megatron.data.conversations._build", pytest.fail)
        again = load_examples(path, _encoder(folder), cache)
    assert np.array_equal(again.tokens, first.tokens)
    assert np.array_equal(again.trained, first.trained)
    assert again.summary() == first.summary()
    for changed in (
        _encoder(folder, "{{ bos_token }}" + CHATML),
        _encoder(folder, train_on_inputs=True),
    ):
        other = load_examples(path, changed, cache)
        assert not np.array_equal(other.tokens, first.tokens) or other.trained.all()
    longer = _load(tmp_path, _encoder(folder), [*records, *records])
    assert len(longer) == 2


PREFERENCE = {"prompt": [USER], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "No."}]}
OPENAI = {
    "input": {"messages": [USER], "tools": [], "parallel_tool_calls": True},
    "preferred_output": PREFERENCE["chosen"],
    "non_preferred_output": PREFERENCE["rejected"],
}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}]}


def _said(*messages: Any, **others: Any) -> dict[str, Any]:
    return {"messages": list(messages), **others}


# Malformed records, and what the message names: the problem and the remedy.
REFUSED: dict[str, tuple[Any, str, str]] = {
    "not JSON": (b'{"messages": [', "broken JSON", "line 2|character"),
    "not UTF-8": (b'{"text": "\xff"}', "bad UTF-8", "byte 10"),
    "half a surrogate": (b'{"text": "\\ud800"}', "surrogate", "string"),
    "not an object": (b"[1]", "a list", "write one record"),
    "a key twice": (b'{"text": "a", "text": "b"}', "'text' occurs twice", "remove one"),
    "a nested key twice": (
        b'{"messages": [{"role": "user", "role": "user", "content": "a"}]}',
        "'role' occurs twice",
        "remove one",
    ),
    "no known format": ({"question": "a"}, "keys: 'question'", "messages"),
    "preferences for imitation": (PREFERENCE, "preference record", "give other data"),
    "messages not a list": ({"messages": "Hello"}, "'messages' is a string", "write a list"),
    "no messages": ({"messages": []}, "empty list", "add messages"),
    "a message not an object": (_said("Hello"), "message 1 is a string", "write an object"),
    "no role": (_said({"content": "a"}), "no 'role'", "give one of"),
    "ShareGPT's names": (_said({"from": "human", "value": "a"}), "no 'role'", "'conversations'"),
    "unknown role": (_said({"role": "robot", "content": "a"}), "unknown role 'robot'", "system"),
    "no content": (_said(USER, {"role": "assistant"}), "no 'content'", "write its text"),
    "content not text": (_said(USER, {**ANSWER, "content": 1}), "'content' is a number", "write"),
    "an image": (
        _said({"role": "user", "content": [{"type": "image_url"}]}, ANSWER),
        "'image_url'",
        "only text",
    ),
    "an empty turn": (_said(USER, {**ANSWER, "content": " \n"}), "empty", "remove the turn"),
    "no turn of the assistant": (_said(USER), "no turn of the assistant", "add an answer"),
    "the assistant first": (_said(ANSWER, USER), "roles out of order", "alternate"),
    "the user twice": (_said(USER, USER, ANSWER), "message 2: roles out of order", "alternate"),
    "the system late": (
        _said(USER, {"role": "system", "content": "a"}, ANSWER),
        "'system' after 'user'",
        "begin with",
    ),
    "a tool that was not called": (
        _said(USER, ANSWER, {"role": "tool", "content": "1"}),
        "'tool' after 'assistant'",
        "follows an assistant's tool_calls",
    ),
    "a call by the user": (
        _said({**USER, "tool_calls": []}, ANSWER),
        "only the assistant",
        "remove",
    ),
    "calls not a list": (_said(USER, {**ANSWER, "tool_calls": "f"}), "not a list", "write a list"),
    "a call not an object": (
        _said(USER, {**ANSWER, "tool_calls": [{"name": "f"}, "g"]}),
        "not a list of objects",
        "write a list",
    ),
    "a call without a name": (_said(USER, {**ANSWER, "tool_calls": [{}]}), "no 'name'", "name the"),
    "broken arguments": (
        _said(USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}, USER),
        "'arguments' of 'f': broken JSON",
        "write valid JSON",
    ),
    "tools not objects": (_said(USER, ANSWER, tools=["f"]), "'tools' is not", "write a list"),
    "tools in broken JSON": (
        _said(USER, ANSWER, tools="["),
        "'tools': broken JSON",
        "write valid JSON",
    ),
    "variables not an object": (
        _said(USER, ANSWER, chat_template_kwargs=[1]),
        "'chat_template_kwargs' is a list",
        "write an object",
    ),
    "another weight": (_said(USER, {**ANSWER, "weight": 2}), "'weight' of a turn is 2", "0 or 1"),
    "train not a boolean": (_said(USER, {**ANSWER, "train": 1}), "'train' of a turn is 1", "true"),
    "nothing has weight": (_said(USER, {**ANSWER, "weight": 0}), "weight 0", "give one weight 1"),
    "an unknown speaker": (
        {"conversations": [{"from": "alien", "value": "a"}]},
        "unknown 'from' 'alien'",
        "human",
    ),
    "a speaker without words": (
        {"conversations": [{"from": "human"}]},
        "lacks 'from' or 'value'",
        "write both",
    ),
    "conversations not a list": ({"conversations": {}}, "not a list of turns", "from"),
    "a string and messages": (
        {"prompt": "Hello", "completion": [ANSWER]},
        "some are lists of messages",
        "use the same type",
    ),
    "a completion by the user": (
        {"prompt": [USER], "completion": [USER]},
        "does not begin with a turn of the assistant",
        "move earlier turns",
    ),
    "an empty completion": ({"prompt": "a", "completion": ""}, "'completion' is empty", "remove"),
    "text not a string": ({"text": 1}, "'text' is a number", "write a string"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_malformed_records_are_refused_with_file_line_and_remedy(
    name: str, folder: Path, tmp_path: Path
) -> None:
    record, problem, remedy = REFUSED[name]
    with pytest.raises(DataError) as caught:
        _load(tmp_path, _encoder(folder), [_said(USER, ANSWER), record], workers=1)
    said = str(caught.value)
    assert said.startswith(f"--data-path {tmp_path / 'chats.jsonl'}:2: ")
    assert problem in said
    assert re.search(remedy, said)
    assert "--skip-bad-lines" in said
    assert "\n" not in said


def test_lines_are_counted_over_the_blocks_of_each_file(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("megatron.data.conversations._BLOCK_BYTES", 1)  # a block per line
    good = json.dumps(_said(USER, ANSWER))
    names = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    for name, lines in zip(names, ([good, good, "[", good, "["], ["[", good]), strict=True):
        Path(name).write_text("\n".join(lines) + "\n")
    found = load_examples(
        str(tmp_path), _encoder(folder), IndexCache(()), workers=1, skip_bad_lines=True
    )
    assert len(found) == 4
    warnings = capsys.readouterr().err.splitlines()
    places = [re.sub("^WARNING: --data-path (.*?): .*", r"\1", line) for line in warnings]
    assert places == [f"{names[0]}:3", f"{names[0]}:5", f"{names[1]}:1"]


def test_malformed_records_are_left_out_if_wanted(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [record for record, _, _ in REFUSED.values()]
    encoder = _encoder(folder)
    found = _load(tmp_path, encoder, [_said(USER, ANSWER), *records], skip_bad_lines=True)
    assert len(found) == 1
    assert f"bad lines skipped: {len(REFUSED)}" in found.summary()
    assert ": 1 records (" in found.summary()
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 3
    assert warnings[0].startswith(f"WARNING: --data-path {tmp_path / 'chats.jsonl'}:2: ")
    assert "only counted" in warnings[2]


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (_said(USER, ANSWER), 'needs "chosen" and "rejected"'),
        ({"chosen": "Yes", "rejected": "Yes"}, "are the same"),
        ({"chosen": "Yes", "rejected": [ANSWER]}, "differ in type"),
        ({**PREFERENCE, "rejected": "No."}, "some are lists"),
        (
            {**PREFERENCE, "rejected": [USER]},
            "'rejected' does not begin with a turn of the assistant",
        ),
        ({**PREFERENCE, "rejected": [{**ANSWER, "weight": 0}]}, "weight 0|only in 'messages'"),
        ({**OPENAI, "input": [USER]}, "'input' has no messages"),
        ({**OPENAI, "input": {"messages": []}}, "'input' is an empty list"),
        ({**OPENAI, "preferred_output": [USER]}, "'preferred_output' does not begin with a turn"),
        ({"chosen": ANSWER, "rejected": ANSWER}, "follow no prompt: write it in 'messages'"),
    ],
)
def test_malformed_preferences_are_refused(
    record: dict[str, Any], problem: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=rf"chats.jsonl:1: .*({problem})"):
        _load(tmp_path, _encoder(folder, preferences=True), [record])


def test_a_preference_is_two_examples_with_one_prompt(folder: Path, tmp_path: Path) -> None:
    encoder = _encoder(folder, preferences=True)
    implicit = {key: [USER, *PREFERENCE[key]] for key in ("chosen", "rejected")}
    strings = {"chosen": "One two three", "rejected": "One two four"}
    repeated = {"prompt": USER["content"], **implicit}
    question = {**PREFERENCE, "prompt": USER["content"]}
    single = {key: PREFERENCE[key][0] for key in ("chosen", "rejected")}
    spoken = {key: {"from": "gpt", "value": turn["content"]} for key, turn in single.items()}
    asked = [{"from": "human", "value": USER["content"]}]
    axolotl = {"messages": [USER], "prompt": None, **single}
    factory = {"conversations": asked, **spoken}
    records = [PREFERENCE, implicit, strings, repeated, question, OPENAI, axolotl, factory]
    found = _load(tmp_path, encoder, records)
    answers = ["Hi there.<|endoftext|>", "No.<|endoftext|>"]
    ends = [" three<|endoftext|>", " four<|endoftext|>"]
    assert _trained(encoder, found) == [*answers, *answers, *ends, *answers * 5]
    for one in (1, *range(3, len(records))):
        assert np.array_equal(found[2 * one][0], found[0][0])
    for pair in range(len(records)):
        chosen, rejected = found[2 * pair], found[2 * pair + 1]
        assert np.array_equal(chosen[0][~chosen[1]], rejected[0][~rejected[1]])
    for kind in ("preferences", "labels"):
        with pytest.raises(ConfigError, match="cut answers that are compared as a whole"):
            _encoder(folder, truncation="split", **{kind: True})


def test_labeled_answers_say_on_their_first_token_whether_they_are_desirable(
    folder: Path, tmp_path: Path
) -> None:
    encoder = _encoder(folder, labels=True)
    good = {"prompt": [USER], "completion": [ANSWER], "label": True}
    found = _load(tmp_path, encoder, [good, {**good, "label": False}, PREFERENCE])
    assert [bool(found[i][1][0]) for i in range(4)] == [True, False, True, False]
    for i in range(4):
        ids, trained = found[i]
        answer = encoder.tokenizer.detokenize(ids[1:][trained[1:]].tolist())
        assert answer == ("No.<|endoftext|>" if i == 3 else "Hi there.<|endoftext|>")


def test_ids_are_collected_in_a_file_not_in_memory(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(_said(USER, ANSWER)))
    found = load_examples(str(path), _encoder(folder), IndexCache(()), workers=1)
    for array in (found.tokens, found.trained, found.lengths):
        assert isinstance(array.base, np.memmap)
    assert list(tmp_path.iterdir()) == [path]  # the files have no name


def test_turns_without_weight_are_context_only(folder: Path, tmp_path: Path) -> None:
    turns = [USER, {**ANSWER, "weight": 0}, USER, {**ANSWER, "content": "Two"}]
    marked = CHATML.replace(
        "{{ m.content }}<|endoftext|>",
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|endoftext|>"
        "{% endgeneration %}{% else %}{{ m.content }}<|endoftext|>{% endif %}",
    )
    for template in (CHATML, marked):
        encoder = _encoder(folder, template)
        assert _trained(encoder, _load(tmp_path, encoder, [_said(*turns)])) == ["Two<|endoftext|>"]
        turns[1].pop("weight", None)
        turns[1]["train"] = False
        assert _trained(encoder, _load(tmp_path, encoder, [_said(*turns)])) == ["Two<|endoftext|>"]
        turns[1]["train"] = True
        last = _encoder(folder, template, last_turn_only=True)
        assert _trained(last, _load(tmp_path, last, [_said(*turns)])) == ["Two<|endoftext|>"]
        turns[1]["weight"] = 0
        every = _encoder(folder, template, train_on_inputs=True)
        assert _load(tmp_path, every, [_said(*turns)]).trained.all()


def test_reasoning_may_be_left_out_of_earlier_turns(folder: Path, tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}<|{{ m.role }}|>"
        "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
        "{{ m.content }}<|endoftext|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    encoder = _encoder(folder, template)
    examples = _load(tmp_path, encoder, [_said(USER, ANSWER, USER, {**ANSWER, "content": "\nTwo"})])
    assert _trained(encoder, examples) == [
        "Hi there.<|endoftext|><think></think>\nTwo<|endoftext|>"
    ]


def test_tools_and_other_inputs_reach_the_template(folder: Path, tmp_path: Path) -> None:
    template = (
        "{{ tools[0].function.name }} {{ style }} {{ strftime_now('%d %b %Y') }}\n"
        "{% for m in messages %}<|{{ m.role }}|>{% if m.tool_calls %}"
        "{{ m.tool_calls[0].function.arguments.x }}{% else %}{{ m.content }}{% endif %}"
        "<|endoftext|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    observed = {"role": "tool", "content": "42"}
    developer = {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}
    record = _said(developer, USER, CALL, observed, ANSWER, chat_template_kwargs={"style": "S"})
    tools = [{"type": "function", "function": {"name": "f"}}]
    sharegpt = {
        "system": "Be brief.",
        "conversations": [
            {"from": "human", "value": "Hello"},
            {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
            {"from": "observation", "value": "42"},
            {"from": "gpt", "value": "Hi there."},
        ],
        "chat_template_kwargs": {"style": "S"},
    }
    encoder = _encoder(folder, template)
    found = _load(
        tmp_path, encoder, [{**record, "tools": tools}, {**sharegpt, "tools": json.dumps(tools)}]
    )
    for ids, trained in (found[0], found[1]):
        assert encoder.tokenizer.detokenize(ids.tolist()) == (
            "f S 26 Jul 2024\n<|system|>Be brief.<|endoftext|><|user|>Hello<|endoftext|>"
            "<|assistant|>1<|endoftext|><|tool|>42<|endoftext|><|assistant|>Hi there.<|endoftext|>"
        )
        said = encoder.tokenizer.detokenize(ids[trained].tolist())
        assert said == "1<|endoftext|>Hi there.<|endoftext|>"


def test_long_examples_are_reported_dropped_cut_or_split(folder: Path, tmp_path: Path) -> None:
    long = {"prompt": "one two three", "completion": " four five six seven eight nine ten."}
    whole = _load(tmp_path, _encoder(folder), [long])
    ids, trained = whole[0]
    most = len(ids) - 3

    def load(way: str, most: int = most, records: tuple[Any, ...] = (long,)) -> TokenizedExamples:
        return _load(tmp_path, _encoder(folder, max_length=most, truncation=way), list(records))

    with pytest.raises(DataError, match=rf":1: .*{len(ids)} tokens.*--seq-length.*--truncation"):
        load("error")
    start, end = load("keep-start"), load("keep-end")
    assert np.array_equal(start[0][0], ids[:most])
    assert np.array_equal(start[0][1], trained[:most])
    assert np.array_equal(end[0][0], ids[-most:])
    assert "cut to --seq-length: 1" in start.summary()
    dropped = load("drop", records=(long, {"text": "a"}))
    assert len(dropped) == 1
    assert "dropped because longer than --seq-length: 1" in dropped.summary()
    parts = load("split", most=4, records=({"text": "one two three four five six seven"},))
    uncut = load("error", most=64, records=({"text": "one two three four five six seven"},))
    pieces = [parts[index][0][index > 0 :] for index in range(len(parts))]
    assert parts.lengths.max() <= 4
    assert np.array_equal(np.concatenate(pieces), uncut[0][0])  # each label is in one part
    first = int(np.argmax(trained))
    with pytest.raises(DataError, match="no token is trained: 1; no examples are left"):
        load("keep-start", most=first)


@pytest.mark.parametrize("name", HOSTILE_TEMPLATES)
def test_a_hostile_template_is_stopped(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.data.conversations._RENDER_SECONDS", 0.5)
    with pytest.raises(DataError, match="chats.jsonl:1: .*(chat template|no examples are left)"):
        _load(tmp_path, _encoder(folder, HOSTILE_TEMPLATES[name]), [_said(USER, ANSWER)])


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (None, "messages need a chat template.*--chat-template"),
        ("{{ raise_exception('no tools') }}", "refuses the messages: no tools"),
        ("{{ messages | length }} {{ messages }}", "differently when more .*generation"),
        ("{% generation %}{% endgeneration %}a", "dropped because no token is trained"),
    ],
)
def test_a_template_that_does_not_fit_is_refused(
    template: str | None, problem: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=problem):
        _load(tmp_path, _encoder(folder, template), [_said(USER, ANSWER, USER, ANSWER)])


def test_tokenizers_of_bytes_mask_as_those_with_offsets(folder: Path, tmp_path: Path) -> None:
    """`<|endoftext|>` is one token in each, and characters of several tokens are kept whole."""
    text = {"role": "assistant", "content": "naïve 東京 🙂\n\n"}
    words = {"vocab_file": str(folder / "vocab.json"), "merge_file": str(folder / "merges.txt")}
    ranks = tmp_path / "bytes.tiktoken"
    ranks.write_bytes(b"".join(base64.b64encode(bytes([i])) + b" %d\n" % i for i in range(256)))
    template = CHATML.replace("<|{{ m.role }}|>", "{{ m.role }}").replace(
        "<|assistant|>", "assistant"
    )
    found = []
    for tokenizer in (
        TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder)),
        TokenizerConfig(tokenizer_type="GPT2BPETokenizer", **words),
        TokenizerConfig(tokenizer_type="TikTokenizer", tokenizer_model=str(ranks)),
    ):
        encoder = ConversationEncoder(ConversationOptions(tokenizer, template, 256))
        examples = _load(tmp_path, encoder, [_said(USER, text, USER, text)])
        assert _trained(encoder, examples) == [f"{text['content']}<|endoftext|>" * 2]
        found.append(examples[0])
    assert np.array_equal(found[0][0], found[1][0])
    assert np.array_equal(found[0][1], found[1][1])


def test_answers_that_would_not_end_are_refused(folder: Path) -> None:
    words = {"vocab_file": str(folder / "vocab.json"), "merge_file": str(folder / "merges.txt")}
    gpt2 = TokenizerConfig(tokenizer_type="GPT2BPETokenizer", **words)
    with pytest.raises(ConfigError, match="writes eos_token, but .*--chat-template"):
        ConversationEncoder(ConversationOptions(gpt2, "{{ eos_token }}", 64))


def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    numbers = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=10)
    encoder = ConversationEncoder(ConversationOptions(numbers, None, 64))
    with pytest.raises(DataError, match=r":1: token id 12 is outside the vocabulary \(0 to 10\)"):
        _load(tmp_path, encoder, [{"prompt": "1 2", "completion": " 12"}])


def test_files_that_hold_no_conversations_are_named(folder: Path, tmp_path: Path) -> None:
    cache = IndexCache(())
    for name, problem in (("a.txt", "JSON lines"), ("b.jsonl", "empty"), ("c.jsonl", "no such")):
        if not name.startswith("c"):
            (tmp_path / name).write_text("text" if name == "a.txt" else "")
        with pytest.raises(DataError, match=f"--data-path .*{name}: .*{problem}"):
            load_examples(str(tmp_path / name), _encoder(folder), cache)
    (tmp_path / "d.jsonl").write_text("{}")
    with pytest.MonkeyPatch.context() as patch:
        refuse = Mock(side_effect=PermissionError(errno.EACCES, "Permission denied"))
        patch.setattr(np, "memmap", refuse)
        with pytest.raises(DataError, match=r"d.jsonl: cannot be read \(Permission denied\): make"):
            load_examples(str(tmp_path / "d.jsonl"), _encoder(folder), cache)


def test_tables_of_parquet_are_read_row_by_row(folder: Path, tmp_path: Path) -> None:
    """Every message in a table has every key, with null where none was given."""
    call = {**CALL, "content": None}
    records = [
        _said(USER, ANSWER, tools=None, prompt_id=1),
        _said(USER, call, {"role": "tool", "content": "1"}, ANSWER, tools="[]", prompt_id=2),
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "chats.parquet")
    encoder = _encoder(folder)
    found = load_examples(str(tmp_path / "chats.parquet"), encoder, IndexCache(()))
    end = "<|endoftext|>"
    assert _trained(encoder, found) == [f"Hi there.{end}", f"{end}Hi there.{end}"]
    (tmp_path / "chats.parquet").write_bytes(b"PAR1 damaged")
    with pytest.raises(DataError, match="--data-path .*chats.parquet: not a readable parquet"):
        load_examples(str(tmp_path / "chats.parquet"), encoder, IndexCache(()))


def test_packed_files_and_folders_are_read_in_order(folder: Path, tmp_path: Path) -> None:
    for number in range(3):
        line = json.dumps(_said(USER, {**ANSWER, "content": f"Answer {number}"})).encode() + b"\n"
        with gzip.open(tmp_path / f"part{number}.jsonl.gz", "wb") as file:
            file.write(line * 2)
    encoder = _encoder(folder)
    found = load_examples(str(tmp_path), encoder, IndexCache(()), workers=2)
    assert [text[7] for text in _trained(encoder, found)] == list("001122")


def test_lines_that_cannot_be_encoded_are_reported_with_their_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = _encoder(folder)
    encoder._is_limited = True  # so that this process gets no memory limit
    long = encoder(TextBlock("f", 5, 9, 14, b"", "the line is longer than 1 MiB"))
    assert long.bad == [BadLine(0, 0, "the line is longer than 1 MiB: remove the line")]
    assert (long.lines, len(long.lengths), len(long.tokens)) == (1, 0, 0)
    good, large = b'{"text": "Hello"}', b'{"text": "large"}'
    plain = encoder.encode_record

    def encode(line: bytes, counts: Counter[str]) -> Any:
        if line == large:
            raise MemoryError
        return plain(line, counts)

    monkeypatch.setattr(encoder, "encode_record", encode)
    lines = [good, b" ", large, good]
    found = encoder(TextBlock("f", 5, 9, 14, b"\n".join([*lines, b""])))
    reason = "the chat template needs too much memory for this record: shorten the record, or "
    reason += "give another template with --chat-template"
    assert found.bad == [BadLine(2, len(good) + 3, reason)]
    assert (found.lines, len(found.lengths), found.counts["records"]) == (4, 2, 2)


VALUES = (None, True, 0, 2, -1.5, "", " ", "a", "user", "[", "{}", [], ["a"], [None], {}, {"a": 1})


def _changed(value: Any, draw: random.Random) -> Any:
    """Return the value with one of its parts replaced, removed or repeated."""
    if draw.random() < 0.25 or not isinstance(value, dict | list) or not value:
        return draw.choice(VALUES)
    if isinstance(value, list):
        at = draw.randrange(len(value))
        middle = draw.choice(([], [value[at]] * 2, [_changed(value[at], draw)] * 1))
        return [*value[:at], *middle, *value[at + 1 :]]
    key = draw.choice(sorted(value))
    kept = {name: entry for name, entry in value.items() if name != key}
    return kept if draw.random() < 0.2 else {**kept, key: _changed(value[key], draw)}


def test_records_of_any_shape_are_read_or_refused(folder: Path) -> None:
    draw = random.Random(25)
    sharegpt = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    observed = {"role": "tool", "content": [{"type": "text", "text": "1"}]}
    records: list[Any] = [
        _said({"role": "system", "content": "S"}, USER, CALL, observed, ANSWER, tools=[{"a": 1}]),
        sharegpt | {"system": "S", "tools": "[]"},
        {"prompt": [USER], "completion": [ANSWER]},
        {"prompt": "a", "completion": "b"},
        PREFERENCE,
        {"chosen": [USER, ANSWER], "rejected": [USER, {**ANSWER, "content": "No."}]},
    ]
    encoders = [_encoder(folder, preferences=wanted) for wanted in (False, True)]
    read, refusals = 0, []
    for _ in range(4000):
        record = draw.choice(records)
        for _ in range(draw.randint(1, 2)):
            record = _changed(record, draw)
        encoder = encoders[isinstance(record, dict) and "chosen" in record]
        try:
            read += bool(encoder.encode_record(json.dumps(record).encode(), Counter()))
        except (ValueError, DataError) as error:
            refusals.append(str(error))
    assert read > 200
    assert len(refusals) > 2000
    assert all(": " in said for said in refusals)  # the problem and the remedy


@pytest.mark.parametrize(
    ("hard", "is_set"),
    [(-1, True), (7 * 4096 + (2 << 30) + 1, True), (7 * 4096 + (2 << 30), False)],
)
def test_an_encoding_process_limits_its_memory_unless_it_has_less(
    hard: int, is_set: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    memory = SimpleNamespace(
        RLIMIT_AS=9,
        RLIM_INFINITY=-1,
        getpagesize=lambda: 4096,
        getrlimit=lambda kind: (5, hard),
        setrlimit=lambda *limit: told.append(limit),
    )
    timers = SimpleNamespace(SIGPROF=27, signal=lambda number, handler: told.append(number))
    (tmp_path / "statm").write_text("7 3 2 1")
    monkeypatch.setattr(conversations, "resource", memory)
    monkeypatch.setattr(conversations, "signal", timers)
    monkeypatch.setattr(conversations, "Path", lambda path: tmp_path / Path(path).name)
    conversations._limit_process()
    assert told == [27, *[(9, (7 * 4096 + (2 << 30), hard))] * is_set]
