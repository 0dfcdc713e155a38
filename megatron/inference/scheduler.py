"""Which sequences a step computes, how many tokens of each, and in which blocks: no tensors here.

A step has a budget of tokens. Sequences that only need their next token come first, then the rest
of prompts begun, then new prompts in the order of their arrival; a prompt that does not fit is cut
into chunks, and one that begins like another of the same step comes a step later, to share. Where
blocks run out, the sequence that began last gives its own back and is computed again later.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron.inference.blocks import FIRST_KEY, BlockPool, Key, next_key

UNKNOWN = -1  # a token that a step under way chooses


@dataclass(frozen=True)
class SchedulerSettings:
    """Sizes.

    Attributes:
        blocks: of the cache.
        block_size: tokens of a block.
        max_sequences: of a step.
        max_tokens: of a step; at least `max_sequences`, so that every sequence can go on.
    """

    blocks: int
    block_size: int
    max_sequences: int
    max_tokens: int

    def __post_init__(self) -> None:
        assert min(self.blocks, self.block_size, self.max_sequences) >= 1, self
        assert self.max_tokens >= self.max_sequences, self

    def blocks_for(self, tokens: int) -> int:
        """How many hold so many tokens."""
        return -(-tokens // self.block_size)


@dataclass(eq=False)
class Sequence:
    """Tokens whose keys and values belong together.

    Attributes:
        request: whose it is.
        tokens: so far; who owns the sequence appends. The last may be `UNKNOWN`.
        reuses: may begin with blocks that others have computed.
        prompt: of the tokens, so many at the beginning are read and not written, all that there
            are at first: they are computed as a prompt is, also where a single one is left.
        computed: so many tokens are in the cache, or will be after the steps under way.
        cached: of these found there, when it began first.
        blocks: that hold them, and those of the step under way.
        keys: of the full ones among them that are published.
        is_over: it has been removed; what a step under way finds for it is of no use.
    """

    request: str
    tokens: list[int]
    reuses: bool = True
    computed: int = 0
    cached: int = 0
    blocks: tuple[int, ...] = ()
    keys: list[Key] = field(default_factory=list)
    is_new: bool = True
    is_over: bool = False
    prompt: int = -1

    def __post_init__(self) -> None:
        if self.prompt < 0:
            self.prompt = len(self.tokens)

    @property
    def missing(self) -> int:
        """Tokens that are not computed."""
        return len(self.tokens) - self.computed


class Row(NamedTuple):
    """What a step does for one sequence: computes tokens `start` to `start + size`.

    Attributes:
        tokens: these.
        blocks: of the sequence up to them; the same object until it changes.
        is_last: after them all known tokens are computed: the next can be chosen.
    """

    sequence: Sequence
    start: int
    tokens: tuple[int, ...]
    blocks: tuple[int, ...]
    is_last: bool

    @property
    def size(self) -> int:
        """Tokens computed."""
        return len(self.tokens)

    @property
    def goes_on(self) -> bool:
        """It is one token, and not of a prompt."""
        return len(self.tokens) == 1 and self.start >= self.sequence.prompt


Plan = tuple[Row, ...]  # those that go on first


class Scheduler:
    """Plans steps. Call `begun` with a plan once it is under way, before the next `plan`, and
    `done` once it is carried out. Steps are carried out in the order of their plans."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.settings = settings
        self.pool = BlockPool(settings.blocks)
        self.preempted = 0
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # in the order in which they began

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Those that have a place, in the order in which they began."""
        return tuple(self._running)

    def add(self, sequence: Sequence) -> None:
        """Take a sequence; it waits for its turn."""
        self._waiting.append(sequence)

    def fork(self, parent: Sequence, tokens: list[int]) -> Sequence:
        """A second sequence that begins like `parent`, a running one, whose full blocks it shares.

        It comes after all others in line where there is no place for it now.
        """
        size = self.settings.block_size
        child = Sequence(parent.request, tokens, parent.reuses, is_new=False, prompt=parent.prompt)
        if len(self._running) >= self.settings.max_sequences or parent not in self._running:
            self.add(child)
            return child
        full = parent.computed // size
        child.blocks = tuple(self.pool.share_block(block) for block in parent.blocks[:full])
        child.keys = parent.keys[:full]
        child.computed = full * size
        self._running.append(child)
        return child

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, and give its blocks back."""
        if sequence in self._running:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        self._release(sequence)
        sequence.is_over = True

    def plan(self) -> Plan:
        """The next step; empty where nothing is to do."""
        step = _Step(self.settings.max_tokens)
        going_on = [s for s in self._running if s.missing == 1]
        begun = [s for s in self._running if s.missing > 1]
        for sequence in going_on + begun:
            count = min(sequence.missing, step.budget)
            if count and sequence not in step.preempted and self._make_room(sequence, count, step):
                step.put(sequence, count)
        self._begin_waiting(step)
        if not step.rows and self._waiting:
            self._begin_stuck(step)
        return tuple(sorted(step.rows.values(), key=lambda row: not row.goes_on))

    def begun(self, plan: Plan) -> None:
        """Steps that come later find the plan's tokens in the cache."""
        for row in plan:
            row.sequence.computed = row.start + row.size

    def done(self, plan: Plan) -> None:
        """The plan's tokens are in the cache, and all of them are known.

        Others can begin with the prompt's. What was written behind it was computed token by token,
        and its last bits may not be those that it has as part of another prompt.
        """
        size = self.settings.block_size
        for row in plan:
            sequence = row.sequence
            # It may have lost its place, and begun again, since the step began.
            computed = min(row.start + row.size, sequence.computed, sequence.prompt)
            for index in range(len(sequence.keys), computed // size):
                key = _key(sequence, index, size)
                self.pool.publish(sequence.blocks[index], key)
                sequence.keys.append(key)

    def _make_room(self, sequence: Sequence, count: int, step: _Step) -> bool:
        """Give it blocks for so many tokens more, others' where needed; False: it lost its own."""
        while not self._grow(sequence, count):
            last = self._running[-1]
            self._preempt(last)
            self._waiting.appendleft(last)
            step.drop(last)
            if last is sequence:
                return False
        return True

    def _begin_waiting(self, step: _Step) -> None:
        """Those that come next and fit."""
        while self._waiting and step.budget and len(self._running) < self.settings.max_sequences:
            sequence = self._waiting[0]
            first = self._first_key(sequence)
            if first in step.coming or not self._begin(sequence):
                return
            if first is not None and not sequence.computed:
                step.coming.add(first)
            self._waiting.popleft()
            self._running.append(sequence)
            count = min(sequence.missing, step.budget)
            self._grow(sequence, count)
            step.put(sequence, count)

    def _begin_stuck(self, step: _Step) -> None:
        """Nobody who runs has anything to compute, and they leave no room to the first in line:
        beams that wait for one another. They give up theirs and go to the end of the line."""
        while self._running and not step.rows:
            last = self._running[-1]
            self._preempt(last)
            self._waiting.append(last)
            self._begin_waiting(step)

    def _grow(self, sequence: Sequence, count: int) -> bool:
        """Give it free blocks for so many tokens more; False, and nothing, where too few are."""
        needed = self.settings.blocks_for(sequence.computed + count) - len(sequence.blocks)
        if needed > self.pool.available:
            return False
        if needed > 0:
            taken = [self.pool.take() for _ in range(needed)]
            sequence.blocks += tuple(block for block in taken if block is not None)
        return True

    def _begin(self, sequence: Sequence) -> bool:
        """Give it the blocks that are computed already, if all that it needs can be had."""
        known = self._known_keys(sequence)
        unused = sum(self.pool.is_unused(key) for key in known)
        needed = self.settings.blocks_for(len(sequence.tokens)) - len(known)
        if needed > self.pool.available - unused:
            return False
        sequence.blocks = tuple(self.pool.share(key) for key in known)
        sequence.keys = known
        sequence.computed = len(known) * self.settings.block_size
        if sequence.is_new:
            sequence.cached, sequence.is_new = sequence.computed, False
        return True

    def _first_key(self, sequence: Sequence) -> Key | None:
        """Of the first block, if others can begin with it."""
        size = self.settings.block_size
        if not sequence.reuses or len(sequence.tokens) <= size:
            return None
        return next_key(FIRST_KEY, sequence.tokens[:size])

    def _known_keys(self, sequence: Sequence) -> list[Key]:
        """Of the blocks it can begin with. The last token is always computed: it says what is
        next."""
        keys: list[Key] = []
        size = self.settings.block_size
        most = (len(sequence.tokens) - 1) // size if sequence.reuses else 0
        for index in range(most):
            tokens = sequence.tokens[index * size : (index + 1) * size]
            key = next_key(keys[-1] if keys else FIRST_KEY, tokens)
            if not self.pool.is_known(key):
                break
            keys.append(key)
        return keys

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._release(sequence)
        self.preempted += 1

    def _release(self, sequence: Sequence) -> None:
        for block in reversed(sequence.blocks):  # a beginning stays longer than what follows it
            self.pool.release(block)
        sequence.blocks, sequence.keys, sequence.computed = (), [], 0


@dataclass
class _Step:
    """A plan in the making."""

    budget: int  # tokens left
    rows: dict[Sequence, Row] = field(default_factory=dict)
    preempted: set[Sequence] = field(default_factory=set)
    coming: set[Key | None] = field(default_factory=set)
    """First blocks that are computed in this step: who begins like that waits for the next one."""

    def put(self, sequence: Sequence, count: int) -> None:
        self.rows[sequence] = _row(sequence, count)
        self.budget -= count

    def drop(self, sequence: Sequence) -> None:
        self.preempted.add(sequence)
        row = self.rows.pop(sequence, None)
        self.budget += 0 if row is None else row.size


def _row(sequence: Sequence, count: int) -> Row:
    start = sequence.computed
    return Row(
        sequence,
        start,
        tuple(sequence.tokens[start : start + count]),
        sequence.blocks,
        is_last=start + count == len(sequence.tokens),
    )


def _key(sequence: Sequence, index: int, size: int) -> Key:
    previous = sequence.keys[index - 1] if index else FIRST_KEY
    return next_key(previous, sequence.tokens[index * size : (index + 1) * size])
