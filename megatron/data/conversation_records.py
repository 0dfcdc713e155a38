"""Conversation records in other programs' formats, checked and converted to a common format.

The keys of a record determine its format:

    messages                        OpenAI and TRL: a list of {"role", "content"}
    conversations                   ShareGPT: a list of {"from", "value"}
    prompt, completion              two strings, or two lists of messages
    prompt, completion, label       the same, plus whether the answer is desirable (KTO)
    prompt, chosen, rejected        preferences; if the prompt is missing, or is a string while the
                                    answers are messages, the prompt is the answers' common
                                    prefix
    messages, chosen, rejected      Axolotl's preferences: each answer is a single message
    conversations, chosen, rejected     the same in ShareGPT's format (LLaMA-Factory)
    input, preferred_output, non_preferred_output       OpenAI's preferences
    text                            plain text, trained on in full

Every function raises a ValueError that names the problem and the remedy. The caller adds the file
and the line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from megatron.data.text_input import json_kind, load_line
from megatron.tokenizer.chat_template import Chat

Record = dict[str, Any]
Message = dict[str, Any]

_ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "bot": "assistant",
    "system": "system",
    "function_call": "function_call",
    "observation": "tool",
    "tool": "tool",
}
# The roles that may precede each role.
_FOLLOWS = {"user": {"system", "assistant"}, "assistant": {"user", "tool"}}
_REASONING = ("reasoning_content", "thinking", "reasoning")
_OPENAI_ANSWERS = ("preferred_output", "non_preferred_output")
_FORMATS = (
    ("preference", {"chosen", "rejected"}),
    ("preference", {"input", *_OPENAI_ANSWERS}),
    ("completion", {"prompt", "completion"}),
    ("messages", {"messages"}),
    ("sharegpt", {"conversations"}),
    ("text", {"text"}),
)
# The keys of a record that are read. Tables may have other columns.
COLUMNS = (
    *("messages", "conversations", "system", "prompt", "completion", "chosen", "rejected", "text"),
    *("label", "input", *_OPENAI_ANSWERS),
    *("tools", "documents", "chat_template_kwargs"),
)
_KNOWN_FORMATS = (
    '{"messages": [...]}, {"prompt", "completion"}, {"prompt", "chosen", "rejected"}, '
    '{"conversations": [...]} or {"text"}'
)


class PlainText(NamedTuple):
    """Plain text without a chat template, followed by the end-of-text token.

    Attributes:
        prompt: The text to condition on.
        completion: The text to train on.
    """

    prompt: str
    completion: str


Example = Chat | PlainText


def parse_record(line: bytes) -> Record:
    """Return the JSON object in a line.

    Raises:
        ValueError: The line is not a JSON object, or a key occurs twice in an object.
    """

    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> Record:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            keys = [key for key, _ in pairs]
            duplicate = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(f"the key {duplicate!r} occurs twice in an object: remove one")
        return fields

    record = load_line(line)
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, found {json_kind(record)}: write one record")
    json.loads(line.decode("utf-8"), object_pairs_hook=refuse_duplicates)
    return record


def format_of(record: Record) -> str:
    """Return the format of a record: preference, completion, messages, sharegpt or text.

    Raises:
        ValueError: The keys do not match any format.
    """
    keys = {key for key, value in record.items() if value is not None}
    for name, needed in _FORMATS:
        if needed <= keys:
            return name
    present = ", ".join(map(repr, sorted(keys)))
    raise ValueError(f"no known format (keys: {present or 'none'}): write {_KNOWN_FORMATS}")


def read_examples(record: Record, *, preferences: bool) -> list[Example]:
    """Return the example in a record, or the chosen and the rejected example of a preference.

    Args:
        record: The record, as returned by `parse_record`.
        preferences: Whether the run needs preferences, as opposed to examples to imitate.

    Raises:
        ValueError: The record is malformed.
    """
    name = format_of(record)
    if (name == "preference") != preferences:
        expected = '"chosen" and "rejected"' if preferences else "an answer to imitate"
        raise ValueError(f"a {name} record, but this run needs {expected}: give other data")
    if name == "text":
        return [PlainText("", _text(record, "text"))]
    if name == "sharegpt":
        return [_chat(_from_sharegpt(record), record)]
    if name == "messages":
        return [_chat(_messages(record, "messages"), record)]
    prompt_key, answer_keys = "prompt", ("chosen", "rejected") if preferences else ("completion",)
    if preferences and record.get("chosen") is None:
        conversation = record["input"]
        if not isinstance(conversation, dict) or "messages" not in conversation:
            raise ValueError("'input' has no messages: write {\"messages\": [...]}")
        prompt_key, answer_keys = "input", _OPENAI_ANSWERS
        record = {**record, "input": conversation["messages"], "tools": conversation.get("tools")}
    elif preferences and all(isinstance(record[key], dict) for key in answer_keys):
        record = _with_single_messages(record)
    # UltraFeedback's prompts are strings, while both of its answers are lists of messages.
    kinds_of_values = [type(record.get(key)) for key in ("prompt", "chosen", "rejected")]
    if record.get(prompt_key) is None or kinds_of_values == [str, list, list]:
        record = _with_prompt(record)
    kinds = {isinstance(record[key], str) for key in (prompt_key, *answer_keys)}
    if len(kinds) > 1:
        names = ", ".join(map(repr, (prompt_key, *answer_keys)))
        raise ValueError(
            f"{names}: some are strings, some are lists of messages: use the same type for all"
        )
    if kinds == {True}:
        return [PlainText(record[prompt_key], _text(record, key)) for key in answer_keys]
    prompt = _messages(record, prompt_key)
    return [_completed(prompt, _messages(record, key), record, key) for key in answer_keys]


def read_labeled(record: Record) -> list[tuple[Example, bool]]:
    """Return the answers in a record, and whether each is desirable.

    A preference has two: the chosen answer is desirable, and the rejected one is not.

    Raises:
        ValueError: The record is malformed, or does not say whether its answer is desirable.
    """
    name = format_of(record)
    if name == "preference":
        return list(zip(read_examples(record, preferences=True), (True, False), strict=True))
    if name != "completion":
        raise ValueError(
            f'a {name} record, but this run needs {{"prompt", "completion", "label"}} or '
            '{"prompt", "chosen", "rejected"}: give other data'
        )
    label = record.get("label")
    if not isinstance(label, bool):
        raise ValueError(
            f"'label' is {json_kind(label)}: write true for a desirable answer, otherwise false"
        )
    return [(example, label) for example in read_examples(record, preferences=False)]


def _text(record: Record, key: str) -> str:
    value = record[key]
    if not isinstance(value, str):
        raise ValueError(f"{key!r} is {json_kind(value)}, expected a string: write a string")
    if not value or value.isspace():
        raise ValueError(f"{key!r} is empty: write a text, or remove the line")
    return value


def _with_single_messages(record: Record) -> Record:
    """Convert a preference's answers from single messages to lists of messages."""
    answers: Record = {key: [record[key]] for key in ("chosen", "rejected")}
    if all("from" in turn for (turn,) in answers.values()):
        answers = {key: _from_sharegpt({"conversations": turns}) for key, turns in answers.items()}
    prompt = record.get("prompt") or record.get("messages")
    if prompt is None:
        if not record.get("conversations"):
            raise ValueError("'chosen' and 'rejected' follow no prompt: write it in 'messages'")
        prompt = _from_sharegpt(record)
    return {**record, **answers, "prompt": prompt}


