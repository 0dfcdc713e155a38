"""The service behind all endpoints, which sends prompts to the engine and returns texts."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from megatron.inference.messages import Add, Cancel, Command, Report, Unpacker, pack
from megatron.inference.request import (
    MAX_SEED,
    Event,
    Finished,
    NeighborPassage,
    Prompt,
    Request,
    Retrieved,
    Sampling,
    Stats,
    Token,
    TopLogprobs,
)
from megatron.inference.server.endpoint import ApiError
from megatron.inference.server.settings import CHUNK, FrontSettings
from megatron.inference.server.texts import Texts
from megatron.inference.text import Detokenizer, StopStrings
from megatron.tokenizer import Tokenizer

_ENGINE_STOPPED = "the engine has stopped; the server's log has the reason"


@dataclass(frozen=True)
class TextRequest:
    """One sequence of a client's request.

    Attributes:
        prompt: Token ids of the prompt, at least one.
        sampling: Settings for continuing the prompt.
        stop_strings: Strings that end the answer and are not part of it.
        silent_stop_tokens: Stop tokens that end the answer and are not part of its text.
        echo: Whether the answer begins with the prompt.
        adapter: Index of the adapter to use, counted from 1; 0 is the base model.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    stop_strings: tuple[str, ...] = ()
    silent_stop_tokens: frozenset[int] = frozenset()
    echo: bool = False
    adapter: int = 0


class EngineClient:
    """The web server's end of the socket to rank 0. It sends requests and receives events."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, max_sequences: int
    ) -> None:
        """Start with no requests.

        Args:
            reader: Reader of rank 0's messages.
            writer: Writer of messages to rank 0.
            max_sequences: Maximum number of sequences that may run or wait.
        """
        self._reader = reader
        self._writer = writer
        self._max_sequences = max_sequences
        self._queues: dict[str, asyncio.Queue[Event]] = {}  # by request name
        self._numbers = itertools.count(1)
        self.stats = Stats()
        self.alive = True

    @property
    def active(self) -> int:
        """Number of sequences that the engine has not finished yet."""
        return len(self._queues)

    def start(self, requests: Sequence[TextRequest]) -> tuple[list[str], asyncio.Queue[Event]]:
        """Send the sequences of one client's request to the engine: all of them, or none.

        Args:
            requests: The sequences to continue.

        Returns:
            The names of the sequences, and the queue of their events. The last event of each
            sequence is a `Finished`.

        Raises:
            ApiError: Too many sequences are running or waiting (429), or the engine has stopped
                (503).
        """
        if not self.alive:
            raise ApiError(503, _ENGINE_STOPPED)
        if self.active + len(requests) > self._max_sequences:
            raise ApiError(
                429,
                f"{self.active} sequences are running or waiting, and {len(requests)} more would "
                f"exceed the server's {self._max_sequences}: try again in a moment",
            )
        names, events = [f"r{next(self._numbers)}" for _ in requests], asyncio.Queue[Event]()
        for name, request in zip(names, requests, strict=True):
            self._queues[name] = events
            self._send(Add(Request(name, request.prompt, request.sampling, request.adapter)))
        return names, events

    def cancel(self, name: str) -> None:
        """Cancel a running sequence. It stays active until the engine has ended it."""
        if name in self._queues:
            self._send(Cancel(name))

    async def run(self) -> None:
        """Pass events to their queues until rank 0 is gone, then end all requests with an error.

        Raises:
            MessageError: Rank 0 has sent an invalid message. All requests have ended then, too.
        """
        unpacker = Unpacker[Report](Report)
        try:
            while data := await self._reader.read(CHUNK):
                for report in unpacker.feed(data):
                    for event in report.events:
                        self._dispatch(event)
                    self.stats = report.stats
        finally:
            self.alive = False
            for name in list(self._queues):
                self._dispatch(Finished(name, "error", _ENGINE_STOPPED))
            self._writer.close()

    def _dispatch(self, event: Event) -> None:
        queue = self._queues.get(event.request)
        if queue is not None:
            queue.put_nowait(event)
        if isinstance(event, Finished):
            self._queues.pop(event.request, None)

    def _send(self, command: Command) -> None:
        if self.alive:
            self._writer.write(pack(Command, command))


@dataclass(frozen=True)
class DecodedToken:
    """A token with its text.

    Attributes:
        id: Id of the token.
        text: Text of this token alone. A partial character becomes U+FFFD.
        offset: Number of characters in the answer before the token.
        logprob: Log probability of the token, or `None` if it was not requested or the token is the
            first of a prompt.
        top: Texts and log probabilities of the most likely tokens at its position.
    """

    id: int
    text: str
    offset: int
    logprob: float | None
    top: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class TextPiece:
    """Text that can be shown now, with the tokens that begin before its end.

    Attributes:
        text: The text, which may be empty.
        tokens: The tokens, without those of earlier pieces.
        passages: Passages that Retro has read since the previous piece.
    """

    text: str
    tokens: tuple[DecodedToken, ...]
    passages: tuple[NeighborPassage, ...] = ()


class TokenDecoder:
    """A decoder of tokens to text, each in the context of the tokens before it."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), offset: int = 0) -> None:
        """Start after a prompt.

        Args:
            tokenizer: Tokenizer of the model.
            prompt: Tokens before the first one, which serve only as context.
            offset: Number of characters before the first token.
        """
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, prompt)
        self._last = tuple(prompt[-1:])
        self._characters = offset
        self._is_buffering = False

    def add(self, token: int, logprob: float | None, top: TopLogprobs) -> tuple[str, DecodedToken]:
        """Add a token, and return the text that can be shown now and the token with its text.

        Args:
            token: Id of the token.
            logprob: Log probability of the token, or `None` if it is not known.
            top: The most likely tokens at its position, with their log probabilities.
        """
        offset = self._characters
        text = self._detokenizer.add(token)
        token_text = (
            text if text and not self._is_buffering else self._tokenizer.detokenize([token])
        )
        context_length = len(self._tokenizer.detokenize(self._last)) if top else 0
        alternatives = tuple(  # tokens that could have been chosen instead
            (self._tokenizer.detokenize([*self._last, other])[context_length:], value)
            for other, value in top
        )
        self._is_buffering = not text
        self._characters += len(text)
        self._last = (token,)
        return text, DecodedToken(token, token_text, offset, logprob, alternatives)

    def flush(self) -> str:
        """Return the remaining text. Call this when there are no more tokens."""
        return self._detokenizer.flush()


