"""OpenAI's API: `/v1/completions`, `/v1/chat/completions` and `/v1/models`.

Completions are returned whole or streamed, as OpenAI's clients expect.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.inference.request import Sampling
from megatron.inference.server import schema
from megatron.inference.server.endpoint import ApiError, EventStream
from megatron.inference.server.service import (
    AnswerGroup,
    DecodedToken,
    Service,
    TextAnswer,
    TextPiece,
    TextRequest,
    passages_to_json,
)
from megatron.inference.server.settings import MAX_PROMPTS

Choice = dict[str, Any]
Prompts = list[tuple[int, ...]]  # token ids


@dataclass(frozen=True)
class ResponseFormat:
    """The format of an endpoint's answers.

    Attributes:
        id_prefix: Prefix of the answers' ids.
        whole_object: Value of "object" in a whole answer.
        chunk_object: Value of "object" in a chunk of a streamed answer.
        make_choice: Function that returns a choice without its index. It takes the text, whether to
            report log probabilities, and whether the text is a part of a streamed answer.
        first_choice: Chunk with which a stream begins, before any text.
    """

    id_prefix: str
    whole_object: str
    chunk_object: str
    make_choice: Callable[[TextPiece, bool, bool], Choice]
    first_choice: Choice | None = None


def _completion(piece: TextPiece, logprobs: bool, is_part: bool) -> Choice:
    """Return a completion, or the next part of one, with four parallel lists about its tokens."""
    if not logprobs:
        return {"text": piece.text, "logprobs": None}
    lists = {
        "tokens": [token.text for token in piece.tokens],
        "token_logprobs": [token.logprob for token in piece.tokens],
        "top_logprobs": [dict(token.top) if token.top else None for token in piece.tokens],
        "text_offset": [token.offset for token in piece.tokens],
    }
    return {"text": piece.text, "logprobs": lists}


def _message(piece: TextPiece, logprobs: bool, is_part: bool) -> Choice:
    """Return a chat message, or the next part of one, with a list of its tokens."""
    scored = {"logprobs": _token_objects(piece.tokens) if logprobs else None}
    if is_part:
        return {"delta": {"content": piece.text} if piece.text else {}, **scored}
    return {"message": {"role": "assistant", "content": piece.text, "refusal": None}, **scored}


def _token_objects(tokens: Sequence[DecodedToken]) -> dict[str, Any]:
    def token_object(text: str, logprob: float | None) -> dict[str, Any]:
        # A partial character's text does not reveal its bytes.
        utf8_bytes = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": utf8_bytes}

    content = [
        {
            **token_object(token.text, token.logprob),
            "top_logprobs": [token_object(*alternative) for alternative in token.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


_COMPLETION = ResponseFormat("cmpl-", "text_completion", "text_completion", _completion)
_CHAT = ResponseFormat(
    "chatcmpl-",
    "chat.completion",
    "chat.completion.chunk",
    _message,
    first_choice={"delta": {"role": "assistant", "content": ""}, "logprobs": None},
)


@dataclass(frozen=True)
class OpenAiApi:
    """The handlers of OpenAI's endpoints, which share one service.

    Attributes:
        service: The tokenizer and the engine.
        observe_first: Function that is called with the seconds from a request to its first text.
    """

    service: Service
    observe_first: Callable[[float], None]

    async def complete(self, body: Mapping[str, Any]) -> dict[str, Any] | EventStream:
        """Answer `POST /v1/completions`.

        Args:
            body: The JSON object that the client sent.

        Raises:
            ApiError: The request is invalid, or the server is busy or has failed.
        """
        request = schema.read_request(schema.CompletionRequest, body)
        self.service.adapter_of(request.model)
        prompts = await self._read_prompts(request.prompt)
        return await self._answer(request, _COMPLETION, prompts, request.max_tokens)

    async def chat(self, body: Mapping[str, Any]) -> dict[str, Any] | EventStream:
        """Answer `POST /v1/chat/completions`.

        Args:
            body: The JSON object that the client sent.

        Raises:
            ApiError: The request is invalid, or the server is busy or has failed.
        """
        request = schema.read_request(schema.ChatRequest, body)
        self.service.adapter_of(request.model)
        prompt = await self._read_messages(request.messages)
        limit = self.service.settings.server.max_tokens_to_oom // request.n
        room = min(self.service.max_length, limit) - len(prompt)
        new_tokens = request.max_completion_tokens or request.max_tokens or max(1, room)
        return await self._answer(request, _CHAT, [prompt], new_tokens)

    def models(self) -> dict[str, Any]:
        """Return the answer to `GET /v1/models`."""
        names = self.service.settings.models
        return {"object": "list", "data": [self.model(name) for name in names]}

    def model(self, name: str) -> dict[str, Any]:
        """Return the answer to `GET /v1/models/NAME`.

        Args:
            name: Name of the model, or of one of its adapters.

        Raises:
            ApiError: There is no such model (404).
        """
        settings = self.service.settings
        return {
            "id": name,
            "object": "model",
            "created": settings.created,
            "owned_by": "megatron",
            "parent": settings.model if self.service.adapter_of(name) else None,
            "max_model_len": self.service.max_length,
            "chat": self.service.settings.chat_template is not None,
        }

    async def _read_prompts(self, prompt: str | list[str] | list[int] | list[list[int]]) -> Prompts:
        """Return the token ids of every prompt.

        An empty text becomes the end-of-document token, after which a new text begins.

        Raises:
            ApiError: There is no prompt, there are too many, or an id is outside the vocabulary
                (400).
        """
        is_single = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))
        inputs: list[Any] = [prompt] if is_single else list(prompt)
        if not 0 < len(inputs) <= MAX_PROMPTS or [] in inputs:
            raise ApiError(400, f"prompt: give 1 to {MAX_PROMPTS} prompts", field="prompt")
        if isinstance(inputs[0], str):
            return [
                self.service.nonempty_prompt(ids)
                for ids in await self.service.texts.tokenize(inputs)
            ]
        max_id = self.service.settings.engine.vocab_size - 1
        prompts = []
        for ids in inputs:
            # A longer prompt will be rejected because of its length.
            checked = ids[: self.service.max_length]
            invalid = next((token for token in checked if not 0 <= token <= max_id), None)
            if invalid is not None:
                message = f"prompt: token id {invalid} is outside the vocabulary (0 to {max_id})"
                raise ApiError(400, message, "prompt")
            prompts.append(tuple(ids))
        return prompts

    async def _read_messages(self, messages: Sequence[schema.Message]) -> tuple[int, ...]:
        """Return the token ids of a conversation.

        Raises:
            ApiError: The model has no template, or the template rejects the messages (400).
        """
        texts = self.service.texts
        text = await texts.render([message.for_template() for message in messages])
        (ids,) = await texts.tokenize([text], parses_special=True)
        if not ids:
            message = "messages: the chat template renders an empty string: add some content"
            raise ApiError(400, message, "messages")
        return ids

    def _make_requests(
        self, request: schema.AnyRequest, prompts: Prompts, new_tokens: int
    ) -> list[TextRequest]:
        """Return `n` sequences for each prompt, in the order of OpenAI's "choices".

        Raises:
            ApiError: The request exceeds a limit (400 or 422).
        """
        service, answers_per_prompt = self.service, request.n
        if len(prompts) * answers_per_prompt > MAX_PROMPTS:
            raise ApiError(
                400,
                f"{len(prompts)} prompts times n {answers_per_prompt} is more than {MAX_PROMPTS} "
                "answers: lower n, or send fewer prompts",
                field="n",
            )
        longest = max(len(prompt) for prompt in prompts)
        if longest + new_tokens > service.max_length:
            raise ApiError(
                422,
                f"the prompt has {longest} tokens and max_tokens is {new_tokens}, but together "
                f"they must fit in the model's {service.max_length}: shorten the prompt or lower "
                "max_tokens",
                field="max_tokens",
            )
        service.check_total(prompts, new_tokens, answers_per_prompt)
        top_k, top_p = service.settings.resolve_top_k_top_p(request.top_k, request.top_p)
        if request.top_p == 0:  # 0 keeps a single token in OpenAI's API, but disables our limit
            top_k = 1
        temperature, default = request.temperature, service.settings.server.temperature
        echo = isinstance(request, schema.CompletionRequest) and request.echo
        sampling = Sampling(
            max_new_tokens=new_tokens,
            temperature=default if temperature is None else temperature,
            top_k=top_k,
            top_p=top_p,
            repetition_penalty=request.repetition_penalty,
            stop_tokens=tuple(sorted(service.stop_tokens)),
            logprobs=request.num_top_logprobs is not None,
            top_logprobs=request.num_top_logprobs or 0,
            prompt_logprobs=echo and request.num_top_logprobs is not None,
        )
        adapter = service.adapter_of(request.model)
        stops = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
        seeds = [service.seed_of(request.seed, index) for index in range(answers_per_prompt)]
        return [
            TextRequest(
                prompt, replace(sampling, seed=seed), stops, service.stop_tokens, echo, adapter
            )
            for prompt in prompts
            for seed in seeds
        ]

    async def _answer(
        self,
        request: schema.AnyRequest,
        response_format: ResponseFormat,
        prompts: Prompts,
        new_tokens: int,
    ) -> dict[str, Any] | EventStream:
        requests = self._make_requests(request, prompts, new_tokens)
        group = AnswerGroup(self.service, requests, self.observe_first)
        if request.stream:
            return EventStream(self._stream(request, response_format, group), group.close)
        with contextlib.closing(group):
            pieces = await group.whole()
        scored = request.num_top_logprobs is not None
        choices = [
            {
                "index": index,
                **response_format.make_choice(piece, scored, False),
                "finish_reason": answer.reason,
            }
            for index, (piece, answer) in enumerate(zip(pieces, group.answers, strict=True))
        ]
        if self.service.settings.retrieves:
            for choice, answer in zip(choices, group.answers, strict=True):
                choice["passages"] = passages_to_json(answer.passages)
        envelope = self._envelope(request, response_format.id_prefix, response_format.whole_object)
        return {**envelope, "choices": choices, "usage": _usage(group.answers, request.n)}

    async def _stream(
        self, request: schema.AnyRequest, response_format: ResponseFormat, group: AnswerGroup
    ) -> AsyncGenerator[dict[str, Any], None]:
        envelope = self._envelope(request, response_format.id_prefix, response_format.chunk_object)
        options = request.stream_options
        includes_usage = options is not None and options.include_usage
        usage = {"usage": None} if includes_usage else {}
        if response_format.first_choice is not None:
            for index in range(len(group.answers)):
                choice = {"index": index, **response_format.first_choice, "finish_reason": None}
                yield {**envelope, "choices": [choice], **usage}
        async for index, piece in group.pieces():
            end = group.answers[index].reason if piece is None else None
            logprobs = request.num_top_logprobs is not None and piece is not None
            part = response_format.make_choice(piece or TextPiece("", ()), logprobs, True)
            choice = {"index": index, **part, "finish_reason": end}
            if piece is not None and piece.passages:
                choice["passages"] = passages_to_json(piece.passages)
            yield {**envelope, "choices": [choice], **usage}
        if includes_usage:
            yield {**envelope, "choices": [], "usage": _usage(group.answers, request.n)}

    def _envelope(self, request: schema.AnyRequest, prefix: str, kind: str) -> dict[str, Any]:
        return {
            "id": prefix + secrets.token_hex(12),
            "object": kind,
            "created": int(time.time()),
            "model": request.model or self.service.settings.model,
        }


def _usage(answers: Sequence[TextAnswer], answers_per_prompt: int) -> dict[str, Any]:
    """Return the token counts. Each prompt counts once, however many answers it has."""
    prompts = sum(len(answer.request.prompt) for answer in answers[::answers_per_prompt])
    new = sum(answer.new_tokens for answer in answers)
    cached = sum(
        answer.finished.cached_tokens for answer in answers[::answers_per_prompt] if answer.finished
    )
    return {
        "prompt_tokens": prompts,
        "completion_tokens": new,
        "total_tokens": prompts + new,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
