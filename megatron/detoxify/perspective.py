"""A client of the Perspective API, which keeps to a rate and repeats requests that failed.

The service's answers are untrusted: they are read up to a limit, redirects are not followed (they
would take the key along), and every number is checked.
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
_MAX_ANSWER_BYTES = 1 << 20
# Too many requests, or trouble that passes.
_AGAIN = {408, 425, 429, 500, 502, 503, 504}
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0  # seconds
_LONGEST_ASKED = 600.0  # seconds; a server that asks for more is not waited for
_LOCAL = {"localhost", "127.0.0.1", "::1"}


class TextRefusedError(UserError):
    """The service does not score a text, for example because of its language."""


class ServiceError(UserError):
    """The service cannot be used, or its answers make no sense."""


class _Again(Exception):  # noqa: N818 - it is caught where it is raised
    """A request that may succeed later. `wait` is the time the server asked for, in seconds."""

    def __init__(self, reason: str, wait: float | None = None) -> None:
        super().__init__(reason)
        self.wait = wait


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A handler that turns redirects into errors."""

    def redirect_request(self, *args: Any) -> None:
        return None


class RequestPace:
    """A limit on the rate at which several threads may begin requests."""

    def __init__(self, per_second: float) -> None:
        """Let the first request begin at once."""
        self._interval = 1 / per_second
        self._lock = threading.Lock()
        self._next = 0.0  # the earliest time of the next request
        self._stopped = threading.Event()

    def wait(self) -> None:
        """Wait until the next request may begin.

        Raises:
            ServiceError: `stop` was called.
        """
        with self._lock:
            start = max(self._next, time.monotonic())
            self._next = start + self._interval
        if self._stopped.wait(start - time.monotonic()):
            raise ServiceError("stopped")

    def pause(self, seconds: float) -> None:
        """Let no request begin for some time."""
        with self._lock:
            self._next = max(self._next, time.monotonic() + seconds)

    def stop(self) -> None:
        """End all waiting."""
        self._stopped.set()