def _with_prompt(record: Record) -> Record:
    """Return a preference whose prompt is the common prefix of its two answers.

    If they have no common prefix, a prompt given as a string becomes the user's turn.
    """
    chosen, rejected = record["chosen"], record["rejected"]
    if not isinstance(chosen, str | list) or type(chosen) is not type(rejected):
        raise ValueError(
            "'chosen' and 'rejected' differ in type: write two strings or two lists of messages"
        )
    pairs = zip(chosen, rejected, strict=False)
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    if common == len(chosen) == len(rejected):
        raise ValueError("'chosen' and 'rejected' are the same: remove the line")
    if isinstance(chosen, str) and chosen[:common].endswith(" "):
        common -= 1  # a token includes the space before its word
    prompt = chosen[:common]
    if not common and record.get("prompt"):  # the answers do not repeat the question
        prompt = [{"role": "user", "content": record["prompt"]}]
    parts = {"prompt": prompt, "chosen": chosen[common:], "rejected": rejected[common:]}
    return {**record, **parts}


def _completed(prompt: list[Message], answer: list[Message], record: Record, key: str) -> Chat:
    if not answer or answer[0]["role"] != "assistant":
        raise ValueError(
            f"{key!r} does not begin with a turn of the assistant: move earlier turns to 'prompt'"
        )
    chat = _chat([*prompt, *answer], record)
    if chat.untrained:
        raise ValueError(f"{key!r} has 'weight' or 'train': use them only in 'messages'")
    return chat._replace(prompt=len(prompt))


