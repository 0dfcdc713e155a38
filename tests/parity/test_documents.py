"""Packed documents train like separate documents in every layout.

Router losses are means over all tokens of a sequence or micro-batch, whichever documents these
belong to. They differ from those of separate documents by definition, as they differ between two
micro-batch sizes. So mixtures are compared with separate documents without router losses, and with
packed documents on one process with them.
"""

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
    MULTI_TOKEN,
    NORM_TOLERANCE,
    LayoutCase,
    largest_difference,
    train_curves,
)
from tests.parity.mixtures import IN_FP32, SOFTMAX, MixtureCase, differences

ITERATIONS = 2
_DROPLESS = "--moe-router-topk 2 --moe-shared-expert-intermediate-size 16"
_RECOMPUTE = "--recompute-granularity full --recompute-method uniform"
# The table of LAYOUTS has learned positions, except in two layouts.
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
_BIASED = LayoutCase(
    4,
    tensor=2,
    context=2,
    flags="--cp-comm-type a2a",
    network="--position-embedding-type alibi --embed-layernorm --window-size 3,0",
)
# A depth's loss is the mean over a micro-batch's labels with no document end before them, as in
# Megatron Core, so layouts with micro-batches unlike the single process's have other means.
_SAME_MEANS = tuple(
    case
    for case in LAYOUTS
    if MULTI_TOKEN not in case.network or case.processes == case.tensor * case.context
)
_IN_A_RING = replace(_BIASED, flags="")
_ONE_NORM = (
    "--position-embedding-type alibi --embed-layernorm --parallel-residual --shared-parallel-norm"
)
_FORGETFUL = "--recompute-granularity selective --recompute-modules layernorm core_attn"
_ALIBI = (
    _BIASED,
    _IN_A_RING,
    LayoutCase(4, tensor=2, flags="--sequence-parallel --zero-stage 3", network=_ONE_NORM),
    LayoutCase(
        2,
        pipeline=2,
        flags=f"--num-layers-per-virtual-pipeline-stage 1 {_FORGETFUL}",
        network=_ONE_NORM,
    ),
)
_IN_CHUNKS = (
    f"{ROPE} --no-rope-freq 2 --attention-chunk-size 3 --attention-temperature-scale 0.5 "
    "--attention-temperature-floor 2"
)
_CHUNKED = (
    LayoutCase(1, network=_IN_CHUNKS),
    LayoutCase(
        4, tensor=2, context=2, flags=f"--cp-comm-type a2a {_FORGETFUL}", network=_IN_CHUNKS
    ),
    LayoutCase(2, context=2, network=_IN_CHUNKS),
)
CASES = (*_SAME_MEANS, *_ALIBI, *_CHUNKED, *(replace(case, network=ROPE) for case in _ROTARY))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name} {case.shown_flags}")
def test_packed_documents_equal_separate_ones(case: LayoutCase) -> None:
    case = replace(case, network=f"{case.network} {DOCUMENTS}")
    expected = one_by_one(tuple(LayoutCase(1, network=case.network).words(ITERATIONS)))
    words = case.words(ITERATIONS)
    # PyTorch's wrapper asks gloo for something that shared memory lacks.
    run = run_distributed if "--DDP-impl torch" in case.flags else run_sharing_memory
    for got in run(case.processes, train_curves, words, **case.sizes):
        assert largest_difference(got.losses, expected.losses) <= LOSS_TOLERANCE
        assert largest_difference(got.norms, expected.norms) <= NORM_TOLERANCE


@pytest.mark.parametrize(
    "case",
    [
        LayoutCase(1),
        LayoutCase(2, context=2),
        LayoutCase(2, context=2, flags="--cp-comm-type a2a"),
        LayoutCase(4, tensor=2, pipeline=2, flags="--sequence-parallel"),
    ],
    ids=lambda case: f"{case.name} {case.shown_flags}",
)
def test_in_16_bits_they_differ_by_rounding(case: LayoutCase) -> None:
    case = replace(case, network=f"{ROPE} --bf16 {DOCUMENTS}")
    expected = one_by_one(tuple(LayoutCase(1, network=case.network).words(ITERATIONS)))
    words = case.words(ITERATIONS)
    for got in run_sharing_memory(case.processes, train_curves, words, **case.sizes):
        assert largest_difference(got.losses, expected.losses) <= 2e-3
        assert largest_difference(got.norms, expected.norms) <= 2e-2


def test_separate_documents_are_not_one_sequence() -> None:
    """The comparison would notice a document that attends to another."""
    words = LayoutCase(1, network=DOCUMENTS).words(ITERATIONS)
    expected = one_by_one(tuple(words))
    words.remove("--reset-attention-mask")
    together = train_curves(Layout.single(), words)
    assert largest_difference(together.losses, expected.losses) > 10 * LOSS_TOLERANCE
    assert largest_difference(together.norms, expected.norms) > 10 * NORM_TOLERANCE


@pytest.mark.parametrize("network", ["", ROPE, "--position-embedding-type alibi"])
def test_every_gradient_is_that_of_separate_documents(network: str) -> None:
    words = LayoutCase(1, network=f"{network} {DOCUMENTS}").words(1)
    packed, separate = gradients(words, GPTRecipe()), gradients(words, OneByOne())
    assert packed.keys() == separate.keys()
    for name, theirs in separate.items():
        torch.testing.assert_close(packed[name], theirs, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [case for case in IN_FP32 if case.network == SOFTMAX], ids=lambda case: case.name
)
def test_packed_documents_of_a_mixture_equal_separate_ones(case: MixtureCase) -> None:
    case = replace(case, network=f"{_DROPLESS} {DOCUMENTS}", iterations=ITERATIONS)
    alone = MixtureCase(1, network=case.network, iterations=ITERATIONS)
    expected = one_by_one(tuple(alone.words))
    for got in run_sharing_memory(case.processes, train_curves, case.words, **case.sizes):
        assert largest_difference(got.losses, expected.losses) <= LOSS_TOLERANCE
        assert largest_difference(got.norms, expected.norms) <= NORM_TOLERANCE


@pytest.mark.parametrize(
    "case",
    [
        MixtureCase(2, context=2, expert=2),
        MixtureCase(2, context=2, expert=2, flags="--cp-comm-type a2a"),
        MixtureCase(4, tensor=2, expert=2, flags="--sequence-parallel"),
        MixtureCase(4, context=2, pipeline=2, expert=2),
    ],
    ids=lambda case: case.name,
)
def test_routers_losses_of_packed_documents_equal_the_single_process(case: MixtureCase) -> None:
    found = differences(replace(case, network=f"{SOFTMAX} {DOCUMENTS}", iterations=ITERATIONS))
    assert {"lm loss", "norm"} < found.keys()
    assert max(found.values()) <= NORM_TOLERANCE
    assert found["lm loss"] <= LOSS_TOLERANCE
