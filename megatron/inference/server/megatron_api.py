"""`PUT /api` as Megatron-LM serves it, with the same fields, order of rules and messages.

Three rules are stricter than Megatron's own: true and false are not integers, every prompt must be
a string, and the length penalty has bounds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict  # pydantic requires this one before Python 3.12

from megatron.inference.request import MOST_LENGTH_PENALTY, Beam, Sampling
from megatron.inference.server.endpoint import ApiError
from megatron.inference.server.service import Service, TextAnswer, TextRequest, spell_prompt
from megatron.inference.server.settings import MAX_PROMPTS
from megatron.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
_MAX_TOP_K = 1000
_MAX_TEMPERATURE = 100.0
_TOO_LONG = "Length of prompt + tokens_to_generate longer than allowed"
_TOO_LONG_BEAM = "context length + tokens_to_generate too large"


class MegatronRequest(BaseModel):
    """The body of `PUT /api`, whose fields are checked in this order."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    prompts: list[str] = Field(min_length=1, max_length=MAX_PROMPTS)
    """Texts to continue."""
    tokens_to_generate: int = Field(64, ge=0)
    """Largest number of new tokens. 0 with logprobs only scores the prompts."""
    logprobs: bool = False
    """Return the log probability of every token, including the prompt's."""
    temperature: float = Field(1.0, gt=0, le=_MAX_TEMPERATURE)
    """Divide the scores by this number before sampling."""
    top_k: int = Field(0, ge=0, le=_MAX_TOP_K)
    """Sample from the k most likely tokens. 1 is greedy; 0 disables the limit."""
    top_p: float = 0.0
    """Sample from the most likely tokens that together have this probability. 0 disables the
    limit."""
    top_p_decay: float = 0.0
    """Multiply top_p by this factor after each token. 0 keeps it constant."""
    top_p_bound: float = 0.0
    """Value below which top_p does not decay."""
    add_BOS: bool = False  # noqa: N815
    """Put the end-of-document token before each prompt."""
    stop_on_double_eol: bool = False
    """End an answer after an empty line."""
    stop_on_eol: bool = False
    """End an answer after a line."""
    prevent_newline_after_colon: bool = False
    """Never choose a new line right after a colon."""
    random_seed: int = Field(-1, ge=0)
    """Seed of the random draws. The same seed gives the same answers."""
    no_log: bool = False
    """Do not write this request to the server's log."""
    beam_width: int | None = Field(None, ge=1)
    """Search for this many best answers instead of sampling."""
    stop_token: int = 50256
    """Token that ends an answer of a beam search. The default is the tokenizer's end of
    document."""
    length_penalty: float = Field(1.0, ge=-MOST_LENGTH_PENALTY, le=MOST_LENGTH_PENALTY)
    """Power of the length by which a beam search divides its scores."""


class MegatronAnswer(TypedDict, total=False):
    """The answer of `PUT /api`. A beam search has scores instead of logprobs."""

    text: list[str]
    segments: list[list[str]]
    logprobs: list[list[float]] | None
    scores: list[float]


# Returns whether a rule holds for a field's value, given the values of all earlier fields.
Holds = Callable[[Any, Mapping[str, Any]], bool]


def _is(kind: type) -> Holds:
    # bool is a subclass of int, but true and false are not integers here.
    return lambda value, _: type(value) is kind


# Each field's rules with Megatron's messages, in the order in which Megatron checks them.
_RULES: dict[str, tuple[tuple[Holds, str], ...]] = {
    "prompts": (
        (
            lambda v, _: isinstance(v, list) and all(isinstance(prompt, str) for prompt in v),
            "prompts is not a list of strings",
        ),
        (lambda v, _: len(v) > 0, "prompts is empty"),
        (lambda v, _: len(v) <= MAX_PROMPTS, f"Maximum number of prompts is {MAX_PROMPTS}"),
    ),
    "tokens_to_generate": (
        (_is(int), "tokens_to_generate must be an integer greater than 0"),
        (lambda v, _: v >= 0, "tokens_to_generate must be an integer greater than or equal to 0"),
    ),
    "temperature": (
        (
            lambda v, _: type(v) in (int, float) and 0 < v <= _MAX_TEMPERATURE,
            "temperature must be a positive number less than or equal to 100.0",
        ),
    ),
    "top_k": (
        (
            _is(int),
            "top_k must be an integer equal to or greater than 0 and less than or equal to 1000",
        ),
        (
            lambda v, _: 0 <= v <= _MAX_TOP_K,
            "top_k must be equal to or greater than 0 and less than or equal to 1000",
        ),
    ),
    "top_p": (
        (_is(float), "top_p must be a positive float less than or equal to 1.0"),
        (
            lambda v, seen: not (v > 0 and seen["top_k"] > 0),
            "cannot set both top-k and top-p samplings.",
        ),
        (lambda v, _: 0 <= v <= 1, "top_p must be less than or equal to 1.0"),
    ),
    "top_p_decay": (
        (_is(float), "top_p_decay must be a positive float less than or equal to 1.0"),
        (lambda _, seen: seen["top_p"] != 0, "top_p_decay cannot be set without top_p"),
        (lambda v, _: 0 <= v <= 1, "top_p_decay must be less than or equal to 1.0"),
    ),
    "top_p_bound": (
        (_is(float), "top_p_bound must be a positive float less than or equal to top_p"),
        (lambda _, seen: seen["top_p"] != 0, "top_p_bound cannot be set without top_p"),
        (
            lambda v, seen: 0 < v <= seen["top_p"],
            "top_p_bound must be greater than 0 and less than top_p",
        ),
    ),
    "random_seed": (
        (_is(int), "random_seed must be integer"),
        (lambda v, _: v >= 0, "random_seed must be a positive integer"),
    ),
    "beam_width": (
        (_is(int), "beam_width must be integer"),
        (lambda v, _: v >= 1, "beam_width must be an integer > 1"),
        (
            lambda _, seen: len(seen["prompts"]) == 1,
            "When doing beam_search, batch size must be 1",
        ),
    ),
    "stop_token": ((_is(int), "stop_token must be an integer"),),
    "length_penalty": (
        (_is(float), "length_penalty must be a float"),
        (
            lambda v, _: abs(v) <= MOST_LENGTH_PENALTY,
            f"length_penalty must be a float from {-MOST_LENGTH_PENALTY:g} to "
            f"{MOST_LENGTH_PENALTY:g}",
        ),
    ),
}
# Rules that are also checked for defaults, after a field's own rules.
_RULES_OF_DEFAULTS: dict[str, tuple[Holds, str]] = {
    "logprobs": (
        lambda v, seen: v or seen["tokens_to_generate"] > 0,
        "tokens_to_generate=0 implies logprobs should be True",
    ),
    "add_BOS": (
        lambda v, seen: v or all(seen["prompts"]),
        "Empty prompts require add_BOS=true",
    ),
}

