"""What rank 0 tells the web server when it starts it: limits, defaults, tokenizer, access."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron.config.data import TokenizerConfig
from megatron.inference.request import EngineLimits

MAX_PROMPTS = 128  # Megatron's own limit for one request
LOOPBACK = ("127.0.0.1", "localhost", "::1")  # names that only this machine reaches


@dataclass(frozen=True)
class ServerLimits:
    """How much the server accepts and how long it waits. All of it protects one process.

    Attributes:
        body_bytes: Size of one request's body. A larger one is refused with 413.
        queued: Sequences that run or wait. A request that would exceed it is refused with 429.
        tokens: Prompts times (longest prompt + new tokens) of one request, else 422.
        read_seconds: Time for a request's headers, and for its body, to arrive, else 408.
        write_seconds: Time for a client to read what it is sent. After that it counts as gone.
        generate_seconds: Time from a request's body to its last token, else 504.
        connections: Open connections. Further ones are closed at once.
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
        top_k: Used if a request sets neither `top_k` nor `top_p`.
        top_p: Used in the same case.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0

    def choose(self, top_k: int | None, top_p: float | None) -> tuple[int, float]:
        """Return `top_k` and `top_p` for a request that sets these, or `None` where it does not."""
        if top_k is None and top_p is None:
            return self.top_k, self.top_p
        return top_k or 0, top_p or 0.0


@dataclass(frozen=True)
class FrontSettings:
    """Everything the web server needs.

    Attributes:
        model: Name of the model for OpenAI's clients.
        tokenizer: Files of the tokenizer.
        engine: What the engine can take.
        limits: What the server accepts.
        defaults: Sampling settings of requests that name none.
        stop_tokens: Ids that end an answer, besides the tokenizer's own.
        chat_template: Text of the chat template, or `None` if the model has none.
        token: Token that clients must send. `None` lets in clients of this machine only.
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
