"""Errors as a client sees them: an HTTP status and one sentence."""

from __future__ import annotations


class ApiError(Exception):
    """A request that is not served.

    Args:
        status: HTTP status code.
        message: what is wrong and how to mend it.
        field: the field of the request that it is about.
        always: with `--legacy-status-codes` too the status is this one, not 200.
    """

    def __init__(
        self, status: int, message: str, *, field: str | None = None, always: bool = True
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.field = field
        self.always = always


class ClientGoneError(Exception):
    """The client has closed its connection: nobody is left to answer."""
