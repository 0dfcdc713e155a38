"""Chat templates, which turn a conversation into the text format that a chat model was trained on.

Templates come with models, so they are not trusted. Jinja's sandbox denies them access to files and
to Python's internals, the size of a product is checked before it is computed, and the length of the
rendered text is limited. A loop without output can only be stopped from outside, so the server, and
the code that tokenizes conversations for training, render in processes with limited time and
memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from os.path import commonprefix
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from megatron.errors import ConfigError, DataError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from megatron.tokenizer.base import Tokenizer

_MAX_TEMPLATE = 1 << 20  # bytes
_MAX_TEXT = 1 << 26  # characters in a rendered text or a repeated string
_MAX_BITS = 1 << 12  # bits of a product of integers
_TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


Span = tuple[int, int]  # start and end (exclusive), in characters

# The date that templates receive in training, so token ids do not depend on the day. Llama 3's
# templates use the same date by default.
TRAINING_DATE = datetime(2024, 7, 26)


class _GenerationTag(Extension):
    """The tag `{% generation %}...{% endgeneration %}`, which marks text to train on.

    Attributes:
        is_used: Whether the template has such a tag.
        length: The number of characters written by the current rendering.
        spans: The spans of text marked by the current rendering.
    """

    tags = {"generation"}
    is_used = False
    length: int
    spans: list[Span]

    def parse(self, parser: Parser) -> Node:
        self.is_used = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Macro) -> str:
        text: str = caller()
        self.spans.append((self.length, self.length + len(text)))
        return text


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox for immutable data, with a limit on the size of products.

    Products can grow so fast that a limit on memory or time would take effect too late.
    """

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute `left * right` or `left ** right`.

        Raises:
            SecurityError: The result would be too large.
        """
        for value, factor in ((left, right), (right, left)):
            is_repeated = isinstance(value, str | list | tuple) and isinstance(factor, int)
            if is_repeated and len(value) * factor > _MAX_TEXT:
                raise SecurityError(f"a value of more than {_MAX_TEXT:,} items")
        if isinstance(left, int) and isinstance(right, int):
            is_power, bits = operator == "**", left.bit_length()
            bits = bits * min(abs(right), _MAX_BITS) if is_power else bits + right.bit_length()
            if bits > _MAX_BITS:
                raise SecurityError("a product with too many digits")
        return super().call_binop(context, operator, left, right)


class ChatTemplate:
    """A chat template of a Hugging Face tokenizer, rendered in Jinja's sandbox."""

    def __init__(
        self, source: str, special: Mapping[str, str], date: datetime | None = None
    ) -> None:
        """Compile the template.

        Args:
            source: The text of the template.
            special: The texts of special tokens such as bos_token and eos_token, by name.
            date: The time that the template's `strftime_now` reports, or `None` for the current
                time.

        Raises:
            ConfigError: The text is not a valid template.
        """

        def refuse(message: str) -> NoReturn:
            raise TemplateError(message)

        def strftime_now(format_string: str) -> str:
            return (date or datetime.now()).strftime(format_string)

        @pass_context  # so that Jinja calls this only when rendering
        def unchanged(_: Context, value: Any) -> Any:
            return value

        environment = _Sandbox(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _GenerationTag],
            # Without these two, the compiler would evaluate constants such as "a" * 3000000000.
            optimized=False,
            finalize=unchanged,
        )
        # Jinja's own filter escapes for HTML.
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = strftime_now
        tag = environment.extensions[_GenerationTag.identifier]
        assert isinstance(tag, _GenerationTag)
        self._tag = tag
        self._special = dict(special)
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template has an error on line {error.lineno}: {error}: fix it, or "
                "give another one with --chat-template"
            ) from error
        except (RecursionError, SyntaxError, MemoryError) as error:
            raise ConfigError(
                f"the chat template is nested too deeply ({error}): give another one with "
                "--chat-template"
            ) from error

    @property
    def has_marks(self) -> bool:
        """Whether the template marks the text to train on with `{% generation %}`."""
        return self._tag.is_used

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        inputs: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the text of a conversation.

        Args:
            messages: Messages, each with a role, content and optionally a name.
            inputs: Other variables of the template, such as `tools` and `documents`.
            add_generation_prompt: Whether the text ends with the beginning of the model's answer.

        Raises:
            DataError: The template refuses these messages, fails on them, or writes too much text.
        """
        return self.render_marked(messages, inputs, add_generation_prompt=add_generation_prompt)[0]

    def render_marked(
        self,
        messages: Sequence[Mapping[str, Any]],
        inputs: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> tuple[str, list[Span]]:
        """Return the text of a conversation and the spans that `{% generation %}` marks.

        Args:
            messages: Messages, each with a role, content and optionally a name.
            inputs: Other variables of the template, such as `tools` and `documents`.
            add_generation_prompt: Whether the text ends with the beginning of the model's answer.

        Returns:
            The text, and the start and end (exclusive) of each span in characters.

        Raises:
            DataError: The template refuses these messages, fails on them, or writes too much text.
        """
        variables = {"tools": None, "documents": None, **self._special, **(inputs or {})}
        variables |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        tag, pieces = self._tag, []
        tag.length, tag.spans = 0, []
        try:
            for piece in self._template.generate(variables):
                pieces.append(piece)
                tag.length += len(piece)
                if tag.length > _MAX_TEXT:
                    raise TemplateError(f"it writes more than {_MAX_TEXT:,} characters")
        except (TemplateError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
            raise DataError(f"the model's chat template refuses the messages: {error}") from None
        return "".join(pieces), tag.spans


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


class Chat(NamedTuple):
    """A conversation to train on.

    Attributes:
        messages: The messages, as the template reads them.
        inputs: Other variables of the template, such as `tools`.
        prompt: The number of leading messages that form the prompt. All text after them is trained
            on. `None` means that the assistant's turns are trained on.
        untrained: The assistant's turns to exclude from training, counted from 0. No effect with
            `prompt`.
    """

    messages: Sequence[Mapping[str, Any]]
    inputs: Mapping[str, Any] = {}
    prompt: int | None = None
    untrained: frozenset[int] = frozenset()


def trained_text(
    template: ChatTemplate, chat: Chat, *, last_only: bool = False
) -> tuple[str, list[Span]]:
    """Return the text of a conversation and the spans to train on.

    The spans are the assistant's turns, each including the token that ends it. If the template
    marks text with `{% generation %}`, the marks define the turns. Otherwise a turn is the text
    that the template appends to a prompt made of the earlier messages. Such a template must write
    the earlier messages the same way with and without the turn. If `chat.prompt` is set, the only
    span is all text after the prompt.

    Args:
        template: The template of the model to train.
        chat: The conversation, and which of its turns to train on.
        last_only: Whether to train only on the assistant's last turn. No effect with `chat.prompt`.

    Returns:
        The text, and the start and end (exclusive) of each span in characters.

    Raises:
        DataError: The template refuses the messages, or does not show which text to train on.
    """
    messages, inputs = chat.messages, chat.inputs
    if chat.prompt is not None:
        text = template.render(messages, inputs, add_generation_prompt=False)
        start = template.render(messages[: chat.prompt], inputs)
        if not text.startswith(start):
            raise _mismatch("the prompt", text, start)
        return text, [(len(start), len(text))]
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    selected = [
        turn
        for turn in range(len(turns))
        if turn not in chat.untrained and not (last_only and turn + 1 < len(turns))
    ]
    text, marks = template.render_marked(messages, inputs)
    if template.has_marks:
        if len(selected) == len(turns):
            return text, marks
        if len(marks) != len(turns):
            raise DataError(
                f"the chat template marks {len(marks)} spans with {{% generation %}}, but the "
                f"assistant has {len(turns)} turns, so individual turns cannot be selected: mark "
                "each turn once"
            )
        return text, [marks[turn] for turn in selected]
    return text, [_added_text(template, chat, turns[turn], text) for turn in selected]


def _added_text(template: ChatTemplate, chat: Chat, index: int, text: str) -> Span:
    """Return the span of an assistant turn: the text that it adds to the earlier messages.

    Args:
        template: The template.
        chat: The conversation.
        index: The index of the turn's message.
        text: The text of the whole conversation.

    Raises:
        DataError: The template writes this message or an earlier one differently when more
            messages follow.
    """
    messages, inputs = chat.messages, chat.inputs
    start = template.render(messages[:index], inputs)
    if not text.startswith(start):
        raise _mismatch(f"the messages before message {index + 1}", text, start)
    if index + 1 == len(messages):
        return len(start), len(text)
    text_through = template.render(messages[: index + 1], inputs, add_generation_prompt=False)
    if text.startswith(text_through) and text_through.startswith(start):
        return len(start), len(text_through)
    # Some templates drop the reasoning before an answer once another message follows.
    answer = str(messages[index].get("content", "")).strip()
    added = text_through[text_through.rfind(answer) :] if answer else text_through
    after = text[len(start) :].lstrip()
    if not after.startswith(added):
        raise _mismatch(f"message {index + 1}", text, text_through)
    return len(start), len(text) - len(after) + len(added)


def _mismatch(part: str, text: str, start: str) -> DataError:
    """Return the error for a template that writes messages differently when more follow."""
    index = len(commonprefix([text, start]))
    return DataError(
        f"the chat template writes {part} differently when more messages follow "
        f"({start[index : index + 30]!r} becomes {text[index : index + 30]!r}), so it does not "
        "show which text to train on: put {% generation %} and {% endgeneration %} around the "
        "assistant's text in the template and give it with --chat-template, or try --last-turn-only"
    )


def encode(
    tokenizer: Tokenizer, text: str, spans: Sequence[Span]
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Tokenize the text of a conversation and mark the tokens to train on.

    The text is tokenized as a whole, as at inference. A token is trained on if any of its
    characters is in a span.

    Args:
        tokenizer: A tokenizer that reports the positions of its tokens.
        text: The text, with special tokens spelled out.
        spans: The spans to train on, in order.

    Returns:
        The token ids, and whether to train on each, `[tokens]` each.

    Raises:
        DataError: The tokenizer rejects the text.
        ConfigError: The tokenizer does not report the positions of its tokens.
    """
    import numpy as np

    ids, bounds = tokenizer.tokenize_spans(text)
    trained = np.zeros(len(ids), np.bool_)
    starts, ends = bounds[:, 0].copy(), bounds[:, 1]
    # Some tokenizers leave a token's leading space out of its span.
    starts[1:] = np.minimum(starts[1:], ends[:-1])
    for first, end in spans:
        if first < end:
            trained[np.searchsorted(ends, first, "right") : np.searchsorted(starts, end)] = True
    return np.array(ids, np.int32), trained


