"""What every endpoint does with the engine: prompts to tokens, limits, answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megatron.inference.request import LARGEST_SEED, Sampling
from megatron.inference.server.answer import Answer
from megatron.inference.server.engine_client import EngineClient
from megatron.inference.server.errors import ApiError
from megatron.inference.server.metrics import Metrics
from megatron.inference.server.settings import FrontSettings
from megatron.tokenizer import Tokenizer

# Shorter texts are tokenized at once: handing them to a thread takes longer.
_LONG_TEXT = 4096  # characters


@dataclass(frozen=True)
class Asked:
    """One sequence to be answered.

    Attributes:
        prompt: token ids, at least one.
        stops: strings that end the answer.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    stops: tuple[str, ...] = ()


class Service:
    """The tokenizer, the engine and the settings, joined."""

    def __init__(
        self,
        settings: FrontSettings,
        tokenizer: Tokenizer,
        engine: EngineClient,
        metrics: Metrics,
    ) -> None:
        self.settings = settings
        self.tokenizer = tokenizer
        self.engine = engine
        self.metrics = metrics
        ends = tokenizer.special_ids("eod", "eos")
        self.ends = ends | frozenset(settings.stop_tokens)  # end a document or a turn

    @property
    def max_length(self) -> int:
        """Tokens of one prompt and its answer."""
        engine = self.settings.engine
        return min(engine.max_length, engine.cache_tokens)

    async def tokenize(self, text: str, *, spelled: bool = False) -> tuple[int, ...]:
        """Ids of a text. A long one does not keep the others waiting.

        Args:
            spelled: the text spells its special tokens out.
        """
        tokenizer = self.tokenizer
        tokenize = tokenizer.tokenize_spelled if spelled else tokenizer.tokenize_open
        if len(text) < _LONG_TEXT:
            return tuple(tokenize(text))
        return tuple(await asyncio.to_thread(tokenize, text))

    def begun(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        """`prompt`; of an empty one the end of document, which is also what a text begins after.

        Raises:
            ApiError: 400 it is empty, and the tokenizer has no such token.
        """
        eod = tuple(self.tokenizer.special_ids("eod"))
        if not prompt and not eod:
            raise ApiError(400, "the prompt is empty, and no token of this model begins a text")
        return prompt or eod

    def check_total(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, copies: int = 1
    ) -> None:
        """Raises ApiError 422 where one request has too many tokens."""
        total = copies * len(prompts) * (max(len(prompt) for prompt in prompts) + new_tokens)
        if total > self.settings.limits.tokens:
            raise ApiError(
                422,
                f"Too many tokens.  {total} is greater than {self.settings.limits.tokens}",
                always=False,
            )

    @staticmethod
    def seed_of(seed: int | None, number: int) -> int | None:
        """The seed of a request's sequence number so and so: equal prompts get different answers.
        None, or less than 0: none was given."""
        return None if seed is None or seed < 0 else (seed + number) & LARGEST_SEED

    @contextlib.contextmanager
    def answers(self, asked: Sequence[Asked], silent: frozenset[int]) -> Iterator[list[Answer]]:
        """Send the sequences to the engine; on leaving, those that still run are ended."""
        answers, close = self.start(asked, silent)
        try:
            yield answers
        finally:
            close()

    def start(
        self, asked: Sequence[Asked], silent: frozenset[int]
    ) -> tuple[list[Answer], Callable[[], None]]:
        """The same for answers that outlive the caller: they, and what ends those that run.

        Args:
            silent: stop tokens that are no part of an answer's text.

        Raises:
            ApiError: 429 too much to do, 503 no engine.
        """
        streams = self.engine.start([(each.prompt, each.sampling) for each in asked])
        answers = [
            Answer(self.tokenizer, stream, each.stops, silent)
            for each, stream in zip(asked, streams, strict=True)
        ]

        def close() -> None:
            for stream in streams:
                stream.close()

        return answers, close
