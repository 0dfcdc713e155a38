"""Batch arithmetic: fixed and growing batches, and run lengths."""

from dataclasses import replace

import pytest

from megatron.training.batches import BatchPlan, Rampup
from tests.config.command import parse

# 16, 24, 32 over 100 samples: each step takes 50, and sample 100 still belongs to the ramp.
GROWING = BatchPlan(micro_batch=2, global_batch=32, rampup=Rampup(16, 8, 100), data_parallel=4)


@pytest.mark.parametrize(
    ("consumed", "batch", "micro_batches"),
    [(0, 16, 2), (49, 16, 2), (50, 24, 3), (99, 24, 3), (100, 32, 4), (101, 32, 4)],
)
def test_rampup_table(consumed, batch, micro_batches):
    assert GROWING.global_batch_at(consumed) == batch
    assert GROWING.micro_batches_at(consumed) == micro_batches


def test_rampup_run_length():
    # Updates start at 0 16 32 48 (16 each), 64 88 (24 each), 112, with 32 each from there on.
    assert GROWING.iterations_for(64) == 4
    assert GROWING.iterations_for(111) == 5
    assert GROWING.iterations_for(112) == 6
    assert GROWING.iterations_for(176) == 8
    assert GROWING.iterations_for(175) == 7
    assert GROWING.iterations_for(63) == 3  # ends inside the ramp-up


@pytest.mark.parametrize(
    ("global_batch", "ramp"),
    [(1536, Rampup(32, 32, 5859375)), (768, Rampup(48, 48, 100_003)), (8, Rampup(8, 8, 50))],
)
def test_rampup_equals_megatrons_loop(global_batch, ramp):
    """Compare with Megatron 23.08's update-by-update formula, on the paper's own ramps."""
    plan = BatchPlan(1, global_batch, ramp)
    increments = (global_batch - ramp.start) // ramp.increment
    consumed = iterations = 0
    while consumed < ramp.samples + 10 * global_batch:
        batch = global_batch
        if consumed <= ramp.samples and increments:
            batch = ramp.start + int(consumed / (ramp.samples / increments)) * ramp.increment
        assert plan.global_batch_at(consumed) == batch
        consumed, iterations = consumed + batch, iterations + 1
    assert plan.iterations_for(consumed) == iterations
    assert plan.iterations_for(consumed - 1) == iterations - 1


def test_fixed_batch():
    plan = BatchPlan(4, 16, data_parallel=2)
    assert plan.global_batch_at(10**9) == 16
    assert plan.micro_batches_at(0) == 2
    assert plan.iterations_for(47) == 2
    assert plan.iterations_for(48) == 3


def test_from_config() -> None:
    words = "--micro-batch-size 2 --global-batch-size 32 --rampup-batch-size 16 8 100"
    config = parse(words, "--train-samples 200", without=["--train-iters"]).config
    assert BatchPlan.from_config(config, data_parallel=4) == replace(GROWING, seq_length=128)


def test_a_ramp_up_of_very_many_updates_is_counted_at_once():
    plan = BatchPlan(1, 12, Rampup(4, 4, 10**12))
    # 4 until and including the update that reaches half of the samples, then 8.
    assert plan.iterations_for(4 * 10**11) == 10**11
    assert plan.iterations_for(10**12 + 12) == 10**12 // 8 + 10**12 // 16 + 1
