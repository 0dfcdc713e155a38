"""Goodput with failures: the closed form against simulation, and the best checkpoint interval."""

import random

import pytest

from megatron.planner.prediction import Failures

LLAMA = Failures(between=50_000 * 3600 / 16_384, checkpoint=30, restart=600)


def simulated(failures: Failures, interval: float, intervals: int, seed: int) -> float:
    """Return the goodput of a run of this many intervals, with failures drawn one by one."""
    draw = random.Random(seed)
    clock = 0.0
    failure = draw.expovariate(1 / failures.between)
    for _ in range(intervals):
        waits = 0.0  # for a restart, if the last attempt failed
        while clock + waits + interval + failures.checkpoint > failure:
            clock, waits = failure, failures.restart
            failure = clock + draw.expovariate(1 / failures.between)
        clock += waits + interval + failures.checkpoint
    return intervals * interval / clock


@pytest.mark.parametrize("interval", [300, 900, 3000])
def test_the_expected_goodput_is_what_simulated_runs_reach(interval):
    runs = [simulated(LLAMA, interval, intervals=4000, seed=seed) for seed in range(5)]
    assert sum(runs) / 5 == pytest.approx(LLAMA.goodput(interval), rel=0.01)


def test_the_best_interval_is_daly_s_and_no_other_is_better():
    for failures in (LLAMA, Failures(between=3600, checkpoint=120, restart=60)):
        best = failures.goodput(failures.best)
        assert failures.best == pytest.approx(failures.daly, rel=0.01)
        assert failures.young == pytest.approx(failures.daly, rel=0.2)
        assert all(best >= failures.goodput(failures.best * factor) for factor in (0.7, 0.95, 1.4))


def test_where_saving_takes_longer_than_failures_daly_waits_for_one():
    assert Failures(between=10.0, checkpoint=30.0, restart=1.0).daly == 10.0


def test_nothing_gets_done_if_an_interval_never_ends():
    assert LLAMA.goodput(1e9) == 0.0
