"""Vocabulary-parallel cross entropy against PyTorch's own."""

import pytest
import torch
import torch.nn.functional as F

from megatron.kernels import cross_entropy
from megatron.kernels.cross_entropy import choose_cross_entropy
from megatron.parallel.cross_entropy import linear_cross_entropy, vocabulary_cross_entropy
from megatron.parallel.layout import Layout
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
    loss = vocabulary_cross_entropy(part, labels, layout.tensor, form=form)
    (loss * weights).sum().backward()
    assert torch.equal(part, before)  # the caller's logits stay as they were
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
