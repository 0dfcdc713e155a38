"""Requests of OpenAI's API to sequences for the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.inference.request import Sampling
from megatron.inference.server.chat import ChatTemplate
from megatron.inference.server.errors import ApiError
from megatron.inference.server.limits import MAX_PROMPTS, MAX_STOP_LENGTH, MAX_STOPS
from megatron.inference.server.service import Asked, Service

_NEW_TOKENS = 16  # OpenAI's default for completions
_PROMPT = "prompt: give a text, a list of texts, a list of token ids, or a list of such lists"
_MESSAGES = (
    'messages: give a list of objects like {"role": "user", "content": "text"}; content may also '
    'be a list of {"type": "text", "text": "..."}'
)


async def read_prompts(service: Service, prompt: Any) -> list[tuple[int, ...]]:
    """The token ids of every prompt; of an empty text the end of document, which begins a text.

    Raises:
        ApiError: 400.
    """
    given = prompt if isinstance(prompt, list) and not _is_ids(prompt) else [prompt]
    if not 0 < len(given) <= MAX_PROMPTS:
        raise ApiError(400, f"prompt: give 1 to {MAX_PROMPTS} prompts", field="prompt")
    prompts = []
    for each in given:
        if isinstance(each, str):
            prompts.append(service.begun(await service.tokenize(each)))
        elif _is_ids(each):
            _check_ids(each, service.settings.engine.vocab_size)
            prompts.append(tuple(each))
        else:
            raise ApiError(400, _PROMPT, field="prompt")
    return prompts


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


def _check_ids(ids: Sequence[int], vocab_size: int) -> None:
    wrong = [token for token in ids if not 0 <= token < vocab_size]
    if wrong:
        raise ApiError(400, f"prompt: {wrong[0]} is no token id below {vocab_size}", field="prompt")


async def read_messages(
    service: Service, template: ChatTemplate | None, messages: Any
) -> tuple[int, ...]:
    """The token ids of a conversation.

    Raises:
        ApiError: 400.
    """
    if template is None:
        raise ApiError(
            400,
            "this model's tokenizer has no chat template: use /v1/completions, or start the server "
            "with --chat-template",
            field="messages",
        )
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, _MESSAGES, field="messages")
    text = template.render([_read_message(message) for message in messages])
    ids = await service.tokenize(text, spelled=True)
    if not ids:
        raise ApiError(400, "the chat template makes no text of these messages", field="messages")
    return ids


def _read_message(message: Any) -> dict[str, str]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ApiError(400, _MESSAGES, field="messages")
    # An answer that a client sends back has null in all fields that it does not use.
    given = {name: value for name, value in message.items() if value is not None}
    others = [name for name in given if name not in ("role", "content", "name")]
    if others:
        raise ApiError(400, f"messages: {others[0][:64]!r} is not supported", field="messages")
    if not isinstance(given.get("name", ""), str):
        raise ApiError(400, "messages: name: give a string", field="messages")
    return {**given, "content": _content(given.get("content"))}


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [None]
    return "".join(_part(part) for part in parts)


def _part(part: Any) -> str:
    if isinstance(part, dict) and part.get("type") == "text":
        text = part.get("text")
        if isinstance(text, str):
            return text
    raise ApiError(400, _MESSAGES, field="messages")


def make_asked(
    service: Service,
    prompts: Sequence[tuple[int, ...]],
    values: Mapping[str, Any],
    *,
    new_tokens: int,
    logprobs: int | None,
    echo: bool = False,
) -> list[Asked]:
    """n sequences for each prompt, in the order of OpenAI's `choices`.

    Args:
        logprobs: None: none; else the most likely tokens to tell beside the chosen one.

    Raises:
        ApiError: 400, 422 over the limits.
    """
    _check_lengths(service, prompts, new_tokens, values["n"])
    stops = _read_stops(values["stop"])
    defaults = service.settings.defaults
    top_k, top_p = defaults.choose(values["top_k"], values["top_p"])
    if values["top_p"] == 0:  # OpenAI's clients mean the smallest set there is; our 0 means all
        top_k = 1
    temperature = values["temperature"]
    common = {
        "max_new_tokens": new_tokens,
        "temperature": defaults.temperature if temperature is None else temperature,
        "top_k": top_k,
        "top_p": top_p,
        "repetition_penalty": values["repetition_penalty"],
        "stop_tokens": tuple(sorted(service.ends)),
        "logprobs": logprobs is not None,
        "top_logprobs": logprobs or 0,
        "prompt_logprobs": echo and logprobs is not None,
    }
    return [
        Asked(prompt, Sampling(**common, seed=service.seed_of(values["seed"], copy)), stops)
        for prompt in prompts
        for copy in range(values["n"])
    ]


def _check_lengths(
    service: Service, prompts: Sequence[tuple[int, ...]], new_tokens: int, copies: int
) -> None:
    if len(prompts) * copies > MAX_PROMPTS:
        raise ApiError(
            400, f"{len(prompts)} prompts times n {copies}: at most {MAX_PROMPTS}", field="n"
        )
    longest = max(len(prompt) for prompt in prompts)
    if longest + new_tokens > service.max_length:
        raise ApiError(
            422,
            f"a prompt of {longest} tokens and max_tokens {new_tokens} are more than the model's "
            f"{service.max_length}",
            field="max_tokens",
        )
    service.check_total(prompts, new_tokens, copies)


def _read_stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    right = (
        isinstance(stops, list)
        and len(stops) <= MAX_STOPS
        and all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_LENGTH for stop in stops)
    )
    if not right:
        raise ApiError(
            400,
            f"stop: give a text or up to {MAX_STOPS} of them, each of 1 to {MAX_STOP_LENGTH} "
            "characters",
            field="stop",
        )
    return tuple(stops)


def completion_tokens(values: Mapping[str, Any]) -> int:
    """max_tokens of a completion.

    Raises:
        ApiError: 400 nothing to do.
    """
    new_tokens: int = _NEW_TOKENS if values["max_tokens"] is None else values["max_tokens"]
    if new_tokens == 0 and not (values["echo"] and values["logprobs"] is not None):
        raise ApiError(
            400,
            "max_tokens 0 only scores the prompt: give echo true and logprobs",
            field="max_tokens",
        )
    return new_tokens


def chat_tokens(service: Service, prompt: Sequence[int], values: Mapping[str, Any]) -> int:
    """max_tokens of a chat: what fits, where the request does not say."""
    asked = values["max_completion_tokens"] or values["max_tokens"]
    room = min(service.max_length, service.settings.limits.tokens // values["n"]) - len(prompt)
    return int(asked or max(1, room))
