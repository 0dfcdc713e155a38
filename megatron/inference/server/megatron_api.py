"""`PUT /api` as Megatron-LM serves it: its fields, its rules in its order, and its very messages.

Three rules are stricter than Megatron's own: true and false are not integers, every prompt must be
a string, and the length penalty has bounds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, Field
from typing_extensions import TypedDict  # pydantic asks for this one before Python 3.12

from megatron.inference.request import MOST_LENGTH_PENALTY, Beam, Sampling
from megatron.inference.server.endpoint import ApiError
from megatron.inference.server.service import Asked, Service, TextAnswer, spell_prompt
from megatron.inference.server.settings import MAX_PROMPTS
from megatron.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
_MAX_TOP_K = 1000
_MAX_TEMPERATURE = 100.0
_TOO_LONG = "Length of prompt + tokens_to_generate longer than allowed"
_TOO_LONG_BEAM = "context length + tokens_to_generate too large"


class MegatronRequest(BaseModel):
    """The body of `PUT /api`. The rules below are asked in the order of these fields."""

    prompts: list[str] = Field(
        min_length=1, max_length=MAX_PROMPTS, description="texts to continue"
    )
    tokens_to_generate: int = Field(
        64, ge=0, description="largest number of new tokens; 0 with logprobs scores the prompts"
    )
    logprobs: bool = Field(
        False, description="return the log probability of every token, the prompt's too"
    )
    temperature: float = Field(
        1.0, gt=0, le=_MAX_TEMPERATURE, description="divide the scores by this before sampling"
    )
    top_k: int = Field(
        0,
        ge=0,
        le=_MAX_TOP_K,
        description="sample from the k most likely tokens; 1: greedy; 0: all",
    )
    top_p: float = Field(
        0.0,
        description="sample from the most likely tokens that together have this probability; "
        "0: all",
    )
    top_p_decay: float = Field(
        0.0, description="multiply top_p by this after each token; 0: keep it"
    )
    top_p_bound: float = Field(0.0, description="top_p does not decay below this")
    add_BOS: bool = Field(  # noqa: N815
        False, description="put the end-of-document token before each prompt"
    )
    stop_on_double_eol: bool = Field(False, description="end an answer after an empty line")
    stop_on_eol: bool = Field(False, description="end an answer after a line")
    prevent_newline_after_colon: bool = Field(
        False, description="never choose a new line right after a colon"
    )
    random_seed: int = Field(-1, ge=0, description="the same seed gives the same answers")
    no_log: bool = Field(False, description="do not write this request to the server's log")
    beam_width: int | None = Field(
        None, ge=1, description="search for this many best answers instead of sampling"
    )
    stop_token: int = Field(
        50256,
        description="with beam search: ends an answer; default: the tokenizer's end of document",
    )
    length_penalty: float = Field(
        1.0,
        ge=-MOST_LENGTH_PENALTY,
        le=MOST_LENGTH_PENALTY,
        description="with beam search: a score is divided by the length to this power",
    )


class MegatronAnswer(TypedDict, total=False):
    """The answer of `PUT /api`. A beam search has scores in the place of logprobs."""

    text: list[str]
    segments: list[list[str]]
    logprobs: list[list[float]] | None
    scores: list[float]


class ContractRule(NamedTuple):
    """What must hold for a field, and what is said if it does not.

    Attributes:
        field: Name of the field.
        holds: Function of the field's value and the values of this and the earlier fields.
        message: Megatron's message.
        absent_too: Whether the rule is asked about the default as well.
        always: Whether the status is 400 under `--legacy-status-codes` too, as in Megatron.
    """

    field: str
    holds: Callable[[Any, Mapping[str, Any]], bool]
    message: str
    absent_too: bool = False
    always: bool = False


def _is(kind: type) -> Callable[[Any, Mapping[str, Any]], bool]:
    # bool is a subclass of int, but true and false are not integers here.
    return lambda value, _: type(value) is kind


def _switch(name: str) -> ContractRule:
    return ContractRule(name, _is(bool), f"{name} must be a boolean value")


# Megatron asks these in this order, and answers with the first that does not hold.
_RULES = (
    ContractRule(
        "prompts",
        lambda v, _: isinstance(v, list) and all(isinstance(prompt, str) for prompt in v),
        "prompts is not a list of strings",
        always=True,
    ),
    ContractRule("prompts", lambda v, _: len(v) > 0, "prompts is empty", always=True),
    ContractRule(
        "prompts",
        lambda v, _: len(v) <= MAX_PROMPTS,
        f"Maximum number of prompts is {MAX_PROMPTS}",
        always=True,
    ),
    ContractRule(
        "tokens_to_generate", _is(int), "tokens_to_generate must be an integer greater than 0"
    ),
    ContractRule(
        "tokens_to_generate",
        lambda v, _: v >= 0,
        "tokens_to_generate must be an integer greater than or equal to 0",
    ),
    _switch("logprobs"),
    ContractRule(
        "logprobs",
        lambda v, seen: v or seen["tokens_to_generate"] > 0,
        "tokens_to_generate=0 implies logprobs should be True",
        absent_too=True,
    ),
    ContractRule(
        "temperature",
        lambda v, _: type(v) in (int, float) and 0 < v <= _MAX_TEMPERATURE,
        "temperature must be a positive number less than or equal to 100.0",
    ),
    ContractRule(
        "top_k",
        _is(int),
        "top_k must be an integer equal to or greater than 0 and less than or equal to 1000",
    ),
    ContractRule(
        "top_k",
        lambda v, _: 0 <= v <= _MAX_TOP_K,
        "top_k must be equal to or greater than 0 and less than or equal to 1000",
    ),
    ContractRule("top_p", _is(float), "top_p must be a positive float less than or equal to 1.0"),
    ContractRule(
        "top_p",
        lambda v, seen: not (v > 0 and seen["top_k"] > 0),
        "cannot set both top-k and top-p samplings.",
    ),
    ContractRule("top_p", lambda v, _: 0 <= v <= 1, "top_p must be less than or equal to 1.0"),
    ContractRule(
        "top_p_decay",
        _is(float),
        "top_p_decay must be a positive float less than or equal to 1.0",
    ),
    ContractRule(
        "top_p_decay",
        lambda _, seen: seen["top_p"] != 0,
        "top_p_decay cannot be set without top_p",
    ),
    ContractRule(
        "top_p_decay", lambda v, _: 0 <= v <= 1, "top_p_decay must be less than or equal to 1.0"
    ),
    ContractRule(
        "top_p_bound",
        _is(float),
        "top_p_bound must be a positive float less than or equal to top_p",
    ),
    ContractRule(
        "top_p_bound",
        lambda _, seen: seen["top_p"] != 0,
        "top_p_bound cannot be set without top_p",
    ),
    ContractRule(
        "top_p_bound",
        lambda v, seen: 0 < v <= seen["top_p"],
        "top_p_bound must be greater than 0 and less than top_p",
    ),
    _switch("add_BOS"),
    ContractRule(
        "add_BOS",
        lambda v, seen: v or all(seen["prompts"]),
        "Empty prompts require add_BOS=true",
        absent_too=True,
    ),
    *map(_switch, ("stop_on_double_eol", "stop_on_eol", "prevent_newline_after_colon")),
    ContractRule("random_seed", _is(int), "random_seed must be integer"),
    ContractRule("random_seed", lambda v, _: v >= 0, "random_seed must be a positive integer"),
    _switch("no_log"),
    ContractRule("beam_width", _is(int), "beam_width must be integer"),
    ContractRule("beam_width", lambda v, _: v >= 1, "beam_width must be an integer > 1"),
    ContractRule(
        "beam_width",
        lambda _, seen: len(seen["prompts"]) == 1,
        "When doing beam_search, batch size must be 1",
    ),
    ContractRule("stop_token", _is(int), "stop_token must be an integer"),
    ContractRule("length_penalty", _is(float), "length_penalty must be a float"),
    ContractRule(
        "length_penalty",
        lambda v, _: abs(v) <= MOST_LENGTH_PENALTY,
        f"length_penalty must be a float from {-MOST_LENGTH_PENALTY:g} to {MOST_LENGTH_PENALTY:g}",
    ),
)

# (name, whether it must be present, message), asked before anything else.
_NAMES = (
    ("prompts", True, "prompts argument required"),
    ("max_len", False, "max_len is no longer used.  Replace with tokens_to_generate"),
    ("sentences", False, "sentences is no longer used.  Replace with prompts"),
)


def read_contract(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return every field's value. Fields that Megatron does not know are ignored, as it does.

    Raises:
        ApiError: The first rule that does not hold.
    """
    for name, wanted, message in _NAMES:
        if (name in body) != wanted:
            raise ApiError(400, message, field=name)
    values = {name: field.default for name, field in MegatronRequest.model_fields.items()}
    values |= {name: body[name] for name in values if name in body}
    for rule in _RULES:
        name = rule.field
        if (name in body or rule.absent_too) and not rule.holds(values[name], values):
            raise ApiError(400, rule.message, field=name, always=rule.always)
    return values


