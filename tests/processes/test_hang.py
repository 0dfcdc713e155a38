"""Which ranks are to blame for a hang, according to the processes' states."""

from megatron.processes import watchdog
from megatron.processes.watchdog import State, Wait, absent_ranks, explain, ranks_text

ALL = (0, 1, 2, 3)


def _state(operation="optimizer step", wait=None, *, place=7, behind=False, **started):
    counts = {tuple(map(int, name[1:])): count for name, count in started.items()}
    return State(9, 2, operation, place, wait, behind, counts, "step.py:70 in train_step")


def test_a_state_survives_the_store():
    state = _state(wait=Wait("all-reduce", (0, 1), 3), r01=3)
    assert State.from_text(state.to_text().encode()) == state
    assert State.from_text(_state().to_text().encode()) == _state()


def test_every_process_exits_within_10_seconds_of_an_alarm():
    assert (watchdog.BEAT, watchdog._SILENCE, watchdog._LINGER) == (1.0, 3.0, 2.0)
    assert (watchdog._PATIENCE, watchdog.GRACE, watchdog.CRASHED) == (8.0, 5.0, 1)
    assert watchdog._PRINT == 1.0


def test_a_rank_that_has_started_no_collective_of_a_group_is_absent_from_its_first():
    first = _state(wait=Wait("all-reduce", (0, 1, 2, 3), 1), r0123=1)
    joined, message = _state(r0123=1), _state(wait=Wait("receive", (3, 4), None))
    states = {0: first, 1: _state(), 2: joined, 3: None, 4: message}
    assert absent_ranks(first, 0, states, frozenset()) == {1, 3}
    assert absent_ranks(first, 0, states, frozenset({2})) == {1, 2, 3}
    assert absent_ranks(message, 4, states, frozenset()) == {3, 4}
    assert absent_ranks(joined, 2, states, frozenset()) == {1, 3}


def test_the_rank_that_does_not_wait_is_named():
    wait = Wait("all-reduce", (0, 1), 3)
    states = {0: _state(wait=wait, r01=3), 1: _state("forward of micro-batch 0", r01=2)}
    missing, report = explain(states, frozenset(), 60.0)
    assert missing == {1}
    headline, first, second, _ = report.splitlines()
    assert headline == (
        "hang in iteration 2, optimizer step: rank 1 did not join the all-reduce within 60 s "
        "(--distributed-timeout-minutes 1)"
    )
    assert first.startswith("  rank 1: alive in iteration 2, forward of micro-batch 0, at step.py")
    assert second.startswith("  rank 0: waits in iteration 2, optimizer step, for all-reduce with")


def test_a_silent_rank_is_named_and_those_that_wait_for_its_victims_are_not():
    states = {
        0: _state(wait=Wait("all-reduce", (0, 1), 5), r01=5),
        1: _state("forward of micro-batch 0", Wait("receive", (3,), None), r01=4, place=3),
        2: None,
        3: _state("forward of micro-batch 0"),
    }
    missing, report = explain(states, frozenset({2, 3}), 60.0)
    assert missing == {3}
    assert "hang in iteration 2, forward of micro-batch 0: rank 3 did not join the rec" in report
    assert "rank 3: no sign of life" in report
    assert "rank 2: never reported its state" in report


def test_the_headline_is_of_a_rank_that_waits_for_the_missing_one_itself():
    states = {
        0: _state("reduction of the norm", Wait("all-reduce", (0, 1), 5), place=2, r01=5),
        1: _state("forward of micro-batch 0", Wait("receive", (3,), None), place=3, r01=4),
        3: _state("loading of micro-batch 0"),
    }
    missing, report = explain(states, frozenset(), 60.0)
    assert missing == {3}
    assert "hang in iteration 2, forward of micro-batch 0: rank 3 did not join the rec" in report


def test_where_all_wait_whoever_went_past_a_communication_is_named():
    first, later = Wait("all-reduce", (0, 1), 4), Wait("all-reduce", ALL, 9)
    states = {
        0: _state("reduction of the gradients", first, place=5, r01=4, r0123=8),
        1: _state(wait=later, r01=3, r0123=9),
        2: _state(wait=later, r0123=9),
        3: _state(wait=later, r0123=9),
    }
    missing, report = explain(states, frozenset(), 60.0)
    assert missing == {1}
    assert report.startswith("hang in iteration 2, reduction of the gradients: rank 1 did not")


def test_devices_that_wait_are_compared_by_what_was_started():
    states = {
        0: _state(behind=True, r0123=9, r01=4),
        1: _state("loading of micro-batch 3", r0123=8, r01=4),
        2: _state(behind=True, r0123=9),
        3: _state(behind=True, r0123=9),
    }
    assert explain(states, frozenset(), 60.0)[0] == {1}


def test_where_all_have_joined_the_network_is_suspected():
    wait = Wait("all-reduce", (0, 1), 3)
    missing, report = explain(dict.fromkeys((0, 1), _state(wait=wait, r01=3)), frozenset(), 60.0)
    assert not missing
    assert "every rank has joined the all-reduce" in report
    assert "ranks 0-1: waits" in report or "rank 0: waits" in report


def test_the_whole_report():
    data, place = (0, 1, 2, 3), "step.py:70 in train_step"
    waits = "waits in iteration 2, optimizer step"
    states = {
        0: _state(wait=Wait("all-reduce", data, 5), r0123=5),
        1: _state(wait=Wait("all-reduce", data, 5), r0123=5),
        2: _state("loading of micro-batch 0", r0123=4),
        3: _state("forward of micro-batch 1", r0123=4),
        4: _state(behind=True),
        5: None,
    }
    missing, report = explain(states, frozenset({3}), 90.0)
    assert missing == {2, 3}
    assert report.splitlines() == [
        "hang in iteration 2, optimizer step: ranks 2-3 did not join the all-reduce within 90 s "
        "(--distributed-timeout-minutes 1.5)",
        f"  rank 2: alive in iteration 2, loading of micro-batch 0, at {place}",
        "  rank 5: never reported its state",
        "  rank 3: no sign of life (stopped, killed, or cut off); last seen in iteration 2, "
        "forward of micro-batch 1",
        f"  rank 4: waits for its device in iteration 2, optimizer step, at {place}",
        f"  rank 1: {waits}, for all-reduce with ranks 0, 2-3, at {place}",
        f"  rank 0: {waits}, for all-reduce with ranks 1-3, at {place}",
        "  If nothing is broken and an operation simply takes that long, raise "
        "--distributed-timeout-minutes.",
    ]


def test_ranks_in_the_same_state_share_a_line():
    states = dict.fromkeys((0, 1, 2, 4), _state(behind=True, r01=2))
    missing, report = explain(states, frozenset(), 60.0)
    assert not missing
    first, second, _ = report.splitlines()
    assert "every rank has joined the communication, which did not end within 60 s" in first
    assert second.startswith("  ranks 0-2, 4: waits for its device in iteration 2")


def test_where_nobody_waits_those_that_are_silent_are_named():
    states = {0: _state("logging"), 1: _state("logging"), 2: None}
    missing, report = explain(states, frozenset({1}), 60.0)
    assert missing == {1}
    assert report.startswith("hang: rank 1 made no progress within 60 s")


def test_ranks_are_written_short():
    assert ranks_text([3]) == "rank 3"
    assert ranks_text({5, 0, 2, 1}) == "ranks 0-2, 5"


def test_where_nobody_waits_those_that_are_alive_are_named():
    missing, report = explain({1: _state("logging")}, frozenset(), 60.0)
    assert missing == {1}
    assert report.startswith("hang: rank 1 made no progress within 60 s")