def decode_prompt(
    tokenizer: Tokenizer, prompt: Sequence[int], scores: Prompt | None = None
) -> list[DecodedToken]:
    """Return a prompt's tokens with their texts.

    The first token has no context, so it has no log probability.

    Args:
        tokenizer: Tokenizer of the model.
        prompt: Token ids of the prompt.
        scores: Log probabilities of the prompt; `None` if they were not requested.
    """
    decoder = TokenDecoder(tokenizer)
    logprobs = (None, *scores.logprobs) if scores else (None,) * len(prompt)
    tops = ((), *scores.top) if scores and scores.top else ((),) * len(prompt)
    return [
        decoder.add(token, logprob, top)[1]
        for token, logprob, top in zip(prompt, logprobs, tops, strict=True)
    ]


class TextAnswer:
    """The engine's answer to one sequence, as text.

    Attributes:
        request: The sequence to which this is the answer.
        prompt: Log probabilities of the prompt; `None` until they arrive.
        passages: Passages that Retro has read so far.
        new_tokens: Number of new tokens so far, including silent stop tokens.
        finished: The engine's last event; `None` until it arrives, and if a stop string ended the
            answer before it.
    """

    def __init__(self, tokenizer: Tokenizer, request: TextRequest) -> None:
        """Start without text.

        Args:
            tokenizer: Tokenizer of the model.
            request: The sequence to which this is the answer.
        """
        self.request = request
        self._tokenizer = tokenizer
        self._prompt_text = tokenizer.detokenize(request.prompt) if request.echo else ""
        self._num_returned = len(self._prompt_text)  # characters
        self._decoder = TokenDecoder(tokenizer, request.prompt, self._num_returned)
        self._stops = StopStrings(request.stop_strings)
        self._pending_tokens: list[DecodedToken] = []  # tokens whose text is held back
        self._stopped = False  # by a stop string
        self.prompt: Prompt | None = None
        self.passages: list[NeighborPassage] = []
        self.new_tokens = 0
        self.finished: Finished | None = None

    @property
    def reason(self) -> Literal["stop", "length"]:
        """The reason the answer ended."""
        ended_by_length = self.finished is not None and self.finished.reason == "length"
        return "length" if ended_by_length and not self._stopped else "stop"

    @property
    def can_echo(self) -> bool:
        """Whether the prompt can be returned, with any log probabilities that were requested.

        Retro's passages arrive before a long prompt has been scored.
        """
        return self.prompt is not None or not self.request.sampling.prompt_logprobs

    @property
    def is_complete(self) -> bool:
        """Whether a stop string or the engine has ended the answer."""
        return self._stopped or self.finished is not None

    def echo(self) -> TextPiece:
        """Return the prompt, with its tokens if their log probabilities were requested."""
        tokens = []
        if self.prompt is not None:
            tokens = decode_prompt(self._tokenizer, self.request.prompt, self.prompt)
        return TextPiece(self._prompt_text, tuple(tokens))

    def process(self, events: Sequence[Event]) -> TextPiece:
        """Return the part of the text that can be shown after the next events.

        Raises:
            ApiError: The engine cannot answer the request (422), or it failed (500).
        """
        text, num_passages = "", len(self.passages)
        for event in events:
            text += self._process_event(event)
            if self._stopped:
                break
        self._num_returned += len(text)
        # At the end nothing is held back, so this includes tokens with no text, or with only the
        # beginning of a character.
        end = self._num_returned + (self.finished is not None)
        count = sum(token.offset < end for token in self._pending_tokens)
        tokens, self._pending_tokens = self._pending_tokens[:count], self._pending_tokens[count:]
        return TextPiece(text, tuple(tokens), tuple(self.passages[num_passages:]))

    def _process_event(self, event: Event) -> str:
        """Process an event, and return the text that can be shown after it."""
        if isinstance(event, Prompt):
            self.prompt = event
            return ""
        if isinstance(event, Retrieved):
            # Beams that begin alike read the same passages.
            self.passages += [passage for passage in event.passages if passage not in self.passages]
            return ""
        if isinstance(event, Token):
            self.new_tokens += 1
            if event.token in self.request.silent_stop_tokens:
                return ""
            text, decoded = self._decoder.add(event.token, event.logprob, event.top)
            self._pending_tokens.append(decoded)
            return self._cut_at_stop(text)
        if event.reason == "refused":
            raise ApiError(422, event.message, keeps_status=False)
        if event.reason in ("error", "cancelled"):
            raise ApiError(500, f"the engine failed: {event.message or event.reason}")
        self.finished = event
        text = self._cut_at_stop(self._decoder.flush())
        return text if self._stopped else text + self._stops.flush()

    def _cut_at_stop(self, text: str) -> str:
        released = self._stops.add(text)
        self._stopped = released.stop is not None
        return released.text


