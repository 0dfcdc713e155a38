"""Split layers equal the whole layer, forward and backward."""

import math
from dataclasses import replace

import pytest
import torch

from megatron.parallel import collectives
from megatron.parallel.build import BuildContext
from megatron.parallel.collectives import Pending, gather_to
from megatron.parallel.layers import Linear, Projections, VocabularyEmbedding
from megatron.parallel.layout import Layout
from megatron.parallel.parameter import Init, initialize, spec_of
from megatron.parallel.products import Products
from tests.distributed import run_distributed
from tests.parallel.buffers import new_buffer

INIT = Init("normal", 0.3)


def _stacked(parts):
    return None if parts == 1 else Projections(("a", "b"), (6, 6))


def take_part(full, parameter):
    """Return the slice of a whole tensor that `parameter` holds."""
    spec = spec_of(parameter)
    box = zip(spec.offset, parameter.shape, strict=True)
    return full[tuple(slice(start, start + size) for start, size in box)]


def gradients(module):
    return {name: p.grad for name, p in module.named_parameters()}


def run_linear(layout, split, parts):
    """Return a layer's whole output, input gradient and weight gradients, given whole inputs."""
    module = Linear(
        8, 12, BuildContext(layout), split=split, init=INIT, projections=_stacked(parts)
    )
    for parameter in module.parameters():  # biases too, as zeros would hide mistakes
        shape = spec_of(parameter).global_shape
        full = torch.sin(torch.arange(float(math.prod(shape)))).view(shape)
        with torch.no_grad():
            parameter.copy_(take_part(full, parameter))
    x = torch.cos(torch.arange(40.0)).view(5, 1, 8).requires_grad_()
    fed = x.chunk(layout.tensor.size, -1)[layout.tensor.rank] if split == "row" else x
    out = module(fed)
    share = 1.0
    if split == "column":
        share = 1 / layout.tensor.size  # gather_to sums the gradients of the ranks
        out = gather_to(out, layout.tensor)
        if parts == 2 and layout.tensor.size == 2:  # [gate0 up0 gate1 up1] -> [gate, up]
            out = torch.cat([out.chunk(4, -1)[i] for i in (0, 2, 1, 3)], -1)
    out.backward(share * torch.sin(torch.arange(60.0)).view_as(out))
    return out.detach(), x.grad, gradients(module)


@pytest.mark.parametrize(("split", "parts"), [("column", 1), ("column", 2), ("row", 1)])
def test_split_linear_equals_whole(split, parts):
    out, x_grad, grads = run_linear(Layout.single(), split, parts)
    whole = Linear(
        8, 12, BuildContext(Layout.single()), split=split, init=INIT, projections=_stacked(parts)
    )
    results = run_distributed(2, run_linear, split, parts, tensor=2)
    # A row-split layer gives each rank the gradient of its own part of the input.
    joined = sum(r[1] for r in results) if split == "row" else results[0][1]
    torch.testing.assert_close(joined, x_grad)
    for rank, (part_out, _, part_grads) in enumerate(results):
        torch.testing.assert_close(part_out, out)
        layout = Layout.at(rank, 2, tensor=2)
        part = Linear(
            8, 12, BuildContext(layout), split=split, init=INIT, projections=_stacked(parts)
        )
        for name, parameter in part.named_parameters():
            torch.testing.assert_close(part_grads[name], take_part(grads[name], parameter))
    assert {n: tuple(p.shape) for n, p in whole.named_parameters()} == {
        n: spec_of(p).global_shape for n, p in part.named_parameters()
    }


def test_linear_is_the_plain_product():
    module = Linear(4, 6, BuildContext(Layout.at(1, 2, tensor=2)), split=None, init=INIT)
    initialize(module.named_parameters(), seed=1)
    with torch.no_grad():
        module.bias.fill_(0.5)
    x = torch.randn(3, 2, 4)
    out = module(x)
    torch.testing.assert_close(out, x @ module.weight.t() + 0.5)
    assert "_Product" not in type(out.grad_fn).__name__  # autograd needs no help
    context = BuildContext(Layout.single())
    assert Linear(4, 6, context, split=None, init=INIT, bias=False).bias is None


def run_embedding(layout):
    module = VocabularyEmbedding(10, 4, BuildContext(layout), init=INIT)
    initialize([("word", module.weight)], seed=2)
    tokens = torch.tensor([[0, 9, 4], [5, 4, 4]])
    out = module(tokens)
    out.backward(torch.arange(24.0).view_as(out))
    return out.detach(), module.weight.grad


def test_split_embedding_equals_whole():
    out, grad = run_embedding(Layout.single())
    results = run_distributed(2, run_embedding, tensor=2)
    for part_out, _ in results:
        torch.testing.assert_close(part_out, out)
    torch.testing.assert_close(torch.cat([g for _, g in results]), grad)


def test_lookup_in_fp32_sums_gradients_in_fp32():
    """Add up 4096 ones: a bf16 sum would stop at 256."""

    def gradient(lookup_in_fp32):
        module = VocabularyEmbedding(
            2,
            1,
            BuildContext(Layout.single(), dtype=torch.bfloat16),
            init=INIT,
            lookup_in_fp32=lookup_in_fp32,
        )
        initialize([("word", module.weight)], seed=2)
        out = module(torch.zeros(1, 4096, dtype=torch.long))
        assert out.dtype == torch.bfloat16
        out.backward(torch.ones_like(out))
        return module.weight.grad[0].item()

    assert gradient(True) == 4096
    assert gradient(False) < 4096


