"""A mixture of experts trains in every layout as in one process."""

from dataclasses import replace

import pytest

from tests.distributed import run_sharing_memory, toy_device
from tests.parity.mixtures import (
    MIXTURES,
    SIGMOID,
    SOFTMAX,
    MixtureCase,
    alone,
    differences,
    train_mixture,
)

ITERATIONS = 6


@pytest.mark.slow
@pytest.mark.parametrize("case", MIXTURES, ids=lambda case: case.name)
def test_losses_norms_and_biases_equal_the_single_process(case):
    """Compare the first iterations. tools/compare_layouts.py compares all 20: docs/layouts.md."""
    found = dict(differences(replace(case, iterations=min(case.iterations, ITERATIONS))))
    assert found.pop("biases") == 0
    norm = found.pop("norm")
    tolerance = case.tolerance
    if "--fp16" in case.network and toy_device().is_gpu:
        tolerance = 3e-3  # a GPU's rounding depends on the number of rows: measured 1.2e-3
    for name, difference in found.items():
        assert difference <= tolerance, name
    assert norm <= 10 * tolerance


def test_some_of_the_tensor_ranks_may_split_each_expert():
    for sizes, flags in (
        ({"processes": 4, "expert": 2}, "--sequence-parallel"),
        ({"processes": 4, "expert": 1}, "--sequence-parallel --zero-stage 3"),
        ({"processes": 8, "expert": 4}, "--sequence-parallel --zero-stage 2"),
    ):
        case = MixtureCase(tensor=4, expert_tensor=2, flags=flags, iterations=3, **sizes)
        for name, difference in differences(case).items():
            assert difference <= 1e-6, (case, name)


def test_ranks_may_be_numbered_with_the_pipeline_before_data():
    flags = "--use-tp-pp-dp-mapping --zero-stage 1 --overlap-grad-reduce --overlap-param-gather"
    for case in (
        MixtureCase(4, pipeline=2, expert=2, flags=flags),
        MixtureCase(4, context=2, pipeline=2, expert=2, flags=flags),
        MixtureCase(
            8, tensor=2, pipeline=2, expert=4, expert_tensor=1, flags=f"{flags} --sequence-parallel"
        ),
    ):
        for name, difference in differences(replace(case, iterations=3)).items():
            assert difference <= 1e-5, (case, name)


@pytest.mark.parametrize("network", [SOFTMAX, SIGMOID], ids=["softmax", "sigmoid"])
def test_the_curves_are_those_of_a_training(network):
    losses, norms, biases = alone(network)
    assert {len(curve) for curve in (*losses.values(), norms)} == {20}
    assert losses["lm loss"][-1] < 0.9 * losses["lm loss"][0]
    assert len(losses) == (3 if network == SOFTMAX else 2)
    if network == SIGMOID:
        assert len(biases) == 3
        assert all(0 < bias.abs().max() < 0.21 for bias in biases.values())


def _exchanges(layout, words):
    """Return how often experts exchanged tokens, and the losses."""
    kinds, transfer = [], layout.journal.transfer

    def noted(kind, ranks, work):
        kinds.append((kind, ranks))
        return transfer(kind, ranks, work)

    layout.journal.transfer = noted
    curves = train_mixture(layout, words)
    return kinds.count(("all-to-all", layout.expert.ranks)), curves.losses


def test_only_whole_mixtures_exchange_tokens_again():
    case = MixtureCase(2, expert=2, iterations=1)
    again = "--recompute-granularity selective --recompute-modules"
    (kept, losses), *_ = run_sharing_memory(2, _exchanges, case.words, **case.sizes)
    assert kept > 0
    for modules, more in (("layernorm moe_act shared_experts mlp core_attn", 0), ("moe", 1)):
        words = [*case.words, *again.split(), *modules.split()]
        for count, ours in run_sharing_memory(2, _exchanges, words, **case.sizes):
            assert (count > kept) == bool(more)
            assert ours == losses


def test_no_layout_of_a_mixture_is_listed_twice():
    assert len({case.name for case in MIXTURES}) == len(MIXTURES) >= 40
    assert all(isinstance(case, MixtureCase) for case in MIXTURES)
