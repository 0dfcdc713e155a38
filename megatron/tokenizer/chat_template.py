"""Chat templates, which turn a conversation into the text form that a chat model was trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatron.errors import ConfigError, DataError

_MAX_TEMPLATE = 1 << 20  # bytes
_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class _GenerationTag(Extension):
    """The tag `{% generation %}...{% endgeneration %}`, which marks text to train on.

    During generation its content is plain text.
    """

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@pass_context
def _as_it_is(_: Context, value: Any) -> Any:
    """Return the value unchanged. Taking a context makes Jinja call this only while rendering."""
    return value


class ChatTemplate:
    """A chat template of a Hugging Face tokenizer, rendered by Jinja in a sandbox."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        """Compile the template.

        Args:
            source: Text of the template.
            special: Texts of special tokens such as bos_token and eos_token, by name.

        Raises:
            ConfigError: The text is not a valid template.
        """

        def refuse(message: str) -> NoReturn:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _GenerationTag],
            # Without these two, compiling would compute constants such as "a" * 3000000000.
            optimized=False,
            finalize=_as_it_is,
        )
        # Jinja's own filter escapes for HTML.
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(
            value, ensure_ascii=False, indent=indent
        )
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._special = dict(special)
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template has a mistake in line {error.lineno}: {error}: fix it, or "
                "give another one with --chat-template"
            ) from error
        except (RecursionError, SyntaxError, MemoryError) as error:
            raise ConfigError(
                f"the chat template is nested too deeply ({error}): give another one with "
                "--chat-template"
            ) from error

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the text of a conversation, up to the beginning of the model's answer.

        Args:
            messages: Messages, each with a role, content and optionally a name.

        Raises:
            DataError: The template refuses these messages.
        """
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._special,
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
            raise DataError(f"the model's chat template refuses the messages: {error}") from None


def find_template(chat_template: str | None, tokenizer_model: str | None) -> str | None:
    """Return the template of `--chat-template`, or by default the one next to the tokenizer.

    Args:
        chat_template: The template's file, or `None` for the default.
        tokenizer_model: The tokenizer's file or folder.

    Returns:
        The template's text, or `None` if there is no template.

    Raises:
        ConfigError: A file cannot be read.
    """
    if chat_template is not None:
        return _read("--chat-template", Path(chat_template))
    path = _beside(tokenizer_model, "chat_template.jinja")
    if path is not None:
        return _read("the tokenizer's", path)
    found = _settings(tokenizer_model).get("chat_template")
    if isinstance(found, list):  # several named templates
        named = [each for each in found if isinstance(each, dict) and each.get("name") == "default"]
        found = named[-1].get("template") if named else None
    return found if isinstance(found, str) else None


def special_tokens(tokenizer_model: str | None) -> dict[str, str]:
    """Return the texts of special tokens by name, from the tokenizer's tokenizer_config.json.

    Args:
        tokenizer_model: File or folder of the tokenizer.

    Raises:
        ConfigError: The file cannot be read or is not JSON.
    """
    settings = _settings(tokenizer_model)
    found = {name: settings.get(name) for name in _TOKENS}
    texts = {n: e.get("content") if isinstance(e, dict) else e for n, e in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _beside(tokenizer_model: str | None, name: str) -> Path | None:
    """Return the path of a file next to the tokenizer, or `None` if there is no such file."""
    if tokenizer_model is None:
        return None
    model = Path(tokenizer_model)
    path = (model if model.is_dir() else model.parent) / name
    return path if path.is_file() else None


def _settings(tokenizer_model: str | None) -> dict[str, Any]:
    path = _beside(tokenizer_model, "tokenizer_config.json")
    if path is None:
        return {}
    try:
        value = json.loads(_read("the tokenizer's", path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}: fix the file") from error
    return value if isinstance(value, dict) else {}


def _read(what: str, path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_TEMPLATE + 1)
        if len(data) > _MAX_TEMPLATE:
            raise ConfigError(f"{what} {path} is larger than {_MAX_TEMPLATE:,} bytes")
        return data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} {path} cannot be read: {error}") from error