class Queue:
    """Keeps pushed work until `run`."""

    def __init__(self):
        self.is_collecting = True
        self.works = []

    def push(self, work):
        self.works.append(work)

    def run(self):
        while self.works:
            self.works.pop(0)()


CASES = [("column", False), ("column", True), ("row", False), ("row", True), (None, False)]


def _two_backwards(layout, case, deferred, dtype, overlap=True):
    """Return two micro-batches' gradients in a buffer, and how often the weight's hook ran."""
    split, sequence = case
    layout = replace(layout, sequence_parallel=sequence)
    queue = Queue() if deferred else None
    context = BuildContext(layout, dtype=dtype, overlap=overlap, weight_gradients=queue)
    module = Linear(8, 12, context, split=split, init=INIT)
    initialize(module.named_parameters(), seed=3)
    buffer = new_buffer(module.named_parameters(), Layout.single(), accumulate_in_fp32=True)
    hooked = []
    module.weight.register_post_accumulate_grad_hook(lambda p: hooked.append(p.shape))
    input_grads = []
    for step in range(2):
        whole = torch.cos(torch.arange(64.0) + step).view(8, 1, 8)
        x = whole
        if split == "row":
            x = x.chunk(layout.tensor.size, -1)[layout.tensor.rank]
        elif sequence:
            x = x.chunk(layout.tensor.size)[layout.tensor.rank]
        x = x.to(dtype).requires_grad_()
        out = module(x)
        if queue is not None:
            before = buffer.gradient(module.weight).clone()
        out.backward(torch.sin(torch.arange(float(out.numel()))).view_as(out).to(dtype))
        if queue is not None:
            assert torch.equal(buffer.gradient(module.weight), before)
            assert len(hooked) == 0
        input_grads.append(x.grad)
    if queue is not None:
        assert len(queue.works) == 2
        queue.run()
    gradients = [buffer.gradient(p).clone() for p in module.parameters()]
    return gradients, input_grads, len(hooked)


def _all_two_backwards(layout, dtype):
    return [
        [_two_backwards(layout, case, *how) for how in ((False, dtype), (True, dtype))]
        + [_two_backwards(layout, case, False, dtype, overlap=False)]
        for case in CASES
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deferred_weight_gradients_are_the_same_bits(dtype):
    """The same holds for gradients without overlap."""
    for results in run_distributed(2, _all_two_backwards, dtype, tensor=2):
        for direct, deferred, in_turn in results:
            assert direct[2] == deferred[2] == 2
            torch.testing.assert_close(deferred[:2], direct[:2], rtol=0, atol=0)
            torch.testing.assert_close(in_turn, direct, rtol=0, atol=0)


def test_a_queue_that_does_not_collect_is_passed_over():
    expected = _two_backwards(Layout.single(), ("column", False), False, torch.float32)
    queue = Queue()
    queue.is_collecting = False
    context = BuildContext(Layout.single(), weight_gradients=queue)
    module = Linear(8, 12, context, split="column", init=INIT)
    initialize(module.named_parameters(), seed=3)
    for step in range(2):
        out = module(torch.cos(torch.arange(64.0) + step).view(8, 1, 8))
        out.backward(torch.sin(torch.arange(96.0)).view_as(out))
    assert not queue.works
    torch.testing.assert_close(module.weight.grad, expected[0][0])


def _order_of_events(layout, sequence, overlap):
    """Return the collectives and products of a column layer's backward, in starting order."""
    layout = replace(layout, sequence_parallel=sequence)
    events = []

    def starting(name, function):
        def start(x, axis):
            events.append(name)
            pending = function(x, axis)
            return Pending(pending.result, Work(name, pending.transfer))

        return start

    class Work:
        def __init__(self, name, transfer):
            self.name, self.transfer = name, transfer

        def wait(self):
            events.append(f"{self.name} done")
            self.transfer.wait()

    for name in ("start_all_gather", "start_all_reduce", "start_reduce_scatter"):
        short = name.removeprefix("start_")
        setattr(collectives, name, starting(short, getattr(collectives, name)))

    class Noting(Products):
        def weight_gradient(self, *args, **options):
            events.append("weight")
            super().weight_gradient(*args, **options)

    context = BuildContext(layout, overlap=overlap).multiplying_by(Noting)
    module = Linear(8, 8, context, split="column", init=INIT, bias=False)
    initialize(module.named_parameters(), seed=3)
    out = module(torch.ones(4, 1, 8).requires_grad_())
    events.clear()
    out.sum().backward()
    return events


@pytest.mark.parametrize(
    ("sequence", "overlap", "expected"),
    [
        (False, True, "all_reduce, weight, all_reduce done"),
        (False, False, "all_reduce, all_reduce done, weight"),
        (
            True,
            True,
            "all_gather, reduce_scatter, all_gather done, weight, reduce_scatter done",
        ),
        (
            True,
            False,
            "all_gather, all_gather done, reduce_scatter, reduce_scatter done, weight",
        ),
    ],
)
def test_communication_overlaps_the_products(sequence, overlap, expected):
    for events in run_distributed(2, _order_of_events, sequence, overlap, tensor=2):
        assert ", ".join(events) == expected
