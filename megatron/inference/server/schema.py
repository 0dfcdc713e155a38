"""Pydantic models of OpenAI's requests, for validation and for the OpenAPI document."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from megatron.config.fields import attribute_docs, suggestion
from megatron.inference.request import MAX_SEED
from megatron.inference.server.endpoint import ApiError
from megatron.inference.server.settings import MAX_PROMPTS

_MAX_STOPS = 16
_MAX_STOP_LENGTH = 256  # characters
_MAX_MESSAGES = 4096
_MAX_TOP_LOGPROBS = 20
_DEFAULT_NEW_TOKENS = 16  # OpenAI's default for completions
_MAX_QUOTED = 64  # number of characters to quote from an unknown field name

_FAIL_FAST = Field(fail_fast=True)  # only the first mistake is reported
_Stop = Annotated[str, Field(min_length=1, max_length=_MAX_STOP_LENGTH)]
_Prompt = Annotated[
    # Without this, checking a million numbers as a list of strings would collect a million
    # mistakes.
    str
    | Annotated[list[str], _FAIL_FAST]
    | Annotated[list[int], _FAIL_FAST]
    | Annotated[list[Annotated[list[int], _FAIL_FAST]], _FAIL_FAST],
    Field(union_mode="left_to_right"),
]


def describe(schema: dict[str, Any], kind: type[BaseModel]) -> None:
    """Add the descriptions in a model's docstring to its schema in the OpenAPI document.

    Args:
        schema: JSON schema of the model, which is changed.
        kind: The model, whose docstring describes the fields under `Attributes:`.
    """
    schema["description"] = (inspect.getdoc(kind) or "").partition("\n\nAttributes:")[0]
    for name, text in attribute_docs(kind).items():
        if name in schema["properties"]:
            schema["properties"][name]["description"] = text


class _Schema(BaseModel):
    """A JSON object with exactly these fields and types, in which null means "not given"."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, json_schema_extra=describe)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: field for name, field in value.items() if field is not None}


class StreamOptions(_Schema):
    """Options of a streamed answer.

    Attributes:
        include_usage: End the stream with token counts.
    """

    include_usage: bool = False


class TextPart(_Schema):
    """One piece of text in a message."""

    model_config = ConfigDict(extra="ignore")
    type: Literal["text"]
    text: str


class Message(_Schema):
    """One turn of a conversation."""

    role: str
    content: str | Annotated[list[TextPart], _FAIL_FAST]
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        """Return the fields that the client has set, with the content as a single string."""
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {**self.model_dump(exclude_none=True), "content": text}


class OpenAiRequest(_Schema):
    """The fields that both endpoints have.

    Attributes:
        model: Name of the model or of one of its adapters, as in /v1/models. The default is the
            model without an adapter.
        n: Number of answers to each prompt.
        temperature: Divide the logits by this number before sampling. 0 always takes the most
            likely token.
        top_p: Sample from the most likely tokens that together have this probability. 1 disables
            the limit; 0 takes the most likely token.
        top_k: Sample from the k most likely tokens. 0 disables the limit. Not in OpenAI's API.
        repetition_penalty: Lower the logits of tokens that have already occurred. 1 disables it.
            Not in OpenAI's API.
        seed: Seed for sampling. The same seed gives the same answers, also to equal prompts in a
            request. Only the n answers to a prompt differ.
        stop: Stop sequences, which end an answer and are not part of it.
        stream: Send the answer as server-sent events while it is generated.
        stream_options: Options of a streamed answer.
        user: Accepted for compatibility; no effect.
    """

    model: str | None = None
    n: int = Field(1, ge=1, le=MAX_PROMPTS)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0, le=1000)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    stop: _Stop | Annotated[list[_Stop], Field(max_length=_MAX_STOPS)] = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None

    def model_post_init(self, context: Any) -> None:
        """Raise `ApiError` if a field is set without another one that it requires."""
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options requires stream: true", "stream_options")


class CompletionRequest(OpenAiRequest):
    """The body of `POST /v1/completions`.

    Attributes:
        prompt: A string, several strings, or the token ids of either.
        max_tokens: Maximum number of new tokens in an answer.
        logprobs: Return the log probability of each token, and of this many of the most likely
            tokens at its position.
        echo: Put the prompt before the answer.
    """

    prompt: _Prompt
    max_tokens: int = Field(_DEFAULT_NEW_TOKENS, ge=0)
    logprobs: int | None = Field(None, ge=0, le=_MAX_TOP_LOGPROBS)
    echo: bool = False

    @property
    def num_top_logprobs(self) -> int | None:
        """Number of most likely tokens to report per position; `None` for no log probabilities."""
        return self.logprobs

    def model_post_init(self, context: Any) -> None:
        """Raise `ApiError` if a field is set without another that it requires."""
        super().model_post_init(context)
        if self.max_tokens == 0 and not (self.echo and self.logprobs is not None):
            message = "max_tokens 0 only scores the prompt: it requires echo: true and logprobs"
            raise ApiError(400, message, "max_tokens")


