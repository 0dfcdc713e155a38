"""Schedules in DeepSpeed's JSON file that do not specify all lengths or rates."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.test_deepspeed import read, wrong


@pytest.mark.parametrize(
    ("words", "length"),
    [("", "the whole run (--train-iters 40)"), ("--lr-decay-iters 9", "--lr-decay-iters 9")],
)
def test_a_decay_without_a_length_says_which_it_takes(
    words: str, length: str, tmp_path: Path
) -> None:
    params = {"warmup_num_steps": 4}
    content = {"scheduler": {"type": "WarmupDecayLR", "params": params}}
    (told,) = [
        notice
        for notice in read(tmp_path, content, words, without=["--lr"]).notices
        if "total_num_steps" in notice
    ]
    assert told.endswith(f"line 3): total_num_steps is not given: the decay takes {length}")


def test_ratios_need_a_rate(tmp_path: Path) -> None:
    cosine = {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 20}}}
    (line, *_) = wrong(tmp_path, cosine, without=["--lr"])
    assert line.endswith("as multiples of the peak: add optimizer.params.lr, or --lr")
