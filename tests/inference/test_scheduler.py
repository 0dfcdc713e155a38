"""Plans keep their guarantees for any arrivals, and no block is ever lost."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from megatron.inference.cache import BlockPool, next_key
from megatron.inference.scheduler import (
    Row,
    Scheduler,
    SchedulerSettings,
    Sequence,
    StepPlan,
    _OpenPlan,
)

SETTINGS = SchedulerSettings(blocks=12, block_size=4, max_sequences=3, max_tokens=8)


def carry_out(scheduler: Scheduler) -> list[tuple[int, int]]:
    """Plan and execute a step; return (start, count) of each row."""
    plan = scheduler.plan()
    scheduler.mark_started(plan)
    scheduler.mark_complete(plan)
    return [(row.start, row.size) for row in plan]


def test_a_long_prompt_is_cut_into_chunks_and_others_continue_meanwhile() -> None:
    scheduler = Scheduler(SETTINGS)
    first = Sequence("r", list(range(2)))
    scheduler.add(first)
    assert carry_out(scheduler) == [(0, 2)]
    first.tokens.append(9)
    scheduler.add(Sequence("r", list(range(100, 120))))
    assert carry_out(scheduler) == [(2, 1), (0, 7)]
    first.tokens.append(9)
    assert carry_out(scheduler) == [(3, 1), (7, 7)]
    assert carry_out(scheduler) == [(14, 6)]
    assert carry_out(scheduler) == []


def test_a_plan_gets_the_tokens_of_a_preempted_sequence_back() -> None:
    plan = _OpenPlan(budget=8)
    first, second = Sequence("r", list(range(5))), Sequence("r", [1, 2])
    plan.add(first, 3)
    plan.add(second, 1, (7, 8))
    assert (plan.budget, [row.size for row in plan.rows.values()]) == (2, [3, 3])
    plan.remove(first)
    assert (plan.budget, list(plan.rows), plan.preempted) == (5, [second], {first})
    plan.remove(first)  # it has no row any more
    assert (plan.budget, plan.preempted) == (5, {first})


def test_a_snapshot_of_states_is_taken_where_prompts_may_branch_and_restored_there() -> None:
    """It follows the last whole block of a prompt, and uses the slot after the sequences'."""
    scheduler = Scheduler(replace(SETTINGS, max_tokens=6, has_states=True, snapshots=1))

    def run() -> list[tuple[int, int, int, int]]:
        plan = scheduler.plan()
        scheduler.mark_started(plan)
        scheduler.mark_complete(plan)
        return [(row.start, row.size, row.restore_slot, row.snapshot_slot) for row in plan]

    first, second = Sequence("r", list(range(11))), Sequence("r", [*range(9), 99])
    scheduler.add(first)
    assert [run() for _ in range(3)] == [[(0, 6, -1, -1)], [(6, 2, -1, 3)], [(8, 3, -1, -1)]]
    scheduler.remove(first)
    scheduler.add(second)
    assert run() == [(8, 2, 3, -1)]
    second.tokens.append(7)
    assert run() == [(10, 1, -1, -1)]
    assert (second.cached, second.state_slot) == (8, 2)


