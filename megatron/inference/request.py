"""What goes into an engine and what comes out of it: requests and events, of tokens only, no text.

All of it is plain data, frozen, and travels between processes as JSON (`messages`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from megatron.errors import UserError

Reason = Literal["stop", "length", "cancelled", "refused", "error"]
TopLogprobs = tuple[tuple[int, float], ...]  # (token, log probability), most likely first

LARGEST_SEED = 2**63 - 1
# A length to a larger power is not a floating-point number for long texts, in either direction.
MOST_LENGTH_PENALTY = 20.0
_MOST_TOP_LOGPROBS = 100
# Field: (least, most, what to give).
_BOUNDS: dict[str, tuple[float, float, str]] = {
    "max_new_tokens": (0, math.inf, "0 or more"),
    "temperature": (0, math.inf, "0 (greedy) or more"),
    "top_k": (0, math.inf, "0 (all) or more"),
    "top_p": (0, 1, "0 (all) to 1"),
    "top_p_decay": (0, 1, "0 (none) to 1"),
    "top_p_bound": (0, 1, "0 (none) to 1"),
    "repetition_penalty": (math.nextafter(0, 1), math.inf, "more than 0"),
    "seed": (0, LARGEST_SEED, f"0 to {LARGEST_SEED}"),
    "beam_width": (1, math.inf, "1 (no beam search) or more"),
    "length_penalty": (
        -MOST_LENGTH_PENALTY,
        MOST_LENGTH_PENALTY,
        f"{-MOST_LENGTH_PENALTY:g} to {MOST_LENGTH_PENALTY:g}",
    ),
    "top_logprobs": (0, _MOST_TOP_LOGPROBS, f"0 to {_MOST_TOP_LOGPROBS}"),
}


class RequestError(UserError):
    """A request that the engine cannot serve. The message names field, value and remedy."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to continue a prompt, and what to report about it.

    A token is sampled in this order: `repetition_penalty` weakens the scores of tokens that
    occurred, all scores are divided by `temperature`, only the `top_k` most likely tokens are kept,
    and of these only the most likely that together have `top_p`.

    Attributes:
        max_new_tokens: Largest number of new tokens. 0 only scores the prompt.
        temperature: 0 always takes the most likely token.
        top_k: Sample from the k most likely tokens. 0: all; 1: greedy.
        top_p: Sample from the smallest set of most likely tokens that has this probability. 0: all.
        top_p_decay: `top_p` is multiplied by this after each token. 0: it stays.
        top_p_bound: `top_p` does not decay below this.
        repetition_penalty: Positive scores of tokens of the prompt and the answer are divided by
            this, negative ones multiplied. 1: off.
        seed: The same seed gives the same tokens, whatever else runs. `None`: derived from the
            engine's seed and the request's id.
        stop_tokens: The answer ends with the first of these, which is part of it. The tokenizer's
            end of document must be one of them if it is to end an answer.
        stop_sequences: The answer ends once its last tokens are one of these; the first ones may
            belong to the prompt. Megatron's double end of line is the stop token 628 and the
            sequence (198, 198); its end of line is the stop tokens 628 and 198.
        banned_pairs: (first, second): `second` is never chosen right after `first`. Megatron's
            "prevent newline after colon".
        beam_width: Above 1, beam search for this many best answers, without sampling.
        length_penalty: With beam search, an answer's score is the sum of its log probabilities
            divided by its length to this power, which is within `MOST_LENGTH_PENALTY` of 0.
        logprobs: Report each new token's log probability, before temperature and the like.
        top_logprobs: Also report this many most likely tokens in its place.
        prompt_logprobs: Report log probabilities of the prompt's tokens too.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    top_p_decay: float = 0.0
    top_p_bound: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop_tokens: tuple[int, ...] = ()
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    banned_pairs: tuple[tuple[int, int], ...] = ()
    beam_width: int = 1
    length_penalty: float = 1.0
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False

    def __post_init__(self) -> None:
        """Raise `RequestError` if a value is out of range."""
        values = {name: getattr(self, name) for name in _BOUNDS}
        if not all(value is None or math.isfinite(value) for value in values.values()):
            raise RequestError("temperature, top_p, penalties: give finite numbers")
        for name, (least, most, wanted) in _BOUNDS.items():
            value = values[name]
            if value is not None and not least <= value <= most:
                raise RequestError(f"{name} {value}: give {wanted}")
        if not all(self.stop_sequences):
            raise RequestError("stop_sequences: one of them is empty")
        if self.beam_width > 1 and self.max_new_tokens == 0:
            raise RequestError("beam_width with max_new_tokens 0: there is nothing to search")