# (name, whether it must be present, message), checked before anything else.
_NAMES = (
    ("prompts", True, "prompts argument required"),
    ("max_len", False, "max_len is no longer used.  Replace with tokens_to_generate"),
    ("sentences", False, "sentences is no longer used.  Replace with prompts"),
)


def read_contract(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return every field's value, ignoring fields that Megatron does not know, as it does.

    Raises:
        ApiError: A rule does not hold. The message is that of the first such rule.
    """
    for name, is_required, message in _NAMES:
        if (name in body) != is_required:
            raise ApiError(400, message, field=name)
    values = {name: field.default for name, field in MegatronRequest.model_fields.items()}
    values |= {name: body[name] for name in values if name in body}
    for name, field in MegatronRequest.model_fields.items():
        rules: tuple[tuple[Holds, str], ...] = ()
        if name in body:
            is_switch = field.annotation is bool
            switch = (_is(bool), f"{name} must be a boolean value")
            rules = (switch,) if is_switch else _RULES[name]
        if name in _RULES_OF_DEFAULTS:
            rules = (*rules, _RULES_OF_DEFAULTS[name])
        for holds, message in rules:
            if not holds(values[name], values):
                # Megatron always answers mistakes in the prompts with 400.
                raise ApiError(400, message, field=name, always=name == "prompts")
    return values


class MegatronApi:
    """The handler of `PUT /api`, which returns whole texts, prompts included, never streamed."""

    def __init__(self, service: Service) -> None:
        """Look up the tokens for the end of a line and a colon.

        Args:
            service: The tokenizer and the engine.
        """
        self._service = service
        self._newline = _single_token(service.tokenizer, "\n")
        self._double_newline = _single_token(service.tokenizer, "\n\n")
        self._colon = _single_token(service.tokenizer, ":")

    async def handle(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return {text, segments, logprobs}, or for a beam search {text, segments, scores}.

        Raises:
            ApiError: The request has a mistake. The message is Megatron's.
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
        # A tokenizer may give no tokens for a text, which then counts as empty.
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

        requests = [TextRequest(prompt, sampling(number)) for number, prompt in enumerate(prompts)]
        answers, stack = self._service.start(requests, silent=frozenset())
        with stack:
            rows = await asyncio.gather(*(self._row(answer) for answer in answers))
        texts, segments, logprobs = zip(*rows, strict=True)
        scores = list(logprobs) if values["logprobs"] else None
        return {"text": list(texts), "segments": list(segments), "logprobs": scores}

    async def _row(self, answer: TextAnswer) -> tuple[str, list[str], list[float]]:
        """Return the text, segments and log probabilities of one prompt with its answer."""
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
        requests = [TextRequest(prompt, sampling)]
        (answer,), stack = self._service.start(requests, silent=frozenset())
        with stack:
            tokens = [token async for piece in answer.pieces() for token in piece.tokens]
        assert answer.finished is not None
        beams = answer.finished.beams
        if not beams:  # a search of width 1 is greedy decoding, scored here as the engine would
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
    """Return the id of the token with exactly this text, if there is one.

    In GPT-2's vocabulary the end of a line is token 198, and the end of two lines 628.
    """
    ids = tokenizer.tokenize_open(text)
    return frozenset(token for token in ids[-1:] if tokenizer.detokenize([token]) == text)


def _spell(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[str, list[str]]:
    return tokenizer.detokenize(ids), [token.text for token in spell_prompt(tokenizer, ids)]
