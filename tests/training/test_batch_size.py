"""Batch arithmetic: fixed and growing batches, and run lengths."""

from dataclasses import replace

import pytest

from megatron.errors import DataError
from megatron.parallel.layout import Layout
from megatron.training.batches import BatchPlan, BatchStep, ramp_up, samples_needed
from megatron.training.run import Progress
from tests.config.command import parse, problems
from tests.training.toy import build_toy

# 16, 24, 32 over 100 samples: each step takes 50, and sample 100 still belongs to the ramp.
GROWING = BatchPlan(
    micro_batch=2, global_batch=32, steps=ramp_up(16, 8, 100, full=32), data_parallel=4
)


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
    [
        (1536, (32, 32, 5859375)),
        (768, (48, 48, 100_003)),
        (8, (8, 8, 50)),
        (64, (1, 1, 7)),
        (1000, (1, 3, 123_457)),
        (50, (1, 1, 1)),  # in floating point, 1 / (1 / 49) is below 49
    ],
)
def test_rampup_equals_megatrons_loop(global_batch, ramp):
    """Compare with Megatron 23.08's update-by-update formula, on the paper's own ramps."""
    plan = BatchPlan(1, global_batch, ramp_up(*ramp, full=global_batch))
    start, increment, samples = ramp
    increments = (global_batch - start) // increment
    consumed = iterations = 0
    while consumed < samples + 10 * global_batch:
        batch = global_batch
        if consumed <= samples and increments:
            batch = start + int(consumed / (samples / increments)) * increment
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
    assert plan.tokens_at(0, 0) == 16  # samples of a single token, by default


def test_samples_of_a_run() -> None:
    larger = "--eval-global-batch-size 12 --eval-micro-batch-size 4"
    words = f"--global-batch-size 8 --eval-interval 10 --eval-iters 3 {larger}"
    config = parse(words).config
    assert samples_needed(config, 40, Progress()) == (320, 5 * 36, 36)
    assert samples_needed(config, 39, Progress()) == (312, 4 * 36, 36)
    # The first 10 updates were larger.
    begun = Progress(iteration=10, consumed_samples=200)
    assert samples_needed(config, 40, begun) == (200 + 30 * 8, 5 * 36, 36)
    begun = Progress(iteration=10, consumed_samples=20)
    assert samples_needed(config, 40, begun) == (320, 5 * 36, 36)
    config = parse("--train-samples 200 --eval-iters 3", without=["--train-iters"]).config
    assert samples_needed(config, 50, Progress()) == (200, 12, 12)


def test_more_samples_than_there_are() -> None:
    for words, told in (
        ("--train-iters 2", "--train-iters 2"),
        ("--train-samples 8 --train-tokens 200", "--train-samples 8 --train-tokens 200"),
    ):
        run = build_toy(Layout.single(), words.split())
        with pytest.raises(DataError) as refusal:
            list(run.train_batches)
        assert str(refusal.value) == (
            f"the dataset of 8 samples is exhausted: it was built for {told}"
        )


def test_from_config() -> None:
    words = "--micro-batch-size 2 --global-batch-size 32 --rampup-batch-size 16 8 100"
    config = parse(words, "--train-samples 200", without=["--train-iters"]).config
    assert BatchPlan.from_config(config, data_parallel=4) == replace(GROWING, seq_length=128)


def test_a_ramp_up_of_very_many_updates_is_counted_at_once():
    plan = BatchPlan(1, 12, ramp_up(4, 4, 10**12, full=12))
    # 4 until and including the update that reaches half of the samples, then 8.
    assert plan.iterations_for(4 * 10**11) == 10**11
    assert plan.iterations_for(10**12 + 12) == 10**12 // 8 + 10**12 // 16 + 1


def test_a_schedule_of_batch_sizes_counts_tokens() -> None:
    words = '--micro-batch-size 2 --step-batch-size-schedule "0:8,1.28K:16 2560:4"'
    config = parse(words, "--train-samples 200", without=["--train-iters"]).config
    assert config.training.global_batch_size == 16
    plan = BatchPlan.from_config(config, data_parallel=2)
    assert plan.steps == (BatchStep(0, 8), BatchStep(10, 16), BatchStep(20, 4))  # 128 tokens each
    # Updates start at 0 8 (8 each), 16 (16), 32 36 (4 each).
    assert [plan.global_batch_at(samples) for samples in (0, 8, 9, 10, 16, 19, 20, 32)] == [
        *(8, 8, 8, 16, 16, 16, 4, 4)
    ]
    for samples, updates in ((7, 0), (8, 1), (16, 2), (31, 2), (32, 3), (35, 3), (36, 4), (41, 5)):
        assert plan.iterations_for(samples) == updates
        tokens = 128 * samples
        assert plan.iterations_for_tokens(tokens) == updates + (samples not in (8, 16, 32, 36))


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("0:8 12", "12: expected TOKENS:BATCH"),
        ("0:8 1X:16", "1X:16: expected TOKENS:BATCH"),
        ("1:8 2B:16", "the numbers of tokens must grow, and begin with 0"),
        ("0:8 2B:16 2B:32", "the numbers of tokens must grow, and begin with 0"),
        ("0:8 100:16", "two sizes begin within the same sample of 128 tokens: drop one of them"),
        ("0:8 1K:10", "the size 10 is not a multiple of --micro-batch-size x data-parallel "),
        ("0:0", "0:0: expected TOKENS:BATCH"),
    ],
)
def test_mistakes_in_a_schedule_of_batch_sizes(schedule: str, message: str) -> None:
    (line,) = problems(
        f'--step-batch-size-schedule "{schedule}" --train-samples 9', without=["--train-iters"]
    )
    assert line.startswith(f'--step-batch-size-schedule "{schedule}": {message}')


def test_what_a_schedule_of_batch_sizes_cannot_be_combined_with() -> None:
    flag = '--step-batch-size-schedule "0:4 1K:8"'
    lines = problems(flag, "--global-batch-size 16 --rampup-batch-size 4 4 100")
    assert [line for line in lines if flag in line] == [
        f"{flag} cannot be combined with --rampup-batch-size: drop one of them",
        f"{flag} counts tokens: give the length as --train-samples or --train-tokens, not "
        "--train-iters",
        f"--global-batch-size 16 is not the largest batch of {flag}: drop it, or use 8",
    ]
    assert any(
        line.startswith("--lr-decay-style range-test cannot be combined with --step-batch-size")
        for line in problems(flag, "--lr-decay-style range-test")
    )
