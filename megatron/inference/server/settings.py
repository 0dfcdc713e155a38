"""The settings that rank 0 sends to the web server: limits, defaults, tokenizer and access."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron.config.data import TokenizerConfig
from megatron.inference.request import EngineLimits

MAX_PROMPTS = 128  # Megatron's own limit for one request
LOOPBACK = ("127.0.0.1", "localhost", "::1")  # names that only this machine can connect to


@dataclass(frozen=True)
class ServerLimits:
    """Limits on requests, times and connections, which protect the web server's process.

    Attributes:
        body_bytes: Largest size of a request's body. A larger one is refused with 413.
        queued: Largest number of sequences that run or wait. A request that would exceed it is
            refused with 429.
        tokens: Largest value of prompts times (longest prompt + new tokens) in one request. A
            larger one is refused with 422.
        read_seconds: Longest time for a request's headers to arrive, and then for its body. A
            slower request gets 408.
        write_seconds: Longest time for a client to read what it is sent. A slower client counts as
            gone.
        generate_seconds: Longest time from a request's body to its last token. A slower answer
            gets 504.
        connections: Largest number of open connections. Further ones are closed at once.
    """

    body_bytes: int = 1 << 20
    queued: int = 1024
    tokens: int = 12000
    read_seconds: float = 10.0
    write_seconds: float = 30.0
    generate_seconds: float = 600.0
    connections: int = 4096


@dataclass(frozen=True)
class Defaults:
    """Sampling settings of the command line, for requests that do not set them.

    Attributes:
        temperature: Divisor of the scores.
        top_k: Number of most likely tokens to sample from, if a request sets neither `top_k` nor
            `top_p`.
        top_p: Probability of the tokens to sample from, if a request sets neither.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0

    def choose(self, top_k: int | None, top_p: float | None) -> tuple[int, float]:
        """Return `top_k` and `top_p` for a request with these values, `None` if it sets none."""
        if top_k is None and top_p is None:
            return self.top_k, self.top_p
        return top_k or 0, top_p or 0.0


@dataclass(frozen=True)
class FrontSettings:
    """Everything the web server needs.

    Attributes:
        model: Name of the model for OpenAI's clients.
        tokenizer: Files of the tokenizer.
        engine: Limits of the engine.
        limits: Limits of the server.
        defaults: Sampling settings for requests that set none.
        stop_tokens: Ids that end an answer, besides the tokenizer's own.
        chat_template: Text of the chat template, or `None` if the model has none.
        token: Token that clients must send. `None` admits only clients on this machine.
        legacy_status_codes: Whether `PUT /api` answers most mistakes with status 200.
        created: When the server started, in seconds since 1970.
    """

    model: str
    tokenizer: TokenizerConfig
    engine: EngineLimits
    limits: ServerLimits = ServerLimits()
    defaults: Defaults = Defaults()
    stop_tokens: tuple[int, ...] = ()
    chat_template: str | None = None
    token: str | None = field(default=None, repr=False)
    legacy_status_codes: bool = False
    created: int = 0