def _chat(messages: list[Message], record: Record) -> Chat:
    """Return a conversation made of the messages, after checking their order."""
    _check_order(messages)
    turns = [message for message in messages if message["role"] == "assistant"]
    if not turns:
        raise ValueError("no turn of the assistant: add an answer, or remove the line")
    untrained = set()
    for turn, message in enumerate(turns):
        weight, train = message.get("weight", 1), message.get("train", True)
        if weight not in (0, 1) or isinstance(weight, bool):
            raise ValueError(f"the 'weight' of a turn is {weight!r}: give 0 or 1")
        if not isinstance(train, bool):
            raise ValueError(f"'train' of a turn is {train!r}: give true or false")
        if not (weight and train):
            untrained.add(turn)
    if len(untrained) == len(turns):
        raise ValueError(
            "every turn of the assistant has weight 0: give one weight 1, or remove the line"
        )
    inputs = record.get("chat_template_kwargs") or {}
    if not isinstance(inputs, dict):
        raise ValueError(f"'chat_template_kwargs' is {json_kind(inputs)}: write an object instead")
    lists = {key: _list_of_objects(record, key) for key in ("tools", "documents")}
    lists = {key: value for key, value in lists.items() if value is not None}
    stripped = [
        {key: value for key, value in message.items() if key not in ("weight", "train")}
        for message in messages
    ]
    return Chat(stripped, {**inputs, **lists}, untrained=frozenset(untrained))


def _check_order(messages: list[Message]) -> None:
    previous = "system"
    for index, message in enumerate(messages):
        role = "system" if message["role"] == "developer" else message["role"]
        if role == "system":
            is_allowed = index == 0
        elif role == "tool":
            is_allowed = previous == "tool" or bool(index and messages[index - 1].get("tool_calls"))
        else:
            is_allowed = previous in _FOLLOWS[role]
        if not is_allowed:
            after = f"after {messages[index - 1]['role']!r}" if index else "at the beginning"
            raise ValueError(
                f"message {index + 1}: roles out of order ({message['role']!r} {after}): begin "
                "with an optional system turn, then alternate user and assistant; 'tool' follows "
                "an assistant's tool_calls"
            )
        previous = role


