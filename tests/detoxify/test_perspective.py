"""The Perspective API client, tested with a local stand-in."""

from __future__ import annotations

import email.utils
import json
import time
from collections.abc import Iterator

import pytest

from megatron.detoxify import perspective as module
from megatron.detoxify.perspective import (
    PerspectiveClient,
    RequestPace,
    ServiceError,
    TextRefusedError,
)
from megatron.detoxify.scorers import ATTRIBUTES, PerspectiveScorer, Scored
from megatron.errors import ConfigError
from tests.detoxify.stand_in import KEY, Answer, StandIn, error_body, perspective


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    monkeypatch.setattr(module, "_FIRST_WAIT", 0.01)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with perspective() as found:
        yield found


def client_of(service: StandIn, **options: float) -> PerspectiveClient:
    return PerspectiveClient(
        KEY, service.url, ATTRIBUTES, **{"requests_per_second": 1000, "retries": 3, **options}
    )


def test_a_request_is_the_one_of_megatrons_script_and_is_not_stored(service: StandIn) -> None:
    scores = client_of(service).score("rude 0.75")
    assert scores == dict.fromkeys(ATTRIBUTES, 0.75)
    assert service.bodies == [
        {
            "comment": {"text": "rude 0.75"},
            "requestedAttributes": {
                name: {}
                for name in (
                    *("TOXICITY", "SEVERE_TOXICITY", "SEXUALLY_EXPLICIT", "THREAT", "PROFANITY"),
                    "IDENTITY_ATTACK",
                )
            },
            "languages": ["en"],
            "spanAnnotations": False,
            "doNotStore": True,
        }
    ]


def test_a_long_text_is_cut_between_two_characters(service: StandIn) -> None:
    client_of(service).score("x" + 20000 * "é")
    (text,) = service.texts()
    assert text == "x" + 10239 * "é"  # 20,479 of at most 20,480 bytes


@pytest.mark.parametrize(
    "failure",
    [
        Answer(429, error_body("Quota exceeded")),
        Answer(500, b"<html>"),
        Answer(503, b""),
        Answer(0),
        Answer(200, b"not JSON"),
        Answer(200, b"[]"),
        Answer(200, b'{"attributeScores": {"TOXICITY": {"summaryScore": {"value": 7}}}}'),
        Answer(200, b'{"attributeScores": {"TOXICITY": {"summaryScore": {"value": NaN}}}}'),
    ],
    ids=str,
)
def test_what_may_succeed_later_is_repeated(service: StandIn, failure: Answer) -> None:
    service.answers = [failure, failure]
    assert client_of(service).score("text")["toxicity"] == 0.1
    assert len(service.bodies) == 3


def test_repeating_has_an_end_that_tells_the_reason(service: StandIn) -> None:
    service.answers = [Answer(503, error_body("backend is busy"))] * 9
    with pytest.raises(ServiceError, match="4 attempts failed.*status 503: backend is busy"):
        client_of(service).score("text")
    assert len(service.bodies) == 4


def test_waits_grow(service: StandIn) -> None:
    service.answers = [Answer(500, b"")] * 4
    client_of(service, retries=4).score("text")
    waits = [b - a for a, b in zip(service.times, service.times[1:], strict=False)]
    for attempt, wait in enumerate(waits):
        assert wait >= 0.01 * 2**attempt / 2


@pytest.mark.parametrize("as_date", [False, True])
def test_the_server_says_when_to_come_back(service: StandIn, as_date: bool) -> None:
    after = email.utils.formatdate(time.time() + 2, usegmt=True) if as_date else "0.3"
    service.answers = [Answer(429, b"", (("Retry-After", after),))]
    client_of(service).score("text")
    first, second = service.times
    assert second - first >= 0.3
    service.answers = [Answer(429, b"", (("Retry-After", "86400"),))]
    with pytest.raises(ServiceError, match="requests a delay of 86400 seconds"):
        client_of(service).score("text")


