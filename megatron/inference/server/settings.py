"""The settings that rank 0 sends to the web server: flags, limits, tokenizer and access."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron.config.data import TokenizerConfig
from megatron.config.generation import ServerConfig
from megatron.inference.request import EngineLimits

CHUNK = 1 << 16  # bytes to read at a time from the socket between the web server and rank 0
MAX_PROMPTS = 128  # Megatron's own limit for one request
LOOPBACK = ("127.0.0.1", "localhost", "::1")  # addresses to which only this machine can connect


@dataclass(frozen=True)
class ServerLimits:
    """Limits that have no flag, which protect the web server's process.

    Attributes:
        read_seconds: Maximum time for a request's headers to arrive, and then for its body. A
            slower request gets status 408.
        write_seconds: Maximum time for a client to read the bytes sent to it. A slower client is
            disconnected.
        large_body_speed: Maximum bytes per second read from one address, in bodies over 64 KiB.
        connections: Maximum number of open connections. Further ones are closed immediately. The
            number is lowered if the process may not open as many files.
        text_seconds: Maximum time to tokenize a request's texts, or to render its conversation.
        text_memory: Memory for this work, in bytes, in addition to the tokenizer's own.
        long_texts: Maximum number of requests with long texts that are being tokenized or waiting
            to be. Further requests get status 429.
        long_texts_per_client: Maximum number of such requests from one address.
    """

    read_seconds: float = 10.0
    write_seconds: float = 30.0
    large_body_speed: int = 16 << 20
    connections: int = 4096
    text_seconds: float = 10.0
    text_memory: int = 1 << 30
    long_texts: int = 64
    long_texts_per_client: int = 8


@dataclass(frozen=True)
class FrontSettings:
    """All settings of the web server.

    Attributes:
        model: The model's name for OpenAI clients.
        tokenizer: The tokenizer's files.
        engine: The engine's limits. The server's flags may lower the maximum length.
        server: The server's flags.
        limits: Limits that have no flag.
        stop_tokens: Ids of tokens that end an answer, in addition to the tokenizer's own.
        chat_template: Text of the chat template, or `None` if the model has none.
        token: Token that clients must send. `None` admits only clients on this machine.
        created: Start time of the server in seconds since 1970.
        retrieves: Whether the model is Retro, whose answers come with the passages it has read.
        adapters: Names of the model's adapters, in the engine's order.
    """

    model: str
    tokenizer: TokenizerConfig
    engine: EngineLimits
    server: ServerConfig = ServerConfig()
    limits: ServerLimits = ServerLimits()
    stop_tokens: tuple[int, ...] = ()
    chat_template: str | None = None
    token: str | None = field(default=None, repr=False)
    created: int = 0
    retrieves: bool = False
    adapters: tuple[str, ...] = ()

    @property
    def models(self) -> tuple[str, ...]:
        """Names that a request's `model` may have: the base model's, then the adapters'."""
        return (self.model, *self.adapters)

    def resolve_top_k_top_p(self, top_k: int | None, top_p: float | None) -> tuple[int, float]:
        """Return the `top_k` and `top_p` to use for a request.

        Args:
            top_k: Value in the request, or `None` if it sets none.
            top_p: Value in the request, or `None` if it sets none.

        Returns:
            The request's values, with 0 for the one that it does not set, or the values from the
            command line if the request sets neither.
        """
        if top_k is None and top_p is None:
            return self.server.top_k, self.server.top_p
        return top_k or 0, top_p or 0.0