class PerspectiveClient:
    """A client that several threads may use at the same time."""

    def __init__(
        self,
        key: str,
        url: str,
        attributes: Sequence[str],
        *,
        language: str = "en",
        requests_per_second: float = 1.0,
        retries: int = 8,
        timeout: float = 60.0,
    ) -> None:
        """Check the address. Nothing is sent yet.

        Args:
            key: The API key.
            url: Address of the method `comments:analyze`.
            attributes: Names of the scores to request, in lower case.
            language: Language of the texts.
            requests_per_second: Limit on the rate of requests, repeated ones included.
            retries: How often a request that failed is repeated.
            timeout: Seconds to wait for an answer.

        Raises:
            ConfigError: The address would send the key unencrypted, or is not one.
        """
        try:
            parts = urllib.parse.urlsplit(url)
            _ = parts.port  # raises for what is not a number
        except ValueError as error:
            raise ConfigError(f"--api-url {url}: not an address ({error}): fix it") from error
        if not url.isascii() or not url.isprintable() or " " in url:
            raise ConfigError(
                f"--api-url {url!r}: has a space or a character outside ASCII: remove it, or "
                "write it as in %20"
            )
        is_safe = parts.scheme == "https" or parts.scheme == "http" and parts.hostname in _LOCAL
        if not is_safe or not parts.hostname:
            raise ConfigError(
                f"--api-url {url}: give an address with https:// (http:// only on this machine), "
                "because the API key is sent to it"
            )
        self.attributes, self.language = tuple(attributes), language
        self._url, self._retries, self._timeout = url, retries, timeout
        # The key is not in the address, which error messages and proxies' logs show.
        self._headers = {"Content-Type": "application/json", "X-Goog-Api-Key": key}
        self._opener = urllib.request.build_opener(_NoRedirects)
        self._pace = RequestPace(requests_per_second)
        self._random = random.Random()

    def score(self, text: str) -> dict[str, float]:
        """Return the scores of a text, each from 0 to 1, by attribute.

        Raises:
            TextRefusedError: The service does not score this text.
            ServiceError: The service cannot be used, or no attempt succeeded.
        """
        part = text.encode("utf-8", "replace")[:_MAX_TEXT_BYTES].decode("utf-8", "ignore")
        body = {
            "comment": {"text": part},
            "requestedAttributes": {name.upper(): {} for name in self.attributes},
            "languages": [self.language],
            "spanAnnotations": False,
            "doNotStore": True,
        }
        data = json.dumps(body).encode()
        for attempt in range(self._retries + 1):
            self._pace.wait()
            try:
                return self._scores_in(self._send(data))
            except _Again as error:
                reason, wait = str(error), error.wait
            if attempt == self._retries:
                break
            if wait is None:
                longest = min(_LONGEST_WAIT, _FIRST_WAIT * 2**attempt)
                wait = longest * self._random.uniform(0.5, 1)
            elif wait > _LONGEST_ASKED:
                raise ServiceError(
                    f"{self._url} asks to wait {wait:.0f} seconds: run the command again then; it "
                    "continues"
                )
            self._pace.pause(wait)
        raise ServiceError(
            f"{self._url}: {self._retries + 1} attempts failed, the last one with: {reason}: run "
            "the command again to continue; if the quota is used up, lower --requests-per-second"
        )

    def stop(self) -> None:
        """Make requests that wait for their turn, and later ones, fail at once."""
        self._pace.stop()

    def _send(self, data: bytes) -> bytes:
        """Return the body of the answer to one request."""
        request = urllib.request.Request(self._url, data, self._headers, method="POST")
        try:
            with self._opener.open(request, timeout=self._timeout) as response:
                body: bytes = response.read(_MAX_ANSWER_BYTES + 1)
        except urllib.error.HTTPError as error:
            raise self._refusal(error) from error
        except (OSError, http.client.HTTPException) as error:  # the network, or a broken answer
            raise _Again(str(error) or type(error).__name__) from error
        if len(body) > _MAX_ANSWER_BYTES:
            raise ServiceError(
                f"{self._url} answers with more than {_MAX_ANSWER_BYTES} bytes: is this the "
                "Perspective API? Check --api-url"
            )
        return body

    def _refusal(self, error: urllib.error.HTTPError) -> Exception:
        """Return the exception to raise for an answer with another status than 200."""
        with error:
            try:
                content = json_object(error.read(_MAX_ANSWER_BYTES))
            except (OSError, http.client.HTTPException):
                content = {}
        told = content.get("error")
        told = told if isinstance(told, dict) else {}
        message = f"status {error.code}: {str(told.get('message', error.reason))[:300]}"
        if error.code in _AGAIN:
            return _Again(message, _seconds_of(error.headers.get("Retry-After")))
        details = told.get("details")
        details = details if isinstance(details, list) else []
        # The service's own errors are about the text. Others are about the key or the request.
        if error.code == http.HTTPStatus.BAD_REQUEST and any(
            isinstance(one, dict) and "errorType" in one for one in details
        ):
            return TextRefusedError(message)
        return ServiceError(
            f"{self._url}: {message}: check the API key (--api-key-file), that its project has the "
            "Perspective Comment Analyzer API enabled, --attributes and --language"
        )

    def _scores_in(self, body: bytes) -> dict[str, float]:
        """Return the scores in an answer.

        Raises:
            _Again: The answer is not what the service's documentation promises.
        """
        scores = {}
        try:
            found = json_object(body)["attributeScores"]
            for name in self.attributes:
                value = found[name.upper()]["summaryScore"]["value"]
                if isinstance(value, bool) or not 0 <= value <= 1:
                    raise ValueError
                scores[name] = float(value)
        except (KeyError, TypeError, ValueError):
            raise _Again(f"an answer without valid scores: {body[:200]!r}") from None
        return scores


def _seconds_of(retry_after: str | None) -> float | None:
    """Return the seconds that a Retry-After header asks for, or `None` if it asks for none."""
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
