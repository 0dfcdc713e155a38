"""The body of a request: JSON, of a bounded size, within a bounded time."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request

from megatron.inference.server.errors import ApiError, ClientGoneError
from megatron.inference.server.limits import Limits

# A body that is too large is read to its end all the same where it is not much too large: an answer
# before that is lost by clients that first send everything.
_DRAINED = 16  # times the limit


async def read_object(request: Request, limits: Limits) -> dict[str, Any]:
    """The JSON object that the request carries.

    Raises:
        ApiError: 400 no JSON object, 408 too slow, 413 too large, 415 another content type.
        ClientGoneError: the client left meanwhile.
    """
    _check_content_type(request.headers.get("content-type", ""))
    try:
        async with asyncio.timeout(limits.read_seconds):
            data = await _read(request, limits.body_bytes)
    except TimeoutError:
        raise ApiError(
            408, f"the body did not arrive within {limits.read_seconds:g} seconds"
        ) from None
    except ClientDisconnect:
        raise ClientGoneError from None
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body is not a JSON object")
    return value


def _check_content_type(value: str) -> None:
    """Only JSON: a web page of another site can post plain text here, but not JSON."""
    kind = value.partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415, f"Content-Type is {kind or 'not given'}: send the header application/json"
        )


async def _read(request: Request, limit: int) -> bytes:
    announced = request.headers.get("content-length", "0")
    too_large = ApiError(413, f"the body is larger than {limit:,} bytes")
    if int(announced) > _DRAINED * limit:
        raise too_large
    data, size = bytearray(), 0
    async for part in request.stream():
        size += len(part)
        if size > _DRAINED * limit:
            raise too_large
        if size <= limit:
            data += part
    if size > limit:
        raise too_large
    return bytes(data)
