"""`PUT /api` as Megatron-LM serves it, with the same fields, order of rules and messages.

Three rules are stricter than Megatron's own: true and false are not integers, every prompt must be
a string, and the length penalty has bounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict  # pydantic requires this one before Python 3.12

from megatron.inference.request import MAX_LENGTH_PENALTY, Beam, NeighborPassage, Sampling
from megatron.inference.server.endpoint import ApiError
from megatron.inference.server.schema import describe
from megatron.inference.server.service import (
    AnswerGroup,
    Service,
    TextAnswer,
    TextPiece,
    TextRequest,
    decode_prompt,
    passages_to_json,
)
from megatron.inference.server.settings import MAX_PROMPTS
from megatron.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
_MAX_TOP_K = 1000
_MAX_TEMPERATURE = 100.0
_TOO_LONG = "Length of prompt + tokens_to_generate longer than allowed"
_TOO_LONG_BEAM = "context length + tokens_to_generate too large"


class MegatronRequest(BaseModel):
    """The body of `PUT /api`.

    Attributes:
        prompts: Texts to continue.
        tokens_to_generate: Maximum number of new tokens. 0 with logprobs only scores the prompts.
        logprobs: Return the log probability of every token, including the prompt's.
        temperature: Divide the logits by this number before sampling.
        top_k: Sample from the k most likely tokens. 1 is greedy; 0 disables the limit.
        top_p: Sample from the most likely tokens that together have this probability. 0 disables
            the limit.
        top_p_decay: Multiply top_p by this factor after each token. 0 keeps it constant.
        top_p_bound: Value below which top_p does not decay.
        add_BOS: Put the end-of-document token before each prompt.
        stop_on_double_eol: End an answer at the first empty line. No effect in a beam search.
        stop_on_eol: End an answer at the first newline. No effect in a beam search.
        prevent_newline_after_colon: Never choose a newline right after a colon.
        random_seed: Seed for sampling. The same seed gives the same answers. Equal prompts in a
            request get different ones.
        no_log: Do not write this request to the server's log, even under --log-requests.
        beam_width: Number of beams. Instead of sampling, a beam search returns the best answers, as
            many as there are beams.
        stop_token: Token that ends the answers of a beam search. By default, the tokens that end
            all other answers do, such as the tokenizer's end of document.
        length_penalty: A beam search divides each score by the answer's length raised to this
            power.
        model: Name of the model or of one of its adapters, as in /v1/models. The default is the
            model without an adapter. Not in Megatron's API.
    """

    model_config = ConfigDict(json_schema_extra=describe)

    prompts: list[str] = Field(min_length=1, max_length=MAX_PROMPTS)
    tokens_to_generate: int = Field(64, ge=0)
    logprobs: bool = False
    temperature: float = Field(1.0, gt=0, le=_MAX_TEMPERATURE)
    top_k: int = Field(0, ge=0, le=_MAX_TOP_K)
    top_p: float = 0.0
    top_p_decay: float = 0.0
    top_p_bound: float = 0.0
    add_BOS: bool = False  # noqa: N815
    stop_on_double_eol: bool = False
    stop_on_eol: bool = False
    prevent_newline_after_colon: bool = False
    random_seed: int | None = Field(None, ge=0)
    no_log: bool = False
    beam_width: int | None = Field(None, ge=1)
    stop_token: int | None = None
    length_penalty: float = Field(1.0, ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY)
    model: str | None = None


class MegatronAnswer(TypedDict, total=False):
    """The answer of `PUT /api`. A beam search has scores instead of logprobs.

    Only a Retro model's answer has passages, a list for each prompt.
    """

    text: list[str]
    segments: list[list[str]]
    logprobs: list[list[float]] | None
    scores: list[float]
    passages: list[list[NeighborPassage]]


# A function that returns whether a rule holds for a field's value, given the whole request.
Check = Callable[[Any, MegatronRequest], bool]


def _has_type(kind: type) -> Check:
    # bool is a subclass of int, but JSON's true and false are not integers.
    return lambda value, _: type(value) is kind


_TOP_K_RANGE = "equal to or greater than 0 and less than or equal to 1000"
# (field, rule, Megatron's message), in Megatron's order. {} in a message stands for the field.
_RULES: tuple[tuple[str, Check, str], ...] = (
    (
        "prompts",
        lambda v, _: isinstance(v, list) and all(isinstance(text, str) for text in v),
        "{} is not a list of strings",
    ),
    ("prompts", lambda v, _: len(v) > 0, "{} is empty"),
    ("prompts", lambda v, _: len(v) <= MAX_PROMPTS, f"Maximum number of prompts is {MAX_PROMPTS}"),
    ("tokens_to_generate", _has_type(int), "{} must be an integer greater than 0"),
    ("tokens_to_generate", lambda v, _: v >= 0, "{} must be an integer greater than or equal to 0"),
    ("logprobs", _has_type(bool), "{} must be a boolean value"),
    (
        "logprobs",
        lambda v, r: v or r.tokens_to_generate > 0,
        "tokens_to_generate=0 implies logprobs should be True",
    ),
    (
        "temperature",
        lambda v, _: type(v) in (int, float) and 0 < v <= _MAX_TEMPERATURE,
        "{} must be a positive number less than or equal to 100.0",
    ),
    ("top_k", _has_type(int), "{} must be an integer " + _TOP_K_RANGE),
    ("top_k", lambda v, _: 0 <= v <= _MAX_TOP_K, "{} must be " + _TOP_K_RANGE),
    ("top_p", _has_type(float), "{} must be a positive float less than or equal to 1.0"),
    ("top_p", lambda v, r: v <= 0 or r.top_k <= 0, "cannot set both top-k and top-p samplings."),
    ("top_p", lambda v, _: 0 <= v <= 1, "{} must be less than or equal to 1.0"),
    ("top_p_decay", _has_type(float), "{} must be a positive float less than or equal to 1.0"),
    ("top_p_decay", lambda _, r: r.top_p != 0, "{} cannot be set without top_p"),
    ("top_p_decay", lambda v, _: 0 <= v <= 1, "{} must be less than or equal to 1.0"),
    ("top_p_bound", _has_type(float), "{} must be a positive float less than or equal to top_p"),
    ("top_p_bound", lambda _, r: r.top_p != 0, "{} cannot be set without top_p"),
    ("top_p_bound", lambda v, r: 0 < v <= r.top_p, "{} must be greater than 0 and less than top_p"),
    ("add_BOS", _has_type(bool), "{} must be a boolean value"),
    ("add_BOS", lambda v, r: v or all(r.prompts), "Empty prompts require add_BOS=true"),
    ("stop_on_double_eol", _has_type(bool), "{} must be a boolean value"),
    ("stop_on_eol", _has_type(bool), "{} must be a boolean value"),
    ("prevent_newline_after_colon", _has_type(bool), "{} must be a boolean value"),
    ("random_seed", _has_type(int), "{} must be integer"),
    ("random_seed", lambda v, _: v >= 0, "{} must be a positive integer"),
    ("no_log", _has_type(bool), "{} must be a boolean value"),
    ("beam_width", _has_type(int), "{} must be integer"),
    ("beam_width", lambda v, _: v >= 1, "{} must be an integer > 1"),
    (
        "beam_width",
        lambda _, r: len(r.prompts) == 1,
        "When doing beam_search, batch size must be 1",
    ),
    ("stop_token", _has_type(int), "{} must be an integer"),
    ("length_penalty", _has_type(float), "{} must be a float"),
    (
        "length_penalty",
        lambda v, _: abs(v) <= MAX_LENGTH_PENALTY,
        f"{{}} must be a float from {-MAX_LENGTH_PENALTY:g} to {MAX_LENGTH_PENALTY:g}",
    ),
    ("model", lambda v, _: v is None or isinstance(v, str), "{} must be a string"),
)
# Fields whose default values are also checked.
_CHECKED_DEFAULTS = ("logprobs", "add_BOS")

# (name, whether it must be present, message), checked before anything else.
_FIELD_PRESENCE = (
    ("prompts", True, "prompts argument required"),
    ("max_len", False, "max_len is no longer used.  Replace with tokens_to_generate"),
    ("sentences", False, "sentences is no longer used.  Replace with prompts"),
)


def parse_request(body: Mapping[str, Any]) -> MegatronRequest:
    """Parse and check the body of a request. Unknown fields are ignored, as in Megatron.

    Args:
        body: The JSON object that the client sent.

    Raises:
        ApiError: The request breaks a rule. The message is that of the first rule it breaks.
    """
    for name, is_required, message in _FIELD_PRESENCE:
        if (name in body) != is_required:
            raise ApiError(400, message, name)
    fields = {name: body[name] for name in MegatronRequest.model_fields if name in body}
    request = MegatronRequest.model_construct(**fields)
    for name, is_valid, message in _RULES:
        is_checked = name in fields or name in _CHECKED_DEFAULTS
        if is_checked and not is_valid(getattr(request, name), request):
            # Megatron always answers a mistake in the prompts with status 400.
            raise ApiError(400, message.format(name), name, keeps_status=name == "prompts")
    return request


class MegatronApi:
    """The handler of `PUT /api`, which returns whole texts including prompts, and never streams."""

    def __init__(self, service: Service) -> None:
        """Look up the tokens for a newline, a double newline and a colon.

        Args:
            service: The tokenizer and the engine.
        """
        self._service = service
        self._newline = _single_token(service.tokenizer, "\n")
        self._double_newline = _single_token(service.tokenizer, "\n\n")
        self._colon = _single_token(service.tokenizer, ":")

    async def handle(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return {text, segments, logprobs}, or for a beam search {text, segments, scores}.

        With a Retro model, the result also has the passages that were read for each prompt.

        Args:
            body: The JSON object that the client sent.

        Raises:
            ApiError: The request is invalid, or the server is busy or has failed. If the request
                breaks one of Megatron's rules, the message is Megatron's.
        """
        service, request = self._service, parse_request(body)
        if service.settings.server.log_requests and not request.no_log:
            logger.info("/api %.2000s", dict(body))
        adapter = service.adapter_of(request.model)
        start = service.nonempty_prompt(()) if request.add_BOS else ()
        # A tokenizer may return no tokens for a text, which then counts as empty.
        message = _TOO_LONG if request.beam_width is None else _TOO_LONG_BEAM
        token_ids = await service.texts.tokenize(request.prompts, too_long=message)
        prompts = [service.nonempty_prompt(start + ids) for ids in token_ids]
        self._check_length(prompts, request)
        if request.beam_width is None:
            samplings = [self._sampling(request, body, index) for index in range(len(prompts))]
        else:
            samplings = [self._beam_search(request)]
        requests = [
            TextRequest(prompt, sampling, adapter=adapter)
            for prompt, sampling in zip(prompts, samplings, strict=True)
        ]
        with contextlib.closing(AnswerGroup(service, requests)) as group:
            pieces = await group.whole()
        if request.beam_width is None:
            token_ids = [tuple(token.id for token in piece.tokens) for piece in pieces]
            rows = zip(group.answers, pieces, strict=True)
            logprobs = [_logprobs(*row) for row in rows] if request.logprobs else None
            scores: dict[str, Any] = {"logprobs": logprobs}
        else:
            beams = _beams(group.answers[0], pieces[0])
            token_ids = [beam.tokens for beam in beams]
            prompts *= len(beams)
            scores = {"scores": [beam.score for beam in beams]}
        texts, segments = [], []
        for prompt, tokens in zip(prompts, token_ids, strict=True):
            ids = (*prompt, *tokens)
            decoded = await asyncio.to_thread(decode_prompt, service.tokenizer, ids)
            texts.append(service.tokenizer.detokenize(ids))
            segments.append([token.text for token in decoded])
        if service.settings.retrieves:
            scores["passages"] = [passages_to_json(answer.passages) for answer in group.answers]
        return {"text": texts, "segments": segments, **scores}

    def _check_length(self, prompts: Sequence[Sequence[int]], request: MegatronRequest) -> None:
        new_tokens, width = request.tokens_to_generate, request.beam_width
        if max(len(prompt) for prompt in prompts) + new_tokens > self._service.max_length:
            message = _TOO_LONG if width is None else _TOO_LONG_BEAM
            raise ApiError(422, message, keeps_status=False)
        max_width = self._service.settings.engine.max_beams
        if width is not None and (new_tokens == 0 or width > max_width):
            raise ApiError(
                422,
                f"beam_width {width} with tokens_to_generate {new_tokens}: give a beam_width of at "
                f"most {max_width} and at least one token",
                keeps_status=False,
            )
        self._service.check_total(prompts, new_tokens, answers_per_prompt=width or 1)

    def _banned(self, request: MegatronRequest) -> tuple[tuple[int, int], ...]:
        is_banned = request.prevent_newline_after_colon
        return tuple(itertools.product(self._colon, self._newline)) if is_banned else ()

    def _sampling(self, request: MegatronRequest, body: Mapping[str, Any], index: int) -> Sampling:
        """Return the settings for continuing the prompt with this index."""
        settings = self._service.settings  # the command line sets the defaults
        top_k, top_p = settings.resolve_top_k_top_p(body.get("top_k"), body.get("top_p"))
        eol, double_eol = request.stop_on_eol, request.stop_on_double_eol
        stop_tokens = set(self._service.stop_tokens)
        stop_tokens |= self._double_newline if eol or double_eol else set()
        stop_tokens |= self._newline if eol else set()
        pair = tuple(self._newline) * 2
        return Sampling(
            max_new_tokens=request.tokens_to_generate,
            temperature=float(body.get("temperature", settings.server.temperature)),
            top_k=top_k,
            top_p=top_p,
            top_p_decay=request.top_p_decay,
            top_p_bound=request.top_p_bound,
            seed=self._service.seed_of(request.random_seed, index),
            stop_tokens=tuple(sorted(stop_tokens)),
            stop_sequences=(pair,) if double_eol and pair else (),
            banned_pairs=self._banned(request),
            logprobs=request.logprobs,
            prompt_logprobs=request.logprobs,
        )

    def _beam_search(self, request: MegatronRequest) -> Sampling:
        stop_token = request.stop_token
        stop_tokens = self._service.stop_tokens if stop_token is None else {stop_token}
        vocabulary = range(self._service.settings.engine.vocab_size)
        assert request.beam_width is not None
        return Sampling(
            max_new_tokens=request.tokens_to_generate,
            top_k=1,
            stop_tokens=tuple(token for token in stop_tokens if token in vocabulary),
            banned_pairs=self._banned(request),
            beam_width=request.beam_width,
            length_penalty=request.length_penalty,
            logprobs=True,
        )


def _logprobs(answer: TextAnswer, piece: TextPiece) -> list[float]:
    """Return the log probabilities of the tokens of a prompt and its answer, except the first."""
    prompt = answer.prompt.logprobs if answer.prompt else ()
    return [*prompt, *(token.logprob for token in piece.tokens if token.logprob is not None)]


def _beams(answer: TextAnswer, piece: TextPiece) -> Sequence[Beam]:
    """Return the answers of a beam search, best first."""
    assert answer.finished is not None
    if answer.finished.beams:
        return answer.finished.beams
    # A search of width 1 is greedy decoding, scored here as the engine scores beams.
    logprobs = tuple(token.logprob or 0.0 for token in piece.tokens)
    score = sum(logprobs) / max(1, len(logprobs)) ** answer.request.sampling.length_penalty
    return [Beam(tuple(token.id for token in piece.tokens), score, logprobs)]


def _single_token(tokenizer: Tokenizer, text: str) -> frozenset[int]:
    """Return a set with the id of the token that has exactly this text, or an empty set.

    In GPT-2's vocabulary, a newline is token 198 and a double newline is token 628.
    """
    ids = tokenizer.tokenize_unterminated(text)
    return frozenset(token for token in ids[-1:] if tokenizer.detokenize([token]) == text)
