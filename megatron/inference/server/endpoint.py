"""Handling of HTTP requests: bodies, deadlines, clients that disconnect, and errors."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from typing_extensions import TypedDict  # pydantic requires this one before Python 3.12

from megatron.inference.server.settings import FrontSettings, ServerLimits

# A body of up to this many times the limit is still read to the end, because a client that reads
# only after sending everything would miss an earlier answer.
_DRAIN_FACTOR = 16
# Bodies up to this size are read immediately. Reading, parsing and rejecting a larger one would
# delay the answers to all other clients.
_SMALL_BODY = 1 << 16  # bytes
_BURST = 1.0  # seconds' worth of large bodies that a client may send without waiting

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
# After 408 and 413, the unread part of the body would be parsed as the next request.
_ERROR_HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    408: {"Connection": "close"},
    413: {"Connection": "close"},
    429: {"Retry-After": "1"},
}

# Address of the client whose request is being answered.
client_address: ContextVar[str] = ContextVar("client_address", default="")

T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(eq=False)
class ApiError(Exception):
    """An error that the client sees, as an HTTP status and one sentence.

    Attributes:
        status: HTTP status code.
        message: Description of the problem and its remedy.
        field: Name of the invalid field, or `None` if the error is not about a single field.
        keeps_status: Whether the status is kept under `--legacy-status-codes`. If not, that flag
            changes it to 200 in answers of `/api`.
    """

    status: int
    message: str
    field: str | None = None
    keeps_status: bool = True

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response."""
        return _ERROR_HEADERS.get(self.status, {})


class ErrorDetail(TypedDict):
    """The details of an error in OpenAI's format."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    """The body of an error response in OpenAI's format."""

    error: ErrorDetail


def error_body(error: ApiError) -> ErrorBody:
    """Return an error in OpenAI's format."""
    default = "server_error" if error.status >= 500 else "invalid_request_error"
    kind = _ERROR_TYPES.get(error.status, default)
    return {"error": {"message": error.message, "type": kind, "param": error.field, "code": None}}


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a response with `value` as JSON."""
    return Response(orjson.dumps(value), status, headers, media_type="application/json")


def error_response(error: ApiError) -> Response:
    """Return a response with an error in OpenAI's format."""
    return json_response(error_body(error), error.status, error.headers)


@dataclass(frozen=True)
class EventStream:
    """A streamed answer.

    Attributes:
        objects: JSON objects, in the order in which they become ready.
        close: Function that ends the work on the answer. It is called once, even if nothing was
            streamed.
    """

    objects: AsyncGenerator[dict[str, Any], None]
    close: Callable[[], None]


Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any] | EventStream]]


class RateLimiter:
    """A limit on the speed at which large bodies are read, separate for each client's address.

    Bytes that have to wait stay in the client's socket, where they cost the server nothing.
    """

    def __init__(self, limits: ServerLimits) -> None:
        """Start with the full speed available.

        Args:
            limits: The number of bytes per second, and the longest wait.
        """
        self._limits = limits
        # The time up to which each address has used its share. An address that has used nothing
        # for a while is removed.
        self._used_until: dict[str, float] = {}

    async def wait(self, address: str, size: int) -> None:
        """Wait until the next bytes of a large body may be processed.

        Args:
            address: Address of the client.
            size: Number of bytes.
        """
        now = asyncio.get_running_loop().time()
        if address not in self._used_until and len(self._used_until) >= self._limits.connections:
            active = {client: until for client, until in self._used_until.items() if until > now}
            self._used_until = active
        start = max(self._used_until.get(address, 0.0), now - _BURST)
        # Requests that time out while they wait must not keep later ones waiting for long.
        until = min(start + size / self._limits.large_body_speed, now + self._limits.read_seconds)
        self._used_until[address] = until
        if until > now:
            await asyncio.sleep(until - now)


