"""The Perspective API client, tested with a local stand-in."""

from __future__ import annotations

import email.utils
import json
import threading
import time
from collections.abc import Iterator
from typing import cast

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
from tests.detoxify.stand_in import (
    KEY,
    Answer,
    StandIn,
    error_body,
    perspective,
    scores_body,
)

REQUEST = {"comment": {"text": "text"}, "requestedAttributes": [a.upper() for a in ATTRIBUTES]}


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    monkeypatch.setattr(module, "_FIRST_WAIT", 0.01)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with perspective() as found:
        yield found


def client_to(url: str, key: str = KEY, **options: float) -> PerspectiveClient:
    given = {"requests_per_second": 1000, "retries": 3, "timeout": 60.0, **options}
    return PerspectiveClient(key, url, ATTRIBUTES, language="en", **given)


def client_of(service: StandIn, **options: float) -> PerspectiveClient:
    return client_to(service.url, **options)


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
        Answer(408, b""),
        Answer(425, b""),
        Answer(429, error_body("Quota exceeded")),
        Answer(500, b"<html>"),
        Answer(502, b""),
        Answer(503, b""),
        Answer(504, b""),
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


def test_a_response_below_the_limit_is_read(service: StandIn) -> None:
    service.answers = [Answer(200, scores_body(REQUEST).ljust((1 << 20) - 1))]
    assert client_of(service).score("text")["toxicity"] == 0.1


def test_waits_double_up_to_a_minute(
    service: StandIn, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FIRST_WAIT", 1.0)
    client = client_of(service, retries=8)
    monkeypatch.setattr(client._random, "uniform", lambda low, high: low + high)
    service.answers = [Answer(500, b"")] * 8
    client.score("text")
    assert waits == [1.5 * limit for limit in (1, 2, 4, 8, 16, 32, 60, 60)]


def test_the_server_says_when_to_come_back(service: StandIn) -> None:
    service.answers = [Answer(429, b"", (("Retry-After", "0.3"),))]
    client_of(service).score("text")
    first, second = service.times
    assert second - first >= 0.3
    service.answers = [Answer(429, b"", (("Retry-After", "86400"),))]
    with pytest.raises(ServiceError, match="requests a delay of 86400 seconds"):
        client_of(service).score("text")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list of the pauses that clients ask for, which take no time."""
    found: list[float] = []
    monkeypatch.setattr(RequestPace, "pause", lambda _, seconds: found.append(seconds))
    return found


def test_the_server_says_when_to_come_back_as_a_date(service: StandIn, waits: list[float]) -> None:
    after = email.utils.formatdate(time.time() + 500, usegmt=True)
    service.answers = [Answer(429, b"", (("Retry-After", after),))]
    client_of(service).score("text")
    assert 300 < waits[0] <= 500


def test_a_delay_in_the_past_is_none(service: StandIn, waits: list[float]) -> None:
    service.answers = [Answer(503, b"", (("Retry-After", "-5"),))]
    client_of(service).score("text")
    assert waits == [0.0]


@pytest.mark.parametrize("delay", ["nan", "inf", "soon", "Fri, 99 Nov 2026 20:00:00 GMT"])
def test_an_invalid_delay_is_ignored(service: StandIn, waits: list[float], delay: str) -> None:
    service.answers = [Answer(503, b"", (("Retry-After", delay),))]
    client_of(service).score("text")
    assert 0.005 <= waits[0] <= 0.01


def test_a_delay_of_more_than_ten_minutes_ends_the_command(
    service: StandIn, waits: list[float]
) -> None:
    service.answers = [Answer(429, b"", (("Retry-After", "600"),))]
    client = client_of(service)
    client.score("text")
    assert waits == [600.0]
    service.answers = [Answer(429, b"", (("Retry-After", "601"),))]
    with pytest.raises(ServiceError, match="requests a delay of 601 seconds"):
        client.score("text")


def test_the_last_reason_is_reported_without_the_requested_delay(service: StandIn) -> None:
    busy = Answer(503, error_body("busy"), (("Retry-After", "0"),))
    service.answers = [busy] * 4
    with pytest.raises(ServiceError, match="the last one with: [^(]*busy: run"):
        client_of(service).score("text")


def test_requests_keep_to_the_rate_with_many_workers(service: StandIn) -> None:
    scorer = PerspectiveScorer(client_of(service, requests_per_second=50), workers=8)
    texts = [f"rude 0.{i:02}" for i in range(20)]
    started = time.monotonic()
    found = [scored.scores for scored in scorer.score(texts)]
    assert [scores["toxicity"] for scores in found if scores] == [i / 100 for i in range(20)]
    assert max(service.times) - started >= 19 / 50
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
        (Answer(200, b" " * (1 << 20)), "1048576 bytes or more"),
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
    client = client_to(service.url, "secret")
    with pytest.raises(ServiceError, match="API key not valid") as caught:
        client.score("text")
    assert "secret" not in str(caught.value)
    assert not isinstance(caught.value, TextRefusedError)


@pytest.mark.parametrize("url", ["http://example.org/x", "ftp://localhost/x", "example.org", ""])
def test_the_key_is_sent_encrypted_only(url: str) -> None:
    with pytest.raises(ConfigError, match="give a URL with https://"):
        client_to(url)


@pytest.mark.parametrize(
    "url",
    ["https://[::1", "https://localhost:abc/x", "https://localhost/a b", "https://localhost/é"],
)
def test_a_broken_address_is_named_at_once(url: str) -> None:
    with pytest.raises(ConfigError, match="--api-url "):
        client_to(url)


def test_no_server(service: StandIn) -> None:
    client = client_to("http://127.0.0.1:9/", retries=1)
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


def test_requests_start_at_the_rate_and_after_the_longest_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, waits = 0.5, list[float]()
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    pace = RequestPace(4)
    monkeypatch.setattr(pace._stopped, "wait", waits.append)
    for _ in range(3):
        pace.wait()
    pace.pause(2.0)
    pace.pause(1.0)
    pace.wait()
    now = 10.0
    pace.wait()
    assert waits == [0.0, 0.25, 0.5, 2.0, 0.0]


def test_a_stopped_client_sends_nothing(service: StandIn) -> None:
    client = client_of(service)
    client.stop()
    with pytest.raises(ServiceError, match="stopped"):
        client.score("text")
    assert not service.bodies


class SlowClient:
    """A client that answers one text at once, and the others when it is stopped."""

    attributes, language = ("toxicity",), "en"

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answered: list[str] = []
        self._stopped = threading.Event()

    def score(self, text: str) -> dict[str, float]:
        self.asked.append(text)
        if text != "quick":
            assert self._stopped.wait(120)
            time.sleep(0.05)
        self.answered.append(text)
        return {"toxicity": 0.5}

    def stop(self) -> None:
        self._stopped.set()


def test_two_texts_per_worker_are_read_ahead_and_dropped_when_stopped() -> None:
    client, texts = SlowClient(), iter(["quick", "one", "two", "three", "four"])
    scores = PerspectiveScorer(cast(PerspectiveClient, client), workers=2).score(texts)
    assert next(scores).scores == {"toxicity": 0.5}
    assert list(texts) == ["four"]
    deadline = time.monotonic() + 60
    while len(client.asked) < 3 and time.monotonic() < deadline:  # both workers are busy
        time.sleep(0.01)
    scores.close()
    assert sorted(client.answered) == ["one", "quick", "two"]
    assert sorted(client.asked) == ["one", "quick", "two"]
