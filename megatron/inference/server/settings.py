"""What rank 0 tells the front when it starts it, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron.config.data import TokenizerConfig
from megatron.inference.request import Limits as EngineLimits
from megatron.inference.server.limits import Limits


@dataclass(frozen=True)
class Defaults:
    """What a request gets that does not say: from the command line.

    Attributes:
        temperature: divides the scores.
        top_k, top_p: where the request names neither of them.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0

    def choose(self, top_k: int | None, top_p: float | None) -> tuple[int, float]:
        """(top_k, top_p) of a request that names these, or None where it does not."""
        if top_k is None and top_p is None:
            return self.top_k, self.top_p
        return top_k or 0, top_p or 0.0


@dataclass(frozen=True)
class FrontSettings:
    """Everything the front needs.

    Attributes:
        model: its name for OpenAI's clients.
        tokenizer: where the tokenizer's files are.
        engine: what the engine can take.
        stop_tokens: ids that end an answer beside the tokenizer's own ends.
        chat_template: its text; None: there is none.
        token: clients must have it; None: clients of this machine need none.
        legacy_status_codes: `PUT /api` answers most mistakes with status 200.
        created: when the server started, seconds since 1970.
    """

    model: str
    tokenizer: TokenizerConfig
    engine: EngineLimits
    limits: Limits = Limits()
    defaults: Defaults = Defaults()
    stop_tokens: tuple[int, ...] = ()
    chat_template: str | None = None
    token: str | None = field(default=None, repr=False)
    legacy_status_codes: bool = False
    created: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> FrontSettings:
        """The opposite. It comes from our own rank 0 and is not checked again."""
        parts = {
            "tokenizer": TokenizerConfig(**_with_tuples(value["tokenizer"])),
            "engine": EngineLimits(**value["engine"]),
            "limits": Limits(**value["limits"]),
            "defaults": Defaults(**value["defaults"]),
            "stop_tokens": tuple(value["stop_tokens"]),
        }
        return cls(**{**value, **parts})


def _with_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has lists only; configurations have tuples only."""
    return {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
