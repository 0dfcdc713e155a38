"""Flat gradient buffers: their plan, how backward fills them, and averaging over processes."""

import pytest
import torch
from torch import nn

from megatron.parallel.buckets import ALIGNMENT_BYTES
from megatron.parallel.layout import Layout
from tests.distributed import run_distributed
from tests.parallel.buffers import new_buffer


def _model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def _buffer(model, layout=None, **options):
    options = {"accumulate_in_fp32": False, **options}
    return new_buffer(model.named_parameters(), layout or Layout.single(), **options)


def test_parameters_lie_in_reverse_order_at_aligned_starts():
    model = _model()
    buffer = _buffer(model)
    starts = [buffer.gradient(p).data_ptr() for p in model.parameters()]
    assert starts == sorted(starts, reverse=True)
    assert all((start - starts[-1]) % ALIGNMENT_BYTES == 0 for start in starts)


def _backward(model, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(4, 6, generator=generator).to(next(model.parameters()).dtype)
    model(inputs).square().mean().backward()


def test_same_dtype_accumulates_in_place():
    model, plain = _model(), _model()
    buffer = _buffer(model)
    for seed in (1, 2):
        _backward(model, seed)
        _backward(plain, seed)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is buffer.gradient(ours)
        assert ours.grad.data_ptr() == ours.main_grad.data_ptr()
        assert torch.equal(buffer.gradient(ours), theirs.grad)


def test_16bit_gradients_add_up_in_fp32():
    model, plain = _model(torch.bfloat16), _model(torch.bfloat16)
    buffer = _buffer(model, accumulate_in_fp32=True)
    expected = [torch.zeros(p.shape) for p in plain.parameters()]
    for seed in range(5):
        _backward(model, seed)
        plain.zero_grad()
        _backward(plain, seed)
        for total, parameter in zip(expected, plain.parameters(), strict=True):
            total.add_(parameter.grad.float())
    for parameter, total in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is None
        assert buffer.gradient(parameter).dtype == torch.float32
        assert torch.equal(buffer.gradient(parameter), total)


def test_a_tied_parameter_has_one_gradient():
    for dtype in (torch.float32, torch.bfloat16):
        table = nn.Parameter(torch.ones(3, 2, dtype=dtype))
        buffer = new_buffer([("table", table)], Layout.single(), accumulate_in_fp32=True)
        (table[0].sum() + 2 * table.sum()).backward()
        expected = torch.tensor([[3.0, 3], [2, 2], [2, 2]])
        assert torch.equal(buffer.gradient(table), expected)


def test_zero_forgets_and_reattaches():
    model = _model()
    buffer = _buffer(model)
    _backward(model, 1)
    model.zero_grad(set_to_none=True)
    buffer.zero()
    _backward(model, 2)
    plain = _model()
    _backward(plain, 2)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(buffer.gradient(ours), theirs.grad)


def test_mixed_dtypes_and_frozen_parameters():
    half = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    full = nn.Parameter(torch.zeros(2))
    frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    named = [("half", half), ("full", full), ("frozen", frozen)]
    buffer = new_buffer(named, Layout.single(), accumulate_in_fp32=False)
    assert buffer.gradient(half).dtype == torch.float16
    assert buffer.gradient(full).dtype == torch.float32
    assert not hasattr(frozen, "main_grad")
    buffer.reduce()  # alone, there is nothing to communicate


def test_views_merge_neighbors():
    model = _model()
    buffer = _buffer(model)
    first, second, third, last = model.parameters()
    _backward(model, 1)
    (everything,) = buffer.views(lambda p: True)
    assert everything.data_ptr() == buffer.gradient(last).data_ptr()
    total = sum(buffer.gradient(p).square().sum() for p in model.parameters())
    assert everything.square().sum() == pytest.approx(total.item())
    gaps = buffer.views(lambda p: p is not second)
    assert [view.data_ptr() for view in gaps] == [
        buffer.gradient(last).data_ptr(),
        buffer.gradient(first).data_ptr(),
    ]
    assert gaps[0].numel() > third.numel()


def _reduced(layout, dtype, bucket_bytes):
    """Split four micro-batches among the ranks and return the reduced gradients."""
    model = _model(dtype)
    buffer = _buffer(model, layout, accumulate_in_fp32=True, bucket_bytes=bucket_bytes)
    mine = range(layout.data.rank, 4, layout.data.size)
    for seed in mine:
        _backward(model, seed)
    buffer.reduce()
    return [buffer.gradient(p).div(len(mine)).tolist() for p in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bucket_bytes", [64, 2**20])
def test_averages_are_equal_on_all_ranks_and_for_all_sizes(dtype, bucket_bytes):
    alone = _reduced(Layout.single(), dtype, bucket_bytes)
    for size in (2, 4):
        ranks = run_distributed(size, _reduced, dtype, bucket_bytes)
        assert all(rank == ranks[0] for rank in ranks)  # bit for bit
        for ours, theirs in zip(ranks[0], alone, strict=True):
            torch.testing.assert_close(
                torch.tensor(ours), torch.tensor(theirs), rtol=1e-5, atol=1e-8
            )


def _reduced_over_context(layout):
    parameter = nn.Parameter(torch.zeros(3))
    buffer = new_buffer([("p", parameter)], layout, accumulate_in_fp32=False)
    (parameter.sum() * 2**layout.world.rank).backward()
    buffer.reduce()
    return buffer.gradient(parameter).tolist()


def test_context_ranks_are_averaged_and_tensor_ranks_are_not():
    assert run_distributed(4, _reduced_over_context, context=2) == [[15 / 4] * 3] * 4
    expected = [[5 / 2] * 3, [10 / 2] * 3] * 2
    assert run_distributed(4, _reduced_over_context, tensor=2) == expected
