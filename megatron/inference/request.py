"""The requests that an engine accepts and the events that it returns: tokens only, no text.

All of them are frozen dataclasses, which processes send each other as JSON (`messages`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from megatron.errors import UserError

Reason = Literal["stop", "length", "cancelled", "refused", "error"]
TopLogprobs = tuple[tuple[int, float], ...]  # (token, log probability), most likely first

MAX_SEED = 2**63 - 1
# With a larger exponent, the power of a long text's length would overflow or underflow a float.
MAX_LENGTH_PENALTY = 20
_MAX_TOP_LOGPROBS = 100
# Field: (smallest value, largest value, allowed values in words if the two numbers do not suffice).
_BOUNDS: dict[str, tuple[float, float, str]] = {
    "max_new_tokens": (0, math.inf, "0 or more"),
    "temperature": (0, math.inf, "0 (greedy) or more"),
    "top_k": (0, math.inf, "0 (all) or more"),
    "top_p": (0, 1, "0 (all) to 1"),
    "top_p_decay": (0, 1, "0 (none) to 1"),
    "top_p_bound": (0, 1, "0 (none) to 1"),
    "repetition_penalty": (math.nextafter(0, 1), math.inf, "more than 0"),
    "seed": (0, MAX_SEED, ""),
    "beam_width": (1, math.inf, "1 (no beam search) or more"),
    "length_penalty": (-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY, ""),
    "top_logprobs": (0, _MAX_TOP_LOGPROBS, ""),
}


class RequestError(UserError):
    """An error in a request. The message names the field, the value and the remedy."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings for continuing a prompt, and the log probabilities to report.

    Settings apply in this order: `repetition_penalty` weakens the logits of tokens that have
    occurred, all logits are divided by `temperature`, the `top_k` most likely tokens are kept, and
    among these the most likely ones whose total probability reaches `top_p`.

    Attributes:
        max_new_tokens: Maximum number of new tokens. 0 only scores the prompt.
        temperature: Divisor of the logits before sampling. 0 always takes the most likely token.
        top_k: Sample from the k most likely tokens. 0 disables the limit; 1 is greedy.
        top_p: Sample from the smallest set of most likely tokens whose total probability reaches
            this value. 0 disables the limit.
        top_p_decay: Factor that multiplies `top_p` after each token. 0 keeps `top_p` constant.
        top_p_bound: Value below which `top_p` does not decay.
        repetition_penalty: Number that divides the positive logits and multiplies the negative
            logits of tokens in the prompt and the answer. 1 disables it.
        seed: Seed of the random draws. The same seed gives the same tokens, regardless of other
            requests. `None` derives one from the engine's seed and the request's id.
        stop_tokens: Tokens that end the answer and are part of it. The tokenizer's end-of-document
            token ends an answer only if it is listed here.
        stop_sequences: Token sequences that end the answer once its last tokens match one. The
            match may begin in the prompt. Megatron's `stop_on_double_eol` uses the stop token 628
            and the sequence (198, 198); its `stop_on_eol` uses the stop tokens 628 and 198.
        banned_pairs: Pairs (first, second) of tokens. `second` is never chosen right after `first`.
            Megatron's "prevent newline after colon" uses them.
        beam_width: Number of beams. If it is above 1, a beam search without sampling returns the
            best answers that it has found, as many as there are beams.
        length_penalty: Exponent of the length: a beam search divides an answer's summed log
            probabilities by its length raised to this power. Its magnitude is at most
            `MAX_LENGTH_PENALTY`.
        logprobs: Whether to report each new token's log probability. It is computed before any
            setting but `banned_pairs` applies. A beam search always reports it.
        top_logprobs: Number of most likely tokens to report with each token.
        prompt_logprobs: Whether to also report the log probabilities of the prompt's tokens.
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
        """Raise `RequestError` if a value is out of range or empty, or two exclude each other."""
        values = {name: getattr(self, name) for name in _BOUNDS}
        if not all(value is None or math.isfinite(value) for value in values.values()):
            raise RequestError(
                "one of the numbers is not finite: give a finite temperature, top_p and penalties"
            )
        for name, (low, high, allowed) in _BOUNDS.items():
            value = values[name]
            if value is not None and not low <= value <= high:
                raise RequestError(f"{name} {value}: give {allowed or f'{low} to {high}'}")
        if not all(self.stop_sequences):
            raise RequestError("stop_sequences contains an empty sequence: remove it")
        if self.beam_width > 1 and self.max_new_tokens == 0:
            raise RequestError(
                f"beam_width {self.beam_width} with max_new_tokens 0: give at least one new token"
            )