@dataclass(frozen=True)
class Request:
    """A prompt to continue.

    Attributes:
        id: Chosen by the caller. No two requests have the same at a time.
        prompt: At least one token.
        sampling: How to continue.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling

    def __post_init__(self) -> None:
        """Raise `RequestError` if the prompt is empty."""
        if not self.prompt:
            raise RequestError("the prompt is empty: give at least one token")


@dataclass(frozen=True)
class Prompt:
    """The prompt's log probabilities, once, before the first token, if they were asked for.

    Attributes:
        request: Id of the request.
        logprobs: Of all tokens of the prompt except the first, which follows nothing.
        top: The most likely tokens in those places. Empty without `top_logprobs`.
    """

    request: str
    logprobs: tuple[float, ...]
    top: tuple[TopLogprobs, ...] = ()


@dataclass(frozen=True)
class Token:
    """The next token of an answer. Beam search has only the end, none of these.

    Attributes:
        request: Id of the request.
        token: The token.
        logprob: `None` if the request does not ask for it.
        top: Empty if the request does not ask for it.
    """

    request: str
    token: int
    logprob: float | None = None
    top: TopLogprobs = ()


@dataclass(frozen=True)
class Beam:
    """One answer of a beam search.

    Attributes:
        tokens: Without the prompt, but with the stop token if there is one.
        score: Sum of `logprobs` divided by the length to the power of `length_penalty`.
        logprobs: Of each token.
    """

    tokens: tuple[int, ...]
    score: float
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Finished:
    """The end of a request, always its last event.

    Attributes:
        request: Id of the request.
        reason: "stop": a stop token or sequence. "length": `max_new_tokens`. "cancelled".
            "refused": the engine cannot answer it, and never began. "error": something went wrong.
        message: What is wrong, with reason "refused" or "error".
        new_tokens: Length of the answer, for a beam search of the best one.
        cached_tokens: Tokens of the prompt that had been computed for an earlier request.
        beams: Answers of a beam search, best first.
    """

    request: str
    reason: Reason
    message: str = ""
    new_tokens: int = 0
    cached_tokens: int = 0
    beams: tuple[Beam, ...] = ()


Event = Prompt | Token | Finished


@dataclass(frozen=True)
class EngineLimits:
    """What an engine can take.

    Attributes:
        vocab_size: Tokens are 0 to this, exclusive.
        max_length: Largest number of tokens of a prompt and its answer.
        cache_tokens: Tokens of all requests that fit in the KV cache.
        max_beams: Widest beam search.
    """

    vocab_size: int
    max_length: int
    cache_tokens: int
    max_beams: int


@dataclass(frozen=True)
class Stats:
    """What an engine is doing, for metrics.

    Attributes:
        running: Requests that have a place in the batch.
        waiting: Requests that wait for one.
        blocks: Blocks of the KV cache.
        blocks_used: Blocks that running requests use.
        preempted: Times that a request gave up its blocks, to be computed again later.
        prompt_tokens: Tokens of prompts since the start.
        cached_tokens: Those of them that were found in the cache.
        new_tokens: Tokens generated since the start.
    """

    running: int = 0
    waiting: int = 0
    blocks: int = 0
    blocks_used: int = 0
    preempted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
