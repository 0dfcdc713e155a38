"""The ASGI application: its routes and its OpenAPI document."""

from __future__ import annotations

from functools import cache
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
from megatron.inference.server.endpoint import (
    ApiError,
    Endpoint,
    ErrorBody,
    Handler,
    RateLimiter,
    error_response,
    json_response,
)
from megatron.inference.server.megatron_api import MegatronAnswer, MegatronApi, MegatronRequest
from megatron.inference.server.middleware import Guard, Metrics, MetricsMiddleware
from megatron.inference.server.openai_api import OpenAiApi
from megatron.inference.server.schema import ChatRequest, CompletionRequest
from megatron.inference.server.service import Service

# The page's files by path. The page loads nothing from other sites.
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
    400: "The request is invalid.",
    401: "The token is missing or wrong.",
    403: "The Host header does not name this machine.",
    404: "There is no such model.",
    408: "The request did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not application/json.",
    422: "The request has more tokens than the model or the server allows.",
    429: "Too many requests are running or waiting.",
    503: "The engine has stopped.",
    504: "The answer took too long.",
}


def build_app(service: Service, metrics: Metrics) -> ASGIApp:
    """Return the ASGI application.

    Args:
        service: The tokenizer and the engine.
        metrics: Metrics that count and time the requests.
    """
    settings = service.settings
    legacy, rate_limiter = settings.server.legacy_status_codes, RateLimiter(settings.limits)
    openai = OpenAiApi(service, metrics.first_token_seconds.observe)

    async def models(_: Request) -> Response:
        return json_response(openai.models())

    async def model(request: Request) -> Response:
        return json_response(openai.model(request.path_params["name"]))

    async def health(_: Request) -> Response:
        alive = service.engine.alive
        return json_response({"status": "ok" if alive else "stopped"}, 200 if alive else 503)

    async def current_metrics(_: Request) -> Response:
        return Response(metrics.text(), media_type=_PROMETHEUS)

    async def openapi(_: Request) -> Response:
        return json_response(openapi_document(settings.token is not None, legacy))

    async def page_file(request: Request) -> Response:
        name, kind = _PAGE[request.scope["path"]]
        data = files("megatron.inference.server").joinpath("page", name).read_bytes()
        return Response(data, headers=_PAGE_HEADERS, media_type=kind)

    async def handle_api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        if request.scope["path"] != "/api":
            return error_response(error)
        status = 200 if legacy and not error.keeps_status else error.status
        return json_response(error.message, status, error.headers)

    def endpoint(path: str, handle: Handler, *methods: str) -> Route:
        return Route(path, Endpoint(handle, settings, rate_limiter), methods=methods)

    # Routes that need no token: the health check, and the page, which has no secrets and asks for
    # the token.
    open_routes = [Route("/health", health), *(Route(path, page_file) for path in _PAGE)]
    routes = [
        endpoint("/api", MegatronApi(service).handle, "PUT", "POST"),
        endpoint("/v1/completions", openai.complete, "POST"),
        endpoint("/v1/chat/completions", openai.chat, "POST"),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/metrics", current_metrics),
        Route("/openapi.json", openapi),
        *open_routes,
    ]
    app = Starlette(
        routes=routes,
        exception_handlers={HTTPException: _unknown_route, ApiError: handle_api_error},
    )
    open_app = Starlette(routes=open_routes, exception_handlers={HTTPException: _needs_token})
    for application in (app, open_app):
        application.router.redirect_slashes = False
    paths = frozenset(route.path for route in routes)
    return MetricsMiddleware(Guard(app, open_app, settings.token), metrics, paths)


async def _unknown_route(request: Request, error: Exception) -> Response:
    """Answer a request with an unknown path or method."""
    assert isinstance(error, HTTPException)
    headers = error.headers or {}
    reason = f"use {headers.get('Allow', '')}" if error.status_code == 405 else error.detail
    message = f"{request.method} {request.scope['path']}: {reason}"
    response = error_response(ApiError(error.status_code, message))
    response.headers.update(headers)
    return response


async def _needs_token(_: Request, __: Exception) -> Response:
    """Answer a request without a valid token for a route that requires one."""
    return error_response(
        ApiError(
            401,
            "send the header Authorization: Bearer TOKEN, with the token of the server's "
            "--auth-token-file",
        )
    )


@cache  # built on the first request, because building it takes longer than all other routes
def openapi_document(needs_token: bool, legacy_status_codes: bool) -> dict[str, Any]:
    """Return this server's OpenAPI 3.1 document, generated from the request models.

    Args:
        needs_token: Whether clients must send a token.
        legacy_status_codes: Whether `PUT /api` answers most invalid requests with status 200.
    """
    schemas: dict[str, Any] = {}

    def content(schema: Any, kind: str = "application/json") -> dict[str, Any]:
        return {"content": {kind: {"schema": schema}}}

    def schema_of(kind: Any) -> dict[str, Any]:
        template = "#/components/schemas/{model}"
        schema = TypeAdapter(kind).json_schema(ref_template=template)
        schemas.update(schema.pop("$defs", {}))
        return schema

    openai_error = content(schema_of(ErrorBody))

    def operation(
        summary: str, request: type[BaseModel], answer: dict[str, Any], error: dict[str, Any]
    ) -> dict[str, Any]:
        body = {"required": True, **content(schema_of(request))}
        responses = {"200": {"description": "The answer.", **answer}}
        for status, text in _STATUSES.items():
            error_content = openai_error if status in (401, 403) else error
            responses[str(status)] = {"description": text, **error_content}
        return {"summary": summary, "requestBody": body, "responses": responses}

    def plain(summary: str, kind: str = "application/json", **more: Any) -> dict[str, Any]:
        answer = {"description": "The answer.", **content({}, kind)}
        return {"get": {"summary": summary, "responses": {"200": answer}, **more}}

    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    api = operation(
        "Generate whole texts with Megatron-LM's API",
        MegatronRequest,
        content(schema_of(MegatronAnswer)),
        content({"type": "string", "description": "The error message."}),
    )
    if legacy_status_codes:
        api["description"] = "Most invalid requests are answered with status 200 and a string."
    whole, stream = content({"type": "object"}), content({"type": "string"}, "text/event-stream")
    whole_or_stream = {"content": whole["content"] | stream["content"]}
    completion = operation("Continue a text", CompletionRequest, whole_or_stream, openai_error)
    chat = operation("Answer a conversation", ChatRequest, whole_or_stream, openai_error)
    bearer = {"type": "http", "scheme": "bearer"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Megatron text generation", "version": __version__},
        "paths": {
            "/api": {"put": api, "post": api},
            "/v1/completions": {"post": completion},
            "/v1/chat/completions": {"post": chat},
            "/v1/models": plain("List the served model and its adapters"),
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
