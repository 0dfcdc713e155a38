"""The fields of `/v1/completions` and `/v1/chat/completions`, and OpenAI's that are refused."""

from __future__ import annotations

from megatron.inference.request import LARGEST_SEED
from megatron.inference.server.fields import Field, Unsupported
from megatron.inference.server.limits import MAX_PROMPTS, MAX_STOPS

MAX_TOP_LOGPROBS = 20
_IDS = {"type": "array", "items": {"type": "integer"}}
_STOP = {
    "oneOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "maxItems": MAX_STOPS},
    ]
}
_STREAM_OPTIONS = {"type": "object", "properties": {"include_usage": {"type": "boolean"}}}
_PROMPT = {
    "oneOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "maxItems": MAX_PROMPTS},
        _IDS,
        {"type": "array", "items": _IDS, "maxItems": MAX_PROMPTS},
    ]
}
_MESSAGES = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "properties": {
            "role": {"type": "string"},
            "name": {"type": "string"},
            "content": {
                "oneOf": [
                    {"type": "string"},
                    {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "properties": {
                                "type": {"const": "text"},
                                "text": {"type": "string"},
                            },
                        },
                    },
                ]
            },
        },
        "required": ["role", "content"],
    },
}

COMMON: tuple[Field, ...] = (
    Field("model", str, "its name, as in /v1/models; absent: the one that is served"),
    Field("n", int, "answers to each prompt", 1, 1, MAX_PROMPTS),
    Field(
        "temperature",
        float,
        "divides the scores before a token is drawn; 0: always the most likely token",
        None,
        0,
        100,
    ),
    Field(
        "top_p",
        float,
        "draw among the most likely tokens that together have this probability; 1: all; 0: one",
        None,
        0,
        1,
    ),
    Field(
        "top_k",
        int,
        "draw among the so many most likely tokens; 0: all (not in OpenAI's API)",
        None,
        0,
        1000,
    ),
    Field(
        "repetition_penalty",
        float,
        "weakens the scores of tokens that occurred; 1: not (not in OpenAI's API)",
        1.0,
        0.01,
        100,
    ),
    Field("seed", int, "the same seed gives the same answers", None, 0, LARGEST_SEED),
    Field("stop", list, "texts that end an answer and are no part of it", schema=_STOP),
    Field("stream", bool, "send the answer as server-sent events, bit by bit", False),
    Field("stream_options", dict, "include_usage: end with a count", schema=_STREAM_OPTIONS),
    Field("user", str, "who asks; not used"),
)

COMPLETION: tuple[Field, ...] = (
    Field("prompt", list, "text or token ids, or several", required=True, schema=_PROMPT),
    Field("max_tokens", int, "tokens of an answer, at most (absent: 16)", None, 0),
    Field(
        "logprobs",
        int,
        "tell the log probability of each token, and those of the so many most likely",
        None,
        0,
        MAX_TOP_LOGPROBS,
    ),
    Field("echo", bool, "put the prompt before the answer", False),
    *COMMON,
)

CHAT: tuple[Field, ...] = (
    Field("messages", list, "the conversation so far", required=True, schema=_MESSAGES),
    Field("max_tokens", int, "tokens of an answer, at most (absent: what fits)", None, 1),
    Field("max_completion_tokens", int, "the same; goes before max_tokens", None, 1),
    Field("logprobs", bool, "tell the log probability of each token", False),
    Field(
        "top_logprobs",
        int,
        "with logprobs: also those of the so many most likely",
        None,
        0,
        MAX_TOP_LOGPROBS,
    ),
    *COMMON,
)

_PENALTY = "use repetition_penalty"
_TEXT_ONLY = "the model answers in text only"
_REFUSED_BY_BOTH: tuple[Unsupported, ...] = (
    Unsupported("frequency_penalty", _PENALTY, (0, 0.0)),
    Unsupported("presence_penalty", _PENALTY, (0, 0.0)),
    Unsupported("logit_bias", "no scores can be shifted: leave it out", ({},)),
)
REFUSED_COMPLETION: tuple[Unsupported, ...] = (
    *_REFUSED_BY_BOTH,
    Unsupported("best_of", "ask for n answers and choose among them", (1,)),
    Unsupported("suffix", "text is only continued, never inserted: leave it out", ("",)),
)
REFUSED_CHAT: tuple[Unsupported, ...] = (
    *_REFUSED_BY_BOTH,
    Unsupported("tools", "no functions are called: leave it out", ([],)),
    Unsupported("tool_choice", "no functions are called: leave it out", ("none",)),
    Unsupported("parallel_tool_calls", "no functions are called: leave it out", (True, False)),
    Unsupported("functions", "no functions are called: leave it out", ([],)),
    Unsupported("function_call", "no functions are called: leave it out", ("none",)),
    Unsupported(
        "response_format", "answers have no enforced form: leave it out", ({"type": "text"},)
    ),
    Unsupported("modalities", _TEXT_ONLY, (["text"],)),
    Unsupported("audio", _TEXT_ONLY),
    Unsupported("prediction", "leave it out"),
    Unsupported("reasoning_effort", "there is no such setting: leave it out", ("none",)),
    Unsupported("verbosity", "there is no such setting: leave it out"),
    Unsupported("web_search_options", "nothing is searched: leave it out"),
    Unsupported("store", "nothing is kept: leave it out", (False,)),
    Unsupported("metadata", "nothing is kept: leave it out", ({},)),
    Unsupported("service_tier", "there is one only: leave it out", ("auto", "default")),
)
