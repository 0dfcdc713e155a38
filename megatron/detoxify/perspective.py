"""A client for the Perspective API that limits the rate of requests and retries failed requests.

The service's responses are not trusted: their size is limited, redirects are not followed (the key
would be sent along), and every number is checked.
"""

from __future__ import annotations

import email.utils
import http.client
import json
import math
import random
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from typing import Any

from megatron.data.json_lines import json_object
from megatron.errors import ConfigError, UserError

ENDPOINT = "https://commentanalyzer.googleapis.com/v1alpha1/comments:analyze"
_MAX_TEXT_BYTES = 20480  # the service's limit for one text
_MAX_RESPONSE_BYTES = 1 << 20
# Status codes after which a request is retried: too many requests, or a temporary problem.
_RETRY_STATUSES = {408, 425, 429, 500, 502, 503, 504}
_FIRST_WAIT, _MAX_WAIT = 1.0, 60.0  # seconds
_MAX_RETRY_AFTER = 600.0  # seconds; the command stops if the server requests a longer wait
_LOCAL = {"localhost", "127.0.0.1", "::1"}


class TextRefusedError(UserError):
    """Raised when the service rejects a text, for example because of its language."""


class ServiceError(UserError):
    """Raised when the service cannot be used, or its responses are invalid."""


