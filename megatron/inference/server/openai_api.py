"""`/v1/completions` and `/v1/chat/completions`, whole or streamed, as OpenAI's clients expect."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.inference.server.answer import Answer, Piece, Spelled, spell_prompt
from megatron.inference.server.chat import ChatTemplate
from megatron.inference.server.endpoint import Answered, Events
from megatron.inference.server.errors import ApiError
from megatron.inference.server.fields import read_fields
from megatron.inference.server.openai_asked import (
    chat_tokens,
    completion_tokens,
    make_asked,
    read_messages,
    read_prompts,
)
from megatron.inference.server.openai_fields import (
    CHAT,
    COMPLETION,
    REFUSED_CHAT,
    REFUSED_COMPLETION,
)
from megatron.inference.server.openai_forms import ChatForm, CompletionForm, Form
from megatron.inference.server.service import Asked, Service


@dataclass(frozen=True)
class Plan:
    """A request that has been read.

    Attributes:
        asked: a sequence for each choice.
        copies: choices for each prompt.
    """

    asked: list[Asked]
    copies: int
    stream: bool
    include_usage: bool
    logprobs: bool
    echo: bool = False


class OpenAiApi:
    """Both endpoints over one service."""

    def __init__(self, service: Service, template: ChatTemplate | None) -> None:
        self._service = service
        self._template = template

    async def complete(self, body: Mapping[str, Any]) -> Answered:
        """`POST /v1/completions`."""
        values = read_fields(body, COMPLETION, REFUSED_COMPLETION)
        self._check_model(values["model"])
        usage = _include_usage(values)
        prompts = await read_prompts(self._service, values["prompt"])
        echo, logprobs = values["echo"], values["logprobs"]
        new_tokens = completion_tokens(values)
        asked = make_asked(
            self._service, prompts, values, new_tokens=new_tokens, logprobs=logprobs, echo=echo
        )
        plan = Plan(asked, values["n"], values["stream"], usage, logprobs is not None, echo)
        return await self._answer(plan, CompletionForm())

    async def chat(self, body: Mapping[str, Any]) -> Answered:
        """`POST /v1/chat/completions`."""
        values = read_fields(body, CHAT, REFUSED_CHAT)
        self._check_model(values["model"])
        usage = _include_usage(values)
        prompt = await read_messages(self._service, self._template, values["messages"])
        if values["top_logprobs"] and not values["logprobs"]:
            raise ApiError(400, "top_logprobs goes with logprobs true", field="top_logprobs")
        logprobs = (values["top_logprobs"] or 0) if values["logprobs"] else None
        new_tokens = chat_tokens(self._service, prompt, values)
        asked = make_asked(
            self._service, [prompt], values, new_tokens=new_tokens, logprobs=logprobs
        )
        plan = Plan(asked, values["n"], values["stream"], usage, logprobs is not None)
        return await self._answer(plan, ChatForm())

    def models(self) -> dict[str, Any]:
        """`GET /v1/models`."""
        return {"object": "list", "data": [self.model(self._service.settings.model)]}

    def model(self, name: str) -> dict[str, Any]:
        """`GET /v1/models/NAME`.

        Raises:
            ApiError: 404 it is not served here.
        """
        self._check_model(name)
        settings = self._service.settings
        return {
            "id": settings.model,
            "object": "model",
            "created": settings.created,
            "owned_by": "megatron",
            "max_model_len": self._service.max_length,
            "chat": self._template is not None,
        }

    def _check_model(self, name: str | None) -> None:
        served = self._service.settings.model
        if name is not None and name != served:
            raise ApiError(
                404, f"model {name[:100]!r} is not served here: {served!r} is", field="model"
            )

    async def _answer(self, plan: Plan, form: Form) -> Answered:
        start = time.perf_counter()
        answers, close = self._service.start(plan.asked, silent=self._service.ends)

        def count() -> None:
            self._service.metrics.first_token_seconds.observe(time.perf_counter() - start)

        source = _Source(answers, plan, self._service, count)
        if plan.stream:
            return Events(self._stream(source, plan, form), close)
        try:
            return await self._whole(source, plan, form)
        finally:
            close()

    async def _whole(self, source: _Source, plan: Plan, form: Form) -> dict[str, Any]:
        pieces = await asyncio.gather(*(_joined(each) for each in source.all()))
        choices = [
            {
                "index": index,
                **form.choice(piece, logprobs=plan.logprobs),
                "finish_reason": answer.reason,
            }
            for index, (piece, answer) in enumerate(zip(pieces, source.answers, strict=True))
        ]
        head = self._head(form.prefix, form.whole)
        return {**head, "choices": choices, "usage": _usage(source.answers, plan.copies)}

    async def _stream(
        self, source: _Source, plan: Plan, form: Form
    ) -> AsyncGenerator[dict[str, Any], None]:
        head = self._head(form.prefix, form.part)
        tail = {"usage": None} if plan.include_usage else {}
        first = form.first()
        if first is not None:
            for index in range(len(source.answers)):
                choice = {"index": index, **first, "finish_reason": None}
                yield {**head, "choices": [choice], **tail}
        async with contextlib.aclosing(_merged(source.all())) as merged:
            async for index, piece in merged:
                end = source.answers[index].reason if piece is None else None
                told = form.delta(piece or Piece("", ()), logprobs=plan.logprobs and bool(piece))
                yield {**head, "choices": [{"index": index, **told, "finish_reason": end}], **tail}
        if plan.include_usage:
            yield {**head, "choices": [], "usage": _usage(source.answers, plan.copies)}

    def _head(self, prefix: str, kind: str) -> dict[str, Any]:
        return {
            "id": prefix + secrets.token_hex(12),
            "object": kind,
            "created": int(time.time()),
            "model": self._service.settings.model,
        }


class _Source:
    """The pieces of every choice, the echoed prompt first."""

    def __init__(
        self,
        answers: Sequence[Answer],
        plan: Plan,
        service: Service,
        count_first: Callable[[], None],
    ) -> None:
        self.answers = answers
        self._plan = plan
        self._tokenizer = service.tokenizer
        self._count_first: Callable[[], None] | None = count_first

    def all(self) -> list[AsyncGenerator[Piece, None]]:
        """One generator for each choice, none of whose pieces is empty."""
        return [self._pieces(answer) for answer in self.answers]

    async def _pieces(self, answer: Answer) -> AsyncGenerator[Piece, None]:
        offset = 0
        if self._plan.echo and not self._plan.logprobs:
            prompt = self._tokenizer.detokenize(answer.prompt_ids)
            offset = len(prompt)
            yield Piece(prompt, ())
        async for piece in answer.pieces():
            if self._plan.echo and self._plan.logprobs and not offset:
                assert answer.prompt is not None
                prompt = self._tokenizer.detokenize(answer.prompt_ids)
                spelled = await asyncio.to_thread(
                    spell_prompt, self._tokenizer, answer.prompt_ids, answer.prompt
                )
                offset = len(prompt)
                yield Piece(prompt, tuple(spelled))
            if piece.text or piece.tokens:
                self._count()
                yield Piece(piece.text, tuple(_moved(token, offset) for token in piece.tokens))

    def _count(self) -> None:
        if self._count_first is not None:
            self._count_first()
            self._count_first = None


def _moved(token: Spelled, by: int) -> Spelled:
    return Spelled(token.id, token.text, token.offset + by, token.logprob, token.top)


async def _joined(pieces: AsyncGenerator[Piece, None]) -> Piece:
    texts: list[str] = []
    tokens: list[Spelled] = []
    async for piece in pieces:
        texts.append(piece.text)
        tokens.extend(piece.tokens)
    return Piece("".join(texts), tuple(tokens))


async def _merged(
    sources: Sequence[AsyncGenerator[Piece, None]],
) -> AsyncGenerator[tuple[int, Piece | None], None]:
    """(index, piece) as they come, and (index, None) at the end of each."""
    if len(sources) == 1:
        async for piece in sources[0]:
            yield 0, piece
        yield 0, None
        return
    ready: asyncio.Queue[tuple[int, Piece | None | BaseException]] = asyncio.Queue()

    async def forward(index: int) -> None:
        try:
            async for piece in sources[index]:
                ready.put_nowait((index, piece))
            ready.put_nowait((index, None))
        except Exception as error:
            ready.put_nowait((index, error))

    tasks = [asyncio.ensure_future(forward(index)) for index in range(len(sources))]
    try:
        left = len(tasks)
        while left:
            index, ended = await ready.get()
            if isinstance(ended, BaseException):
                raise ended
            left -= ended is None
            yield index, ended
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _include_usage(values: Mapping[str, Any]) -> bool:
    options = values["stream_options"]
    if options is None:
        return False
    right = isinstance(options, dict) and set(options) <= {"include_usage"}
    if not right or type(options.get("include_usage", False)) is not bool:
        raise ApiError(
            400,
            'stream_options: give {"include_usage": true} or leave it out',
            field="stream_options",
        )
    if not values["stream"]:
        raise ApiError(400, "stream_options goes with stream true", field="stream_options")
    return bool(options.get("include_usage", False))


def _usage(answers: Sequence[Answer], copies: int) -> dict[str, Any]:
    """Each prompt counts once, however many answers it has."""
    prompts = sum(len(answer.prompt_ids) for answer in answers[::copies])
    new = sum(answer.new_tokens for answer in answers)
    cached = sum(answer.finished.cached_tokens for answer in answers[::copies] if answer.finished)
    return {
        "prompt_tokens": prompts,
        "completion_tokens": new,
        "total_tokens": prompts + new,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
