"""Products cut by rows to overlap with communication equal those that are not cut."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from megatron.parallel.build import BuildContext
from megatron.parallel.exchange import GroupExchange
from megatron.parallel.layers import Linear
from megatron.parallel.layout import Axis, Layout
from megatron.parallel.linear import OverlappedColumn, OverlappedRow
from megatron.parallel.parameter import Init, initialize
from megatron.parallel.pipeline.weight_gradients import WeightGradientQueue
from megatron.parallel.products import Products
from tests.distributed import run_distributed
from tests.parallel.buffers import new_buffer

INIT = Init("normal", 0.3)
TO = ("autograd", "slot", "queue", "slot and queue")
CASES = [(split, bias, to) for split in ("column", "row") for bias in (False, True) for to in TO]


class Counting(GroupExchange):
    """Counts the uses that are opened."""

    def __init__(self, axis):
        super().__init__(axis)
        self.uses = 0

    def open(self, rows):
        self.uses += 1
        return super().open(rows)


def two_passes(layout, case, dtype, exchange):
    """Return outputs, input gradients and weight gradients of two micro-batches."""
    split, bias, to = case
    queue = WeightGradientQueue() if "queue" in to else None
    context = BuildContext(layout, dtype=dtype, exchange=exchange, weight_gradients=queue)
    layer = Linear(16, 24, context, split=split, init=INIT, bias=bias)
    initialize(layer.named_parameters(), seed=3)
    with torch.no_grad():
        if bias:
            layer.bias.fill_(0.25)
    buffer = new_buffer(layer.named_parameters(), Layout.single(), accumulate_in_fp32=True)
    if "slot" in to:
        context.registry.bind_slots(buffer)
    results = []
    for step in range(2):
        x = torch.cos(torch.arange(512.0) * (step + 1)).view(16, 2, 16).to(dtype)
        dim = 0 if split == "column" else -1
        x = x.chunk(layout.tensor.size, dim)[layout.tensor.rank].contiguous().requires_grad_()
        out = layer(x)
        grad = torch.sin(torch.arange(16 * 2 * 24.0)).view(16, 2, 24).to(dtype)
        dim = -1 if split == "column" else 0
        grad = grad.chunk(layout.tensor.size, dim)[layout.tensor.rank]
        if queue is None:
            out.backward(grad)
        else:
            with queue.collecting(step):
                out.backward(grad)
        results += [out.detach(), x.grad]
    for step in range(2):
        if queue is not None:
            queue.run(step)
    return results + [buffer.gradient(p).clone() for p in layer.parameters()]


def all_cases(layout, dtype):
    layout = replace(layout, sequence_parallel=True)
    results, passes, multiply_rows = [], Counter(), Products.multiply_rows

    def count(self, operands, *rows):
        passes["backward" if operands.backward else "forward"] += 1
        multiply_rows(self, operands, *rows)

    Products.multiply_rows = count  # in this forked process
    for case in CASES:
        exchange = Counting(layout.tensor)
        cut = two_passes(layout, case, dtype, exchange)
        again = two_passes(layout, case, dtype, exchange)
        expected = two_passes(layout, case, dtype, None)
        results.append((cut, again, expected, exchange.uses, dict(passes)))
        passes.clear()
    return results


@pytest.mark.parametrize(
    ("size", "dtype"), [(2, torch.float32), (2, torch.bfloat16), (4, torch.float32)]
)
def test_the_numbers_are_those_of_collectives(size, dtype):
    for results in run_distributed(size, all_cases, dtype, tensor=size):
        for (split, *_), (cut, again, expected, uses, passes) in zip(CASES, results, strict=True):
            assert passes == {"forward": 4 * size, "backward": 4 * size}  # for each rank's rows
            # Forward opens one use; a column layer's backward two, for its input and its gradient.
            assert uses == 2 * 2 * (3 if split == "column" else 2)
            torch.testing.assert_close(cut, expected, rtol=None, atol=None)
            torch.testing.assert_close(cut, again, rtol=0, atol=0)


class Full(GroupExchange):
    """Accepts no message."""

    def fits(self, elements, dtype):
        return False

    def open(self, rows):
        raise AssertionError("it does not fit")


def test_the_largest_message_of_a_layer_must_fit():
    """A row layer sends 1 of 2 shards of its output, a column layer its own shard of the input."""

    class Noting:
        axis = Axis(2)

        def fits(self, elements, dtype):
            return elements, dtype

    x, weight = torch.empty(6, 3, 5, dtype=torch.bfloat16), torch.empty(2, 4, 5)
    assert OverlappedRow(Noting()).fits(x, weight) == (6 * 3 // 2 * 8, torch.bfloat16)
    assert OverlappedColumn(Noting()).fits(x, weight) == (6 * 3 * 5, torch.bfloat16)


def other_cases(layout):
    """Return gradients if the input, the weight or neither needs one, also for large messages."""
    layout = replace(layout, sequence_parallel=True)
    results = []
    for exchange in (None, GroupExchange(layout.tensor), Full(layout.tensor)):
        for split in ("column", "row"):
            for input_has, weight_has in ((True, False), (False, True), (False, False)):
                context = BuildContext(layout, exchange=exchange)
                layer = Linear(16, 24, context, split=split, init=INIT, bias=False)
                initialize(layer.named_parameters(), seed=3)
                layer.weight.requires_grad_(weight_has)
                x = torch.cos(torch.arange(128.0) + layout.tensor.rank).view(8, 1, 16)
                if split == "row":
                    x = x.view(16, 1, 8)
                x.requires_grad_(input_has)
                out = layer(x)
                if out.requires_grad:
                    out.sin().sum().backward()
                results.append((out.detach(), x.grad, layer.weight.grad))
    return results


def test_what_has_no_gradient_gets_none():
    for results in run_distributed(2, other_cases, tensor=2):
        plain, cut, full = results[:6], results[6:12], results[12:]
        torch.testing.assert_close(cut, plain)
        torch.testing.assert_close(full, plain, rtol=0, atol=0)
        assert [[g is not None for g in case[1:]] for case in cut] == 2 * [
            [True, False],
            [False, True],
            [False, False],
        ]
