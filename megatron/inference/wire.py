"""Requests, events and commands as JSON objects and back. No pickle: what comes in is only data."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, get_args

from megatron.inference.request import (
    Beam,
    Event,
    Finished,
    Prompt,
    Reason,
    Request,
    RequestError,
    Sampling,
    Token,
    TopLogprobs,
)

JsonObject = dict[str, Any]


@dataclass(frozen=True)
class Add:
    """Take this request."""

    request: Request


@dataclass(frozen=True)
class Cancel:
    """End this request."""

    request: str


@dataclass(frozen=True)
class Shutdown:
    """End all requests and the loop."""


Command = Add | Cancel | Shutdown


def command_to_json(command: Command) -> JsonObject:
    """An object with the command's name in `command`."""
    match command:
        case Add(request):
            return {"command": "add", "request": asdict(request)}
        case Cancel(request_id):
            return {"command": "cancel", "request": request_id}
    return {"command": "shutdown"}


def command_from_json(value: Mapping[str, Any]) -> Command:
    """The opposite.

    Raises:
        RequestError: it is none.
    """
    match value.get("command"):
        case "add":
            return Add(request_from_json(_field(value, "request", _object)))
        case "cancel":
            return Cancel(_field(value, "request", _string))
        case "shutdown":
            return Shutdown()
    raise RequestError(f"{value.get('command')!r} is no command: add, cancel or shutdown")


def commands_to_bytes(commands: Sequence[Command]) -> bytes:
    """As one process sends them to another."""
    return json.dumps([command_to_json(command) for command in commands]).encode()


def commands_from_bytes(data: bytes) -> list[Command]:
    """The opposite.

    Raises:
        RequestError: there is something else in them.
    """
    return [command_from_json(value) for value in json.loads(data)]


def request_from_json(value: Mapping[str, Any]) -> Request:
    """From `{"id": ..., "prompt": [...], "sampling": {...}}`; fields of `sampling` that are left
    out have their defaults.

    Raises:
        RequestError: a field is missing, unknown, or of the wrong type or range.
    """
    sampling = _field(value, "sampling", _object)
    known = {field.name for field in fields(Sampling)}
    for name in sampling:
        if name not in known:
            raise RequestError(f"sampling has no field {name!r}: {', '.join(sorted(known))}")
    return Request(
        id=_field(value, "id", _string),
        prompt=_field(value, "prompt", _tokens),
        sampling=Sampling(**{name: _field(sampling, name, _READERS[name]) for name in sampling}),
    )


def event_to_json(event: Event) -> JsonObject:
    """An object with the event's name in `event`: "prompt", "token" or "finished"."""
    return {"event": type(event).__name__.lower(), **asdict(event)}


def event_from_json(value: Mapping[str, Any]) -> Event:
    """The opposite.

    Raises:
        RequestError: it is none.
    """
    request = _field(value, "request", _string)
    match value.get("event"):
        case "prompt":
            tops = tuple(_top(top) for top in _field(value, "top", _list))
            return Prompt(request, _field(value, "logprobs", _numbers), tops)
        case "token":
            logprob = value.get("logprob")
            return Token(
                request,
                _field(value, "token", _integer),
                None if logprob is None else _number(logprob),
                _field(value, "top", _top),
            )
        case "finished":
            reason: Reason = _field(value, "reason", _reason)
            return Finished(
                request,
                reason,
                _field(value, "message", _string),
                _field(value, "new_tokens", _integer),
                _field(value, "cached_tokens", _integer),
                tuple(_beam(beam) for beam in _field(value, "beams", _list)),
            )
    raise RequestError(f"{value.get('event')!r} is no event: prompt, token or finished")


def _field(value: Mapping[str, Any], name: str, read: Callable[[Any], Any]) -> Any:
    if name not in value:
        raise RequestError(f"{name} is missing")
    try:
        return read(value[name])
    except (TypeError, ValueError) as error:
        raise RequestError(f"{name} {value[name]!r}: {error}") from None


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError("give an integer")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("give a number")
    return float(value)


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("give a string")
    return value


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError("give true or false")
    return value


def _list(value: Any) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise TypeError("give a list")
    return value


def _object(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError("give an object")
    return value


def _tokens(value: Any) -> tuple[int, ...]:
    return tuple(_integer(token) for token in _list(value))


def _numbers(value: Any) -> tuple[float, ...]:
    return tuple(_number(number) for number in _list(value))


def _token_lists(value: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(_tokens(tokens) for tokens in _list(value))


def _pairs(value: Any) -> tuple[tuple[int, int], ...]:
    return tuple((first, second) for first, second in _token_lists(value))


def _top(value: Any) -> TopLogprobs:
    return tuple((_integer(token), _number(logprob)) for token, logprob in _list(value))


def _seed(value: Any) -> int | None:
    return None if value is None else _integer(value)


def _reason(value: Any) -> Reason:
    if value not in get_args(Reason):
        raise ValueError(f"give one of {', '.join(get_args(Reason))}")
    reason: Reason = value
    return reason


def _beam(value: Any) -> Beam:
    beam = _object(value)
    return Beam(
        _field(beam, "tokens", _tokens),
        _field(beam, "score", _number),
        _field(beam, "logprobs", _numbers),
    )


_READERS: dict[str, Callable[[Any], Any]] = {
    "max_new_tokens": _integer,
    "temperature": _number,
    "top_k": _integer,
    "top_p": _number,
    "top_p_decay": _number,
    "top_p_bound": _number,
    "repetition_penalty": _number,
    "seed": _seed,
    "stop_tokens": _tokens,
    "stop_sequences": _token_lists,
    "banned_pairs": _pairs,
    "beam_width": _integer,
    "length_penalty": _number,
    "logprobs": _boolean,
    "top_logprobs": _integer,
    "prompt_logprobs": _boolean,
}
