"""What requests may contain, and how errors are reported: values at and beyond their bounds."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.inference.server.app import openapi_document
from megatron.inference.server.endpoint import ApiError, error_response, json_response
from megatron.inference.server.megatron_api import MegatronRequest
from megatron.inference.server.schema import ChatRequest, CompletionRequest, read_request

HI = {"role": "user", "content": "Hi"}
COMPLETION, CHAT = CompletionRequest, ChatRequest
_STOPS = "stop: give a string or up to 16 of them, each of 1 to 256 characters"


def _read(kind: Any, **fields: Any) -> Any:
    required: dict[str, Any] = {"prompt": "x"} if kind is COMPLETION else {"messages": [HI]}
    return read_request(kind, {**required, **fields})


@pytest.mark.parametrize(
    ("kind", "name", "low", "high"),
    [
        (COMPLETION, "n", 1, 128),
        (COMPLETION, "temperature", 0, 100),
        (COMPLETION, "top_p", 0, 1),
        (COMPLETION, "top_k", 0, 1000),
        (COMPLETION, "repetition_penalty", 0.01, 100),
        (COMPLETION, "seed", 0, 2**63 - 1),
        (COMPLETION, "logprobs", 0, 20),
        (COMPLETION, "max_tokens", 0, None),
        (CHAT, "max_tokens", 1, None),
        (CHAT, "max_completion_tokens", 1, None),
        (CHAT, "top_logprobs", 0, 20),
    ],
)
def test_numbers(kind: Any, name: str, low: float, high: int | None) -> None:
    others = {"echo": True, "logprobs": 1} if kind is COMPLETION else {"logprobs": True}
    for value in (low, 10**9 if high is None else high):
        assert getattr(_read(kind, **{**others, name: value}), name) == value
    step = 0.001 if isinstance(low, float) else 1
    allowed = f"{low} or more" if high is None else f"{low} to {high}"
    for value in (low - step, *([] if high is None else [high + 1])):
        with pytest.raises(ApiError) as caught:
            _read(kind, **{**others, name: value})
        error = caught.value
        assert (error.status, error.field) == (400, name)
        assert error.message == f"{name} {value}: give {allowed}"


@pytest.mark.parametrize(
    ("kind", "good", "bad", "message"),
    [
        (COMPLETION, {"stop": ["x" * 256] * 16}, {"stop": ["x"] * 17}, _STOPS),
        (COMPLETION, {"stop": "x"}, {"stop": "x" * 257}, _STOPS),
        (COMPLETION, {"stop": []}, {"stop": [""]}, _STOPS),
        (CHAT, {"messages": [HI] * 4096}, {"messages": [HI] * 4097}, "messages: give at most 4096"),
        (
            CHAT,
            {"messages": [{**HI, "name": "A"}]},
            {"messages": [{**HI, "y" * 99: 1}]},
            f"messages: '{'y' * 64}' is not supported",
        ),
        (COMPLETION, {"user": "me"}, {"y" * 99: 1}, f"unknown field '{'y' * 64}'"),
        (CHAT, {"store": False}, {"store": True}, "store is not supported: the server does not "
         "store requests: omit it"),
        (CHAT, {"service_tier": "auto"}, {"service_tier": "flex"}, "service_tier is not supported: "
         "the server has only one service tier: omit it"),
        (CHAT, {"parallel_tool_calls": True}, {"parallel_tool_calls": "yes"}, "parallel_tool_calls "
         "is not supported: the model cannot call functions: omit it"),
        (CHAT, {"parallel_tool_calls": False}, {"frequency_penalty": 1.0}, "frequency_penalty is "
         "not supported: use repetition_penalty"),
        (CHAT, {"frequency_penalty": 0, "presence_penalty": 0.0}, {"presence_penalty": 0.1},
         "presence_penalty is not supported: use repetition_penalty"),
        (COMPLETION, {"best_of": 1}, {"best_of": 2}, "best_of is not supported: request n answers "
         "and choose among them"),
        (
            COMPLETION,
            {"max_tokens": 0, "logprobs": 0, "echo": True},
            {"max_tokens": 0, "logprobs": 0},
            "max_tokens 0 only scores the prompt: it requires echo: true and logprobs",
        ),
        (
            COMPLETION,
            {"stream": True, "stream_options": {"include_usage": True}},
            {"stream_options": {"include_usage": True}},
            "stream_options requires stream: true",
        ),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_other_fields(kind: Any, good: Any, bad: Any, message: str) -> None:
    _read(kind, **good)
    with pytest.raises(ApiError) as caught:
        _read(kind, **bad)
    assert (caught.value.status, caught.value.message) == (400, message)


def test_defaults_are_openai_s() -> None:
    completion, chat = _read(COMPLETION), _read(CHAT)
    for request in (completion, chat):
        shared = (request.n, request.repetition_penalty, request.stop, request.stream)
        assert shared == (1, 1.0, [], False)
    assert (completion.max_tokens, completion.echo, completion.num_top_logprobs) == (
        16,
        False,
        None,
    )
    assert (chat.max_tokens, chat.num_top_logprobs) == (None, None)
    assert _read(CHAT, logprobs=True).num_top_logprobs == 0
    assert not _read(CHAT, stream=True, stream_options={}).stream_options.include_usage


def test_defaults_are_megatron_s() -> None:
    assert MegatronRequest(prompts=["x"]).model_dump() == {
        "prompts": ["x"],
        "tokens_to_generate": 64,
        "temperature": 1.0,
        "top_k": 0,
        **dict.fromkeys(("top_p", "top_p_decay", "top_p_bound"), 0.0),
        **dict.fromkeys(("logprobs", "add_BOS", "no_log", "prevent_newline_after_colon"), False),
        **dict.fromkeys(("stop_on_double_eol", "stop_on_eol"), False),
        **dict.fromkeys(("random_seed", "beam_width", "stop_token", "model")),
        "length_penalty": 1.0,
    }


_INVALID, _CLOSE = "invalid_request_error", {"connection": "close"}
_ERRORS: dict[int, tuple[str, dict[str, str]]] = {
    400: (_INVALID, {}),
    401: ("authentication_error", {"www-authenticate": "Bearer"}),
    403: ("permission_error", {}),
    404: ("not_found_error", {}),
    408: (_INVALID, _CLOSE),
    413: (_INVALID, _CLOSE),
    415: (_INVALID, {}),
    422: (_INVALID, {}),
    429: ("rate_limit_error", {"retry-after": "1"}),
    503: ("server_error", {}),
    504: ("server_error", {}),
}


@pytest.mark.parametrize("status", [*_ERRORS, 499, 500])
def test_errors_have_openai_s_types_and_the_headers_of_http(status: int) -> None:
    kind, headers = _ERRORS.get(status, (_INVALID if status < 500 else "server_error", {}))
    answer = error_response(ApiError(status, "so", "n"))
    detail = {"message": "so", "type": kind, "param": "n", "code": None}
    assert (answer.status_code, answer.body) == (status, json_response({"error": detail}).body)
    plain = {"content-length", "content-type"}
    assert {name: text for name, text in answer.headers.items() if name not in plain} == headers
    assert json_response([]).status_code == 200


def test_every_path_documents_every_status() -> None:
    paths = openapi_document(False, False)["paths"]
    for path, method in (("/api", "put"), ("/v1/completions", "post")):
        answers = paths[path][method]["responses"]
        assert [*map(int, answers)] == [200, *_ERRORS]
        schemas = {code: answers[code]["content"]["application/json"]["schema"] for code in answers}
        told_as_text = [code for code, schema in schemas.items() if schema.get("type") == "string"]
        others = ["401", "403"] if path == "/api" else [*map(str, _ERRORS)]
        assert told_as_text == [str(code) for code in _ERRORS if str(code) not in others]
