"""Speculative decoding: drafts of the next tokens, all verified in one step.

A drafter proposes the tokens that follow a sequence (its drafts). The next step computes the
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
    """A method of drafting the tokens that follow a sequence."""

    def draft(self, plan: StepPlan) -> None:
        """Set the `drafts` of each sequence for which a plan's step has chosen tokens.

        All ranks call this after each step, once the sequences have their new tokens.
        """


def draft_budget(row: Row, limit: int) -> int:
    """Return the largest number of drafts that the sequence of a computed row may get.

    Args:
        row: A row of the step that has just been computed.
        limit: Upper bound on the number.
    """
    sequence = row.sequence
    if sequence.is_removed or not row.is_last:
        return 0
    return max(0, min(limit, sequence.draft_limit - 1 - len(sequence.tokens)))


def describe_drafts(stats: Stats) -> str:
    """Return a line about the tokens per step and the number of accepted drafts."""
    tokens_per_step = stats.new_tokens / max(stats.choosing_rows, 1)
    return (
        f"speculative decoding: {tokens_per_step:.2f} tokens of an answer per step, "
        f"{stats.accepted_tokens:,} of {stats.drafted_tokens:,} drafts accepted"
    )


@dataclass
class _NgramIndex:
    """An index of the latest occurrence of each n-gram in a sequence.

    Attributes:
        next_index: For each n-gram, the index of the token that follows its latest occurrence. An
            occurrence without a next token does not count.
        num_indexed: Number of tokens of the sequence that have been read.
    """

    next_index: dict[tuple[int, ...], int] = field(default_factory=dict)
    num_indexed: int = 0


class NgramDrafter:
    """A drafter that looks for an earlier occurrence of the last tokens.

    It drafts the tokens after that occurrence (Saxena, "Prompt Lookup Decoding", 2023). Longer
    n-grams are tried first, and the latest of several occurrences is used.

    Args:
        max_drafts: Maximum number of drafts.
        longest: Length of the longest n-gram to look for.
        shortest: Length of the shortest n-gram to look for.
    """

    def __init__(self, max_drafts: int, longest: int, shortest: int) -> None:
        """Start without sequences."""
        self._max_drafts, self._sizes = max_drafts, range(longest, shortest - 1, -1)
        self._indexes: WeakKeyDictionary[Sequence, _NgramIndex] = WeakKeyDictionary()

    def draft(self, plan: StepPlan) -> None:
        """Set the `drafts` of each sequence for which a plan's step has chosen tokens."""
        for row in plan:
            budget = draft_budget(row, self._max_drafts)
            row.sequence.drafts = self._find_drafts(row.sequence, budget) if budget else ()

    def _find_drafts(self, sequence: Sequence, budget: int) -> tuple[int, ...]:
        tokens = sequence.tokens
        index = self._indexes.setdefault(sequence, _NgramIndex())
        for end in range(max(1, index.num_indexed), len(tokens)):  # n-grams that end before `end`
            for size in self._sizes:
                if size <= end:
                    index.next_index[tuple(tokens[end - size : end])] = end
        index.num_indexed = len(tokens)
        for size in self._sizes:
            start = index.next_index.get(tuple(tokens[-size:])) if size <= len(tokens) else None
            if start is not None:
                return tuple(tokens[start : start + budget])
        return ()


class _DepthWindow(NamedTuple):
    """Consecutive positions of a sequence at which a depth is computed.

    Attributes:
        row: The row of the step that has just been computed.
        start: The first position.
        end: The position after the last one. If `row.is_last`, its token is the last known token.
        states: The previous depth's hidden states at these positions, [end - start, 1, h]; `None`
            on ranks without them.
    """

    row: Row
    start: int
    end: int
    states: Tensor | None


