"""Schedules are proven for some layouts here; `show_schedule --check-all` proves all."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megatron.config.parallel import ParallelConfig
from megatron.parallel.pipeline.check import ScheduleError, check, check_bounds
from megatron.parallel.pipeline.schedule import (
    SCHEDULE_KINDS,
    Operation,
    activation_bound,
    forward_only,
    loss_bound,
    make_schedule,
    schedule_kind,
)
from tools.show_schedule import layouts

STAGES = {1, 2, 3, 4, 16}
CHUNKS = {1, 2, 3, 8}
MICRO_BATCHES = {1, 2, 3, 5, 8, 17, 64}


@pytest.mark.parametrize("kind", SCHEDULE_KINDS)
def test_a_sample_of_all_layouts_runs_within_its_memory_bound(kind) -> None:
    count = 0
    for name, p, v, m in layouts(16, 8, 64):
        is_large = p * v * m > 1024
        if name == kind and p in STAGES and v in CHUNKS and m in MICRO_BATCHES and not is_large:
            check_bounds(name, p, v, m)
            count += 1
    assert count > 30


def test_the_largest_layout() -> None:
    check_bounds("interleaved", 16, 8, 64)


def test_one_forward_one_backward_in_words() -> None:
    text = [
        [f"{operation.kind[:1]}{operation.micro_batch}" for operation in operations]
        for operations in make_schedule("1f1b", 2, 1, 3)
    ]
    kinds = {operation.kind for operation in make_schedule("1f1b", 2, 1, 3)[0]}
    assert kinds == {"forward", "backward", "send_activation", "receive_gradient"}
    assert text[0] == ["f0", "s0", "f1", "s1", "r0", "b0", "f2", "s2", "r1", "b1", "r2", "b2"]
    assert text[1] == "r0 f0 b0 s0 r1 f1 b1 s1 r2 f2 b2 s2".split()


def test_chunks_go_around_the_ring() -> None:
    last = make_schedule("interleaved", 2, 2, 2)[1]
    first_two = [o for o in last if o.kind in {"send_activation", "receive_activation"}][:2]
    assert first_two == [
        Operation("receive_activation", 0, 0, 0),
        Operation("send_activation", 0, 0, 0),  # part 1 to part 2, which is stage 0's chunk 1
    ]


def test_one_stage_communicates_with_nobody() -> None:
    (operations,) = make_schedule("interleaved", 1, 3, 2)
    assert {operation.kind for operation in operations} == {"forward", "backward"}
    assert len(operations) == 12


@pytest.mark.parametrize("kind", SCHEDULE_KINDS)
def test_memory_bounds_are_reached_and_differ(kind) -> None:
    chunks = 2 if kind == "interleaved" else 1
    peaks = check(make_schedule(kind, 4, chunks, 16))
    assert peaks == tuple(activation_bound(kind, p, 4, chunks, 16) for p in range(4))
    wanted = {
        "gpipe": (16, 16, 16, 16),
        "1f1b": (4, 3, 2, 1),
        "interleaved": (11, 9, 7, 5),
        "zero-bubble": (4, 4, 4, 4),
    }
    assert peaks == wanted[kind]


@pytest.mark.parametrize("kind", SCHEDULE_KINDS)
def test_only_gpipe_holds_more_than_one_loss(kind) -> None:
    """Count on the last stage, from the last part's forward to the backward of its inputs."""
    chunks = {"gpipe": (1, 2), "interleaved": (2, 3)}.get(kind, (1,))
    for stages, micro_batches in ((1, 3), (2, 1), (2, 5), (4, 3), (4, 16)):
        for count in chunks:
            held = most = 0
            for operation in make_schedule(kind, stages, count, micro_batches)[-1]:
                if operation.chunk == count - 1:
                    held += operation.kind == "forward"
                    held -= operation.kind in {"backward", "backward_input"}
                    most = max(most, held)
            assert most == loss_bound(kind, micro_batches), (stages, micro_batches, count)


def test_forward_only_is_a_schedule_too() -> None:
    schedule = forward_only(make_schedule("interleaved", 3, 2, 5))
    assert check(schedule) == (10, 10, 10)  # nothing is released here, but evaluation keeps nothing
    assert sum(len(operations) for operations in schedule) == 5 * (6 + 2 * 5)


def _changed(change) -> tuple[tuple[Operation, ...], ...]:
    lines = [list(operations) for operations in make_schedule("1f1b", 2, 1, 3)]
    change(lines)
    return tuple(tuple(line) for line in lines)


def _swap_micro_batches(lines) -> None:
    """Let stage 1 take micro-batch 1 before 0: consistent in itself, but not as sent."""
    swap = {0: 1, 1: 0, 2: 2}
    lines[1] = [o._replace(micro_batch=swap[o.micro_batch]) for o in lines[1]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: lines[0].pop(), "lacks"),
        (lambda lines: lines[0].append(Operation("backward", 0, 0)), "nothing more"),
        (lambda lines: lines[1].reverse(), "instead of"),
        (_swap_micro_batches, "receives the message for micro-batch 0"),
        (lambda lines: lines[0].__setitem__(1, lines[0][1]._replace(peer=0)), "instead of"),
    ],
)
def test_a_wrong_schedule_is_found(change, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check(_changed(change))


def test_a_deadlock_is_found_and_says_who_waits() -> None:
    """Stage 0 wants micro-batch 0's gradient before it sends micro-batch 1, stage 1 the reverse."""
    one, two = make_schedule("1f1b", 2, 1, 2)[0], make_schedule("gpipe", 2, 1, 2)[1]
    eager = (*one[:2], *one[4:6], *one[2:4], *one[6:])
    assert [o.kind for o in eager[:4]] == [
        "forward", "send_activation", "receive_gradient", "backward",
    ]  # fmt: skip
    with pytest.raises(ScheduleError, match=r"deadlock: stage 0 .*; stage 1 waits in receive_acti"):
        check((eager, two))


def test_the_default_schedule_depends_on_the_chunks() -> None:
    assert [schedule_kind(ParallelConfig(), chunks) for chunks in (1, 2)] == ["1f1b", "interleaved"]
    assert schedule_kind(ParallelConfig(pipeline_schedule="gpipe"), 2) == "gpipe"


def test_scheduling_needs_no_torch() -> None:
    probe = "import sys; import megatron.parallel.pipeline.simulate; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_chunks_of_a_single_stage_follow_one_another() -> None:
    one, two = (Operation(kind, 0, 0) for kind in ("forward", "backward"))
    first, second = (Operation(kind, 0, 1) for kind in ("forward", "backward"))
    assert check(((one, first, second, two),)) == (2,)
    for wrong in ((first, one, second, two), (one, first, two, second)):
        with pytest.raises(ScheduleError, match="comes before the chunk it depends on"):
            check((wrong,))
