"""8-bit products cut by rows are bit-identical to those that are not cut."""

from dataclasses import replace

import pytest
import torch

from megatron.kernels.fp8 import Fp8Casts
from megatron.parallel.build import BuildContext
from megatron.parallel.exchange import GroupExchange
from megatron.parallel.fp8 import DelayedScaling, Fp8Format, Fp8Products
from megatron.parallel.layers import Linear
from megatron.parallel.layout import Layout
from megatron.parallel.parameter import Init, initialize
from megatron.parallel.pipeline.weight_gradients import WeightGradientQueue
from tests.distributed import run_distributed
from tests.parallel.buffers import new_buffer

HOW = ((False, False, False), (True, False, True), (True, True, False))
CASES = [(split, *how) for split in ("column", "row") for how in HOW]


def two_passes(layout, case, exchange):
    """Return outputs, input gradients and weight gradients of two updates of one micro-batch."""
    split, slots, deferred, delayed = case
    queue = WeightGradientQueue() if deferred else None
    context = BuildContext(
        layout, dtype=torch.bfloat16, exchange=exchange, weight_gradients=queue
    ).multiplying_by(lambda: Fp8Products(Fp8Format(), Fp8Casts()))
    layer = Linear(
        *(64, 96), context, split=split, init=Init("normal", 0.1), bias=split == "column"
    )
    initialize(layer.named_parameters(), seed=3)
    cpu = torch.device("cpu")
    history = None
    if delayed:
        named = layer.named_parameters(prefix="layer")
        history = context.registry.keep_history(named, DelayedScaling(), layout, cpu)
        assert history.layers == ("layer",)
    buffer = new_buffer(layer.named_parameters(), Layout.single(), accumulate_in_fp32=True)
    if slots:
        context.registry.bind_slots(buffer)
    results = []
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(64, 2, 64, generator=generator).bfloat16()
        grad = torch.randn(64, 2, 96, generator=generator).bfloat16()
        size, rank, dims = layout.tensor.size, layout.tensor.rank, (0, -1)
        dims = dims if split == "column" else dims[::-1]
        x = x.chunk(size, dims[0])[rank].contiguous().requires_grad_()
        out = layer(x)
        if queue is None:
            out.backward(grad.chunk(size, dims[1])[rank])
        else:
            with queue.collecting(step):
                out.backward(grad.chunk(size, dims[1])[rank])
            queue.run(step)
        results += [out.detach(), x.grad]
        if history is not None:
            history.update(step + 1)
            context.registry.forget_weights()
            results += list(history.named_tensors().values())
    return [t.clone() for t in results] + [buffer.gradient(p).clone() for p in layer.parameters()]


def all_cases(layout):
    layout = replace(layout, sequence_parallel=True)
    exchange = GroupExchange(layout.tensor)
    return [(two_passes(layout, case, exchange), two_passes(layout, case, None)) for case in CASES]


def test_the_bits_are_those_of_collectives():
    for results in run_distributed(2, all_cases, tensor=2):
        for got, expected in results:
            torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "form", [Fp8Format(by_row=True), Fp8Format(weight_gradient=False)], ids=str
)
def test_scales_of_rows_are_not_cut(form):
    class Never:
        axis = Layout.single().tensor

        def fits(self, elements, dtype):
            raise AssertionError("these products are not cut")

    context = BuildContext(Layout.single(), dtype=torch.bfloat16, exchange=Never())
    layer = Linear(
        32,
        32,
        context.multiplying_by(lambda: Fp8Products(form, Fp8Casts())),
        split="row",
        init=Init("normal", 0.1),
    )
    initialize(layer.named_parameters(), seed=3)
    layer(torch.ones(16, 1, 32, dtype=torch.bfloat16))
    plain = Linear(32, 32, context, split="row", init=Init("normal", 0.1))
    with pytest.raises(AssertionError, match="not cut"):  # unlike the layer above
        plain(torch.ones(16, 1, 32, dtype=torch.bfloat16))