@dataclass(frozen=True)
class Request:
    """A prompt to continue.

    Attributes:
        id: Name chosen by the caller. No two requests in progress may share one.
        prompt: Token ids of the prompt, at least one.
        sampling: Settings for continuing the prompt.
        adapter: Index of the adapter to use, counted from 1 in the engine's order; 0 is the base
            model.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    adapter: int = 0

    def __post_init__(self) -> None:
        """Raise `RequestError` if the prompt is empty."""
        if not self.prompt:
            raise RequestError("the prompt is empty: give at least one token")


@dataclass(frozen=True)
class NeighborPassage:
    """A passage that Retro has read.

    Attributes:
        chunk: Index of the chunk of the text for which the passage was retrieved, from 0.
        corpus: Index of the passage's corpus in the working folder.
        document: Index of the passage's document in the corpus.
        text: Text of the retrieved chunk and of the chunks after it.
    """

    chunk: int
    corpus: int
    document: int
    text: str


@dataclass(frozen=True)
class Retrieved:
    """The passages for chunks of a text, reported before the first token that follows them.

    Attributes:
        request: Id of the request.
        passages: Passages for each chunk in turn, the nearest first. In a beam search, each beam
            has its own events.
    """

    request: str
    passages: tuple[NeighborPassage, ...]


@dataclass(frozen=True)
class Prompt:
    """The prompt's log probabilities, reported once, before the first token, if requested.

    Attributes:
        request: Id of the request.
        logprobs: Log probability of every prompt token except the first, which has no context.
        top: The most likely tokens at those positions. Empty without `top_logprobs`.
    """

    request: str
    logprobs: tuple[float, ...]
    top: tuple[TopLogprobs, ...] = ()


@dataclass(frozen=True)
class Token:
    """The next token of an answer. A beam search reports no tokens, only `Finished`.

    Attributes:
        request: Id of the request.
        token: Id of the token.
        logprob: Log probability of the token, or `None` without `logprobs`.
        top: The most likely tokens at its position. Empty without `top_logprobs`.
    """

    request: str
    token: int
    logprob: float | None = None
    top: TopLogprobs = ()


@dataclass(frozen=True)
class Beam:
    """A single answer from a beam search.

    Attributes:
        tokens: Token ids without the prompt, but with the stop token if there is one.
        score: Sum of `logprobs`, divided by the length raised to the power of `length_penalty`.
        logprobs: Log probability of each token.
    """

    tokens: tuple[int, ...]
    score: float
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Finished:
    """The end of a request, always its last event.

    Attributes:
        request: Id of the request.
        reason: Why the request ended. "stop" is a stop token or sequence, "length" is
            `max_new_tokens`, "cancelled" is a client's cancellation, "refused" means that the
            engine cannot answer the request and has not started, and "error" means that the answer
            failed.
        message: Explanation of the problem if the reason is "refused" or "error".
        new_tokens: Length of the answer in tokens. For a beam search, the length of the best
            answer.
        cached_tokens: Number of prompt tokens that had been computed for an earlier request.
        beams: Answers of a beam search, best first.
    """

    request: str
    reason: Reason
    message: str = ""
    new_tokens: int = 0
    cached_tokens: int = 0
    beams: tuple[Beam, ...] = ()


Event = Retrieved | Prompt | Token | Finished


@dataclass(frozen=True)
class EngineLimits:
    """Limits on the requests that an engine can answer.

    Attributes:
        vocab_size: Number of token ids, which start at 0.
        max_length: Maximum number of tokens in a prompt and its answer together.
        cache_tokens: Number of tokens that fit in the KV cache, for all requests together.
        max_beams: Maximum number of beams in a beam search.
        adapters: Number of adapters.
    """

    vocab_size: int
    max_length: int
    cache_tokens: int
    max_beams: int
    adapters: int = 0


@dataclass(frozen=True)
class Stats:
    """Statistics of an engine, for metrics.

    Attributes:
        running: Number of requests in the batch.
        waiting: Number of requests that are waiting for a slot in the batch.
        blocks: Number of blocks in the KV cache.
        blocks_used: Number of blocks that running requests use.
        preempted: Number of times that a sequence gave up its blocks, to be computed again later.
        prompt_tokens: Number of prompt tokens since the start.
        cached_tokens: Number of these prompt tokens that were found in the cache, counted when
            their requests end.
        new_tokens: Number of tokens generated since the start. A completed beam search counts with
            its best answer.
        drafted_tokens: Number of drafts that steps have checked (speculative decoding).
        accepted_tokens: Number of these drafts that were correct.
        choosing_rows: Number of times that a step has chosen one token for a sequence, in addition
            to the drafts that it accepted. Beam searches are not counted.
    """

    running: int = 0
    waiting: int = 0
    blocks: int = 0
    blocks_used: int = 0
    preempted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    choosing_rows: int = 0
