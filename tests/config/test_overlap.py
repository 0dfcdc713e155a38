"""--tp-comm-overlap: what it goes with, and who says so."""

from __future__ import annotations

import pytest

from tests.config.command import parse, problems

SPLIT = "--tensor-model-parallel-size 2 --tp-comm-overlap"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            "--bf16 --fp8-format hybrid --fp8-recipe rowwise",
            "the transpose of a part has other scales than that of the whole",
        ),
        (
            "--bf16 --fp8-format hybrid --no-fp8-wgrad",
            "an input would travel twice, in 8 bits and in 16",
        ),
        (
            "--no-async-tensor-model-parallel-allreduce",
            "one asks for what the other forbids",
        ),
        (
            "--cuda-graph-impl local",
            "a recording would not know which memory of its neighbours is free",
        ),
        (
            "--distributed-backend gloo",
            "it is for GPUs that map each other's memory",
        ),
    ],
)
def test_what_it_does_not_go_with(words: str, reason: str) -> None:
    flag = words.removeprefix("--bf16 --fp8-format hybrid ")
    line = f"--tp-comm-overlap with {flag}: {reason}: drop one"
    assert line in problems(f"{SPLIT} --sequence-parallel {words}", world_size=2)


def test_it_is_for_parts_of_the_sequence() -> None:
    assert problems(SPLIT, world_size=2) == [
        "--tp-comm-overlap: only what --sequence-parallel sends can travel beside parts of a "
        "product: add that, or drop --tp-comm-overlap"
    ]
    assert parse(f"{SPLIT} --sequence-parallel", world_size=2).config.parallel.tp_comm_overlap


def test_one_process_has_nothing_to_send() -> None:
    assert parse("--tp-comm-overlap").notices == (
        "--tp-comm-overlap: one tensor-parallel process: there is nothing to send",
    )