class MegatronApi:
    """Answers to `PUT /api`: whole texts, prompts included, never streamed."""

    def __init__(self, service: Service) -> None:
        """Look up the tokens that end lines.

        Args:
            service: Tokenizer and engine.
        """
        self._service = service
        self._newline = _single_token(service.tokenizer, "\n")
        self._double_newline = _single_token(service.tokenizer, "\n\n")
        self._colon = _single_token(service.tokenizer, ":")

    async def handle(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return {text, segments, logprobs}, or for a beam search {text, segments, scores}.

        Raises:
            ApiError: With Megatron's message.
        """
        service = self._service
        values = read_contract(body)
        # The command line and the tokenizer have defaults of their own.
        defaults = service.settings.defaults
        values["top_k"], values["top_p"] = defaults.choose(body.get("top_k"), body.get("top_p"))
        values["temperature"] = body.get("temperature", defaults.temperature)
        if not values["no_log"]:
            logger.info("/api %.2000s", dict(body))
        start = service.begun(()) if values["add_BOS"] else ()
        # A text of which the tokenizer keeps nothing is an empty one too.
        prompts = [service.begun(start + await service.tokenize(t)) for t in values["prompts"]]
        self._check_length(prompts, values)
        banned: tuple[tuple[int, int], ...] = ()
        if values["prevent_newline_after_colon"]:
            banned = tuple((colon, line) for colon in self._colon for line in self._newline)
        if values["beam_width"] is None:
            answer = await self._sample(prompts, values, banned)
        else:
            ends = {body["stop_token"]} if "stop_token" in body else service.ends
            answer = await self._beam_search(prompts[0], values, banned, ends)
        return dict(answer)

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
        self,
        prompts: Sequence[tuple[int, ...]],
        values: Mapping[str, Any],
        banned: tuple[tuple[int, int], ...],
    ) -> MegatronAnswer:
        eol, double_eol = values["stop_on_eol"], values["stop_on_double_eol"]
        ends = set(self._service.ends)
        ends |= self._double_newline if eol or double_eol else set()
        ends |= self._newline if eol else set()
        pair = tuple(self._newline) * 2

        def sampling(number: int) -> Sampling:
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
                banned_pairs=banned,
                logprobs=values["logprobs"],
                prompt_logprobs=values["logprobs"],
            )

        asked = [Asked(prompt, sampling(number)) for number, prompt in enumerate(prompts)]
        with self._service.answers(asked, silent=frozenset()) as answers:
            rows = await asyncio.gather(*(self._row(answer) for answer in answers))
        texts, segments, logprobs = zip(*rows, strict=True)
        told = list(logprobs) if values["logprobs"] else None
        return {"text": list(texts), "segments": list(segments), "logprobs": told}

    async def _row(self, answer: TextAnswer) -> tuple[str, list[str], list[float]]:
        """Return text, segments and log probabilities of one prompt with its answer."""
        tokens = [token async for piece in answer.pieces() for token in piece.tokens]
        ids = [*answer.prompt_ids, *(token.id for token in tokens)]
        text, segments = await asyncio.to_thread(_spell, self._service.tokenizer, ids)
        scored = [token.logprob for token in tokens if token.logprob is not None]
        return text, segments, [*(answer.prompt.logprobs if answer.prompt else ()), *scored]

    async def _beam_search(
        self,
        prompt: tuple[int, ...],
        values: Mapping[str, Any],
        banned: tuple[tuple[int, int], ...],
        ends: frozenset[int] | set[int],
    ) -> MegatronAnswer:
        vocabulary = range(self._service.settings.engine.vocab_size)
        sampling = Sampling(
            max_new_tokens=values["tokens_to_generate"],
            top_k=1,
            stop_tokens=tuple(token for token in ends if token in vocabulary),
            banned_pairs=banned,
            beam_width=values["beam_width"],
            length_penalty=values["length_penalty"],
            logprobs=True,
        )
        with self._service.answers([Asked(prompt, sampling)], silent=frozenset()) as (answer,):
            tokens = [token async for piece in answer.pieces() for token in piece.tokens]
        assert answer.finished is not None
        beams = answer.finished.beams
        if not beams:  # a search of width 1 is greedy decoding; score it as the engine does beams
            logprobs = tuple(token.logprob or 0.0 for token in tokens)
            score = sum(logprobs) / max(1, len(logprobs)) ** sampling.length_penalty
            beams = (Beam(tuple(token.id for token in tokens), score, logprobs),)
        spelled = [
            await asyncio.to_thread(_spell, self._service.tokenizer, [*prompt, *beam.tokens])
            for beam in beams
        ]
        return {
            "text": [text for text, _ in spelled],
            "segments": [segments for _, segments in spelled],
            "scores": [beam.score for beam in beams],
        }


def _single_token(tokenizer: Tokenizer, text: str) -> frozenset[int]:
    """Return the id that stands for exactly this text, if there is one.

    In GPT-2's vocabulary the end of a line is 198 and that of two lines 628.
    """
    ids = tokenizer.tokenize_open(text)
    return frozenset(token for token in ids[-1:] if tokenizer.detokenize([token]) == text)


def _spell(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[str, list[str]]:
    return tokenizer.detokenize(ids), [token.text for token in spell_prompt(tokenizer, ids)]
