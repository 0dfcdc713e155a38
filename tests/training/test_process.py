"""What processes must have in common before they train together."""

import pytest

from megatron.errors import ConfigError
from megatron.kernels.library import LibraryChoice
from megatron.parallel.layout import Layout
from megatron.training.process import expect_same_kernels
from tests.distributed import run_distributed

FUSED = LibraryChoice(object(), "as if")  # type: ignore[arg-type]
PLAIN = LibraryChoice(None, "no nvcc")


def _answers(layout: Layout) -> list[str]:
    answers = []
    for plain in (set(), {0, 1, 2}, {1}, {0, 2}):
        try:
            expect_same_kernels(PLAIN if layout.world.rank in plain else FUSED, layout.world)
            answers.append("")
        except ConfigError as error:
            answers.append(str(error))
    return answers


def test_fused_kernels_are_for_all_processes_or_none() -> None:
    ranks = run_distributed(3, _answers)
    assert ranks[0] == ranks[1] == ranks[2]
    everywhere, nowhere, one, two = ranks[0]
    assert everywhere == nowhere == ""
    assert one.startswith("rank 1 of 3 cannot use the fused kernels")
    assert two.startswith("ranks 0, 2 of 3")


def test_a_process_alone_asks_nobody() -> None:
    expect_same_kernels(PLAIN, Layout.single().world)
    with pytest.raises(AssertionError):
        expect_same_kernels(PLAIN, Layout.at(0, 2).world)