class ChatRequest(OpenAiRequest):
    """The body of `POST /v1/chat/completions`.

    Attributes:
        messages: The conversation so far.
        max_tokens: Maximum number of new tokens in an answer. The default is as many as fit.
        max_completion_tokens: The newer name of max_tokens. It takes precedence.
        logprobs: Return the log probability of each token.
        top_logprobs: Return this many of the most likely tokens at each position. Requires
            logprobs.
    """

    messages: list[Message] = Field(min_length=1, max_length=_MAX_MESSAGES, fail_fast=True)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=_MAX_TOP_LOGPROBS)

    @property
    def num_top_logprobs(self) -> int | None:
        """Number of most likely tokens to report per position; `None` for no log probabilities."""
        return self.top_logprobs if self.logprobs else None

    def model_post_init(self, context: Any) -> None:
        """Raise `ApiError` if a field is set without another that it requires."""
        super().model_post_init(context)
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs requires logprobs: true", "top_logprobs")


# Messages about fields that accept more than one type of value.
_EXPECTED_VALUES = {
    "prompt": "prompt: give a string, a list of strings, a list of token ids, or a list of such "
    "lists",
    "messages": 'messages: give a list of objects like {"role": "user", "content": "text"}; '
    'content may also be a list of {"type": "text", "text": "..."}',
    "stop": f"stop: give a string or up to {_MAX_STOPS} of them, each of 1 to {_MAX_STOP_LENGTH} "
    "characters",
    "stream_options": 'stream_options: give {"include_usage": true} or omit it',
}
_TYPES = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
}


_NO_FUNCTIONS = "the model cannot call functions: omit it"
_TEXT_ONLY = "the model answers in text only: omit it"
_NO_SETTING = "this model has no such setting: omit it"
_NOT_STORED = "the server does not store requests: omit it"
# OpenAI's unsupported fields: the reason, and values that are accepted because they have no effect.
_UNSUPPORTED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "frequency_penalty": ("use repetition_penalty", (0, 0.0)),
    "presence_penalty": ("use repetition_penalty", (0, 0.0)),
    "logit_bias": ("the server cannot change individual tokens' scores: omit it", ({},)),
}
_UNSUPPORTED_BY_REQUEST: dict[type[OpenAiRequest], dict[str, tuple[str, tuple[Any, ...]]]] = {
    CompletionRequest: {
        **_UNSUPPORTED,
        "best_of": ("request n answers and choose among them", (1,)),
        "suffix": ("this server only continues text and cannot insert it: omit it", ("",)),
    },
    ChatRequest: {
        **_UNSUPPORTED,
        "tools": (_NO_FUNCTIONS, ([],)),
        "tool_choice": (_NO_FUNCTIONS, ("none",)),
        "parallel_tool_calls": (_NO_FUNCTIONS, (True, False)),
        "functions": (_NO_FUNCTIONS, ([],)),
        "function_call": (_NO_FUNCTIONS, ("none",)),
        "response_format": (
            "the server does not enforce a response format: omit it",
            ({"type": "text"},),
        ),
        "modalities": (_TEXT_ONLY, (["text"],)),
        "audio": (_TEXT_ONLY, ()),
        "prediction": (_NO_SETTING, ()),
        "reasoning_effort": (_NO_SETTING, ("none",)),
        "verbosity": (_NO_SETTING, ()),
        "web_search_options": ("the server does not search the web: omit it", ()),
        "store": (_NOT_STORED, (False,)),
        "metadata": (_NOT_STORED, ({},)),
        "service_tier": ("the server has only one service tier: omit it", ("auto", "default")),
    },
}

AnyRequest = CompletionRequest | ChatRequest
Kind = TypeVar("Kind", CompletionRequest, ChatRequest)


def read_request(kind: type[Kind], body: Mapping[str, Any]) -> Kind:
    """Return the request in a body, validated by its pydantic model.

    Args:
        kind: The pydantic model of this kind of request.
        body: The JSON object that the client sent.

    Raises:
        ApiError: The request is invalid (400). The message is about the first mistake.
    """
    unsupported = _UNSUPPORTED_BY_REQUEST[kind]
    for name, value in body.items():
        if name in unsupported and value is not None and value not in unsupported[name][1]:
            raise ApiError(400, f"{name} is not supported: {unsupported[name][0]}", name)
    values = {name: value for name, value in body.items() if name not in unsupported}
    for name in values:
        if name not in kind.model_fields:
            quoted = name[:_MAX_QUOTED]
            hint = suggestion(quoted, kind.model_fields)
            raise ApiError(400, f"unknown field {quoted!r}{hint}", quoted)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])
        raise ApiError(400, _error_message(kind, name, first), name) from None


def _error_message(kind: type[BaseModel], name: str, error: ErrorDetails) -> str:
    """Return a message about an invalid field that says which values it accepts."""
    if error["type"] == "missing" and len(error["loc"]) == 1:
        return f"{name} is required"
    if name == "messages" and error["type"] == "extra_forbidden":
        return f"messages: {str(error['loc'][-1])[:_MAX_QUOTED]!r} is not supported"
    if name == "messages" and error["type"] == "too_long":
        return f"messages: give at most {_MAX_MESSAGES}"
    if name in _EXPECTED_VALUES:
        return _EXPECTED_VALUES[name]
    if error["type"] in _TYPES:
        return f"{name}: give {_TYPES[error['type']]}"
    bounds: dict[str, float] = {}
    for constraint in kind.model_fields[name].metadata:
        bounds |= {
            side: getattr(constraint, side) for side in ("ge", "le") if hasattr(constraint, side)
        }
    high = f"to {bounds['le']}" if "le" in bounds else "or more"
    return f"{name} {error['input']}: give {bounds['ge']} {high}"
