"""Vocabulary-parallel cross entropy against PyTorch's own."""

import pytest
import torch
import torch.nn.functional as F

from megatron.kernels import cross_entropy
from megatron.kernels.cross_entropy import choose_cross_entropy
from megatron.parallel.collectives import NO_COMMUNICATION, Communication
from megatron.parallel.cross_entropy import (
    _chunks,
    linear_cross_entropy,
    vocabulary_cross_entropy,
)
from megatron.parallel.layout import Layout
from megatron.parallel.products import LinearCall
from tests.distributed import run_distributed

S, B, V = 5, 3, 14


def problem(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    logits = (5 * torch.randn(S, B, V, generator=generator)).to(dtype)
    labels = torch.randint(V, (S, B), generator=generator)
    weights = torch.rand(S, B, generator=generator)  # gradient of each token's loss
    return logits, labels, weights


def expected(dtype=torch.float32):
    logits, labels, weights = problem(dtype)
    logits = logits.double().requires_grad_()
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(S, B)
    (loss * weights).sum().backward()
    return loss.detach(), logits.grad


def run(layout, dtype=torch.float32, in_16_bits=False):
    logits, labels, weights = problem(dtype)
    part = logits.chunk(layout.tensor.size, -1)[layout.tensor.rank].clone().requires_grad_()
    before = part.detach().clone()
    form = choose_cross_entropy(None, in_16_bits=in_16_bits)
    loss = vocabulary_cross_entropy(part, labels, layout.tensor, implementation=form)
    (loss * weights).sum().backward()
    assert torch.equal(part, before)  # the caller's logits are unchanged
    return loss.detach(), part.grad


@pytest.mark.parametrize("chunk", [1, 2 * V + 1, 2**24])
def test_equals_pytorch(chunk, monkeypatch):
    monkeypatch.setattr(cross_entropy, "CHUNK", chunk)
    loss, grad = run(Layout.single())
    torch.testing.assert_close(loss.double(), expected()[0])
    torch.testing.assert_close(grad.double(), expected()[1])


@pytest.mark.parametrize("size", [2])
def test_split_vocabulary_equals_pytorch(size):
    results = run_distributed(size, run, tensor=size)
    for loss, _ in results:
        torch.testing.assert_close(loss.double(), expected()[0])
    grad = torch.cat([grad for _, grad in results], -1)
    torch.testing.assert_close(grad.double(), expected()[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_logits_lose_nothing_in_the_loss(dtype):
    loss, grad = run(Layout.single(), dtype)
    assert (loss.dtype, grad.dtype) == (torch.float32, dtype)
    torch.testing.assert_close(loss.double(), expected(dtype)[0], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(
        grad.double(), expected(dtype)[1], rtol=torch.finfo(dtype).eps, atol=1e-6
    )


def test_exponentials_in_16_bits():
    exact, grad = run(Layout.single(), torch.float16)
    rough, rough_grad = run(Layout.single(), torch.float16, True)
    assert rough.dtype == torch.float32
    assert not torch.equal(exact, rough)
    torch.testing.assert_close(rough, exact, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(rough_grad, grad, rtol=2e-2, atol=2e-3)


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[[1e4, -1e4, 0.0]]], requires_grad=True)
    loss = vocabulary_cross_entropy(logits, torch.tensor([[1]]), Layout.single().tensor)
    loss.sum().backward()
    assert loss.item() == 2e4
    assert logits.grad.tolist() == [[[1, -1, 0]]]


def test_transposed_labels_and_gradients():
    logits, labels, _ = problem()
    back = labels.t().contiguous().t()
    loss = vocabulary_cross_entropy(logits, back, Layout.single().tensor).t()
    torch.testing.assert_close(loss.double(), expected()[0].t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_may_take_the_logits_place(dtype):
    logits, labels, weights = problem(dtype)
    leaf = logits.clone().requires_grad_()
    made = leaf * 1
    loss = vocabulary_cross_entropy(made, labels, Layout.single().tensor, reuse_logits=True)
    (loss * weights).sum().backward(retain_graph=True)
    _, plain = run(Layout.single(), dtype)
    assert torch.equal(leaf.grad, plain)
    assert torch.equal(made.detach(), plain)  # there is no second tensor of that size
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.sum().backward()  # the logits have been overwritten


def test_reuse_is_refused_where_others_need_the_logits():
    leaf = problem()[0].requires_grad_()
    made = leaf * 1
    squares = made.square().sum()  # keeps the logits for its own backward
    loss = vocabulary_cross_entropy(made, problem()[1], Layout.single().tensor, reuse_logits=True)
    loss.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()


H = 6


def linear_problem(dtype=torch.float64):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(6, B, H, generator=generator).to(dtype)
    weight = torch.randn(V, H, generator=generator).to(dtype)
    labels = torch.randint(V, (6, B), generator=generator)
    return x, weight, labels, torch.rand(6, B, generator=generator)


def linear_expected():
    x, weight, labels, weights = linear_problem()
    x.requires_grad_()
    weight.requires_grad_()
    logits = (x @ weight.t()).flatten(0, 1)
    loss = F.cross_entropy(logits, labels.flatten(), reduction="none").view(6, B)
    (loss * weights).sum().backward()
    return loss.detach(), x.grad, weight.grad


def run_linear(layout, sequence_parallel=False, chunk_logits=2**27, dtype=torch.float32):
    """Return the loss, and gradients of this rank's part of x and of its part of the weight."""
    x, weight, labels, weights = linear_problem(dtype)
    axis = layout.tensor
    if sequence_parallel:
        x = x.chunk(axis.size)[axis.rank].clone()
    x.requires_grad_()
    part = weight.chunk(axis.size)[axis.rank].clone().requires_grad_()
    communication = Communication(axis, sequence_parallel)
    options = {"loss_mask": weights, "chunk_logits": chunk_logits}
    loss, total = linear_cross_entropy(LinearCall(x, part), labels, communication, **options)
    assert not loss.requires_grad
    assert total.item() == pytest.approx((loss * weights).sum().item())
    (3 * total / 3).backward()
    with torch.no_grad():
        again = linear_cross_entropy(LinearCall(x, part), labels, communication, **options)
        assert torch.equal(again.losses, loss)
        assert torch.equal(again.total, total)
    return loss, x.grad, part.grad


@pytest.mark.parametrize("chunk_logits", [1, 5 * V, 2**27])
def test_chunked_equals_whole(chunk_logits):
    found = run_linear(Layout.single(), chunk_logits=chunk_logits)
    for ours, theirs in zip(found, linear_expected(), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_chunked_equals_whole_over_ranks(sequence_parallel):
    results = run_distributed(2, run_linear, sequence_parallel, 5 * V, tensor=2)
    loss, x_grad, weight_grad = linear_expected()
    for found in results:
        torch.testing.assert_close(found[0].double(), loss, rtol=1e-6, atol=1e-6)
    parts = [x for _, x, _ in results]
    whole = torch.cat(parts) if sequence_parallel else parts[0]
    torch.testing.assert_close(whole.double(), x_grad, rtol=1e-6, atol=1e-6)
    rows = torch.cat([weight for _, _, weight in results])
    torch.testing.assert_close(rows.double(), weight_grad, rtol=1e-6, atol=1e-6)


def test_chunked_sums_a_16_bit_weights_gradient_in_fp32():
    found = run_linear(Layout.single(), chunk_logits=V, dtype=torch.bfloat16)
    assert found[2].dtype == torch.bfloat16
    for ours, theirs in zip(found, linear_expected(), strict=True):
        error = (ours.double() - theirs).norm() / theirs.norm()
        assert error < 2e-2


def test_chunked_keeps_small_probabilities_in_fp16():
    x, weight, labels, _ = (t[:1] if t.dim() < 3 else t for t in linear_problem(torch.float16))
    x, labels = x[:1, :1], labels[:1, :1]
    weight = torch.zeros(2**16, H, dtype=torch.float16)  # each probability is 2^-16
    x.requires_grad_()
    weight.requires_grad_()
    loss = linear_cross_entropy(LinearCall(x, weight), labels, Communication())
    (2.0**10 * loss.total).backward()  # like a loss scale
    others = torch.arange(2**16) != labels.item()
    expected_grad = 2.0**-6 * x.detach()[0].float()
    torch.testing.assert_close(weight.grad[others].float(), expected_grad.expand(2**16 - 1, H))


@pytest.mark.parametrize("mask", [None, torch.tensor([[1.0, 0.0, 1.0]] * 6), torch.zeros(6, B)])
def test_chunked_differentiates_one_sum_alone(mask):
    x, weight, labels, other = linear_problem(torch.float32)
    weight.requires_grad_()
    counted = torch.ones(6, B) if mask is None else mask

    def gradient(factor):
        loss = linear_cross_entropy(LinearCall(x, weight), labels, Communication(), loss_mask=mask)
        return torch.autograd.grad(factor * loss.total, weight)[0]

    logits = (x @ weight.t()).flatten(0, 1)
    losses = F.cross_entropy(logits, labels.flatten(), reduction="none").view(6, B)
    (whole,) = torch.autograd.grad((losses * 0.5 * counted).sum(), weight)
    torch.testing.assert_close(gradient(0.5), whole, rtol=1e-5, atol=1e-6)
    assert gradient(0.0).abs().max() == 0
    # No other function of the losses can be differentiated by mistake.
    found = linear_cross_entropy(LinearCall(x, weight), labels, Communication(), loss_mask=mask)
    with pytest.raises(RuntimeError, match="does not require grad"):
        (found.losses * other).sum().backward()


def test_a_frozen_weight_has_no_gradient_in_chunks():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(6, 2, 8, generator=generator)
    weight = torch.randn(24, 8, generator=generator)
    labels = torch.randint(0, 24, (6, 2), generator=generator)
    gradients = []
    for is_trained in (True, False):
        leaf, matrix = x.clone().requires_grad_(), weight.clone().requires_grad_(is_trained)
        loss = linear_cross_entropy(
            LinearCall(leaf, matrix), labels, NO_COMMUNICATION, chunk_logits=48
        )
        loss.total.backward()
        gradients.append(leaf.grad)
        assert (matrix.grad is not None) == is_trained
    assert gradients[0].equal(gradients[1])


@pytest.mark.parametrize(
    ("rows", "size", "heights"),
    [
        (4, 100, [4]),  # all of it is within the limit of 1,000 elements
        (1000, 1, [1000]),
        (1001, 1, [512, 489]),  # in whole tiles of 128 rows
        (250, 10, [84, 84, 82]),
        (3, 2000, [1, 1, 1]),  # a row is the least
    ],
)
def test_chunks_are_as_few_as_the_limit_allows(rows: int, size: int, heights: list[int]) -> None:
    chunks = list(_chunks(rows, size, 1000))
    assert [chunk.stop - chunk.start for chunk in chunks] == heights
    assert [row for chunk in chunks for row in range(chunk.start, chunk.stop)] == [*range(rows)]
