"""The contract of Megatron-LM's `PUT /api`, row by row."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from megatron.config.generation import ServerConfig
from megatron.inference.server.endpoint import ApiError
from megatron.inference.server.megatron_api import MegatronRequest, parse_request
from tests.inference.server.fake_engine import FakeEngine, logprob_of
from tests.inference.server.live import Live, make_settings, running

TEXT = "Hello, world!"
TOP_P = {"top_p": 0.5}
TEMPERATURE = "temperature must be a positive number less than or equal to 100.0"
TOP_K_TYPE = "top_k must be an integer equal to or greater than 0 and less than or equal to 1000"
TOP_K_RANGE = "top_k must be equal to or greater than 0 and less than or equal to 1000"
DECAY_RANGE = "top_p_decay must be less than or equal to 1.0"
PENALTY_RANGE = "length_penalty must be a float from -20 to 20"
BOUND_RANGE = "top_p_bound must be greater than 0 and less than top_p"

# (the body without its prompts, message). If a body breaks several rules, the first one is
# reported.
BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"tokens_to_generate": "5"}, "tokens_to_generate must be an integer greater than 0"),
    ({"tokens_to_generate": 5.0}, "tokens_to_generate must be an integer greater than 0"),
    ({"tokens_to_generate": None}, "tokens_to_generate must be an integer greater than 0"),
    (
        {"tokens_to_generate": -1},
        "tokens_to_generate must be an integer greater than or equal to 0",
    ),
    ({"tokens_to_generate": 0}, "tokens_to_generate=0 implies logprobs should be True"),
    ({"logprobs": 1}, "logprobs must be a boolean value"),
    ({"temperature": "hot"}, TEMPERATURE),
    ({"temperature": 0}, TEMPERATURE),
    ({"temperature": 0.0}, TEMPERATURE),
    ({"temperature": -1}, TEMPERATURE),
    ({"temperature": 100.5}, TEMPERATURE),
    ({"top_k": 1.5}, TOP_K_TYPE),
    ({"top_k": -1}, TOP_K_RANGE),
    ({"top_k": 1001}, TOP_K_RANGE),
    ({"top_p": 1}, "top_p must be a positive float less than or equal to 1.0"),
    ({"top_p": 0.5, "top_k": 5}, "cannot set both top-k and top-p samplings."),
    ({"top_p": 1.5}, "top_p must be less than or equal to 1.0"),
    ({"top_p": -0.5}, "top_p must be less than or equal to 1.0"),
    (
        {**TOP_P, "top_p_decay": 1},
        "top_p_decay must be a positive float less than or equal to 1.0",
    ),
    ({"top_p_decay": 0.5}, "top_p_decay cannot be set without top_p"),
    ({**TOP_P, "top_p_decay": 1.5}, DECAY_RANGE),
    ({**TOP_P, "top_p_decay": -0.5}, DECAY_RANGE),
    (
        {**TOP_P, "top_p_bound": 1},
        "top_p_bound must be a positive float less than or equal to top_p",
    ),
    ({"top_p_bound": 0.5}, "top_p_bound cannot be set without top_p"),
    ({**TOP_P, "top_p_bound": 0.0}, BOUND_RANGE),
    ({**TOP_P, "top_p_bound": 0.6}, BOUND_RANGE),
    ({"add_BOS": 1}, "add_BOS must be a boolean value"),
    ({"stop_on_double_eol": 1}, "stop_on_double_eol must be a boolean value"),
    ({"stop_on_eol": 1}, "stop_on_eol must be a boolean value"),
    ({"prevent_newline_after_colon": 1}, "prevent_newline_after_colon must be a boolean value"),
    ({"no_log": 1}, "no_log must be a boolean value"),
    ({"random_seed": 1.0}, "random_seed must be integer"),
    ({"random_seed": -1}, "random_seed must be a positive integer"),
    ({"beam_width": "2"}, "beam_width must be integer"),
    ({"beam_width": 0}, "beam_width must be an integer > 1"),
    ({"beam_width": 2, "stop_token": 1.0}, "stop_token must be an integer"),
    ({"beam_width": 2, "length_penalty": 1}, "length_penalty must be a float"),
    # Stricter than Megatron: a length to this power is out of range; true is not an integer.
    ({"beam_width": 2, "length_penalty": 1e300}, PENALTY_RANGE),
    ({"beam_width": 1, "length_penalty": -20.5}, PENALTY_RANGE),
    ({"tokens_to_generate": True}, "tokens_to_generate must be an integer greater than 0"),
    ({"top_k": True}, TOP_K_TYPE),
    ({"random_seed": True}, "random_seed must be integer"),
    ({"beam_width": True}, "beam_width must be integer"),
    # The order of the rules.
    ({"temperature": 0, "top_k": -1, "tokens_to_generate": -1}, "tokens_to_generate must be an "
     "integer greater than or equal to 0"),
    ({"random_seed": -1, "no_log": 3}, "random_seed must be a positive integer"),
]  # fmt: skip

# (the whole body, message): Megatron answers these with 400 too.
BROKEN_PROMPTS: list[tuple[Any, str]] = [
    ({}, "prompts argument required"),
    ({"prompts": [TEXT], "max_len": 5}, "max_len is no longer used.  Replace with "
     "tokens_to_generate"),
    ({"prompts": [TEXT], "sentences": []}, "sentences is no longer used.  Replace with prompts"),
    ({"prompts": TEXT}, "prompts is not a list of strings"),
    ({"prompts": []}, "prompts is empty"),
    ({"prompts": [TEXT] * 129}, "Maximum number of prompts is 128"),
]  # fmt: skip

# (body, status, message): found only after tokenization.
TOO_MUCH: list[tuple[dict[str, Any], str]] = [
    (
        {"prompts": [TEXT], "tokens_to_generate": 256},
        "Length of prompt + tokens_to_generate longer than allowed",
    ),
    (
        {"prompts": [TEXT], "tokens_to_generate": 256, "beam_width": 2},
        "context length + tokens_to_generate too large",
    ),
    (
        {"prompts": ["Hello"] * 100, "tokens_to_generate": 200},
        "Too many tokens.  20100 is greater than 12000",
    ),
]


@pytest.fixture(scope="module")
def legacy(tokenizer_folder: Path) -> Iterator[Live]:
    engine = FakeEngine()
    flags = ServerConfig(legacy_status_codes=True)
    settings = make_settings(tokenizer_folder, engine, server=flags)
    with running(engine, settings) as server:
        yield server


def _told(answer: httpx.Response) -> tuple[int, Any]:
    return answer.status_code, answer.json()


@pytest.mark.parametrize(("fields", "message"), BROKEN, ids=lambda value: str(value)[:40])
def test_a_broken_rule_is_reported_in_megatrons_words(
    live: Live, legacy: Live, fields: dict[str, Any], message: str
) -> None:
    body = {"prompts": [TEXT], **fields}
    assert _told(live.put(body)) == (400, message)
    assert _told(legacy.put(body)) == (200, message)


@pytest.mark.parametrize(("body", "message"), BROKEN_PROMPTS, ids=lambda value: str(value)[:40])
def test_broken_prompts_are_400_in_both_forms(
    live: Live, legacy: Live, body: Any, message: str
) -> None:
    assert _told(live.put(body)) == _told(legacy.put(body)) == (400, message)


@pytest.mark.parametrize(("body", "message"), TOO_MUCH, ids=lambda value: str(value)[:40])
def test_too_much_is_reported_in_megatrons_words(
    live: Live, legacy: Live, body: dict[str, Any], message: str
) -> None:
    assert _told(live.put(body)) == (422, message)
    assert _told(legacy.put(body)) == (200, message)


def test_two_rules_that_need_other_prompts(live: Live) -> None:
    empty = {"prompts": ["x", ""]}
    assert _told(live.put(empty)) == (400, "Empty prompts require add_BOS=true")
    two = {"prompts": ["x", "y"], "beam_width": 2}
    assert _told(live.put(two)) == (400, "When doing beam_search, batch size must be 1")
    assert _told(live.put({"prompts": ["x", 3]})) == (400, "prompts is not a list of strings")


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1},
        {"temperature": 100},
        {"top_k": 0},
        {"top_k": 1000},
        {"top_p": 0.0},
        {"top_p": 0.0, "top_k": 5},
        {"top_p": 1.0},
        {"top_p": 0.5, "top_p_decay": 1.0, "top_p_bound": 0.5},
        {"random_seed": 0},
        {"random_seed": 2**64 - 1},
        {"beam_width": 1},
        {"beam_width": 2, "stop_token": -1, "length_penalty": 0.5},
        {"beam_width": 1, "length_penalty": 20.0},
        {"beam_width": 2, "length_penalty": -20.0},
        {"tokens_to_generate": 0, "logprobs": True},
        {"an_unknown_field": 1},
    ],
    ids=str,
)
def test_bounds_are_inside(live: Live, fields: dict[str, Any]) -> None:
    assert live.put({"prompts": [TEXT], "tokens_to_generate": 2, **fields}).status_code == 200


def test_answers_hold_the_prompt_and_its_segments(live: Live) -> None:
    answer = live.put({"prompts": ["Hello, world!", "x"], "tokens_to_generate": 6}).json()
    first, second = answer["text"]
    assert (TEXT * 3).startswith(first)
    assert first.startswith(TEXT)
    assert second == "xxxxxxx"
    assert len(answer["segments"][1]) == 7
    assert ["".join(row) for row in answer["segments"]] == answer["text"]
    assert answer["logprobs"] is None


def test_segments_of_a_character_in_several_tokens_are_no_characters(live: Live) -> None:
    answer = live.put({"prompts": ["wörld"], "tokens_to_generate": 1}).json()
    assert "ö" in answer["text"][0]
    assert "\ufffd" in "".join(answer["segments"][0])


def test_logprobs_are_one_fewer_than_segments(live: Live) -> None:
    body = {"prompts": [TEXT], "tokens_to_generate": 3, "logprobs": True}
    answer = live.put(body).json()
    (request,) = [each for each in live.engine.seen if each.sampling.prompt_logprobs][-1:]
    expected = [logprob_of(token) for token in (*request.prompt[1:], *request.prompt[:3])]
    assert answer["logprobs"] == [expected]
    assert len(answer["segments"][0]) == len(expected) + 1


def test_prompts_are_only_scored(live: Live) -> None:
    answer = live.put({"prompts": [TEXT], "tokens_to_generate": 0, "logprobs": True}).json()
    assert answer["text"] == [TEXT]
    assert len(answer["logprobs"][0]) == len(answer["segments"][0]) - 1


def test_beam_search(live: Live) -> None:
    answer = live.put({"prompts": [TEXT], "tokens_to_generate": 3, "beam_width": 2}).json()
    assert set(answer) == {"text", "segments", "scores"}
    assert answer["scores"] == [0.0, -1.0]
    assert all(text.startswith(TEXT) for text in answer["text"])


def test_a_beam_search_of_width_1_is_scored_as_wider_ones_are(live: Live) -> None:
    """The score is the sum of the log probabilities, divided by a power of their number."""
    body = {"prompts": ["xyz"], "tokens_to_generate": 3, "beam_width": 1, "length_penalty": 2.0}
    answer = live.put(body).json()
    total = sum(logprob_of(token) for token in live.engine.seen[-1].prompt)
    assert answer["scores"] == pytest.approx([total / 3**2])


def test_add_bos_puts_the_end_of_document_first(live: Live) -> None:
    text = live.put({"prompts": ["", "x"], "add_BOS": True, "tokens_to_generate": 1}).json()["text"]
    # The fake engine repeats the first token, which is the end of a document.
    assert text == ["<|endoftext|>" * 2, "<|endoftext|>x<|endoftext|>"]


def _sampling_of(live: Live, **fields: Any) -> Any:
    live.put({"prompts": [TEXT], "tokens_to_generate": 1, **fields})
    return live.engine.seen[-1].sampling


def test_fields_reach_the_engine(live: Live) -> None:
    sampling = _sampling_of(
        live, temperature=2, top_p=0.5, top_p_decay=0.9, top_p_bound=0.1, random_seed=7
    )
    assert (sampling.temperature, sampling.top_p) == (2.0, 0.5)
    assert (sampling.top_p_decay, sampling.top_p_bound, sampling.seed) == (0.9, 0.1, 7)
    assert _sampling_of(live).seed is None
    assert _sampling_of(live, top_k=1).top_k == 1


def test_the_ends_of_lines_are_tokens(live: Live, tokenizer_folder: Path) -> None:
    from tokenizers import Tokenizer

    known = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    (eol,), (colon,), (eod,) = (
        known.encode(text).ids for text in ("\n", ":", "<|endoftext|>")
    )  # fmt: skip
    assert _sampling_of(live).stop_tokens == (eod,)
    assert eol in _sampling_of(live, stop_on_eol=True).stop_tokens
    assert _sampling_of(live, stop_on_double_eol=True).stop_sequences == ((eol, eol),)
    banned = {"prevent_newline_after_colon": True}
    assert _sampling_of(live, **banned).banned_pairs == ((colon, eol),)
    assert _sampling_of(live, **banned, beam_width=2).banned_pairs == ((colon, eol),)
    assert _sampling_of(live, beam_width=2).banned_pairs == ()


def test_a_token_of_two_ends_of_lines_stops_too(tokenizer_folder: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    known = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    known.add_tokens(["\n\n"])
    known.save(str(tmp_path / "tokenizer.json"))
    shutil.copy(tokenizer_folder / "tokenizer_config.json", tmp_path)
    (double,) = known.encode("\n\n").ids
    engine = FakeEngine(vocab_size=double + 1)
    with running(engine, make_settings(tmp_path, engine)) as live:
        assert double not in _sampling_of(live).stop_tokens
        assert double in _sampling_of(live, stop_on_double_eol=True).stop_tokens
        assert double in _sampling_of(live, stop_on_eol=True).stop_tokens


def test_seeds_of_equal_prompts_differ(live: Live) -> None:
    live.put({"prompts": ["x", "x"], "tokens_to_generate": 1, "random_seed": 3})
    assert [request.sampling.seed for request in live.engine.seen[-2:]] == [3, 4]


def test_post_is_put_and_get_is_405(live: Live) -> None:
    body = {"prompts": ["x"], "tokens_to_generate": 1}
    assert live.post("/api", body).json() == live.put(body).json()
    assert httpx.get(f"{live.url}/api").status_code == 405


def test_flags_stand_in_where_a_request_is_silent(tokenizer_folder: Path) -> None:
    engine = FakeEngine()
    server = ServerConfig(temperature=0.5, top_p=0.9)
    settings = make_settings(tokenizer_folder, engine, server=server)
    with running(engine, settings) as live:
        sampling = _sampling_of(live)
        assert (sampling.temperature, sampling.top_p) == (0.5, 0.9)
        named = _sampling_of(live, top_k=3)
        assert (named.top_k, named.top_p) == (3, 0.0)


@pytest.mark.parametrize("asked", [False, True])
def test_prompts_are_logged_only_if_asked_for(
    asked: bool, tokenizer_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine()
    server = ServerConfig(log_requests=asked)
    caplog.set_level("INFO")
    with running(engine, make_settings(tokenizer_folder, engine, server=server)) as live:
        live.put({"prompts": ["a secret"], "tokens_to_generate": 1})
        live.put({"prompts": ["not for logs"], "tokens_to_generate": 1, "no_log": True})
        live.post("/v1/completions", {"prompt": "an own one", "max_tokens": 1})
    assert ("a secret" in caplog.text) == asked
    assert "not for logs" not in caplog.text
    assert "an own one" not in caplog.text


def test_documented_bounds_are_those_that_are_checked() -> None:
    def is_valid(name: str, value: float) -> bool:
        try:
            parse_request({"prompts": ["x"], "logprobs": True, name: value})
        except ApiError:
            return False
        return True

    checked = 0
    for name, field in MegatronRequest.model_json_schema()["properties"].items():
        for kind in field.get("anyOf", [field]):
            step = 1 if kind.get("type") == "integer" else 1 / 64
            for key, outside in (("minimum", -step), ("maximum", step)):
                if key in kind and kind.get("type") in ("integer", "number"):
                    bound = int(kind[key]) if step == 1 else float(kind[key])
                    assert is_valid(name, bound), (name, bound)
                    assert not is_valid(name, bound + outside), (name, bound)
                    checked += 1
            if "exclusiveMinimum" in kind:
                assert not is_valid(name, kind["exclusiveMinimum"])
                assert is_valid(name, kind["exclusiveMinimum"] + step)
    assert checked > 5
