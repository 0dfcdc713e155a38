"""The scheduler, which picks each step's sequences, tokens and blocks, without using tensors.

A step has a budget of tokens. Sequences that need only their next token come first, then prompts
that have begun, then new prompts in the order of their arrival. A prompt that does not fit is cut
into chunks. If two new prompts have the same first block, the second waits for the next step, so
that it can share the blocks of the first. If blocks run out, the sequence that began last is
preempted: it gives up its blocks and is computed again later.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.inference.cache import BlockKey, BlockPool, Snapshots, next_key

Integers = NDArray[np.int64]

UNKNOWN = -1  # placeholder for a token that a running step is choosing


@dataclass(frozen=True)
class SchedulerSettings:
    """Sizes of steps and of the cache.

    Attributes:
        blocks: Number of blocks in the cache.
        block_size: Number of tokens in a block.
        max_sequences: Maximum number of sequences in a step.
        max_tokens: Maximum number of tokens in a step, at least `max_sequences`, so that every
            sequence can advance.
        has_states: Whether the model has layers with states. A sequence can then reuse cached
            blocks only up to a snapshot of these states.
        snapshots: Maximum number of snapshots.
        trained_context: Length beyond which all tokens of a sequence have different keys and values
            (LongRoPE). A sequence that outgrows it is recomputed. `None` for no such length.
        dynamic_context: Length beyond which a prompt's keys depend on the prompt's length (dynamic
            NTK). The keys of later tokens depend on their own position. `None` for no such length.
    """

    blocks: int
    block_size: int
    max_sequences: int
    max_tokens: int
    has_states: bool = False
    snapshots: int = 0
    trained_context: int | None = None
    dynamic_context: int | None = None

    def __post_init__(self) -> None:
        """Check that sizes are positive and that a step has room for a token of every sequence."""
        assert min(self.blocks, self.block_size, self.max_sequences) >= 1, self
        assert self.max_tokens >= self.max_sequences, self

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that a sequence of this many tokens needs."""
        return -(-tokens // self.block_size)


@dataclass(eq=False)
class Sequence:
    """A sequence of tokens, whose keys and values are in blocks of the cache.

    Attributes:
        request: Id of the request to which the sequence belongs.
        tokens: Tokens so far, to which the sequence's `Answer` appends. The last one may be
            `UNKNOWN`.
        reuses_cache: Whether the sequence may begin with blocks that other sequences have computed.
        computed: Number of tokens that are in the cache, or will be after the steps in progress.
        cached: Number of tokens that were in the cache when the sequence first began.
        blocks: Blocks of the computed tokens, including those of the step in progress. The array is
            never modified in place; new blocks make a new array.
        keys: Keys of the published full blocks.
        state_slot: The sequence's state slot; -1 while the sequence is not in the batch.
        is_new: Whether the sequence has not begun yet.
        is_removed: Whether the sequence has been removed. Results of a step in progress are then
            discarded.
        prompt_length: Number of tokens that the sequence began with. They are always computed as a
            prompt, even if only one remains. A negative number means all of `tokens`.
        adapter: Index of the sequence's adapter, counted from 1; 0 is the base model.
        draft_limit: Number of tokens beyond which no drafts are made (`speculation`); 0 for no
            drafts at all.
        drafts: Drafts of the tokens that follow `tokens`, for the next step.
        is_long: Whether tokens are computed as in a sequence longer than the training context
            (`SchedulerSettings`).
        rotary_length: The prompt's length if its keys depend on it (`SchedulerSettings`), otherwise
            0.
    """

    request: str
    tokens: list[int]
    reuses_cache: bool = True
    computed: int = 0
    cached: int = 0
    blocks: Integers = field(default_factory=lambda: np.zeros(0, np.int64))
    keys: list[BlockKey] = field(default_factory=list)
    state_slot: int = -1
    is_new: bool = True
    is_removed: bool = False
    prompt_length: int = -1
    adapter: int = 0
    draft_limit: int = 0
    drafts: tuple[int, ...] = ()
    is_long: bool = False
    rotary_length: int = 0

    def __post_init__(self) -> None:
        """Count all tokens as the prompt if `prompt_length` is negative."""
        if self.prompt_length < 0:
            self.prompt_length = len(self.tokens)

    @property
    def uncomputed(self) -> int:
        """Number of tokens that have not been computed yet."""
        return len(self.tokens) - self.computed

    def next_key(self, keys: list[BlockKey], block_size: int) -> BlockKey:
        """Return the key of the full block that follows the blocks with these keys."""
        variant = self.rotary_length or int(self.is_long)
        return next_key(keys, self.tokens, block_size, self.adapter, variant=variant)


class Row(NamedTuple):
    """One sequence's part of a step: its tokens from `start` up to `start + size`.

    Attributes:
        sequence: The sequence to which the tokens belong.
        start: Position of the first token to compute.
        tokens: The tokens to compute.
        blocks: The sequence's blocks, up to and including those of these tokens. The array is the
            same object as in earlier steps unless the blocks have changed.
        is_last: Whether this row has the last known token, so that the next one can be chosen.
        drafts: Number of tokens at the end that are drafts, after the last known token.
        restore_slot: State slot of the snapshot from which the sequence starts; -1 for none.
        snapshot_slot: State slot for a snapshot after the row; -1 for none.
    """

    sequence: Sequence
    start: int
    tokens: tuple[int, ...]
    blocks: Integers
    is_last: bool
    drafts: int = 0
    restore_slot: int = -1
    snapshot_slot: int = -1

    @property
    def size(self) -> int:
        """Number of tokens to compute."""
        return len(self.tokens)

    @property
    def is_decode(self) -> bool:
        """Whether this row computes a single token after the prompt, and any drafts."""
        return len(self.tokens) == 1 + self.drafts and self.start >= self.sequence.prompt_length

    def split_tokens(self) -> list[Row]:
        """Return a row for each token of this row."""
        return [
            self._replace(start=self.start + offset, tokens=(token,), drafts=0)
            for offset, token in enumerate(self.tokens)
        ]


StepPlan = tuple[Row, ...]  # decode rows come first


class Scheduler:
    """A planner of steps, which assigns tokens, blocks and state slots to sequences.

    Call `mark_started` with a plan once its step is in progress, before the next `plan`, and
    `mark_complete` once the step is complete. Steps run in the order of their plans.
    """

    def __init__(self, settings: SchedulerSettings) -> None:
        """Start without sequences.

        Args:
            settings: Sizes of steps and of the cache.
        """
        self.settings = settings
        self.pool = BlockPool(settings.blocks)
        self.preempted = 0
        self.running: list[Sequence] = []  # sequences in the batch, in the order they began
        # Free state slots of running sequences. The slots of snapshots follow them.
        self._free_state_slots = list(range(settings.max_sequences))
        self._snapshots = Snapshots(
            range(settings.max_sequences, settings.max_sequences + settings.snapshots)
        )
        self._waiting: deque[Sequence] = deque()

    def add(self, *sequences: Sequence) -> None:
        """Put sequences at the end of the queue."""
        self._waiting.extend(sequences)

    def fork(self, parent: Sequence, tokens: list[int]) -> Sequence:
        """Return a new sequence that starts like another one and shares its full blocks.

        If the other sequence has been preempted, if there is no room in the batch, or if the model
        has states, put the new sequence at the end of the queue instead.

        Args:
            parent: The other sequence.
            tokens: Tokens of the new sequence.
        """
        size = self.settings.block_size
        child = Sequence(
            parent.request,
            tokens,
            parent.reuses_cache,
            is_new=False,
            prompt_length=parent.prompt_length,
            adapter=parent.adapter,
            is_long=parent.is_long,
            rotary_length=parent.rotary_length,
        )
        batch_is_full = len(self.running) >= self.settings.max_sequences
        if batch_is_full or self.settings.has_states or parent not in self.running:
            self.add(child)
            return child
        num_full_blocks = parent.computed // size
        child.blocks = parent.blocks[:num_full_blocks]
        self.pool.share(child.blocks.tolist())
        child.keys = parent.keys[:num_full_blocks]
        child.computed = num_full_blocks * size
        self._activate(child)
        return child

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, and free its blocks."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        self._release(sequence)
        sequence.is_removed = True

    def plan(self) -> StepPlan:
        """Return the next step, which is empty if there is nothing to do."""
        step = _OpenPlan(self.settings.max_tokens)
        self._restart_outgrown()
        # Drafts use the budget that remains after one token for every sequence.
        room = step.budget - len(self.running)
        # Sequences that need only their next token come first.
        for sequence in sorted(self.running, key=lambda sequence: sequence.uncomputed > 1):
            count = self._row_size(sequence, step.budget)
            if count and sequence not in step.preempted and self._make_room(sequence, count, step):
                drafts = sequence.drafts[:room] if sequence.uncomputed == 1 else ()
                if self.settings.trained_context is not None and not sequence.is_long:
                    drafts = drafts[: self.settings.trained_context - len(sequence.tokens)]
                if drafts and not self._allocate(sequence, count + len(drafts)):
                    drafts = ()  # no sequence is preempted for drafts
                step.add(sequence, count, drafts)
                room -= len(drafts)
        self._admit_waiting(step)
        # If no running sequence has anything to compute, and there is still no room for the first
        # in the queue, the running ones are beams that wait for one another. They give up their
        # blocks and go to the end of the queue.
        while not step.rows and self._waiting and self.running:
            last = self.running[-1]
            self._preempt(last)
            self._waiting.append(last)
            self._admit_waiting(step)
        rows = map(self._with_snapshot, step.rows.values())
        return tuple(sorted(rows, key=lambda row: not row.is_decode))

    def mark_started(self, plan: StepPlan) -> None:
        """Record that later steps will find the plan's tokens in the cache."""
        for row in plan:
            row.sequence.computed = row.start + row.size

    def drop_drafts(self, sequence: Sequence) -> None:
        """Record that the cache has all tokens of a sequence except the last, and no drafts."""
        sequence.computed = min(sequence.computed, len(sequence.tokens) - 1)

    def mark_complete(self, plan: StepPlan) -> None:
        """Record that the plan's tokens are known and in the cache.

        Other sequences can reuse only the prompt's blocks. Later tokens were computed one by one,
        and their keys and values may differ in the last bits from those computed in a prompt.
        """
        size = self.settings.block_size
        for row in plan:
            sequence = row.sequence
            # The sequence may have been preempted and begun again in the meantime.
            computed = min(row.start + row.size, sequence.computed, sequence.prompt_length)
            for index in range(len(sequence.keys), computed // size):
                key = sequence.next_key(sequence.keys, size)
                self.pool.publish(int(sequence.blocks[index]), key)
                sequence.keys.append(key)

    def _restart_outgrown(self) -> None:
        """Move sequences that have grown beyond the training context to the head of the queue.

        They release their blocks and are recomputed. Tokens that a step in progress computes for
        them remain valid, because they were chosen while the sequence was still short.
        """
        limit = self.settings.trained_context
        if limit is None:
            return
        outgrown = [s for s in self.running if not s.is_long and len(s.tokens) > limit]
        for sequence in reversed(outgrown):
            self._preempt(sequence)
            self._waiting.appendleft(sequence)

    def _make_room(self, sequence: Sequence, count: int, step: _OpenPlan) -> bool:
        """Allocate blocks for more tokens of a sequence, preempting later sequences if necessary.

        Returns:
            Whether the sequence got the blocks. If not, it has itself been preempted.
        """
        while not self._allocate(sequence, count):
            last = self.running[-1]
            self._preempt(last)
            self._waiting.appendleft(last)
            step.remove(last)
            if last is sequence:
                return False
        return True

    def _admit_waiting(self, step: _OpenPlan) -> None:
        """Start sequences from the head of the queue, as long as they fit.

        A sequence waits for the next step if this step computes a first block that it can reuse.
        """
        size = self.settings.block_size
        while self._waiting and step.budget and len(self.running) < self.settings.max_sequences:
            sequence = self._waiting[0]
            limit = self.settings.trained_context
            sequence.is_long = limit is not None and len(sequence.tokens) > limit
            dynamic = self.settings.dynamic_context
            if dynamic is not None and sequence.prompt_length > dynamic:
                sequence.rotary_length = sequence.prompt_length
            first_key = None  # key of the first block, if other sequences can reuse it
            reuses = sequence.reuses_cache and not self.settings.has_states
            if reuses and len(sequence.tokens) > size:
                first_key = sequence.next_key([], size)
            if first_key in step.first_keys:
                return
            restore_slot = self._admit(sequence)
            if restore_slot is None:
                return
            if first_key is not None and not sequence.computed:
                step.first_keys.add(first_key)
            self._waiting.popleft()
            self._activate(sequence)
            count = self._row_size(sequence, step.budget)
            self._allocate(sequence, count)
            step.add(sequence, count, restore_slot=restore_slot)

    def _allocate(self, sequence: Sequence, count: int) -> bool:
        """Allocate free blocks for more tokens, and return whether there were enough of them."""
        needed = self.settings.blocks_for(sequence.computed + count) - len(sequence.blocks)
        if needed > self.pool.available:
            return False
        if needed > 0:
            blocks = [self.pool.allocate() for _ in range(needed)]
            sequence.blocks = np.append(sequence.blocks, blocks)
        return True

    def _admit(self, sequence: Sequence) -> int | None:
        """Give a sequence its cached blocks if there is also room for its remaining tokens.

        Returns:
            The slot of the snapshot from which the sequence starts, or -1 for none. `None` if there
            is no room.
        """
        size, tokens = self.settings.block_size, sequence.tokens
        blocks: list[int] = []
        keys: list[BlockKey] = []
        # The last token is always computed, because the next token is chosen from its logits.
        while sequence.reuses_cache and (len(keys) + 1) * size < len(tokens):
            key = sequence.next_key(keys, size)
            block = self.pool.find(key)
            if block is None:
                break
            blocks.append(block)
            keys.append(key)
        while self.settings.has_states and keys and keys[-1] not in self._snapshots:
            keys.pop()
            blocks.pop()
        needed = self.settings.blocks_for(len(tokens)) - len(blocks)
        if needed > self.pool.available - sum(map(self.pool.is_unused, blocks)):
            return None
        self.pool.share(blocks)
        sequence.blocks, sequence.keys = np.array(blocks, np.int64), keys
        sequence.computed = len(blocks) * size
        if sequence.is_new:
            sequence.cached, sequence.is_new = sequence.computed, False
        return self._snapshots.use(keys[-1]) if self.settings.has_states and keys else -1

    def _shared_end(self, sequence: Sequence) -> int:
        """Return the position after the last block of a prompt that other prompts may share."""
        size = self.settings.block_size
        return (sequence.prompt_length - 1) // size * size

    def _row_size(self, sequence: Sequence, budget: int) -> int:
        """Return how many tokens to compute. A row must end where a snapshot will be taken.

        Args:
            sequence: A sequence with tokens to compute.
            budget: The largest number of tokens that may be computed.
        """
        count = min(sequence.uncomputed, budget)
        remaining = self._shared_end(sequence) - sequence.computed
        return min(count, remaining) if self.settings.snapshots and remaining > 0 else count

    def _with_snapshot(self, row: Row) -> Row:
        """Return the row, with a slot for a snapshot if the row ends where one is worth keeping."""
        sequence, size = row.sequence, self.settings.block_size
        end = row.start + row.size
        if not self.settings.snapshots or not 0 < end == self._shared_end(sequence):
            return row
        keys = list(sequence.keys)
        while len(keys) < end // size:
            keys.append(sequence.next_key(keys, size))
        slot = self._snapshots.allocate(keys[end // size - 1])
        return row if slot is None else row._replace(snapshot_slot=slot)

    def _activate(self, sequence: Sequence) -> None:
        """Put a sequence in the batch."""
        sequence.state_slot = self._free_state_slots.pop()
        self.running.append(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        self.preempted += 1

    def _release(self, sequence: Sequence) -> None:
        # In this order, the first blocks stay in the cache longest.
        for block in sequence.blocks[::-1].tolist():
            self.pool.release(block)
        sequence.blocks, sequence.keys, sequence.computed = sequence.blocks[:0], [], 0
        if sequence.state_slot >= 0:
            self._free_state_slots.append(sequence.state_slot)
            sequence.state_slot = -1


@dataclass
class _OpenPlan:
    """A plan in progress.

    Attributes:
        budget: Number of tokens that can still be added.
        rows: The plan's rows so far.
        preempted: Sequences that were preempted to make room.
        first_keys: Keys of first blocks that this step computes. Further sequences that begin with
            one of these blocks wait for the next step.
    """

    budget: int
    rows: dict[Sequence, Row] = field(default_factory=dict)
    preempted: set[Sequence] = field(default_factory=set)
    first_keys: set[BlockKey | None] = field(default_factory=set)

    def add(
        self,
        sequence: Sequence,
        count: int,
        drafts: tuple[int, ...] = (),
        *,
        restore_slot: int = -1,
    ) -> None:
        """Add a row that computes this many more tokens of a sequence, and then its drafts."""
        start = sequence.computed
        tokens = (*sequence.tokens[start : start + count], *drafts)
        is_last = start + count == len(sequence.tokens)
        self.rows[sequence] = Row(
            sequence, start, tokens, sequence.blocks, is_last, len(drafts), restore_slot
        )
        self.budget -= len(tokens)

    def remove(self, sequence: Sequence) -> None:
        """Remove the row of a preempted sequence."""
        self.preempted.add(sequence)
        row = self.rows.pop(sequence, None)
        self.budget += 0 if row is None else row.size
