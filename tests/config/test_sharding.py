"""Flags for what data-parallel processes share."""

from __future__ import annotations

import pytest

from tests.config.command import parse

ALONE = "no effect with a single data-parallel process"


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        ("--zero-stage 3 --overlap-grad-reduce", "--zero-stage 3, --overlap-grad-reduce"),
        (
            "--use-distributed-optimizer --overlap-param-gather --bf16 --fp8-format hybrid "
            "--fp8-param-gather",
            "--use-distributed-optimizer, --overlap-param-gather, --fp8-param-gather",
        ),
        ("--DDP-impl torch", "--DDP-impl torch"),
        (
            "--use-distributed-optimizer --overlap-grad-reduce --save x --save-interval 1 "
            "--ckpt-format legacy",  # its files depend on the first flag
            "--overlap-grad-reduce",
        ),
    ],
)
def test_one_data_parallel_process_shares_with_nobody(words: str, flags: str) -> None:
    split = "--tensor-model-parallel-size 2"
    assert parse(words).notices == parse(words, split, world_size=2).notices
    assert parse(words).notices == (f"{flags}: {ALONE}",)
    context = "--context-parallel-size 2"  # context ranks share as data-parallel processes do
    experts = f"{split} --sequence-parallel --num-experts 2 --expert-tensor-parallel-size 1"
    sharing = [(2, ""), (2, context), (4, split)]
    if "DDP" not in words and "fp8" not in words and "legacy" not in words:
        sharing.append((2, experts))  # replicas of the experts
    for size, more in sharing:
        assert not any(ALONE in line for line in parse(words, more, world_size=size).notices)
