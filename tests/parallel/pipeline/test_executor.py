"""Every schedule gives a single process's gradients, and holds no tensor longer than necessary."""

from __future__ import annotations

import gc
import weakref
from collections import Counter, deque

import pytest
import torch
from torch import Tensor

from megatron.parallel.layout import Layout
from megatron.parallel.pipeline.executor import (
    completing_operations,
    receives_to_post,
    run_schedule,
)
from megatron.parallel.pipeline.schedule import (
    COMPUTE,
    SENDS,
    Operation,
    Schedule,
    ScheduleKind,
    forward_only,
    make_schedule,
)
from megatron.parallel.pipeline.weight_gradients import WeightGradientQueue
from tests.distributed import run_distributed
from tests.parallel.pipeline.chain import alone, in_pipeline

MICRO_BATCHES = 5  # not a multiple of the stage count


def _all_kinds(layout: Layout) -> list[tuple[str, int, list[float], list[Tensor]]]:
    cases = [("gpipe", 1), ("1f1b", 1), ("zero-bubble", 1), ("gpipe", 2), ("interleaved", 2)]
    return [(kind, v, *in_pipeline(layout, kind, v, MICRO_BATCHES)) for kind, v in cases]


@pytest.mark.parametrize("stages", [2, 4])
def test_every_schedule_gives_one_process_gradients_to_the_bit(stages: int) -> None:
    ranks = run_distributed(stages, _all_kinds, pipeline=stages)
    for stage, results in enumerate(ranks):
        for kind, chunks, losses, gradients in results:
            expected_losses, expected = alone(stages * chunks, MICRO_BATCHES)
            mine = [
                gradient
                for c in range(chunks)
                for gradient in expected[2 * (c * stages + stage) :][:2]
            ]
            assert losses == (expected_losses if stage == stages - 1 else []), (kind, stage)
            assert len(gradients) == len(mine) == 2 * chunks
            for gradient, wanted in zip(gradients, mine, strict=True):
                assert wanted.abs().max() > 0
                # Each part accumulates its micro-batches in the same order.
                assert torch.equal(gradient, wanted), (kind, chunks, stage)


@pytest.mark.parametrize(("kind", "chunks"), [("1f1b", 1), ("zero-bubble", 1), ("interleaved", 3)])
def test_one_stage_needs_no_channel(kind, chunks: int) -> None:
    losses, gradients = in_pipeline(Layout.single(), kind, chunks, 3)
    expected_losses, expected = alone(chunks, 3)
    assert losses == expected_losses
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


def _evaluate(layout: Layout) -> tuple[list[float], bool]:
    losses, gradients = in_pipeline(layout, "interleaved", 2, 3, backward=False)
    return losses, any(gradient.any() for gradient in gradients)


def test_forward_only_gives_the_losses_and_no_gradients() -> None:
    results = run_distributed(2, _evaluate, pipeline=2)
    assert results == [([], False), (alone(4, 3)[0], False)]


def _several_pipelines(layout: Layout) -> tuple[list[float], list[Tensor]]:
    return in_pipeline(layout, "interleaved", 2, 4)


def test_pipelines_beside_each_other_do_not_mix() -> None:
    results = run_distributed(4, _several_pipelines, pipeline=2)  # and DP 2
    for rank, (losses, gradients) in enumerate(results):
        twin_losses, twin = results[rank ^ 1]
        assert losses == twin_losses
        assert all(torch.equal(a, b) for a, b in zip(gradients, twin, strict=True))