def test_what_is_written_is_not_shared_as_if_it_had_been_read() -> None:
    """Only tokens computed as part of a prompt are shared, including a last one computed alone."""
    scheduler = Scheduler(SETTINGS)
    written = Sequence("r", [1, 2, 3, 4, 5])
    scheduler.add(written)
    for token in (6, 7, 8, 9):
        carry_out(scheduler)
        written.tokens.append(token)
    longer = Sequence("r", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    scheduler.add(longer)
    rows = scheduler.plan()
    assert [(row.start, row.size, row.is_decode) for row in rows] == [(8, 1, True), (4, 5, False)]
    assert longer.cached == 4
    scheduler.remove(written)
    one_left = Sequence("r", [1, 2, 3, 4, 5])
    scheduler.add(one_left)
    (row,) = (row for row in scheduler.plan() if row.sequence is one_left)
    assert (row.start, row.size, row.is_decode) == (4, 1, False)


def test_a_sequence_that_outgrows_the_trained_context_begins_again() -> None:
    scheduler = Scheduler(replace(SETTINGS, trained_context=6))
    first = Sequence("r", [1, 2, 3, 4, 5, 6])
    scheduler.add(first)
    assert carry_out(scheduler) == [(0, 6)]
    first.tokens.append(7)
    assert carry_out(scheduler) == [(0, 7)]
    assert first.is_long
    first.tokens.append(8)
    assert carry_out(scheduler) == [(7, 1)]
    alike = [Sequence("r", [1, 2, 3, 4, 5, 6, 9]), Sequence("r", [1, 2, 3, 4, 5])]
    scheduler.add(*alike)
    scheduler.remove(first)
    assert carry_out(scheduler) == [(4, 3), (4, 1)]  # a block of long texts, and one of short ones
    assert [one.is_long for one in alike] == [True, False]
    assert alike[0].blocks[0] != alike[1].blocks[0]


def test_drafts_do_not_reach_beyond_the_trained_context() -> None:
    scheduler = Scheduler(replace(SETTINGS, trained_context=6))
    sequence = Sequence("r", [1, 2, 3])
    scheduler.add(sequence)
    carry_out(scheduler)
    sequence.tokens.append(4)
    sequence.drafts = (5, 6, 7, 8)
    (row,) = scheduler.plan()
    assert row.tokens == (4, 5, 6)


@pytest.mark.parametrize(
    ("reuses_cache", "has_states", "rows"),
    [
        (True, False, [(0, 6)]),
        (False, False, [(0, 6), (0, 2)]),
        (True, True, [(0, 6), (0, 2)]),
        (False, True, [(0, 6), (0, 2)]),
    ],
)
def test_sequences_wait_only_for_a_block_that_they_will_reuse(
    reuses_cache: bool, has_states: bool, rows: list[tuple[int, int]]
) -> None:
    scheduler = Scheduler(replace(SETTINGS, has_states=has_states))
    scheduler.add(*(Sequence("r", [1, 2, 3, 4, 5, 6], reuses_cache) for _ in range(2)))
    assert carry_out(scheduler) == rows


def test_a_fork_counts_no_cached_tokens_of_its_own() -> None:
    """Those of its prompt were counted for the sequence from which it was forked."""
    scheduler = Scheduler(replace(SETTINGS, max_sequences=1))
    parent = Sequence("r", list(range(9)))
    scheduler.add(parent)
    while carry_out(scheduler):
        pass
    child = scheduler.fork(parent, [*range(9), 20])
    scheduler.remove(parent)
    assert carry_out(scheduler) == [(8, 2)]
    assert (child.cached, child.prompt_length) == (0, 9)


def test_sequences_that_begin_alike_share_full_blocks() -> None:
    scheduler = Scheduler(SETTINGS)
    first, second = Sequence("r", [1, 2, 3, 4, 5, 6]), Sequence("r", [1, 2, 3, 4, 5, 7])
    for sequence in (first, second):
        scheduler.add(sequence)
        carry_out(scheduler)
    assert (first.cached, second.cached) == (0, 4)
    assert first.blocks[0] == second.blocks[0]
    assert first.blocks[1] != second.blocks[1]
    third = Sequence("r", [1, 2, 3, 4])  # all cached, but the last token predicts the next
    scheduler.add(third)
    assert carry_out(scheduler) == [(0, 4)]


def test_one_of_the_prompts_that_arrive_together_and_begin_alike_is_computed() -> None:
    scheduler = Scheduler(SETTINGS)
    alike = [Sequence("r", [1, 2, 3, 4, last]) for last in (5, 6, 7)]
    for sequence in alike:
        scheduler.add(sequence)
    assert carry_out(scheduler) == [(0, 5)]
    assert carry_out(scheduler) == [(4, 1), (4, 1)]
    assert [sequence.cached for sequence in alike] == [0, 4, 4]


def test_what_follows_another_beginning_is_not_shared() -> None:
    scheduler = Scheduler(SETTINGS)
    for tokens in ([1, 2, 3, 4, 5, 6, 7, 8, 9], [0, 2, 3, 4, 5, 6, 7, 8, 9]):
        sequence = Sequence("r", tokens)
        scheduler.add(sequence)
        carry_out(scheduler)
        assert sequence.cached == 0


def test_blocks_of_ended_sequences_are_found_again_until_they_are_needed() -> None:
    scheduler = Scheduler(SETTINGS)
    old = Sequence("r", list(range(8)))
    scheduler.add(old)
    carry_out(scheduler)
    scheduler.remove(old)
    again = Sequence("r", list(range(9)))
    scheduler.add(again)
    carry_out(scheduler)
    assert again.cached == 8
    scheduler.remove(again)
    large = Sequence("r", [7] * 48)  # uses all blocks
    scheduler.add(large)
    while carry_out(scheduler):
        pass
    scheduler.remove(large)
    fresh = Sequence("r", list(range(9)))
    scheduler.add(fresh)
    carry_out(scheduler)
    assert fresh.cached == 0


def test_the_last_to_begin_gives_its_blocks_up() -> None:
    scheduler = Scheduler(SchedulerSettings(blocks=4, block_size=2, max_sequences=2, max_tokens=8))
    first, second = Sequence("r", [1, 2, 3, 4]), Sequence("r", [5, 6, 7, 8])
    for sequence in (first, second):
        scheduler.add(sequence)
    carry_out(scheduler)
    for sequence in (first, second):
        sequence.tokens.append(0)
    assert carry_out(scheduler) == [(4, 1)]
    assert first in scheduler.running
    assert second not in scheduler.running
    assert scheduler.preempted == 1
    scheduler.remove(first)
    assert [count for _, count in carry_out(scheduler)] == [3]  # its first block was still cached
    assert second.cached == 0, "it had computed that block itself"


def test_a_preempted_sequence_is_the_first_to_begin_again() -> None:
    scheduler = Scheduler(SchedulerSettings(blocks=4, block_size=2, max_sequences=2, max_tokens=8))
    first, second, later = (Sequence("r", tokens) for tokens in ([1, 2, 3, 4], [5, 6, 7, 8], [9]))
    scheduler.add(first, second, later)
    carry_out(scheduler)
    assert scheduler.running == [first, second]
    first.tokens.append(0)
    second.tokens.append(0)
    carry_out(scheduler)
    assert scheduler.running == [first]  # there is a block for `later`, which has to wait
    scheduler.remove(first)
    carry_out(scheduler)
    assert scheduler.running == [second, later]


def test_a_fork_shares_full_blocks_and_computes_the_rest_itself() -> None:
    scheduler = Scheduler(SETTINGS)
    parent = Sequence("r", [1, 2, 3, 4, 5, 6])
    scheduler.add(parent)
    carry_out(scheduler)
    child = scheduler.fork(parent, [*parent.tokens, 8])
    assert scheduler.running == [parent, child]
    parent.tokens.append(7)
    assert carry_out(scheduler) == [(6, 1), (4, 3)]
    assert child.blocks[0] == parent.blocks[0]
    assert child.blocks[1] != parent.blocks[1]


def test_a_fork_of_a_preempted_sequence_waits_behind_it() -> None:
    scheduler = Scheduler(SchedulerSettings(blocks=4, block_size=2, max_sequences=3, max_tokens=8))
    first, second = Sequence("r", [1, 2, 3, 4]), Sequence("r", [5, 6, 7, 8])
    scheduler.add(first, second)
    carry_out(scheduler)
    first.tokens.append(0)
    second.tokens.append(0)
    carry_out(scheduler)  # there is no block for the second one
    child = scheduler.fork(second, [*second.tokens, 9])
    assert (scheduler.running, child.blocks.tolist(), child.computed) == ([first], [], 0)
    scheduler.remove(first)
    carry_out(scheduler)
    assert scheduler.running == [second]


def test_decode_rows_come_first_and_drafts_fill_the_budget() -> None:
    scheduler = Scheduler(replace(SETTINGS, max_sequences=2, max_tokens=4))
    first, second = Sequence("r", [1, 2]), Sequence("r", [3])
    scheduler.add(first, second)
    carry_out(scheduler)
    first.tokens += [8, 9]
    second.tokens.append(7)
    assert carry_out(scheduler) == [(1, 1), (2, 2)]
    for sequence in (first, second):
        sequence.tokens.append(0)
        sequence.drafts = (5, 5, 5)
    plan = scheduler.plan()
    assert [(row.size, row.drafts, row.is_last) for row in plan] == [(3, 2, True), (1, 0, True)]


def test_a_next_token_is_not_delayed_by_a_sequence_with_two() -> None:
    scheduler = Scheduler(replace(SETTINGS, max_sequences=2, max_tokens=2))
    first, second = Sequence("r", [1]), Sequence("r", [3])
    scheduler.add(first, second)
    carry_out(scheduler)
    first.tokens += [8, 9]
    second.tokens.append(7)
    assert carry_out(scheduler) == [(1, 1), (1, 1)]
    assert (first.uncomputed, second.uncomputed) == (1, 0)


def test_only_the_last_chunk_of_a_prompt_chooses_a_token() -> None:
    scheduler = Scheduler(SETTINGS)
    scheduler.add(Sequence("r", list(range(10))))
    last = []
    for _ in range(2):
        (row,) = scheduler.plan()
        last.append((row.is_last, row.drafts, row.restore_slot, row.snapshot_slot))
        scheduler.mark_started((row,))
    assert last == [(False, 0, -1, -1), (True, 0, -1, -1)]
    plain = Row(row.sequence, 0, (1,), row.blocks, is_last=True)
    assert (plain.drafts, plain.restore_slot, plain.snapshot_slot) == (0, -1, -1)


def test_a_row_is_split_into_its_tokens() -> None:
    sequence = Sequence("r", [1, 2, 3, 4, 5])
    row = Row(sequence, 3, (4, 5, 9), sequence.blocks, is_last=True, drafts=1)
    singles = row.split_tokens()
    assert [(one.start, one.tokens) for one in singles] == [(3, (4,)), (4, (5,)), (5, (9,))]
    assert all((one.drafts, one.is_last, one.sequence) == (0, True, sequence) for one in singles)


def test_rejected_drafts_are_dropped() -> None:
    scheduler, sequence = Scheduler(SETTINGS), Sequence("r", [1, 2, 3, 4, 5])
    for computed, kept in ((7, 4), (5, 4), (4, 4), (2, 2)):
        sequence.computed = computed
        scheduler.drop_drafts(sequence)
        assert sequence.computed == kept


@pytest.mark.parametrize(("tokens", "reuses"), [([1, 2, 3], True), ([1, 2, 3, 4, 5], False)])
def test_prompts_that_share_no_block_are_computed_together(tokens: list[int], reuses: bool) -> None:
    scheduler = Scheduler(replace(SETTINGS, max_tokens=10))
    scheduler.add(*(Sequence("r", list(tokens), reuses_cache=reuses) for _ in range(2)))
    assert carry_out(scheduler) == [(0, len(tokens))] * 2
    assert Sequence("r", tokens).prompt_length == len(tokens)


def test_the_last_of_three_to_begin_is_preempted() -> None:
    scheduler = Scheduler(SchedulerSettings(blocks=6, block_size=2, max_sequences=3, max_tokens=12))
    three = [Sequence("r", [4 * index + offset for offset in range(4)]) for index in range(3)]
    scheduler.add(*three)
    carry_out(scheduler)
    for sequence in three:
        sequence.tokens.append(0)
    carry_out(scheduler)
    assert scheduler.running == three[:2]
    assert three[2].state_slot == -1


def test_a_sequence_that_never_began_gives_no_slot_back() -> None:
    scheduler = Scheduler(SETTINGS)
    waiting = Sequence("r", [9])
    scheduler.add(waiting)
    scheduler.remove(waiting)
    scheduler.add(*(Sequence("r", [token]) for token in range(4)))
    carry_out(scheduler)
    assert sorted(sequence.state_slot for sequence in scheduler.running) == [0, 1, 2]


def test_sequences_that_wait_for_one_in_line_make_room() -> None:
    scheduler = Scheduler(SchedulerSettings(blocks=4, block_size=2, max_sequences=4, max_tokens=8))
    idle, large = Sequence("r", [1, 2, 3, 4]), Sequence("r", [5] * 6)
    scheduler.add(idle)
    carry_out(scheduler)
    scheduler.add(large)
    assert carry_out(scheduler) == [(0, 6)]
    assert idle not in scheduler.running


@pytest.mark.parametrize("seed", range(30))
def test_every_sequence_is_computed_once_and_in_order_and_no_block_leaks(seed: int) -> None:
    chance = random.Random(seed)
    settings = SchedulerSettings(
        blocks=chance.randint(6, 20),
        block_size=chance.choice((1, 2, 4)),
        max_sequences=chance.randint(1, 5),
        max_tokens=chance.randint(9, 12),
    )
    scheduler = Scheduler(settings)
    longest = settings.blocks * settings.block_size
    alive: dict[Sequence, int] = {}  # and the length at which it ends
    to_come = 25
    for _ in range(5000):
        if to_come and chance.random() < 0.4:
            length = chance.randint(1, longest)
            prompt = [chance.randint(0, 1) for _ in range(chance.randint(1, length))]
            sequence = Sequence("r", prompt, reuses_cache=chance.random() < 0.8)
            alive[sequence] = length
            scheduler.add(sequence)
            to_come -= 1
        plan = scheduler.plan()
        check(plan, settings)
        scheduler.mark_started(plan)
        scheduler.mark_complete(plan)
        for row in plan:
            if row.is_last:
                row.sequence.tokens.append(chance.randint(0, 1))
        over = [s for s, end in alive.items() if len(s.tokens) > end or chance.random() < 0.01]
        for sequence in over:
            scheduler.remove(sequence)
            del alive[sequence]
        check_blocks(scheduler, list(alive))
        if not alive and not to_come:
            break
    assert not alive, "every request comes to its end"
    assert not to_come
    assert scheduler.pool.available == settings.blocks


def check(plan: StepPlan, settings: SchedulerSettings) -> None:
    kinds = [row.is_decode for row in plan]
    assert kinds == sorted(kinds, reverse=True)
    assert sum(row.size for row in plan) <= settings.max_tokens
    assert len(plan) <= settings.max_sequences
    for row in plan:
        assert row.start == row.sequence.computed
        assert list(row.tokens) == row.sequence.tokens[row.start : row.start + row.size]
        assert len(row.blocks) == settings.blocks_for(row.start + row.size)
    written = [row.blocks[i // settings.block_size] for row in plan for i in places(row)]
    users = [block for row in plan for block in set(row.blocks)]
    assert all(users.count(block) == 1 for block in written), "a block is written by one only"


def places(row: object) -> range:
    return range(row.start, row.start + row.size)  # type: ignore[attr-defined]


def check_blocks(scheduler: Scheduler, alive: list[Sequence]) -> None:
    used = {block for sequence in alive for block in sequence.blocks}
    assert scheduler.pool.available == scheduler.pool.count - len(used)


def test_a_block_is_not_released_twice() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    assert block == 0
    with pytest.raises(KeyError):
        pool.allocate()
    pool.publish(block, next_key([], [1], 1))
    pool.release(block)
    with pytest.raises(AssertionError, match="twice"):
        pool.release(block)
