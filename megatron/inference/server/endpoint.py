"""From an HTTP request to an answer: body, deadline, a client that leaves, errors."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from megatron.inference.server.body import read_object
from megatron.inference.server.errors import ApiError, ClientGoneError
from megatron.inference.server.limits import Limits

T = TypeVar("T")
logger = logging.getLogger(__name__)


class Events:
    """A streamed answer: JSON objects as they come.

    Args:
        objects: the answer.
        close: ends the work behind it; called once, whether or not anything was streamed.
    """

    def __init__(
        self, objects: AsyncGenerator[dict[str, Any], None], close: Callable[[], None]
    ) -> None:
        self.objects = objects
        self.close = close


Answered = dict[str, Any] | Events
Handler = Callable[[dict[str, Any]], Awaitable[Answered]]


def json_response(
    value: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """`value` as JSON."""
    return Response(orjson.dumps(value), status, headers, media_type="application/json")


def openai_error(error: ApiError) -> Response:
    """As OpenAI's clients read it."""
    return json_response(error_object(error), error.status, _headers(error))


def error_object(error: ApiError) -> dict[str, Any]:
    """OpenAI's form of an error."""
    kinds = {404: "not_found_error", 429: "rate_limit_error"}
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    fields = {"type": kinds.get(error.status, kind), "param": error.field, "code": None}
    return {"error": {"message": error.message, **fields}}


def megatron_error(error: ApiError, *, legacy: bool) -> Response:
    """A JSON string, as Megatron answers; its status too, where the old behaviour is asked for."""
    status = error.status if error.always or not legacy else 200
    return json_response(error.message, status, _headers(error))


def _headers(error: ApiError) -> dict[str, str]:
    if error.status == 429:
        return {"Retry-After": "1"}
    # What is left of a body that was not read to its end is not a next request.
    return {"Connection": "close"} if error.status in (408, 413) else {}


class Endpoint:
    """An ASGI application that answers one kind of request.

    Args:
        handle: its body to its answer; raises ApiError for what it does not serve.
        show_error: how a client of this endpoint is told.
    """

    def __init__(
        self, handle: Handler, limits: Limits, show_error: Callable[[ApiError], Response]
    ) -> None:
        self._handle = handle
        self._limits = limits
        self._show_error = show_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        deadline = asyncio.get_running_loop().time() + self._limits.generate_seconds
        with contextlib.suppress(ClientGoneError):
            answer = await self._answer(scope, receive, deadline)
            if isinstance(answer, Response):
                await answer(scope, receive, send)
                return
            try:
                await self._stream(answer, receive, send, deadline)
            finally:
                answer.close()

    async def _answer(self, scope: Scope, receive: Receive, deadline: float) -> Response | Events:
        try:
            body = await read_object(Request(scope, receive), self._limits)
            answer = await _until(deadline, receive, self._handle(body))
            return answer if isinstance(answer, Events) else json_response(answer)
        except ApiError as error:
            return self._show_error(error)
        except ClientGoneError:
            raise
        except Exception:
            logger.exception("%s failed", scope["path"])
            return self._show_error(_our_mistake())

    async def _stream(self, answer: Events, receive: Receive, send: Send, deadline: float) -> None:
        """Server-sent events. An error comes as one of them: the status is already sent."""
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            await _until(deadline, receive, self._send_events(answer, send))
        except ApiError as error:
            await self._send(send, _event(error_object(error)))
        except ClientGoneError:
            raise
        except Exception:
            logger.exception("a stream failed")
            await self._send(send, _event(error_object(_our_mistake())))
        await self._send(send, b"data: [DONE]\n\n")
        await self._send(send, b"", more=False)

    async def _send_events(self, answer: Events, send: Send) -> None:
        async with contextlib.aclosing(answer.objects) as objects:
            async for value in objects:
                await self._send(send, _event(value))

    async def _send(self, send: Send, data: bytes, *, more: bool = True) -> None:
        """Raises ClientGoneError where the client does not take it."""
        try:
            async with asyncio.timeout(self._limits.write_seconds):
                await send({"type": "http.response.body", "body": data, "more_body": more})
        except TimeoutError:
            raise ClientGoneError from None


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def _our_mistake() -> ApiError:
    return ApiError(500, "the server made a mistake; its log says which")


async def _until(deadline: float, receive: Receive, work: Awaitable[T]) -> T:
    """Do the work, unless the client leaves or time is over: then cancel it.

    Raises:
        ClientGoneError: it left.
        ApiError: 504.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    seconds = deadline - asyncio.get_running_loop().time()
    try:
        await asyncio.wait({task, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if gone.done():
            raise ClientGoneError
        raise ApiError(504, "the answer took longer than the server's --request-timeout")
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
