"""Log-probabilities of packed documents, and the gradients of a loss on them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.finetuning.documents import document_sums
from megatron.parallel.context.split import split_sequence
from megatron.parallel.layout import Axis, Layout
from tests.distributed import run_sharing_memory

# Two rows of eight tokens: three documents and padding, then a document without trained tokens.
ENDS = torch.tensor([0, 3, 4, 7, 8, 13, 16])
TRAINED = torch.tensor([[0, 1, 0, 0, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0]])
LOSSES = torch.arange(1.0, 17.0).view(2, 8)


def squared(sums: Tensor) -> Tensor:
    return (sums**2).sum()


def test_sums_are_those_of_each_document() -> None:
    losses = LOSSES.clone().requires_grad_()
    found = document_sums(losses, TRAINED, ENDS, Axis())
    assert found.tokens.tolist() == [1, 0, 2, 0, 4, 0]
    assert found.log_probs.tolist() == [-2, 0, -11, 0, -42, 0]
    squared(found.log_probs).backward()
    assert losses.grad is not None
    assert losses.grad.tolist() == [[0, 4, 0, 0, 22, 22, 0, 0], [84, 84, 84, 84, 0, 0, 0, 0]]


def of_context_rank(layout: Layout) -> tuple[list[float], Tensor]:
    losses = split_sequence(LOSSES, layout.context, dim=1).clone().requires_grad_()
    found = document_sums(losses, TRAINED, ENDS, layout.context)
    squared(found.log_probs).backward()
    assert losses.grad is not None
    return found.log_probs.tolist(), losses.grad


def test_context_ranks_have_whole_sums_and_gradients_whose_mean_is_right() -> None:
    losses = LOSSES.clone().requires_grad_()
    squared(document_sums(losses, TRAINED, ENDS, Axis()).log_probs).backward()
    assert losses.grad is not None
    for rank, (sums, grad) in enumerate(run_sharing_memory(2, of_context_rank, context=2)):
        assert sums == [-2, 0, -11, 0, -42, 0]
        # Training averages over ranks, each of which has only its own tokens.
        part = split_sequence(losses.grad, Axis(size=2, rank=rank), dim=1)
        assert grad / 2 == pytest.approx(part)
