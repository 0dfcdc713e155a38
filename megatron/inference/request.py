"""What goes into an engine and what comes out of it: requests and events, of tokens only, no text.

All of it is plain data, frozen, and travels between processes as JSON (`messages`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

from megatron.errors import UserError

Reason = Literal["stop", "length", "cancelled", "refused", "error"]
TopLogprobs = tuple[tuple[int, float], ...]  # (token, log probability), most likely first

MOST_TOP_LOGPROBS = 100
LARGEST_SEED = 2**63 - 1
# Either way: a length to the power of more is no floating-point number in long texts.
MOST_LENGTH_PENALTY = 20.0


class RequestError(UserError):
    """A request asks for what the engine cannot do. The message names field, value and remedy."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to go on from a prompt, and what to tell about it.

    Tokens are drawn like this: scores of tokens that occurred are weakened by
    `repetition_penalty`, all are divided by `temperature`, then only the `top_k` most likely are
    kept, then only the most likely that together have `top_p`.

    Attributes:
        max_new_tokens: at most so many; 0 only scores the prompt.
        temperature: 0: always the most likely token.
        top_k: 0: all; 1: the most likely.
        top_p: in (0, 1]: the smallest set of most likely tokens that has this probability; 0: all.
        top_p_decay: after each token top_p is multiplied by this; 0: it stays.
        top_p_bound: top_p does not decay below this.
        repetition_penalty: scores of tokens of prompt and answer are divided by this where they
            are positive, else multiplied; 1: nothing.
        seed: the same seed gives the same tokens, whatever else runs; None: another one for each
            request id.
        stop_tokens: the answer ends with the first of these, which is part of it. The tokenizer's
            end of document is one of them where it shall end an answer.
        stop_sequences: the answer ends where its last tokens, or the prompt's last and its first,
            are one of these. Megatron's double end of line is the stop token 628 and the sequence
            (198, 198); its end of line the stop tokens 628 and 198.
        banned_pairs: (first, second): `second` is not chosen where `first` is the last token.
            Megatron's "prevent newline after colon".
        beam_width: above 1: beam search for the so many best answers, which draws nothing.
        length_penalty: of beam search: an answer's score is the sum of its log probabilities over
            its length to this power, which is within `MOST_LENGTH_PENALTY` of 0.
        logprobs: tell each new token's log probability, before temperature and the like.
        top_logprobs: also tell those of the so many most likely tokens at its place.
        prompt_logprobs: tell those of the prompt's tokens too.
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
        """Raises RequestError where a value is out of range."""
        for wrong, message in _checks(self):
            if wrong:
                raise RequestError(message)


def _checks(s: Sampling) -> tuple[tuple[bool, str], ...]:
    numbers = (s.temperature, s.top_p, s.top_p_decay, s.top_p_bound, s.repetition_penalty)
    return (
        (s.max_new_tokens < 0, f"max_new_tokens {s.max_new_tokens}: give 0 or more"),
        (
            not all(map(math.isfinite, (*numbers, s.length_penalty))),
            "temperature, top_p, penalties: give finite numbers",
        ),
        (s.temperature < 0, f"temperature {s.temperature}: give 0 (greedy) or more"),
        (s.top_k < 0, f"top_k {s.top_k}: give 0 (all) or more"),
        (not 0 <= s.top_p <= 1, f"top_p {s.top_p}: give 0 (all) to 1"),
        (not 0 <= s.top_p_decay <= 1, f"top_p_decay {s.top_p_decay}: give 0 (none) to 1"),
        (not 0 <= s.top_p_bound <= 1, f"top_p_bound {s.top_p_bound}: give 0 (none) to 1"),
        (
            s.repetition_penalty <= 0,
            f"repetition_penalty {s.repetition_penalty}: give more than 0",
        ),
        (
            s.seed is not None and not 0 <= s.seed <= LARGEST_SEED,
            f"seed {s.seed}: give 0 to {LARGEST_SEED}",
        ),
        (not all(s.stop_sequences), "stop_sequences: one of them is empty"),
        (s.beam_width < 1, f"beam_width {s.beam_width}: give 1 (no beam search) or more"),
        (
            abs(s.length_penalty) > MOST_LENGTH_PENALTY,
            f"length_penalty {s.length_penalty}: give {-MOST_LENGTH_PENALTY:g} to "
            f"{MOST_LENGTH_PENALTY:g}",
        ),
        (
            s.beam_width > 1 and s.max_new_tokens == 0,
            "beam_width with max_new_tokens 0: there is nothing to search",
        ),
        (
            not 0 <= s.top_logprobs <= MOST_TOP_LOGPROBS,
            f"top_logprobs {s.top_logprobs}: give 0 to {MOST_TOP_LOGPROBS}",
        ),
    )


