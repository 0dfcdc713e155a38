"""The ASGI application: which path is answered by whom."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from importlib.resources import files

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from megatron.inference.server.chat import ChatTemplate
from megatron.inference.server.endpoint import (
    Endpoint,
    json_response,
    megatron_error,
    openai_error,
)
from megatron.inference.server.errors import ApiError
from megatron.inference.server.guard import Guard
from megatron.inference.server.megatron_api import MegatronApi
from megatron.inference.server.metrics import Measured
from megatron.inference.server.openai_api import OpenAiApi
from megatron.inference.server.openapi import document
from megatron.inference.server.service import Service

# What the page consists of, and nothing from elsewhere.
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


def build_app(service: Service, template: ChatTemplate | None) -> ASGIApp:
    """Everything that the server answers."""
    settings = service.settings
    limits = settings.limits
    openai = OpenAiApi(service, template)
    show_api_error = partial(megatron_error, legacy=settings.legacy_status_codes)
    api = Endpoint(MegatronApi(service).handle, limits, show_api_error)
    completions = Endpoint(openai.complete, limits, openai_error)
    chat = Endpoint(openai.chat, limits, openai_error)
    openapi = document(
        needs_token=settings.token is not None, legacy_status_codes=settings.legacy_status_codes
    )
    routes = [
        Route("/api", api, methods=["PUT", "POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/models", _get(lambda: json_response(openai.models()))),
        Route("/v1/models/{name:path}", partial(_model, openai)),
        Route("/health", _get(partial(_health, service))),
        Route("/metrics", _get(lambda: Response(service.metrics.text(), media_type=_PROMETHEUS))),
        Route("/openapi.json", _get(lambda: json_response(openapi))),
        *(Route(path, _get(partial(_page_file, *file))) for path, file in _PAGE.items()),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _unknown})
    app.router.redirect_slashes = False
    paths = frozenset(route.path for route in routes)
    return Measured(Guard(app, settings.token), service.metrics, paths)


_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


def _get(make: Callable[[], Response]) -> Callable[[Request], Awaitable[Response]]:
    async def answer(_: Request) -> Response:
        return make()

    return answer


async def _model(openai: OpenAiApi, request: Request) -> Response:
    try:
        return json_response(openai.model(request.path_params["name"]))
    except ApiError as error:
        return openai_error(error)


def _health(service: Service) -> Response:
    alive = service.engine.alive
    return json_response({"status": "ok" if alive else "stopped"}, 200 if alive else 503)


def _page_file(name: str, kind: str) -> Response:
    data = files("megatron.inference.server").joinpath("page", name).read_bytes()
    return Response(data, headers=_PAGE_HEADERS, media_type=kind)


async def _unknown(request: Request, error: Exception) -> Response:
    """A path or method that there is not."""
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message = f"{method} {path}: give {allowed}"
    else:
        message = f"{method} {path}: {error.detail}"
    response = openai_error(ApiError(error.status_code, message))
    response.headers.update(error.headers or {})
    return response
