"""--tp-comm-overlap: what it can be combined with, and the message for each conflict."""

from __future__ import annotations

import pytest

from tests.config.command import parse, problems

SPLIT = "--tensor-model-parallel-size 2 --tp-comm-overlap"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            "--bf16 --fp8-format hybrid --fp8-recipe rowwise",
            "a chunk's transpose has other scales than the whole matrix's transpose",
        ),
        (
            "--bf16 --fp8-format hybrid --no-fp8-wgrad",
            "each input would be sent twice, in 8 bits and in 16",
        ),
        (
            "--no-async-tensor-model-parallel-allreduce",
            "it turns off the overlap that the first flag asks for",
        ),
        (
            "--cuda-graph-impl local",
            "a recorded graph cannot know which memory of other processes is free",
        ),
        (
            "--distributed-backend gloo",
            "the overlap requires GPUs that map each other's memory",
        ),
    ],
)
def test_what_it_does_not_go_with(words: str, reason: str) -> None:
    flag = words.removeprefix("--bf16 --fp8-format hybrid ")
    line = f"--tp-comm-overlap cannot be combined with {flag}: {reason}: drop one of them"
    assert line in problems(f"{SPLIT} --sequence-parallel {words}", world_size=2)


def test_it_is_for_parts_of_the_sequence() -> None:
    assert problems(SPLIT, world_size=2) == [
        "--tp-comm-overlap requires --sequence-parallel: add it, or drop --tp-comm-overlap"
    ]
    assert parse(f"{SPLIT} --sequence-parallel", world_size=2).config.parallel.tp_comm_overlap


def test_one_process_has_nothing_to_send() -> None:
    assert parse("--tp-comm-overlap").notices == (
        "--tp-comm-overlap: no effect with a single tensor-parallel process",
    )
