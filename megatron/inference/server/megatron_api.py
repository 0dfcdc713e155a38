"""`PUT /api` as Megatron-LM serves it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.inference.request import Beam, Sampling
from megatron.inference.server.answer import Answer, spell_prompt
from megatron.inference.server.errors import ApiError
from megatron.inference.server.megatron_contract import read_contract
from megatron.inference.server.service import Asked, Service
from megatron.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
_TOO_LONG = "Length of prompt + tokens_to_generate longer than allowed"
_TOO_LONG_BEAM = "context length + tokens_to_generate too large"


class MegatronApi:
    """Answers to `PUT /api`: whole texts, prompts included, never streamed."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._newline = _single_token(service.tokenizer, "\n")
        self._double_newline = _single_token(service.tokenizer, "\n\n")
        self._colon = _single_token(service.tokenizer, ":")

    async def handle(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """{text, segments, logprobs}, or of a beam search {text, segments, scores}.

        Raises:
            ApiError: with Megatron's message.
        """
        values = _with_defaults(read_contract(body), body, self._service)
        if not values["no_log"]:
            logger.info("/api %.2000s", dict(body))
        prompts = [await self._tokenize(text, values) for text in values["prompts"]]
        self._check_length(prompts, values)
        if values["beam_width"] is not None:
            return await self._beam_search(prompts[0], values)
        return await self._sample(prompts, values)

    async def _tokenize(self, text: str, values: Mapping[str, Any]) -> tuple[int, ...]:
        start = self._service.begun(()) if values["add_BOS"] else ()
        # A text of nothing that a tokenizer keeps is an empty one too.
        return self._service.begun(start + await self._service.tokenize(text))

    def _check_length(self, prompts: Sequence[Sequence[int]], values: Mapping[str, Any]) -> None:
        new_tokens, width = values["tokens_to_generate"], values["beam_width"]
        if max(len(prompt) for prompt in prompts) + new_tokens > self._service.max_length:
            message = _TOO_LONG if width is None else _TOO_LONG_BEAM
            raise ApiError(422, message, always=False)
        widest = self._service.settings.engine.max_beams
        if width is not None and (new_tokens == 0 or width > widest):
            raise ApiError(
                422,
                f"beam_width {width} with tokens_to_generate {new_tokens}: give a beam_width of at "
                f"most {widest} and at least one token",
                always=False,
            )
        self._service.check_total(prompts, new_tokens, copies=width or 1)

    async def _sample(
        self, prompts: Sequence[tuple[int, ...]], values: Mapping[str, Any]
    ) -> dict[str, Any]:
        asked = [
            Asked(prompt, self._sampling(values, number)) for number, prompt in enumerate(prompts)
        ]
        with self._service.answers(asked, silent=frozenset()) as answers:
            rows = await asyncio.gather(*(self._row(answer) for answer in answers))
        texts, segments, logprobs = zip(*rows, strict=True)
        told = list(logprobs) if values["logprobs"] else None
        return {"text": list(texts), "segments": list(segments), "logprobs": told}

    def _sampling(self, values: Mapping[str, Any], number: int) -> Sampling:
        eol, double_eol = values["stop_on_eol"], values["stop_on_double_eol"]
        ends = set(self._service.ends)
        ends |= self._double_newline if eol or double_eol else set()
        ends |= self._newline if eol else set()
        pair = tuple(self._newline) * 2
        return Sampling(
            max_new_tokens=values["tokens_to_generate"],
            temperature=float(values["temperature"]),
            top_k=values["top_k"],
            top_p=values["top_p"],
            top_p_decay=values["top_p_decay"],
            top_p_bound=values["top_p_bound"],
            seed=self._service.seed_of(values["random_seed"], number),
            stop_tokens=tuple(sorted(ends)),
            stop_sequences=(pair,) if double_eol and pair else (),
            banned_pairs=self._banned(values),
            logprobs=values["logprobs"],
            prompt_logprobs=values["logprobs"],
        )

    def _banned(self, values: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
        if not values["prevent_newline_after_colon"]:
            return ()
        return tuple((colon, newline) for colon in self._colon for newline in self._newline)

    async def _row(self, answer: Answer) -> tuple[str, list[str], list[float]]:
        """Text, segments and log probabilities of one prompt with its answer."""
        tokens = [token async for piece in answer.pieces() for token in piece.tokens]
        ids = [*answer.prompt_ids, *(token.id for token in tokens)]
        text, segments = await asyncio.to_thread(_spell, self._service.tokenizer, ids)
        scored = [token.logprob for token in tokens if token.logprob is not None]
        return text, segments, [*(answer.prompt.logprobs if answer.prompt else ()), *scored]

    async def _beam_search(
        self, prompt: tuple[int, ...], values: Mapping[str, Any]
    ) -> dict[str, Any]:
        vocabulary = range(self._service.settings.engine.vocab_size)
        sampling = Sampling(
            max_new_tokens=values["tokens_to_generate"],
            top_k=1,
            stop_tokens=tuple(token for token in values["stop_tokens"] if token in vocabulary),
            banned_pairs=self._banned(values),
            beam_width=values["beam_width"],
            length_penalty=values["length_penalty"],
            logprobs=True,
        )
        with self._service.answers([Asked(prompt, sampling)], silent=frozenset()) as (answer,):
            tokens = [token async for piece in answer.pieces() for token in piece.tokens]
        assert answer.finished is not None
        beams = answer.finished.beams or (_as_beam(tokens, sampling.length_penalty),)
        spelled = [
            await asyncio.to_thread(_spell, self._service.tokenizer, [*prompt, *beam.tokens])
            for beam in beams
        ]
        return {
            "text": [text for text, _ in spelled],
            "segments": [segments for _, segments in spelled],
            "scores": [beam.score for beam in beams],
        }


def _with_defaults(
    values: dict[str, Any], body: Mapping[str, Any], service: Service
) -> dict[str, Any]:
    """For fields that the request leaves out: the command line's values, the tokenizer's end."""
    defaults = service.settings.defaults
    top_k, top_p = defaults.choose(body.get("top_k"), body.get("top_p"))
    return {
        **values,
        "temperature": body.get("temperature", defaults.temperature),
        "top_k": top_k,
        "top_p": top_p,
        "stop_tokens": {body["stop_token"]} if "stop_token" in body else service.ends,
    }


def _single_token(tokenizer: Tokenizer, text: str) -> frozenset[int]:
    """The id that stands for exactly this text, where there is one: in GPT-2's vocabulary 198 for
    the end of a line and 628 for two."""
    ids = tokenizer.tokenize_open(text)
    return frozenset(token for token in ids[-1:] if tokenizer.detokenize([token]) == text)


def _spell(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[str, list[str]]:
    return tokenizer.detokenize(ids), [token.text for token in spell_prompt(tokenizer, ids)]


def _as_beam(tokens: Sequence[Any], length_penalty: float) -> Beam:
    """A search of width 1 is greedy; its score as the engine's beams have it."""
    logprobs = tuple(token.logprob for token in tokens)
    score = sum(logprobs) / max(1, len(logprobs)) ** length_penalty
    return Beam(tuple(token.id for token in tokens), score, logprobs)
