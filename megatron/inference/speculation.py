"""Speculative decoding: guesses of the next tokens, which are all checked in one step.

A drafter guesses the tokens that follow a sequence (its drafts). The next step computes the
sequence's last token and its drafts together, and chooses a token after each of them as if it were
the last. Drafts are accepted up to the first that differs from the token chosen in its place. Every
answer, sampled or not, therefore has the same tokens as without drafts: the choice of a token
depends only on the tokens before it and on its index in the answer.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from megatron.inference.executor import Executor
from megatron.inference.request import Stats
from megatron.inference.scheduler import Row, Sequence, StepPlan
from megatron.parallel.collectives import broadcast, gather_to


class Drafter(Protocol):
    """A method of guessing the tokens that follow a sequence."""

    def draft(self, plan: StepPlan) -> None:
        """Set the `drafts` of each sequence for which a plan's step has chosen tokens.

        All ranks call this after each step, once the sequences have their new tokens.
        """


def room_of(row: Row, most: int) -> int:
    """Return how many draft tokens the sequence of a computed row may get, at most `most`."""
    sequence = row.sequence
    if sequence.is_over or not row.is_last:
        return 0
    return max(0, min(most, sequence.limit - 1 - len(sequence.tokens)))


def describe_drafts(stats: Stats) -> str:
    """Describe how many drafts were correct."""
    each = stats.new_tokens / max(stats.choosing_rows, 1)
    return (
        f"speculative decoding: {each:.2f} tokens of an answer per step, "
        f"{stats.accepted_tokens:,} of {stats.drafted_tokens:,} drafts accepted"
    )


@dataclass
class _Endings:
    """The latest occurrence of each n-gram in a sequence.

    Attributes:
        after: For each n-gram, the index of the token that follows its latest occurrence. An
            occurrence without a next token does not count.
        known: Number of tokens of the sequence that have been read.
    """

    after: dict[tuple[int, ...], int] = field(default_factory=dict)
    known: int = 0


class NgramDrafter:
    """A drafter that looks for an earlier occurrence of the last tokens.

    It guesses that the tokens after that occurrence will follow again (Saxena, "Prompt Lookup
    Decoding", 2023). Longer n-grams are tried first, and the latest of several occurrences is
    used.

    Args:
        tokens: Maximum number of drafts.
        longest: Length of the longest n-gram to look for.
        shortest: Length of the shortest n-gram to look for.
    """

    def __init__(self, tokens: int, longest: int, shortest: int) -> None:
        """Start without sequences."""
        self._tokens, self._sizes = tokens, range(longest, shortest - 1, -1)
        self._endings: WeakKeyDictionary[Sequence, _Endings] = WeakKeyDictionary()

    def draft(self, plan: StepPlan) -> None:
        """Set the `drafts` of each sequence that the step of a plan has chosen tokens for."""
        for row in plan:
            room = room_of(row, self._tokens)
            row.sequence.drafts = self._guess(row.sequence, room) if room else ()

    def _guess(self, sequence: Sequence, room: int) -> tuple[int, ...]:
        tokens = sequence.tokens
        endings = self._endings.setdefault(sequence, _Endings())
        for end in range(max(1, endings.known), len(tokens)):  # n-grams that end before `end`
            for size in self._sizes:
                if size <= end:
                    endings.after[tuple(tokens[end - size : end])] = end
        endings.known = len(tokens)
        for size in self._sizes:
            start = endings.after.get(tuple(tokens[-size:])) if size <= len(tokens) else None
            if start is not None:
                return tuple(tokens[start : start + room])
        return ()


class _DepthWindow(NamedTuple):
    """Consecutive positions of a sequence at which a depth is computed.

    Attributes:
        row: The row of the step that has just been computed.
        start: The first position.
        end: The position after the last one. Its token is the last known token.
        states: The previous depth's hidden states at these positions, [end - start, 1, h]; `None`
            on ranks without them.
    """

    row: Row
    start: int
    end: int
    states: Tensor | None


class MultiTokenDrafter:
    """A drafter that uses the model's multi-token prediction layers (`models.multi_token`).

    Depth k guesses the token k positions after the next one. Each depth keeps keys and values in
    the cache, in the slots of the model's layers. At position i depth k reads token i + k. If that
    token was a rejected draft, the position is computed again in the next step. The previous
    depth's hidden states are kept for this.

    Args:
        executor: The executor of the model's steps, which keeps their hidden states.
        tokens: Number of drafts, at most the model's number of depths.
    """

    def __init__(self, executor: Executor, tokens: int) -> None:
        """Start without sequences."""
        assert executor.keeps_states, "depths read the hidden states of each step"
        self._executor, self._tokens = executor, tokens
        # For each depth, the position before the next window, and the previous depth's state there.
        self._tails: WeakKeyDictionary[Sequence, dict[int, tuple[int, Tensor | None]]] = (
            WeakKeyDictionary()
        )

    @torch.no_grad()
    def draft(self, plan: StepPlan) -> None:
        """Set the `drafts` of each sequence that the step of a plan has chosen tokens for."""
        windows = self._first_windows(plan)
        guesses: dict[Sequence, list[int]] = {
            window.row.sequence: [] for window in windows if window.row.is_last
        }
        for row in plan:
            row.sequence.drafts = ()
        for depth in range(self._tokens if windows else 0):
            if depth:
                windows = [self._with_tail(window, depth) for window in windows]
            windows = self._run(depth, windows, guesses)
        for window in windows:
            row = window.row
            if row.is_last:
                room = room_of(row, self._tokens)
                row.sequence.drafts = tuple(guesses[row.sequence][:room])

    def _first_windows(self, plan: StepPlan) -> list[_DepthWindow]:
        """Return the part of each sequence that the step computed, without rejected drafts."""
        states, first, windows = self._executor.states, 0, []
        for row in plan:
            end = min(row.start + row.size, row.sequence.computed)
            if not row.sequence.is_over and end > row.start:
                part = None if states is None else states[first : first + end - row.start]
                windows.append(_DepthWindow(row, row.start, end, part))
            first += row.size
        return windows

    def _with_tail(self, window: _DepthWindow, depth: int) -> _DepthWindow:
        """Return the window, extended by the position before it if that state was kept.

        Also keep the state at the position before the next window of this depth.
        """
        tails = self._tails.setdefault(window.row.sequence, {})
        before, state = tails.pop(depth, (-1, None))
        next_tail = window.end - depth
        if next_tail >= window.start:
            kept = (
                None if window.states is None else window.states[next_tail - window.start].clone()
            )
            tails[depth] = next_tail, kept
        if before != window.start - 1 or before < 0:
            return window
        states = window.states
        if states is not None and state is not None:
            states = torch.cat((state.unsqueeze(0), states))
        return window._replace(start=before, states=states)

    def _run(
        self, depth: int, windows: Many[_DepthWindow], guesses: dict[Sequence, list[int]]
    ) -> list[_DepthWindow]:
        """Run one depth on its windows, and append its guess to each sequence's guesses.

        Returns:
            The windows with the depth's own hidden states, in the order in which they were given.
        """
        rows = [self._row(window, depth, guesses) for window in windows]
        order = sorted(range(len(rows)), key=lambda index: not rows[index].goes_on)
        rows = [rows[index] for index in order]
        wanted = [place for place, row in enumerate(rows) if row.is_last]
        outputs = [(place, rows[place].size - 1) for place in wanted]
        tokens, cache = self._executor.inputs(tuple(rows), outputs)
        layout, copy = self._executor.layout, self._executor.copy
        states = None
        best = torch.zeros(len(wanted), dtype=torch.int64, device=tokens.device)
        if layout.pipeline.is_last:
            parts = [windows[index].states for index in order]
            hidden = torch.cat([part for part in parts if part is not None])
            states = self._executor.model.states_ahead(depth, tokens, hidden, cache)
            if wanted:
                logits = self._executor.model.logits(states[cache.outputs])
                logits = gather_to(logits[0], layout.tensor)
                best = logits[:, : self._executor.vocab_size].argmax(dim=-1)
        if wanted:
            broadcast(best, copy, copy.size - layout.tensor.size)
            for place, token in zip(wanted, best.tolist(), strict=True):
                guesses[rows[place].sequence].append(token)
        firsts = np.cumsum([0] + [row.size for row in rows])
        found = list(windows)
        for place, index in enumerate(order):
            part = None if states is None else states[firsts[place] : firsts[place + 1]]
            found[index] = windows[index]._replace(states=part)
        return found

    def _row(self, window: _DepthWindow, depth: int, guesses: dict[Sequence, list[int]]) -> Row:
        """Return the window as a row of a step, with the tokens that a depth reads in it."""
        sequence = window.row.sequence
        size = window.end - window.start
        first = window.start + depth + 1
        guessed = guesses.get(sequence, [])[max(0, first - len(sequence.tokens)) :]
        read = [*sequence.tokens[first : first + size], *guessed][:size]
        # At the end of a chunk, these tokens may not be known yet, one position before the prompt's
        # end or earlier. Such positions are computed again with the next chunk.
        read += [0] * (size - len(read))
        drafts = size - 1 if window.row.goes_on else 0  # they attend one by one
        is_last = window.row.is_last
        return Row(sequence, window.start, tuple(read), sequence.blocks, is_last, drafts)