def find_template(chat_template: str | None, tokenizer_model: str | None) -> str | None:
    """Return the text of the chat template from `--chat-template` or from the tokenizer's folder.

    Args:
        chat_template: The template's file, or `None` for the one in the tokenizer's folder.
        tokenizer_model: The tokenizer's file or folder.

    Returns:
        The template's text, or `None` if there is no template.

    Raises:
        ConfigError: A file cannot be read or is not a template.
    """
    path, flag = _sibling_path(tokenizer_model, "chat_template.jinja"), "the tokenizer's"
    if chat_template is not None:
        path, flag = Path(chat_template), "--chat-template"
    if path is not None:
        text = _read(flag, path)
        try:
            ChatTemplate(text, {})
        except ConfigError as error:
            raise ConfigError(f"{flag} {path}: {error}") from error
        return text
    template = _settings(tokenizer_model).get("chat_template")
    if isinstance(template, list):  # several named templates
        defaults = [
            each for each in template if isinstance(each, dict) and each.get("name") == "default"
        ]
        template = defaults[-1].get("template") if defaults else None
    return template if isinstance(template, str) else None


def special_tokens(tokenizer_model: str | None) -> dict[str, str]:
    """Return the texts of special tokens by name from the tokenizer's tokenizer_config.json.

    The names are `bos_token`, `eos_token`, `pad_token` and `unk_token`, except any that the file
    does not set. Without such a file, the result is empty.

    Args:
        tokenizer_model: The tokenizer's file or folder.

    Raises:
        ConfigError: The file cannot be read or is not JSON.
    """
    settings = _settings(tokenizer_model)
    entries = {name: settings.get(name) for name in _TOKEN_NAMES}
    texts = {
        name: entry.get("content") if isinstance(entry, dict) else entry
        for name, entry in entries.items()
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def added_tokens(tokenizer_model: str | None) -> list[str]:
    """Return the texts of added tokens from the tokenizer's tokenizer_config.json.

    Without such a file, the result is empty.

    Args:
        tokenizer_model: The tokenizer's file or folder.

    Raises:
        ConfigError: The file cannot be read or is not JSON.
    """
    added = _settings(tokenizer_model).get("added_tokens_decoder")
    entries = added.values() if isinstance(added, dict) else ()
    texts = [entry.get("content") for entry in entries if isinstance(entry, dict)]
    return [text for text in texts if isinstance(text, str)]


def _sibling_path(tokenizer_model: str | None, name: str) -> Path | None:
    """Return the path of a file in the tokenizer's folder, or `None` if it does not exist."""
    if tokenizer_model is None:
        return None
    model = Path(tokenizer_model)
    path = (model if os.path.isdir(model) else model.parent) / name
    return path if os.path.isfile(path) else None


def _settings(tokenizer_model: str | None) -> dict[str, Any]:
    path = _sibling_path(tokenizer_model, "tokenizer_config.json")
    if path is None:
        return {}
    try:
        value = json.loads(_read("the tokenizer's", path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}: fix the file") from error
    return value if isinstance(value, dict) else {}


def _read(flag: str, path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_TEMPLATE + 1)
        if len(data) > _MAX_TEMPLATE:
            raise ConfigError(
                f"{flag} {path} is larger than {_MAX_TEMPLATE:,} bytes: give a smaller file"
            )
        return data.decode("utf-8")
    except OSError as error:
        raise ConfigError(
            f"{flag} {path} cannot be read ({error.strerror}): give another file"
        ) from error
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{flag} {path}:{line}: not UTF-8 (byte {error.start}): convert the file"
        ) from error