def test_a_delay_of_more_than_ten_minutes_ends_the_command(
    service: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(RequestPace, "pause", lambda _, seconds: waits.append(seconds))
    service.answers = [Answer(429, b"", (("Retry-After", "600"),))]
    client = client_of(service)
    client.score("text")
    assert waits == [600.0]
    service.answers = [Answer(429, b"", (("Retry-After", "601"),))]
    with pytest.raises(ServiceError, match="requests a delay of 601 seconds"):
        client.score("text")


def test_the_last_reason_is_told_without_the_requested_delay(service: StandIn) -> None:
    busy = Answer(503, error_body("busy"), (("Retry-After", "0"),))
    service.answers = [busy] * 4
    with pytest.raises(ServiceError, match="the last one with: [^(]*busy: run"):
        client_of(service).score("text")


def test_requests_keep_to_the_rate_with_many_workers(service: StandIn) -> None:
    scorer = PerspectiveScorer(client_of(service, requests_per_second=50), workers=8)
    texts = [f"rude 0.{i:02}" for i in range(20)]
    found = [scored.scores for scored in scorer.score(texts)]
    assert [scores["toxicity"] for scores in found if scores] == [i / 100 for i in range(20)]
    times = sorted(service.times)
    assert times[-1] - times[0] >= 18 / 50
    assert next(scorer.score(["rude 0.5"])).scores  # the scorer can be used again


def test_an_error_ends_requests_that_wait_for_their_turn(
    service: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, stopped = client_of(service), list[bool]()
    monkeypatch.setattr(client, "stop", lambda: stopped.append(True))
    service.answers = [Answer(403, error_body("no"))]
    with pytest.raises(ServiceError):
        list(PerspectiveScorer(client, workers=1).score(["one", "two"]))
    assert stopped == [True]
    assert len(list(PerspectiveScorer(client, workers=1).score(["three"]))) == 1
    assert stopped == [True]


def test_a_refused_text_has_no_score_and_the_others_have(service: StandIn) -> None:
    reason = "Attribute THREAT does not support request languages: is"
    service.answers = [
        Answer(400, error_body(reason, errorType="LANGUAGE_NOT_SUPPORTED_BY_ATTRIBUTE"))
    ]
    scorer = PerspectiveScorer(client_of(service), workers=1)
    first, second = scorer.score(["halló", "hello"])
    assert first == Scored(None, f"status 400: {reason}")
    assert second.scores


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Answer(403, error_body("API has not been used")), "status 403: API has not been used"),
        (Answer(400, error_body("Unknown requested attribute")), "check the API key"),
        (Answer(302, b"", (("Location", "http://127.0.0.1:1/"),)), "status 302"),
        (Answer(200, b" " * (2 << 20)), "more than 1048576 bytes"),
        (Answer(404, b'{"error": {"message": {}, "details": 3}}'), "status 404"),
        (Answer(400, json.dumps({"error": [1]}).encode()), "status 400"),
        (Answer(400, b'{"error": {"details": [3, "errorType"]}}'), "status 400"),
    ],
)
def test_other_refusals_end_the_work_at_once(service: StandIn, answer: Answer, said: str) -> None:
    service.answers = [answer]
    with pytest.raises(ServiceError, match=said):
        client_of(service).score("text")
    assert len(service.bodies) == 1


def test_a_wrong_key_is_not_in_the_message(service: StandIn) -> None:
    client = PerspectiveClient("secret", service.url, ATTRIBUTES)
    with pytest.raises(ServiceError, match="API key not valid") as caught:
        client.score("text")
    assert "secret" not in str(caught.value)
    assert not isinstance(caught.value, TextRefusedError)


@pytest.mark.parametrize("url", ["http://example.org/x", "ftp://localhost/x", "example.org", ""])
def test_the_key_is_sent_encrypted_only(url: str) -> None:
    with pytest.raises(ConfigError, match="give a URL with https://"):
        PerspectiveClient(KEY, url, ATTRIBUTES)


@pytest.mark.parametrize(
    "url",
    ["https://[::1", "https://localhost:abc/x", "https://localhost/a b", "https://localhost/é"],
)
def test_a_broken_address_is_named_at_once(url: str) -> None:
    with pytest.raises(ConfigError, match="--api-url "):
        PerspectiveClient(KEY, url, ATTRIBUTES)


def test_no_server(service: StandIn) -> None:
    client = PerspectiveClient(
        KEY, "http://127.0.0.1:9/", ATTRIBUTES, requests_per_second=1000, retries=1
    )
    with pytest.raises(ServiceError, match="2 attempts failed.*refused"):
        client.score("text")


@pytest.mark.parametrize("value", [True, False, -0.01, 1.01, None, "0.5"])
def test_a_score_that_is_no_probability_is_asked_for_again(service: StandIn, value: object) -> None:
    score = {"summaryScore": {"value": value}}
    body = {"attributeScores": {name.upper(): score for name in ATTRIBUTES}}
    service.answers = [Answer(200, json.dumps(body).encode())]
    assert client_of(service).score("rude 0.4")["toxicity"] == 0.4
    assert len(service.bodies) == 2


@pytest.mark.parametrize("value", [0, 1])
def test_the_ends_of_the_range_are_scores(service: StandIn, value: int) -> None:
    score = {"summaryScore": {"value": value}}
    body = {"attributeScores": {name.upper(): score for name in ATTRIBUTES}}
    service.answers = [Answer(200, json.dumps(body).encode())]
    assert client_of(service).score("text") == dict.fromkeys(ATTRIBUTES, float(value))
    assert len(service.bodies) == 1


def test_a_shorter_pause_does_not_end_a_longer_one() -> None:
    """If several workers ask for a pause, the longest one counts."""
    pace = RequestPace(1000)
    pace.pause(0.2)
    pace.pause(0.0)
    began = time.monotonic()
    pace.wait()
    assert time.monotonic() - began > 0.1
