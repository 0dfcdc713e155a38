"""Chat templates, which turn a conversation into the text form that a chat model was trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from megatron.errors import ConfigError
from megatron.inference.server.endpoint import ApiError

if TYPE_CHECKING:
    from jinja2.ext import Extension
    from jinja2.nodes import Node
    from jinja2.parser import Parser

_MAX_TEMPLATE = 1 << 20  # bytes
_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


def _generation_tag() -> type[Extension]:
    """Return the tag `{% generation %}...{% endgeneration %}`, which marks text to train on.

    When text is generated, the tag's content is treated as plain text.
    """
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}

        def parse(self, parser: Parser) -> list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Generation


class ChatTemplate:
    """A Jinja template in the form of Hugging Face's tokenizers, run in a sandbox."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        """Compile the template.

        Args:
            source: Text of the template.
            special: Texts of special tokens such as bos_token and eos_token, by name.

        Raises:
            ConfigError: The text is not a valid template.
        """
        from jinja2 import TemplateError, TemplateSyntaxError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> NoReturn:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _generation_tag()]
        )
        environment.filters["tojson"] = _to_json
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

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the text of a conversation, up to the beginning of the model's answer.

        Args:
            messages: Messages with a role, content and perhaps a name.

        Raises:
            ApiError: The template refuses these messages.
        """
        from jinja2 import TemplateError

        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._special,
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
            raise ApiError(
                400, f"the model's chat template refuses the messages: {error}", field="messages"
            ) from None


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def find_template(chat_template: str | None, tokenizer_model: str | None) -> str | None:
    """Return the text of `--chat-template`, or otherwise of the template beside the tokenizer.

    Args:
        chat_template: File of the template.
        tokenizer_model: File or folder of the tokenizer.

    Returns:
        The template's text, or `None` if there is no template.

    Raises:
        ConfigError: A file cannot be read.
    """
    if chat_template is not None:
        return _read("--chat-template", Path(chat_template))
    folder = _folder(tokenizer_model)
    if folder is None:
        return None
    if (folder / "chat_template.jinja").is_file():
        return _read("the tokenizer's", folder / "chat_template.jinja")
    found = _settings(folder).get("chat_template")
    if isinstance(found, list):  # several by name
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def special_tokens(tokenizer_model: str | None) -> dict[str, str]:
    """Return special tokens such as bos_token from tokenizer_config.json beside the tokenizer."""
    folder = _folder(tokenizer_model)
    settings = {} if folder is None else _settings(folder)
    found = {}
    for name in _TOKENS:
        entry = settings.get(name)
        entry = entry.get("content") if isinstance(entry, dict) else entry
        if isinstance(entry, str):
            found[name] = entry
    return found


def _folder(tokenizer_model: str | None) -> Path | None:
    if tokenizer_model is None:
        return None
    path = Path(tokenizer_model)
    return path if path.is_dir() else path.parent


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read("the tokenizer's", path))
    except ValueError as error:
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
