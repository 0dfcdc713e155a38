"""What a client's request may ask of the engine: how many sequences, tokens and seeds."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.inference.messages import Add, Cancel, Command, Unpacker
from megatron.inference.request import (
    Event,
    Finished,
    NeighborPassage,
    Prompt,
    Retrieved,
    Sampling,
    Token,
)
from megatron.inference.server.endpoint import ApiError
from megatron.inference.server.service import (
    AnswerGroup,
    EngineClient,
    Service,
    TextPiece,
    TextRequest,
)

REQUEST = TextRequest((1, 2), Sampling(max_new_tokens=3), adapter=1)


def test_as_many_sequences_run_or_wait_as_the_server_allows() -> None:
    sent = bytearray()
    writer: Any = SimpleNamespace(write=sent.extend)
    client = EngineClient(None, writer, 3)  # type: ignore[arg-type]
    names, events = client.start([REQUEST, REQUEST])
    assert (names, client.active) == (["r1", "r2"], 2)
    message = "2 sequences are running or waiting, and 2 more would exceed the server's 3: try aga"
    with pytest.raises(ApiError) as caught:
        client.start([REQUEST, REQUEST])
    assert (caught.value.status, caught.value.message[: len(message)]) == (429, message)
    assert client.start([REQUEST])[0] == ["r3"]
    for event in (Token("r1", 7), Finished("r1", "stop"), Token("r1", 8)):
        client._dispatch(event)
    assert [events.get_nowait() for _ in range(events.qsize())] == [
        Token("r1", 7),
        Finished("r1", "stop"),
    ]
    assert client.active == 2
    client.cancel("r1")  # has ended
    client.cancel("r2")
    client.alive = False
    client.cancel("r3")
    commands = list(Unpacker[Command](Command).feed(bytes(sent)))
    assert [type(command) for command in commands] == [Add, Add, Add, Cancel]
    assert commands[-1] == Cancel("r2")
    assert isinstance(commands[0], Add)
    asked = commands[0].request
    assert (asked.id, asked.prompt, asked.sampling, asked.adapter) == (
        "r1",
        REQUEST.prompt,
        REQUEST.sampling,
        1,
    )
    with pytest.raises(ApiError) as caught:
        client.start([REQUEST])
    assert caught.value.status == 503


def test_a_request_has_at_most_as_many_tokens_as_the_server_allows() -> None:
    def check(limit: int) -> None:
        server = SimpleNamespace(max_tokens_to_oom=limit)
        service: Any = SimpleNamespace(settings=SimpleNamespace(server=server))
        # Two answers to each of two prompts, with 3 + 4 tokens each.
        Service.check_total(service, [(1,), (1, 2, 3)], new_tokens=4, answers_per_prompt=2)

    check(28)
    with pytest.raises(ApiError) as caught:
        check(27)
    error = caught.value
    assert error.message == "Too many tokens.  28 is greater than 27"
    assert (error.status, error.keeps_status) == (422, False)


@pytest.mark.parametrize(
    ("seed", "index", "found"),
    [(None, 3, None), (0, 3, 3), (5, 0, 5), (2**63 - 1, 0, 2**63 - 1),
     (2**63 - 1, 2, 1)],
)  # fmt: skip
def test_each_sequence_has_its_own_seed(seed: int | None, index: int, found: int | None) -> None:
    assert Service.seed_of(seed, index) == found


def test_the_echo_of_a_prompt_waits_for_its_log_probabilities() -> None:
    """A long prompt takes several steps, and Retro's first passages come before the last one."""
    passage = NeighborPassage(chunk=0, corpus=0, document=3, text="near")
    later: list[Event] = [Prompt("r1", (-0.5,)), Token("r1", 99, -0.25), Finished("r1", "length")]
    sampling = Sampling(max_new_tokens=1, logprobs=True, prompt_logprobs=True)
    request = TextRequest((97, 98), sampling, echo=True)
    tokenizer = SimpleNamespace(detokenize=lambda ids: "".join(map(chr, ids)))

    async def pieces() -> list[TextPiece]:
        client = EngineClient(None, SimpleNamespace(write=len), 1)  # type: ignore[arg-type]
        service: Any = SimpleNamespace(engine=client, tokenizer=tokenizer)
        group, found = AnswerGroup(service, [request]), []
        client._dispatch(Retrieved("r1", (passage,)))
        async for _, piece in group.pieces():
            found += [] if piece is None else [piece]
            while later:
                client._dispatch(later.pop(0))
        return found

    first, *others = asyncio.run(pieces())
    assert first == TextPiece("", (), (passage,))
    assert [(piece.text, [token.logprob for token in piece.tokens]) for piece in others] == [
        ("ab", [None, -0.5]),
        ("c", [-0.25]),
    ]
