"""Requests, events and commands survive JSON; bytes that are none of these are refused by name."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import asdict, replace
from typing import Any

import pytest

from megatron.inference.messages import (
    MAX_MESSAGE,
    Add,
    Cancel,
    Command,
    MessageError,
    Report,
    Shutdown,
    Unpacker,
    pack,
    read,
    write,
)
from megatron.inference.request import (
    Beam,
    Event,
    Finished,
    Prompt,
    Request,
    RequestError,
    Sampling,
    Stats,
    Token,
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
    assert read(Request, write(Request, [REQUEST])) == [REQUEST]


def test_commands_survive() -> None:
    commands: list[Any] = [Add(REQUEST), Cancel("a"), Shutdown()]
    assert read(Command, write(Command, commands)) == commands


@pytest.mark.parametrize(
    "event",
    [
        Prompt("a", (-0.5,), (((1, -0.1), (2, -3.0)),)),
        Token("a", 7),
        Token("a", 7, -1.25, ((7, -1.25),)),
        Token("a", 7, -math.inf),
        Finished("a", "error", "no", 1, 2, (Beam((1, 2), -0.5, (-0.5, -0.5)),)),
    ],
)
def test_events_survive(event: Event) -> None:
    report = Report.of([event], Stats(running=3))
    assert read(Report, write(Report, [report])) == [report]
    assert report.events == (event,)


def test_each_requests_events_stay_in_order() -> None:
    mine: list[Event] = [Prompt("a", ()), Token("a", 1), Token("a", 2), Finished("a", "stop")]
    others: list[Event] = [Token("b", 3), Token("b", 4), Finished("b", "length"), Token("c", 5)]
    mixed = [event for pair in zip(others, mine, strict=True) for event in pair]
    events = Report.of(mixed, Stats()).events
    assert [event for event in events if event.request == "a"] == mine
    assert [event for event in events if event.request == "b"] == others[:3]
    assert len(events) == 8


def test_messages_arrive_in_any_pieces() -> None:
    data = pack(Command, Cancel("a"), Cancel("b")) + pack(Command, Shutdown())
    for size in (1, 3, len(data)):
        unpacker = Unpacker[Command](Command)
        pieces = [data[start : start + size] for start in range(0, len(data), size)]
        found = [command for piece in pieces for command in unpacker.feed(piece)]
        assert found == [Cancel("a"), Cancel("b"), Shutdown()]


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">I", MAX_MESSAGE + 1),
        struct.pack(">I", 1) + b"{",
        struct.pack(">I", 24) + b'[{"command": "explode"}]',
        struct.pack(">I", 2) + b"\x80\x04",  # how a pickle starts
    ],
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(MessageError):
        list(Unpacker[Command](Command).feed(data))


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("max_new_tokens", "3", "max_new_tokens: Input should be a valid integer"),
        ("max_new_tokens", True, "max_new_tokens: Input should be a valid integer"),
        ("temperature", -1, "temperature -1.0: give 0"),
        ("temperature", float("nan"), "finite"),
        ("top_p", 1.5, "top_p 1.5"),
        ("seed", -1, "seed -1"),
        ("stop_sequences", [[]], "stop_sequences"),
        ("banned_pairs", [[1, 2, 3]], "banned_pairs"),
        ("logprobs", 1, "logprobs: Input should be a valid boolean"),
        ("beam_width", 0, "beam_width 0"),
        ("warmth", 1, "warmth: Unexpected"),
    ],
)
def test_what_is_wrong_is_named(field: str, value: Any, said: str) -> None:
    form = asdict(REQUEST)
    form["sampling"][field] = value
    with pytest.raises((RequestError, MessageError), match=said):
        read(Request, json.dumps([form]).encode())


def test_a_request_needs_a_prompt() -> None:
    with pytest.raises(RequestError, match="empty"):
        replace(REQUEST, prompt=())


@pytest.mark.parametrize(
    ("field", "low", "high", "allowed"),
    [
        ("max_new_tokens", 0, None, "0 or more"),
        ("temperature", 0, None, "0 (greedy) or more"),
        ("top_k", 0, None, "0 (all) or more"),
        ("top_p", 0, 1, "0 (all) to 1"),
        ("top_p_decay", 0, 1, "0 (none) to 1"),
        ("top_p_bound", 0, 1, "0 (none) to 1"),
        ("repetition_penalty", 5e-324, None, "more than 0"),
        ("seed", 0, 2**63 - 1, f"0 to {2**63 - 1}"),
        ("beam_width", 1, None, "1 (no beam search) or more"),
        ("length_penalty", -20, 20, "-20 to 20"),
        ("top_logprobs", 0, 100, "0 to 100"),
    ],
)
def test_a_number_at_its_bound_is_accepted_and_one_beyond_it_is_refused(
    field: str, low: float, high: float | None, allowed: str
) -> None:
    plain = Sampling(max_new_tokens=1)
    for value in (low, 10**9 if high is None else high):
        replace(plain, **{field: value})
    whole = isinstance(low, int)
    for value in (low - 1 if whole else 0, *([] if high is None else [high + 1])):
        with pytest.raises(RequestError) as caught:
            replace(plain, **{field: value})
        assert str(caught.value) == f"{field} {value}: give {allowed}"
    if field == "max_new_tokens":
        with pytest.raises(RequestError, match=r"^beam_width 2 with max_new_tokens 0: give at lea"):
            replace(plain, max_new_tokens=0, beam_width=2)
