"""Simulated times equal the published formulas."""

from __future__ import annotations

import random

import pytest

from megatron.errors import ConfigError
from megatron.parallel.pipeline.schedule import make_schedule
from megatron.parallel.pipeline.simulate import (
    RunnableSchedule,
    Timeline,
    Times,
    simulate,
    time_table,
)


def _uniform(kind, p: int, v: int, m: int, f: float = 1, b: float = 1, w: float = 1) -> Timeline:
    forward, inputs, weights = (time_table("time", [value], p, v) for value in (f, b, w))
    return simulate(make_schedule(kind, p, v, m), Times(forward, inputs, weights))


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (4, 8), (8, 5), (16, 64)])
@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
def test_bubble_of_gpipe_and_1f1b(kind, p: int, m: int) -> None:
    timeline = _uniform(kind, p, 1, m)
    assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1))
    assert timeline.total == pytest.approx(3 * (m + p - 1))


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (4, 2, 4), (4, 3, 16), (8, 4, 32)])
def test_bubble_of_interleaved(p: int, v: int, m: int) -> None:
    assert _uniform("interleaved", p, v, m).bubble == pytest.approx((p - 1) / (v * m + p - 1))


@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 8), (8, 8), (8, 16)])
def test_zero_bubble_leaves_a_third_of_1f1bs_idle_time(p: int, m: int) -> None:
    """Check (p - 1) (F + B - W), where 1F1B has (p - 1) (F + B + W); Qi et al., 2023, table 2."""
    timeline = _uniform("zero-bubble", p, 1, m)
    assert timeline.total == pytest.approx(3 * m + p - 1)
    uneven = _uniform("zero-bubble", p, 1, m, f=1, b=1.2, w=0.8)
    assert uneven.bubble < _uniform("1f1b", p, 1, m, f=1, b=1.2, w=0.8).bubble


def test_an_incomplete_last_group_costs_less_than_a_full_one() -> None:
    times = [_uniform("interleaved", 4, 2, m).total for m in (8, 9, 10, 11, 12)]
    assert times == sorted(times)
    assert times[0] < times[1]


def test_a_slow_stage_and_slow_messages_delay_the_others() -> None:
    schedule = make_schedule("1f1b", 2, 1, 1)
    timeline = simulate(schedule, Times(((1.0,), (3.0,)), ((1.0,), (4.0,)), ((1.0,), (2.0,)), 0.5))
    spans = [[(span.start, span.end) for span in line] for line in timeline.spans]
    assert spans == [[(0, 1), (11, 13)], [(1.5, 4.5), (4.5, 10.5)]]
    assert timeline.busy == (3, 9)
    assert timeline.total == 13
    assert timeline.bubble == pytest.approx(1 - 12 / 26)


@pytest.mark.parametrize(("kind", "v"), [("1f1b", 1), ("interleaved", 3), ("zero-bubble", 1)])
def test_a_schedule_is_timed_again_and_again(kind, v: int) -> None:
    schedule = make_schedule(kind, 4, v, 10)
    runnable = RunnableSchedule(schedule)
    for seed in range(3):
        chance = random.Random(seed)
        tables = [time_table("", [chance.random() for _ in range(4 * v)], 4, v) for _ in range(3)]
        times = Times(*tables, communication=0.1)
        assert runnable.total(times) == simulate(schedule, times).total
        assert runnable.timeline(times) == simulate(schedule, times)


def test_computations_that_take_no_time_leave_no_bubble() -> None:
    timeline = _uniform("1f1b", 2, 1, 3, f=0, b=0, w=0)
    assert (timeline.total, timeline.bubble) == (0, 0)
    nothing = RunnableSchedule(((), ()))
    times = Times(*[((1.0,), (1.0,))] * 3)
    assert nothing.total(times) == nothing.timeline(times).total == 0


def test_times_come_by_stage_or_by_part() -> None:
    assert time_table("t", [6.0], 2, 3) == ((2, 2, 2), (2, 2, 2))
    assert time_table("t", [6.0, 3.0], 2, 3) == ((2, 2, 2), (1, 1, 1))
    assert time_table("t", [0.0, 1, 2, 3, 4, 5], 2, 3) == ((0, 2, 4), (1, 3, 5))
    assert time_table("t", [1.0, 2.0], 1, 2) == ((1, 2),)
    with pytest.raises(ConfigError, match=r"--forward-time: 4 values; give 1 or 2 or 6"):
        time_table("--forward-time", [1.0] * 4, 2, 3)
    with pytest.raises(ConfigError, match="must be a number of at least 0"):
        time_table("--forward-time", [-1.0], 2, 3)