def passages_to_json(passages: Sequence[NeighborPassage]) -> list[dict[str, str | int]]:
    """Return passages as JSON objects for a client."""
    return [asdict(passage) for passage in passages]


class AnswerGroup:
    """The answers to all sequences of one client's request. Call `close` when done.

    Attributes:
        answers: The answers, in the order of the sequences.
    """

    def __init__(
        self,
        service: Service,
        requests: Sequence[TextRequest],
        observe_first: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """Send the sequences to the engine.

        Args:
            service: The tokenizer and the engine.
            requests: The sequences to continue.
            observe_first: Function that is called with the seconds from now to the first text.

        Raises:
            ApiError: Too many sequences are running or waiting (429), or the engine has stopped
                (503).
        """
        self._engine = service.engine
        self._observe_first = observe_first
        self._started = time.perf_counter()
        names, self._events = service.engine.start(requests)
        self.answers = [TextAnswer(service.tokenizer, request) for request in requests]
        self._unfinished = dict(zip(names, enumerate(self.answers), strict=True))

    async def pieces(self) -> AsyncGenerator[tuple[int, TextPiece | None], None]:
        """Yield (index, piece) as text arrives, and (index, None) at the end of each answer.

        A piece contains all text that has arrived since the previous one. When many clients share
        the server, they get fewer and larger pieces instead of falling further and further behind.

        Raises:
            ApiError: The engine cannot answer the request (422), or it failed (500).
        """
        unechoed = {index for index, answer in enumerate(self.answers) if answer.request.echo}
        is_first = True
        while self._unfinished:
            events = [await self._events.get()]
            while not self._events.empty():
                events.append(self._events.get_nowait())
            events_by_name: dict[str, list[Event]] = {}
            for event in events:
                events_by_name.setdefault(event.request, []).append(event)
            for name, answer_events in events_by_name.items():
                if name not in self._unfinished:  # a stop string has ended it
                    continue
                index, answer = self._unfinished[name]
                piece = answer.process(answer_events)
                if index in unechoed and answer.can_echo:
                    unechoed.remove(index)
                    yield index, await asyncio.to_thread(answer.echo)
                if is_first and (piece.text or piece.tokens):
                    is_first = False
                    self._observe_first(time.perf_counter() - self._started)
                if piece.text or piece.tokens or piece.passages:
                    yield index, piece
                if answer.is_complete:
                    del self._unfinished[name]
                    self._engine.cancel(name)  # the engine still runs it after a stop string
                    yield index, None

    async def whole(self) -> list[TextPiece]:
        """Return each answer as a single piece once all answers are complete.

        The pieces have no passages, which are in `answers`.

        Raises:
            ApiError: The engine cannot answer the request (422), or it failed (500).
        """
        pieces: list[list[TextPiece]] = [[] for _ in self.answers]
        async for index, piece in self.pieces():
            if piece is not None:
                pieces[index].append(piece)
        return [
            TextPiece(
                "".join(piece.text for piece in answer_pieces),
                tuple(token for piece in answer_pieces for token in piece.tokens),
            )
            for answer_pieces in pieces
        ]

    def close(self) -> None:
        """Cancel the sequences that are still running."""
        for name in self._unfinished:
            self._engine.cancel(name)


class Service:
    """The tokenizer, the engine and the settings of a server."""

    def __init__(self, settings: FrontSettings, tokenizer: Tokenizer, engine: EngineClient) -> None:
        """Store the settings. The processes that tokenize do not run until `texts.start` is called.

        Args:
            settings: Settings of the server.
            tokenizer: Tokenizer of the model.
            engine: The connection to the engine.

        Raises:
            ConfigError: The text of a single token could be too long.
            DataError: The tokenizer's decoder could take an unbounded time to decode a token.
        """
        self.settings = settings
        self.tokenizer = tokenizer
        self.engine = engine
        self.texts = Texts(settings, tokenizer, self.max_length)
        # Tokens that end a document or a turn.
        self.stop_tokens = tokenizer.special_ids("eod", "eos") | frozenset(settings.stop_tokens)

    @property
    def max_length(self) -> int:
        """Maximum number of tokens in a prompt and its answer together."""
        engine = self.settings.engine
        return min(engine.max_length, engine.cache_tokens)

    def adapter_of(self, model: str | None) -> int:
        """Return the index of the adapter that a request names, or 0 for the base model.

        Args:
            model: Name in the request; `None` means the base model.

        Raises:
            ApiError: No model or adapter has this name (404).
        """
        models = self.settings.models
        if model is None:
            return 0
        if model not in models:
            available = ", ".join(models)
            raise ApiError(
                404, f"unknown model {model[:100]!r}; available: {available}", field="model"
            )
        return models.index(model)

    def nonempty_prompt(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        """Return the prompt or, if it is empty, the end-of-document token that precedes each text.

        Args:
            prompt: Token ids.

        Raises:
            ApiError: The prompt is empty, and the tokenizer has no end-of-document token (400).
        """
        eod = tuple(self.tokenizer.special_ids("eod"))
        if not prompt and not eod:
            raise ApiError(
                400,
                "the prompt is empty, and this model has no end-of-document token to begin a text "
                "with: give a prompt",
            )
        return prompt or eod

    def check_total(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, answers_per_prompt: int
    ) -> None:
        """Check that a request does not have too many tokens.

        Args:
            prompts: Token ids of the prompts.
            new_tokens: Maximum number of new tokens in an answer.
            answers_per_prompt: Number of answers to each prompt.

        Raises:
            ApiError: The request has too many tokens (422).
        """
        total = (
            answers_per_prompt
            * len(prompts)
            * (max(len(prompt) for prompt in prompts) + new_tokens)
        )
        limit = self.settings.server.max_tokens_to_oom
        if total > limit:
            message = f"Too many tokens.  {total} is greater than {limit}"
            raise ApiError(422, message, keeps_status=False)

    @staticmethod
    def seed_of(seed: int | None, index: int) -> int | None:
        """Return the seed of one of a request's sequences, which is different for each index.

        Args:
            seed: Seed of the request, or `None` if it has none.
            index: Index of the prompt (`PUT /api`), or of the answer to its prompt (OpenAI's API).

        Returns:
            The sequence's seed, or `None` if the request has none.
        """
        return None if seed is None else (seed + index) & MAX_SEED
