"""The ASGI application, with the route of every path, and its OpenAPI document."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cache, partial
from importlib.resources import files
from typing import Any

from pydantic import BaseModel, TypeAdapter
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from megatron import __version__
from megatron.inference.server.chat import ChatTemplate
from megatron.inference.server.endpoint import (
    ApiError,
    Endpoint,
    ErrorBody,
    json_response,
    megatron_error,
    openai_error,
)
from megatron.inference.server.megatron_api import MegatronAnswer, MegatronApi, MegatronRequest
from megatron.inference.server.middleware import Guard, Measured, Metrics
from megatron.inference.server.openai_api import OpenAiApi
from megatron.inference.server.schema import ChatRequest, CompletionRequest
from megatron.inference.server.service import Service

# The files of the page, which loads nothing from other sites.
_PAGE = {
    "/": ("index.html", "text/html"),
    "/index.html": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/favicon.svg": ("favicon.svg", "image/svg+xml"),
}
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
_STATUSES = {
    400: "The request has a mistake.",
    401: "The token is missing or wrong.",
    403: "The Host header is not a name of this machine.",
    404: "There is no such model.",
    408: "The request did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not application/json.",
    422: "The request has more tokens than the model or the server accepts.",
    429: "Too many requests run or wait.",
    503: "The engine has stopped.",
    504: "The answer took too long.",
}


def build_app(service: Service, template: ChatTemplate | None, metrics: Metrics) -> ASGIApp:
    """Return the application that answers every path.

    Args:
        service: The tokenizer and the engine.
        template: The model's chat template, or `None` if it has none.
        metrics: Metrics in which requests are counted.
    """
    settings = service.settings
    limits = settings.limits
    openai = OpenAiApi(service, template, metrics.first_token_seconds.observe)
    legacy = settings.legacy_status_codes
    api = Endpoint(MegatronApi(service).handle, limits, partial(megatron_error, legacy=legacy))
    # Made on the first request for it, because that takes longer than all other routes.
    openapi = cache(
        lambda: document(needs_token=settings.token is not None, legacy_status_codes=legacy)
    )

    def health() -> Response:
        alive = service.engine.alive
        return json_response({"status": "ok" if alive else "stopped"}, 200 if alive else 503)

    def page_file(name: str, kind: str) -> Response:
        data = files("megatron.inference.server").joinpath("page", name).read_bytes()
        return Response(data, headers=_PAGE_HEADERS, media_type=kind)

    async def model(request: Request) -> Response:
        try:
            return json_response(openai.model(request.path_params["name"]))
        except ApiError as error:
            return openai_error(error)

    completions = Endpoint(openai.complete, limits, openai_error)
    chat = Endpoint(openai.chat, limits, openai_error)
    routes = [
        Route("/api", api, methods=["PUT", "POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/models", _get(lambda: json_response(openai.models()))),
        Route("/v1/models/{name:path}", model),
        Route("/health", _get(health)),
        Route("/metrics", _get(lambda: Response(metrics.text(), media_type=_PROMETHEUS))),
        Route("/openapi.json", _get(lambda: json_response(openapi()))),
        *(Route(path, _get(partial(page_file, *file))) for path, file in _PAGE.items()),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _unknown})
    app.router.redirect_slashes = False
    paths = frozenset(route.path for route in routes)
    return Measured(Guard(app, settings.token), metrics, paths)


def _get(make: Callable[[], Response]) -> Callable[[Request], Awaitable[Response]]:
    async def answer(_: Request) -> Response:
        return make()

    return answer


async def _unknown(request: Request, error: Exception) -> Response:
    """Answer a path or method that does not exist."""
    assert isinstance(error, HTTPException)
    reason = error.detail
    if error.status_code == 405:
        reason = f"use {(error.headers or {}).get('Allow', '')}"
    message = f"{request.method} {request.url.path}: {reason}"
    response = openai_error(ApiError(error.status_code, message))
    response.headers.update(error.headers or {})
    return response


def document(*, needs_token: bool, legacy_status_codes: bool) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of this server, made from the request models."""
    schemas: dict[str, Any] = {}

    def schema_of(kind: Any) -> dict[str, Any]:
        template = "#/components/schemas/{model}"
        schema = TypeAdapter(kind).json_schema(ref_template=template)
        schemas.update(schema.pop("$defs", {}))
        return schema

    openai_error_schema = schema_of(ErrorBody)

    def operation(
        summary: str,
        request: type[BaseModel],
        answer: dict[str, Any],
        error: dict[str, Any],
        **more: str,
    ) -> dict[str, Any]:
        content = {"application/json": {"schema": answer}}
        if "stream" in request.model_fields:
            content["text/event-stream"] = {"schema": {"type": "string"}}
        responses = {"200": {"description": "The answer.", "content": content}}
        for status, text in _STATUSES.items():
            schema = openai_error_schema if status in (401, 403) else error
            responses[str(status)] = {
                "description": text,
                "content": {"application/json": {"schema": schema}},
            }
        body = {"application/json": {"schema": schema_of(request)}}
        return {
            "summary": summary,
            **more,
            "requestBody": {"required": True, "content": body},
            "responses": responses,
        }

    def plain(summary: str, kind: str = "application/json", **more: Any) -> dict[str, Any]:
        answer = {"description": "The answer.", "content": {kind: {"schema": {}}}}
        return {"get": {"summary": summary, "responses": {"200": answer}, **more}}

    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    more = {}
    if legacy_status_codes:
        more["description"] = "Most mistakes are answered with status 200 and a string."
    api = operation(
        "Generate whole texts with Megatron-LM's API",
        MegatronRequest,
        schema_of(MegatronAnswer),
        {"type": "string", "description": "The error message."},
        **more,
    )
    any_object = {"type": "object"}
    completion = operation("Continue a text", CompletionRequest, any_object, openai_error_schema)
    chat = operation("Answer a conversation", ChatRequest, any_object, openai_error_schema)
    bearer = {"type": "http", "scheme": "bearer"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Megatron text generation", "version": __version__},
        "paths": {
            "/api": {"put": api, "post": api},
            "/v1/completions": {"post": completion},
            "/v1/chat/completions": {"post": chat},
            "/v1/models": plain("List the served model"),
            "/v1/models/{name}": {**plain("Describe a model by its name"), "parameters": [name]},
            "/health": plain("Report whether the engine runs", security=[]),
            "/metrics": plain("Return metrics for Prometheus", "text/plain"),
        },
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": bearer} if needs_token else {},
        },
        "security": [{"token": []}] if needs_token else [],
    }
