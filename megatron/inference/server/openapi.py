"""The OpenAPI document, made from the tables that requests are checked against."""

from __future__ import annotations

from typing import Any

from megatron import __version__
from megatron.inference.server.fields import schema_of
from megatron.inference.server.megatron_contract import describe_contract
from megatron.inference.server.openai_fields import CHAT, COMPLETION

_OBJECT = {"type": "object"}
_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_TEXTS = {"type": "array", "items": {"type": "string"}}
_NUMBERS = {"type": "array", "items": {"type": "number"}}
_API_ANSWER = {
    "type": "object",
    "properties": {
        "text": _TEXTS,
        "segments": {"type": "array", "items": _TEXTS},
        "logprobs": {"oneOf": [{"type": "array", "items": _NUMBERS}, {"type": "null"}]},
        "scores": {**_NUMBERS, "description": "of a beam search, in the place of logprobs"},
    },
}
_NAME = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
_STATUSES = {
    400: "a mistake in the request",
    401: "no token, or a wrong one",
    403: "asked under another host name than this machine's",
    404: "no such model",
    408: "the request did not arrive in time",
    413: "the body is too large",
    415: "the body is not application/json",
    422: "more tokens than the model or the server takes",
    429: "too many requests at a time",
    503: "the engine does not run",
    504: "the answer took too long",
}


def document(*, needs_token: bool, legacy_status_codes: bool) -> dict[str, Any]:
    """OpenAPI 3.1 of this server."""
    string = {"type": "string", "description": "the message"}
    api = _operation("Megatron-LM's API: whole texts", describe_contract(), _API_ANSWER, string)
    if legacy_status_codes:
        api["description"] = "Most mistakes are answered with status 200 and a string."
    paths: dict[str, Any] = {
        "/api": {"put": api, "post": api},
        "/v1/completions": {"post": _operation("Go on from a text", schema_of(COMPLETION))},
        "/v1/chat/completions": {"post": _operation("Answer a conversation", schema_of(CHAT))},
        "/v1/models": {"get": _plain("The model that is served")},
        "/v1/models/{name}": {"get": _plain("The same, by its name"), "parameters": [_NAME]},
        "/health": {"get": {**_plain("Whether the engine runs"), "security": []}},
        "/metrics": {"get": _plain("Figures for Prometheus", "text/plain")},
    }
    bearer = {"type": "http", "scheme": "bearer"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Megatron text generation", "version": __version__},
        "paths": paths,
        "components": {"securitySchemes": {"token": bearer} if needs_token else {}},
        "security": [{"token": []}] if needs_token else [],
    }


def _operation(
    summary: str,
    request: dict[str, Any],
    answer: dict[str, Any] = _OBJECT,
    error: dict[str, Any] = _ERROR,
) -> dict[str, Any]:
    content = {"application/json": {"schema": answer}}
    if "stream" in request["properties"]:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    responses = {"200": {"description": "the answer", "content": content}}
    for status, text in _STATUSES.items():
        told = _ERROR if status in (401, 403) else error
        responses[str(status)] = {
            "description": text,
            "content": {"application/json": {"schema": told}},
        }
    body = {"required": True, "content": {"application/json": {"schema": request}}}
    return {"summary": summary, "requestBody": body, "responses": responses}


def _plain(summary: str, kind: str = "application/json") -> dict[str, Any]:
    answer = {"description": "the answer", "content": {kind: {"schema": {}}}}
    return {"summary": summary, "responses": {"200": answer}}
