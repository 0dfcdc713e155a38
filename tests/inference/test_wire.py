"""Requests, events and commands survive JSON; what is none of them is refused by name."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from megatron.inference.request import (
    Beam,
    Event,
    Finished,
    Prompt,
    Request,
    RequestError,
    Sampling,
    Token,
)
from megatron.inference.wire import (
    Add,
    Cancel,
    Command,
    Shutdown,
    commands_from_bytes,
    commands_to_bytes,
    event_from_json,
    event_to_json,
    request_from_json,
)

FULL = Sampling(
    max_new_tokens=3,
    temperature=0.5,
    top_k=4,
    top_p=0.9,
    top_p_decay=0.8,
    top_p_bound=0.2,
    repetition_penalty=1.3,
    seed=2**62,
    stop_tokens=(0, 628),
    stop_sequences=((198, 198),),
    banned_pairs=((25, 198),),
    beam_width=2,
    length_penalty=-0.5,
    logprobs=True,
    top_logprobs=2,
    prompt_logprobs=True,
)
REQUEST = Request("a", (1, 2), FULL)


def test_every_field_survives() -> None:
    assert all(
        getattr(FULL, name) != getattr(Sampling(max_new_tokens=1), name)
        for name in Sampling.__dataclass_fields__
    ), "give every field of FULL a value of its own"
    assert request_from_json(json.loads(json.dumps(asdict(REQUEST)))) == REQUEST


def test_commands_survive() -> None:
    commands: list[Command] = [Add(REQUEST), Cancel("a"), Shutdown()]
    assert commands_from_bytes(commands_to_bytes(commands)) == commands


@pytest.mark.parametrize(
    "event",
    [
        Prompt("a", (-0.5,), (((1, -0.1), (2, -3.0)),)),
        Token("a", 7),
        Token("a", 7, -1.25, ((7, -1.25),)),
        Finished("a", "error", "no", 1, 2, (Beam((1, 2), -0.5, (-0.5, -0.5)),)),
    ],
)
def test_events_survive(event: Event) -> None:
    assert event_from_json(json.loads(json.dumps(event_to_json(event)))) == event


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("max_new_tokens", "3", "max_new_tokens '3': give an integer"),
        ("max_new_tokens", True, "give an integer"),
        ("temperature", -1, "temperature -1.0: give 0"),
        ("temperature", float("nan"), "finite"),
        ("top_p", 1.5, "top_p 1.5"),
        ("seed", -1, "seed -1"),
        ("stop_sequences", [[]], "stop_sequences"),
        ("banned_pairs", [[1, 2, 3]], "banned_pairs"),
        ("logprobs", 1, "logprobs 1: give true or false"),
        ("beam_width", 0, "beam_width 0"),
        ("warmth", 1, "no field 'warmth'"),
    ],
)
def test_what_is_wrong_is_named(field: str, value: Any, said: str) -> None:
    form = asdict(REQUEST)
    form["sampling"][field] = value
    with pytest.raises(RequestError, match=said):
        request_from_json(form)


def test_a_request_needs_a_prompt() -> None:
    with pytest.raises(RequestError, match="empty"):
        replace(REQUEST, prompt=())
