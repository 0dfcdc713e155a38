"""`megatron serve`: the text generation server."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.config.generation import ServerConfig
from megatron.config.parser import help_if_asked


def serve(words: Sequence[str]) -> int:
    """Run one process of the server, and return the exit code."""
    help_if_asked("megatron serve", (ServerConfig,), trains=False, argv=words)
    from megatron.inference.server.run import main

    return main(words)