@dataclass(frozen=True)
class Endpoint:
    """An ASGI application that answers one kind of request.

    Attributes:
        handle: Function that turns a body into an answer, or raises `ApiError`.
        settings: Settings of the server.
        rate_limiter: Speed at which large bodies are read, which all endpoints share.
    """

    handle: Handler
    settings: FrontSettings
    rate_limiter: RateLimiter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request.

        Raises:
            ApiError: The request is rejected, or its answer failed before any of it was sent. The
                application's exception handler answers it.
        """
        request = Request(scope, receive)
        client_address.set(request.client.host if request.client else "")
        deadline = asyncio.get_running_loop().time() + self.settings.server.request_timeout
        with contextlib.suppress(ClientDisconnect):
            with _log_errors(request):
                body = await read_object(request, self.settings, self.rate_limiter)
                answer = await _before_deadline(deadline, receive, self.handle(body))
            if not isinstance(answer, EventStream):
                await json_response(answer)(scope, receive, send)
                return
            try:
                await self._stream(answer, request, send, deadline)
            finally:
                answer.close()

    async def _stream(
        self, answer: EventStream, request: Request, send: Send, deadline: float
    ) -> None:
        """Send server-sent events. Errors become events too, because the status is sent first."""

        async def put(data: bytes, *, more: bool = True) -> None:
            try:
                async with asyncio.timeout(self.settings.limits.write_seconds):
                    await send({"type": "http.response.body", "body": data, "more_body": more})
            except TimeoutError:
                raise ClientDisconnect from None

        async def put_all() -> None:
            async with contextlib.aclosing(answer.objects) as objects:
                async for value in objects:
                    await put(b"data: " + orjson.dumps(value) + b"\n\n")

        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            with _log_errors(request):
                await _before_deadline(deadline, request.receive, put_all())
        except ApiError as error:
            await put(b"data: " + orjson.dumps(error_body(error)) + b"\n\n")
        await put(b"data: [DONE]\n\n")
        await put(b"", more=False)


@contextlib.contextmanager
def _log_errors(request: Request) -> Iterator[None]:
    """Log an unexpected error in the block, and raise an `ApiError` with status 500 instead."""
    try:
        yield
    except (ApiError, ClientDisconnect):
        raise
    except Exception as error:
        logger.exception("%s failed", request.scope["path"])
        raise ApiError(500, "internal server error; the server's log has the details") from error


async def read_object(
    request: Request, settings: FrontSettings, rate_limiter: RateLimiter
) -> dict[str, Any]:
    """Return the JSON object in a request's body.

    Args:
        request: The HTTP request.
        settings: Settings of the server.
        rate_limiter: Limiter of the speed at which large bodies are read.

    Raises:
        ApiError: The status is 400 if there is no JSON object, 408 if it arrived too slowly, 413 if
            it is too large, and 415 if its content type is not JSON.
        ClientDisconnect: The client has disconnected.
    """
    # Another site's web page can make a browser post plain text here, but not JSON.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415, f"Content-Type is {kind or 'missing'}: send the header with application/json"
        )
    seconds = settings.limits.read_seconds
    try:
        async with asyncio.timeout(seconds):
            data = await _read_body(request, settings.server.max_body_bytes, rate_limiter)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {seconds:g} seconds") from None
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body is not a JSON object")
    return value


async def _read_body(request: Request, limit: int, rate_limiter: RateLimiter) -> bytearray:
    content_length = request.headers.get("content-length", "0")
    too_large = ApiError(413, f"the body is larger than {limit:,} bytes")
    if int(content_length) > _DRAIN_FACTOR * limit:
        raise too_large
    data, size = bytearray(), 0
    async for part in request.stream():
        size += len(part)
        if size > _DRAIN_FACTOR * limit:
            raise too_large
        if size > _SMALL_BODY:
            await rate_limiter.wait(client_address.get(), len(part))
        if size <= limit:
            data += part
    if size > limit:
        raise too_large
    return data


async def _before_deadline(deadline: float, receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of `work`, or cancel it if the client disconnects or the deadline passes.

    Raises:
        ClientDisconnect: The client has disconnected.
        ApiError: The deadline has passed (504).
    """

    async def wait_for_disconnect() -> NoReturn:
        while (await receive())["type"] != "http.disconnect":
            pass
        raise ClientDisconnect

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(wait_for_disconnect())]
    seconds = deadline - asyncio.get_running_loop().time()
    try:
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                return task.result()
        raise ApiError(504, "the answer took longer than the server's --request-timeout")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