class MultiTokenDrafter:
    """A drafter that uses the model's multi-token prediction layers (`models.multi_token`).

    Depth k, counted from 1, drafts the token k positions after the one that the step has chosen.
    Each depth keeps its keys and values in the cache, in the same slots as the model's layers. At
    position i, depth k reads token i + k. If that token was a rejected draft, the position is
    computed again in the next step. The previous depth's hidden states are kept for this.

    Args:
        executor: The executor of the model's steps, which keeps their hidden states.
        max_drafts: Maximum number of drafts, at most the model's number of depths.
    """

    def __init__(self, executor: Executor, max_drafts: int) -> None:
        """Start without sequences."""
        assert executor.keeps_states, "depths read the hidden states of each step"
        self._executor, self._max_drafts = executor, max_drafts
        # For each depth, the position before the next window, and the previous depth's state there.
        self._last_states: WeakKeyDictionary[Sequence, dict[int, tuple[int, Tensor | None]]] = (
            WeakKeyDictionary()
        )

    @torch.no_grad()
    def draft(self, plan: StepPlan) -> None:
        """Set the `drafts` of each sequence for which a plan's step has chosen tokens."""
        windows = self._first_windows(plan)
        drafts: dict[Sequence, list[int]] = {
            window.row.sequence: [] for window in windows if window.row.is_last
        }
        for row in plan:
            row.sequence.drafts = ()
        for depth in range(self._max_drafts if windows else 0):
            if depth:
                windows = [self._extend_window(window, depth) for window in windows]
            windows = self._run(depth, windows, drafts)
        for window in windows:
            row = window.row
            if row.is_last:
                budget = draft_budget(row, self._max_drafts)
                row.sequence.drafts = tuple(drafts[row.sequence][:budget])

    def _first_windows(self, plan: StepPlan) -> list[_DepthWindow]:
        """Return the positions of each sequence that the step computed, without rejected drafts."""
        states, first, windows = self._executor.states, 0, []
        for row in plan:
            end = min(row.start + row.size, row.sequence.computed)
            if not row.sequence.is_removed and end > row.start:
                part = None if states is None else states[first : first + end - row.start]
                windows.append(_DepthWindow(row, row.start, end, part))
            first += row.size
        return windows

    def _extend_window(self, window: _DepthWindow, depth: int) -> _DepthWindow:
        """Return the window, extended by the previous position if the state there was stored.

        Also store the state at the position before the next window of this depth.
        """
        last_states = self._last_states.setdefault(window.row.sequence, {})
        position, state = last_states.pop(depth, (-1, None))
        last_position = window.end - depth
        if last_position >= window.start:
            last_state = (
                None
                if window.states is None
                else window.states[last_position - window.start].clone()
            )
            last_states[depth] = last_position, last_state
        if position != window.start - 1 or position < 0:
            return window
        states = window.states
        if states is not None and state is not None:
            states = torch.cat((state.unsqueeze(0), states))
        return window._replace(start=position, states=states)

    def _run(
        self, depth: int, windows: Many[_DepthWindow], drafts: dict[Sequence, list[int]]
    ) -> list[_DepthWindow]:
        """Run one depth on its windows, and append its token to each sequence's drafts.

        Returns:
            The windows with the depth's own hidden states, in the same order as `windows`.
        """
        rows = [self._row(window, depth, drafts) for window in windows]
        order = sorted(range(len(rows)), key=lambda index: not rows[index].is_decode)
        rows = [rows[index] for index in order]
        output_rows = [i for i, row in enumerate(rows) if row.is_last]
        outputs = [(i, rows[i].size - 1) for i in output_rows]
        tokens, cache = self._executor.inputs(tuple(rows), outputs)
        layout, replica = self._executor.layout, self._executor.replica
        states = None
        best = torch.zeros(len(output_rows), dtype=torch.int64, device=tokens.device)
        if layout.pipeline.is_last:
            parts = [windows[index].states for index in order]
            hidden = torch.cat([part for part in parts if part is not None])
            states = self._executor.model.states_ahead(depth, tokens, hidden, cache)
            if output_rows:
                logits = self._executor.model.logits(states[cache.outputs])
                logits = gather_to(logits[0], layout.tensor)
                best = logits[:, : self._executor.vocab_size].argmax(dim=-1)
        if output_rows:
            broadcast(best, replica, replica.size - layout.tensor.size)
            for i, token in zip(output_rows, best.tolist(), strict=True):
                drafts[rows[i].sequence].append(token)
        row_starts = np.cumsum([0] + [row.size for row in rows])
        result = list(windows)
        for i, index in enumerate(order):
            part = None if states is None else states[row_starts[i] : row_starts[i + 1]]
            result[index] = windows[index]._replace(states=part)
        return result

    def _row(self, window: _DepthWindow, depth: int, drafts: dict[Sequence, list[int]]) -> Row:
        """Return the window as a row of a step, with the tokens that a depth reads in it."""
        sequence = window.row.sequence
        size = window.end - window.start
        first = window.start + depth + 1
        known_drafts = drafts.get(sequence, [])[max(0, first - len(sequence.tokens)) :]
        tokens = [*sequence.tokens[first : first + size], *known_drafts][:size]
        # The last positions of a chunk may read tokens after the prompt, which are not known yet.
        # Such positions are computed again with the next chunk.
        tokens += [0] * (size - len(tokens))
        num_drafts = size - 1 if window.row.is_decode else 0  # they attend one by one
        is_last = window.row.is_last
        return Row(sequence, window.start, tuple(tokens), sequence.blocks, is_last, num_drafts)
