"""Every layout trains like one process: losses and gradient norms from the same seed."""

import pytest

from tests.distributed import run_sharing_memory
from tests.parity.layouts import (
    ITERATIONS,
    LAYOUTS,
    LOSS_TOLERANCE,
    NORM_TOLERANCE,
    OTHER_ITERATIONS,
    OTHER_LAYOUTS,
    LayoutCase,
    compare,
    largest_difference,
    single_process,
)


def _id(case: LayoutCase) -> str:
    return f"{case.kind} {case.name} {case.shown_flags}"


@pytest.mark.parametrize("case", [*LAYOUTS, *OTHER_LAYOUTS], ids=_id)
def test_losses_and_norms_equal_the_single_process(case):
    """Two processes communicate over gloo.

    For more processes, which combine what two have covered, gloo would take most of the time, so
    these use shared memory, and train as far as a BERT or T5. `tools/compare_layouts.py` runs all
    GPT layouts to the end over gloo.
    """
    if case.processes == 2:
        difference = compare(case)
    else:
        difference = compare(case, run_sharing_memory, OTHER_ITERATIONS)
    assert difference.loss <= LOSS_TOLERANCE
    assert difference.norm <= NORM_TOLERANCE


def test_the_curves_are_those_of_a_training():
    losses, norms = single_process("")
    assert len(losses) == len(norms) == ITERATIONS
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_the_other_curves_are_those_of_a_training_too(kind):
    losses, norms = single_process("", kind)
    assert len(norms) == OTHER_ITERATIONS
    assert losses[OTHER_ITERATIONS - 1] < losses[0]


def test_a_difference_is_seen_wherever_it_is():
    assert largest_difference([1.0, 2.0, 4.4], [1.0, 2.0, 4.0]) == pytest.approx(0.1)
    assert largest_difference([1.0, float("nan")], [1.0, 2.0]) == float("inf")
    assert largest_difference([1.0], [1.0, 2.0]) == float("inf")


def test_no_layout_is_listed_twice():
    assert len({(case.processes, case.name, case.shown_flags) for case in LAYOUTS}) == len(LAYOUTS)