@dataclass(frozen=True)
class Request:
    """A prompt to go on from.

    Attributes:
        id: chosen by who asks; no two requests at a time have the same.
        prompt: at least one token.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling

    def __post_init__(self) -> None:
        """Raises RequestError where the prompt is empty."""
        if not self.prompt:
            raise RequestError("the prompt is empty: give at least one token")


@dataclass(frozen=True)
class Prompt:
    """The prompt's log probabilities, once, before the first token; see `prompt_logprobs`.

    Attributes:
        logprobs: of all tokens of the prompt but the first, which follows nothing.
        top: the most likely tokens at those places; empty without `top_logprobs`.
    """

    request: str
    logprobs: tuple[float, ...]
    top: tuple[TopLogprobs, ...] = ()


@dataclass(frozen=True)
class Token:
    """The next token of an answer. Beam search has none of these, only its end.

    Attributes:
        logprob: None where the request does not ask for it.
        top: empty where the request does not ask for it.
    """

    request: str
    token: int
    logprob: float | None = None
    top: TopLogprobs = ()


@dataclass(frozen=True)
class Beam:
    """One answer of a beam search.

    Attributes:
        tokens: without the prompt, with the stop token where there is one.
        score: the sum of `logprobs` over the length to the power of `length_penalty`.
        logprobs: of each token.
    """

    tokens: tuple[int, ...]
    score: float
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Finished:
    """The end of a request, always its last event.

    Attributes:
        reason: "stop": a stop token or sequence; "length": `max_new_tokens`; "cancelled";
            "refused": the engine cannot answer it, and never began; "error": something went wrong.
        message: what is wrong, with reason "refused" or "error".
        new_tokens: of the answer; of the best beam's.
        cached_tokens: of the prompt, that were computed for an earlier request.
        beams: of a beam search, best first.
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
        vocab_size: tokens are 0 to this, exclusive.
        max_length: of prompt and answer together.
        cache_tokens: that fit in the key-value cache, of all requests.
        max_beams: widest beam search.
    """

    vocab_size: int
    max_length: int
    cache_tokens: int
    max_beams: int


@dataclass(frozen=True)
class Stats:
    """What an engine is doing, for metrics.

    Attributes:
        running: requests that have a place in the batch.
        waiting: requests that wait for one.
        blocks: of the key-value cache.
        blocks_used: of these by running requests.
        preempted: times a request gave its blocks up and is computed again, since the start.
        prompt_tokens: taken in since the start.
        cached_tokens: of these found in the cache.
        new_tokens: made since the start.
    """

    running: int = 0
    waiting: int = 0
    blocks: int = 0
    blocks_used: int = 0
    preempted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0


class Engine(Protocol):
    """What runs requests. All ranks of a layout make the same calls in the same order."""

    @property
    def limits(self) -> EngineLimits:
        """What `add` accepts."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        ...

    @property
    def stats(self) -> Stats:
        """What it is doing."""
        ...

    def add(self, request: Request) -> None:
        """Take a request.

        Raises:
            RequestError: it is over the limits, or its id is in use. Nothing has happened.
        """
        ...

    def cancel(self, request: str) -> list[Event]:
        """End a request now; its last event. Nothing where it has ended already."""
        ...

    def step(self) -> list[Event]:
        """Compute some tokens for the requests of the batch; in order for each request."""
        ...

    def abort(self, message: str) -> list[Event]:
        """End all requests with an error; their last events."""
        ...