class _RetryError(Exception):
    """Raised when a request may succeed later.

    Attributes:
        wait: The delay in seconds that the server requested, or `None`.
    """

    def __init__(self, reason: str, wait: float | None = None) -> None:
        super().__init__(reason)
        self.wait = wait


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A handler that turns redirects into errors."""

    def redirect_request(self, *args: Any) -> None:
        return None


class RequestPace:
    """A limit on the rate at which threads start requests.

    Args:
        per_second: The maximum number of requests per second.
    """

    def __init__(self, per_second: float) -> None:
        """Allow the first request to start immediately."""
        self._interval = 1 / per_second
        self._lock = threading.Lock()
        self._next = 0.0  # the earliest time of the next request
        self._stopped = threading.Event()

    def wait(self) -> None:
        """Wait until the next request may start.

        Raises:
            ServiceError: `stop` was called.
        """
        with self._lock:
            start = max(self._next, time.monotonic())
            self._next = start + self._interval
        if self._stopped.wait(start - time.monotonic()):
            raise ServiceError("stopped")

    def pause(self, seconds: float) -> None:
        """Delay the next call of `wait` by at least `seconds` seconds.

        Calls that already wait are not delayed.
        """
        with self._lock:
            self._next = max(self._next, time.monotonic() + seconds)

    def stop(self) -> None:
        """Make all current and future calls to `wait` fail."""
        self._stopped.set()


class PerspectiveClient:
    """A thread-safe client for the Perspective API."""

    def __init__(
        self,
        key: str,
        url: str,
        attributes: Sequence[str],
        *,
        language: str,
        requests_per_second: float,
        retries: int,
        timeout: float,
    ) -> None:
        """Check the URL, without sending anything.

        Args:
            key: The API key.
            url: The URL of the method `comments:analyze`.
            attributes: The names of the scores to request, in lower case.
            language: The language of the texts.
            requests_per_second: The maximum number of requests per second, including retries.
            retries: The maximum number of retries of a request.
            timeout: The time to wait for a response, in seconds.

        Raises:
            ConfigError: The URL is invalid, or the key would be sent unencrypted.
        """
        try:
            parts = urllib.parse.urlsplit(url)
            _ = parts.port  # raises an error if it is not a number
        except ValueError as error:
            raise ConfigError(f"--api-url {url}: not a URL ({error}): fix it") from error
        if not url.isascii() or not url.isprintable() or " " in url:
            raise ConfigError(
                f"--api-url {url!r}: the URL has a space or a non-ASCII character: remove it, or "
                "escape it (a space is %20)"
            )
        is_safe = parts.scheme == "https" or parts.scheme == "http" and parts.hostname in _LOCAL
        if not is_safe or not parts.hostname:
            raise ConfigError(
                f"--api-url {url}: give a URL with https:// (http:// only on this machine), "
                "because the API key is sent to it"
            )
        self.attributes, self.language = tuple(attributes), language
        self._url, self._retries, self._timeout = url, retries, timeout
        # The key is sent in a header, because URLs appear in error messages and proxy logs.
        self._headers = {"Content-Type": "application/json", "X-Goog-Api-Key": key}
        self._opener = urllib.request.build_opener(_NoRedirects)
        self._pace = RequestPace(requests_per_second)
        self._random = random.Random()

    def score(self, text: str) -> dict[str, float]:
        """Return the scores of a text by attribute, each from 0 to 1.

        The end of a text that is too long for the service is cut off.

        Raises:
            TextRefusedError: The service rejects this text.
            ServiceError: The service cannot be used or requests a long delay, all attempts failed,
                or `stop` was called.
        """
        truncated = text.encode("utf-8", "replace")[:_MAX_TEXT_BYTES].decode("utf-8", "ignore")
        body = {
            "comment": {"text": truncated},
            "requestedAttributes": {name.upper(): {} for name in self.attributes},
            "languages": [self.language],
            "spanAnnotations": False,
            "doNotStore": True,
        }
        data = json.dumps(body).encode()
        attempt = 0
        while True:
            self._pace.wait()
            try:
                return self._scores_in(self._send(data))
            except _RetryError as error:
                reason, wait = str(error), error.wait
            if attempt == self._retries:
                raise ServiceError(
                    f"{self._url}: {attempt + 1} attempts failed, the last one with: {reason}: run "
                    "the command again to continue; if the quota is used up, lower "
                    "--requests-per-second"
                )
            if wait is None:
                limit = min(_MAX_WAIT, _FIRST_WAIT * 2**attempt)
                wait = limit * self._random.uniform(0.5, 1)
            elif wait > _MAX_RETRY_AFTER:
                raise ServiceError(
                    f"{self._url} requests a delay of {wait:.0f} seconds: run the command again "
                    "after that time to continue"
                )
            self._pace.pause(wait)
            attempt += 1

    def stop(self) -> None:
        """Make all waiting and future requests fail immediately."""
        self._pace.stop()

    def _send(self, data: bytes) -> bytes:
        """Send a single request, and return the body of its response."""
        request = urllib.request.Request(self._url, data, self._headers, method="POST")
        try:
            with self._opener.open(request, timeout=self._timeout) as response:
                body: bytes = response.read(_MAX_RESPONSE_BYTES)
        except urllib.error.HTTPError as error:
            raise self._refusal(error) from error
        except (OSError, http.client.HTTPException) as error:  # network error or broken response
            raise _RetryError(str(error) or type(error).__name__) from error
        if len(body) == _MAX_RESPONSE_BYTES:
            raise ServiceError(
                f"{self._url} responds with {_MAX_RESPONSE_BYTES} bytes or more, unlike the "
                "Perspective API: check --api-url"
            )
        return body

    def _refusal(self, error: urllib.error.HTTPError) -> Exception:
        """Return the exception to raise for a response with an error status."""
        with error:
            try:
                content = json_object(error.read(_MAX_RESPONSE_BYTES))
            except (OSError, http.client.HTTPException):
                content = {}
        reported = content.get("error")
        reported = reported if isinstance(reported, dict) else {}
        message = f"status {error.code}: {str(reported.get('message', error.reason))[:300]}"
        if error.code in _RETRY_STATUSES:
            return _RetryError(message, _retry_after_seconds(error.headers.get("Retry-After")))
        details = reported.get("details")
        details = details if isinstance(details, list) else []
        # Errors with an errorType concern the text. Others concern the key or the request.
        if error.code == http.HTTPStatus.BAD_REQUEST and any(
            isinstance(detail, dict) and "errorType" in detail for detail in details
        ):
            return TextRefusedError(message)
        return ServiceError(
            f"{self._url}: {message}: check the API key (--api-key-file), --attributes and "
            "--language, and that the key's project has the Perspective Comment Analyzer API "
            "enabled"
        )

    def _scores_in(self, body: bytes) -> dict[str, float]:
        """Return the scores in a response.

        Raises:
            _RetryError: The response does not match the service's documentation.
        """
        scores = {}
        try:
            attribute_scores = json_object(body)["attributeScores"]
            for name in self.attributes:
                value = attribute_scores[name.upper()]["summaryScore"]["value"]
                if isinstance(value, bool) or not 0 <= value <= 1:
                    raise ValueError
                scores[name] = float(value)
        except (KeyError, TypeError, ValueError):
            raise _RetryError(f"a response without valid scores: {body[:200]!r}") from None
        return scores


def _retry_after_seconds(retry_after: str | None) -> float | None:
    """Return the delay in seconds that a Retry-After header sets, or `None` without a valid one."""
    if retry_after is None:
        return None
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time()
        except (ValueError, OverflowError):
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None
