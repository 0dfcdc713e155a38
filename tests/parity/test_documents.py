"""Packed documents train as separate documents do, in every layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron.parallel.layout import Layout
from pretrain_gpt import GPTRecipe
from tests.distributed import run_distributed, run_sharing_memory
from tests.parity.documents import DOCUMENTS, ROPE, OneByOne, gradients, one_by_one
from tests.parity.layouts import (
    LAYOUTS,
    LOSS_TOLERANCE,
    NORM_TOLERANCE,
    LayoutCase,
    largest_difference,
    train_curves,
)

ITERATIONS = 2
_RECOMPUTE = "--recompute-granularity full --recompute-method uniform"
# The table has learned positions, except in two layouts.
_ROTARY = (
    LayoutCase(1),
    LayoutCase(1, flags=_RECOMPUTE),
    LayoutCase(2, tensor=2, flags="--sequence-parallel"),
    LayoutCase(2, pipeline=2, flags="--num-layers-per-virtual-pipeline-stage 1"),
    LayoutCase(2, context=2),
    LayoutCase(4, context=4),
    LayoutCase(2, context=2, flags="--cp-comm-type a2a"),
    LayoutCase(4, tensor=2, context=2, flags=f"--cp-comm-type a2a {_RECOMPUTE}"),
)
CASES = (*LAYOUTS, *(replace(case, network=ROPE) for case in _ROTARY))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name} {case.shown_flags}")
def test_packed_documents_equal_separate_ones(case: LayoutCase) -> None:
    case = replace(case, network=f"{case.network} {DOCUMENTS}")
    expected = one_by_one(case.network, ITERATIONS)
    words = case.words(ITERATIONS)
    # PyTorch's wrapper asks gloo for what shared memory does not have.
    run = run_distributed if "--DDP-impl torch" in case.flags else run_sharing_memory
    for got in run(case.processes, train_curves, words, **case.sizes):
        assert largest_difference(got.losses, expected.losses) <= LOSS_TOLERANCE
        assert largest_difference(got.norms, expected.norms) <= NORM_TOLERANCE


def test_separate_documents_are_not_one_sequence() -> None:
    """The comparison would see a document that attends to another."""
    words = LayoutCase(1, network=DOCUMENTS.replace("--reset-attention-mask ", "")).words(
        ITERATIONS
    )
    together = train_curves(Layout.single(), words)
    expected = one_by_one(DOCUMENTS, ITERATIONS)
    assert largest_difference(together.losses, expected.losses) > 10 * LOSS_TOLERANCE
    assert largest_difference(together.norms, expected.norms) > 10 * NORM_TOLERANCE


@pytest.mark.parametrize("network", ["", ROPE])
def test_every_gradient_is_that_of_separate_documents(network: str) -> None:
    words = LayoutCase(1, network=f"{network} {DOCUMENTS}").words(1)
    packed, separate = gradients(words, GPTRecipe()), gradients(words, OneByOne())
    assert packed.keys() == separate.keys()
    for name, theirs in separate.items():
        torch.testing.assert_close(packed[name], theirs, rtol=1e-5, atol=1e-7, msg=name)