class _Loopback:
    """The last stage's neighbor: supplies activations and takes gradients, but keeps nothing."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    def post_receive(self, operation: Operation) -> None:
        pass

    def receive(self, operation: Operation) -> Tensor:
        return torch.ones(2, 2)

    def send(self, operation: Operation, tensor: Tensor) -> None:
        self.sent.append(operation.kind)

    def finish(self) -> None:
        self.sent.append("finish")


def test_an_output_is_freed_when_it_is_sent_and_an_input_after_its_backward() -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    outputs: list[weakref.ref[Tensor]] = []
    inputs: list[weakref.ref[Tensor]] = []
    most_inputs = 0

    def part(micro_batch: int, x: Tensor | None) -> Tensor:
        assert x is not None
        output = x @ weight  # saves x, not its output
        outputs.append(weakref.ref(output))
        inputs.append(weakref.ref(x))
        return output

    def before(operation: Operation) -> None:
        nonlocal most_inputs
        held = sum(reference() is not None for reference in inputs)
        most_inputs = max(most_inputs, held)
        assert all(reference() is None for reference in outputs)

    gc.disable()  # memory must be freed without it
    try:
        operations = make_schedule("1f1b", 4, 1, 8)[1]
        channel = _Loopback()
        run_schedule(operations, [part], channel, before=before)
    finally:
        gc.enable()
    assert channel.sent.count("send_activation") == channel.sent.count("send_gradient") == 8
    assert channel.sent[-1] == "finish"
    assert most_inputs == 3  # stages - stage
    assert not any(reference() is not None for reference in inputs)
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full((2, 2), 16.0))


def test_left_over_activations_are_an_error() -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    operations = make_schedule("gpipe", 1, 1, 2)[0]
    with pytest.raises(AssertionError, match="left over"):
        run_schedule(operations[:-1], [lambda micro_batch, x: weight.sum()], None)


def test_receives_are_posted_before_the_computation_that_precedes_them() -> None:
    operations = make_schedule("1f1b", 2, 1, 2)[1]
    posts = {
        str(operation.kind) + str(operation.micro_batch): receives
        for operation, receives in zip(operations, receives_to_post(operations), strict=True)
        if receives
    }
    first, second = (Operation("receive_activation", m, 0, 0) for m in range(2))
    assert posts == {"receive_activation0": [first], "backward0": [second]}


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", ["1f1b", "zero-bubble"])
def test_new_kernels_hang_no_pipeline_that_posts_receives_last(
    kind: ScheduleKind, stages: int
) -> None:
    for micro_batches in (1, 2, 3, 4, 9, 16):
        schedule = make_schedule(kind, stages, 1, micro_batches)
        assert _ends(schedule, ahead=False)
        assert _ends(forward_only(schedule), ahead=True)
    assert not _ends(schedule, ahead=True)


# "send" or "receive", the kind of message, its source and its target
_Side = tuple[str, str, int, int]


def _ends(schedule: Schedule, *, ahead: bool) -> bool:
    """Return whether all stages end if every computation waits for all earlier messages."""
    programs: list[deque[_Side | None]] = []  # `None` stands for a computation
    for stage, operations in enumerate(schedule):
        programs.append(deque())
        posts = receives_to_post(operations, ahead=ahead)
        for operation, receives in zip(operations, posts, strict=True):
            starts = receives + [operation] * (operation.kind in SENDS)
            for one in starts:
                assert one.peer is not None
                side, _, message = one.kind.partition("_")
                ends = (stage, one.peer) if side == "send" else (one.peer, stage)
                programs[-1].append((side, message, *ends))
            if operation.kind in COMPUTE:
                programs[-1].append(None)
    started: Counter[_Side] = Counter()
    waits: list[list[tuple[_Side, int]]] = [[] for _ in schedule]  # for so many messages of a side
    moved = True
    while moved:
        moved = False
        for program, pending in zip(programs, waits, strict=True):
            while program:
                if program[0] is None:
                    if any(started[side] < number for side, number in pending):
                        break
                    pending.clear()
                else:
                    side, *message = program[0]
                    started[program[0]] += 1
                    other = ("receive" if side == "send" else "send", *message)
                    pending.append((other, started[program[0]]))
                program.popleft()
                moved = True
    return not any(programs)


def test_the_operation_that_completes_a_chunk() -> None:
    operations = make_schedule("interleaved", 2, 2, 4)[0]
    assert completing_operations(operations) == {
        0: Operation("backward", 3, 0),
        1: Operation("backward", 3, 1),
    }
    operations = make_schedule("zero-bubble", 2, 1, 4)[0]
    assert completing_operations(operations) == {0: Operation("backward_weight", 3, 0)}


def test_weight_gradients_wait_for_their_turn_and_are_freed_one_by_one() -> None:
    queue = WeightGradientQueue()
    done: list[str] = []
    held = torch.ones(1)
    reference = weakref.ref(held)

    def product(x: Tensor = held) -> None:
        done.append("a0")

    with queue.collecting("a"):
        assert queue.is_collecting
        queue.push(product)
        del product, held
        queue.push(lambda: done.append("a1" if reference() is None else "held"))
    with queue.collecting("b"):
        queue.push(lambda: done.append("b0"))
    assert not queue.is_collecting
    assert len(queue) == 2
    queue.run("b")
    queue.run("a")
    assert done == ["b0", "a0", "a1"]
    assert not queue