def _messages(record: Record, key: str) -> list[Message]:
    """Return the messages under a key, each with a role and its content as a string."""
    value = record[key]
    if not isinstance(value, list):
        raise ValueError(f"{key!r} is {json_kind(value)}: write a list of messages instead")
    if not value:
        raise ValueError(f"{key!r} is an empty list: add messages, or remove the line")
    return [_message(message, f"{key!r}, message {at + 1}") for at, message in enumerate(value)]


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise ValueError(
            f"{where} is {json_kind(value)}: write an object with 'role' and 'content' instead"
        )
    # In tables, every message has every key, and most values are null.
    message = {key: entry for key, entry in value.items() if entry is not None}
    role = message.get("role")
    if role is None:
        hint = "; 'from' belongs in 'conversations'" if "from" in message else ""
        raise ValueError(f"{where} has no 'role': give one of {', '.join(_ROLES)}{hint}")
    if role not in _ROLES:
        raise ValueError(f"{where}: unknown role {role!r}: give one of {', '.join(_ROLES)}")
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message["tool_calls"], role, where)
    if "content" not in message and not message.get("tool_calls"):
        raise ValueError(f"{where} ({role}) has no 'content': write its text")
    content = message["content"] = _content(message.get("content", ""), where)
    if not content.strip() and role in ("user", "assistant") and not message.get("tool_calls"):
        raise ValueError(f"{where} ({role}) is empty: write its text, or remove the turn")
    reasoning = next((message[key] for key in _REASONING if key in message), None)
    if reasoning is not None:  # templates use several names for it
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _content(value: Any, where: str) -> str:
    """Return the text of a message's content, given as a string or a list of text parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError(f"{where}: 'content' is {json_kind(value)}: write a string instead")
    texts = []
    for part in value:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else json_kind(part)
            raise ValueError(
                f"{where}: a part of 'content' is {kind!r}, but only text can be trained on: write "
                '{"type": "text", "text": "..."}'
            )
        texts.append(text)
    return "".join(texts)


def _tool_calls(value: Any, role: str, where: str) -> list[Any]:
    """Return tool calls with their arguments parsed into objects, as templates expect them."""
    if role != "assistant":
        raise ValueError(
            f"{where}: role {role!r} has 'tool_calls', but only the assistant calls tools: remove "
            "them"
        )
    if not isinstance(value, list) or not all(isinstance(call, dict) for call in value):
        raise ValueError(f"{where}: 'tool_calls' is not a list of objects: write a list")
    calls = []
    for call in value:
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"{where}: a call in 'tool_calls' has no 'name': name the function")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _json_in(arguments, f"{where}: 'arguments' of {function['name']!r}")
        function = {**function, "arguments": arguments}
        calls.append({**call, "function": function} if "function" in call else function)
    return calls


def _json_in(text: str, what: str) -> Any:
    """Return the value of a string that contains JSON."""
    try:
        return load_line(text.encode())
    except ValueError as error:
        raise ValueError(f"{what}: {error}: write valid JSON in the string") from None


def _list_of_objects(record: Record, key: str) -> list[Any] | None:
    value = record.get(key)
    if isinstance(value, str) and value:
        value = _json_in(value, repr(key))
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise ValueError(f"{key!r} is not a list of objects: write a list")
    return value


def _from_sharegpt(record: Record) -> list[Message]:
    """Return the messages of a ShareGPT record."""
    turns = record["conversations"]
    if not isinstance(turns, list) or not turns:
        raise ValueError('\'conversations\' is not a list of turns: write {"from", "value"}')
    if all(isinstance(turn, dict) and "role" in turn for turn in turns):
        return _messages(record, "conversations")
    messages: list[Any] = []
    if record.get("system"):
        messages.append({"role": "system", "content": _text(record, "system")})
    for index, turn in enumerate(turns):
        where = f"'conversations', turn {index + 1}"
        if not isinstance(turn, dict) or "from" not in turn or "value" not in turn:
            raise ValueError(f"{where} lacks 'from' or 'value': write both")
        role = _SHAREGPT_ROLES.get(turn["from"]) if isinstance(turn["from"], str) else None
        if role is None:
            known_roles = ", ".join(_SHAREGPT_ROLES)
            raise ValueError(f"{where}: unknown 'from' {turn['from']!r}: give one of {known_roles}")
        flags = {key: turn[key] for key in ("weight", "train") if key in turn}
        if role == "function_call":
            call = _json_in(_content(turn["value"], where), where)
            calls = call if isinstance(call, list) else [call]
            tool_calls = [{"type": "function", "function": each} for each in calls]
            messages.append({"role": "assistant", "tool_calls": tool_calls, **flags})
        else:
            messages.append({"role": role, "content": turn["value"], **flags})
    return _messages({"conversations": messages}, "conversations")


def for_template(chat: Chat, *, knows_developers: bool) -> Chat:
    """Return the conversation, with the role `developer` renamed if the template lacks it.

    Args:
        chat: The conversation.
        knows_developers: Whether the template supports the role `developer`, OpenAI's newer name
            for `system`.
    """
    if knows_developers or chat.messages[0]["role"] != "developer":
        return chat
    first: Mapping[str, Any] = {**chat.messages[0], "role": "system"}
    others: Sequence[Mapping[str, Any]] = chat.messages[1:]
    return chat._replace(messages=[first, *others])
