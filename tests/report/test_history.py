"""The history of a run: restarts, its state, and how the files of a folder are found and read."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from megatron.report import charts, page
from megatron.report.charts import chart_of, make_charts, reduce_curve
from megatron.report.history import Event, History
from megatron.report.page import page_data, summarize
from megatron.report.sources import EventFiles, MetricsFile, open_runs
from tests.report.test_report import START, curve_of, event, record, write_events, write_run


def history_of(*records: dict[str, Any]) -> History:
    history = History("run")
    for one in records:
        history.add(one)
    return history


def test_a_start_at_the_beginning_discards_the_first_attempt() -> None:
    """A run that failed before its first checkpoint begins again at iteration 0."""
    history = history_of(START, record(1), record(2), START)
    assert [(each.kind, each.text) for each in history.events] == [
        ("start", ""),
        ("resumed", "repeats 2 iterations"),
    ]
    assert history.curves == {}
    assert history.last_iteration == 0
    history.add(record(1))
    assert list(history.curves["lm loss"].iterations) == [1]


def test_a_start_at_the_last_iteration_repeats_nothing() -> None:
    history = history_of(START, *map(record, (1, 2, 3)), {**START, "iteration": 3}, record(4))
    assert [(each.kind, each.text) for each in history.events] == [("start", ""), ("resumed", "")]
    assert list(history.curves["lm loss"].iterations) == [1, 2, 3, 4]


def test_an_iteration_that_is_recorded_again_replaces_the_first_record() -> None:
    """Files of other programs do not say where a run was resumed."""
    history = history_of(record(1), record(2), record(2, **{"lm loss": 1.0}))
    assert list(history.curves["lm loss"].iterations) == [1, 2]
    assert history.curves["lm loss"].values[-1] == 1.0


def test_a_file_that_begins_with_a_later_start_is_of_a_resumed_run() -> None:
    assert history_of({**START, "iteration": 7}).events[0].kind == "resumed"


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([], "running, or interrupted"),
        ([("end", "of an hour"), ("checkpoint", "saved")], "ended: of an hour"),
        ([("failure", "a disk is full")], "failed: a disk is full"),
        ([("failure", "a disk is full"), ("resumed", "")], "running, or interrupted"),
        ([("end", "of an hour"), ("start", "")], "running, or interrupted"),
    ],
)
def test_the_state_follows_the_last_start_or_end(events: list[tuple[str, str]], state: str) -> None:
    history = History("run", events=[Event(kind, 1, None, text) for kind, text in events])
    assert history.state == state


def test_loads_of_experts_that_are_not_finite_leave_the_last_ones() -> None:
    """A router's loads are NaN after its weights are, but the page still shows the rest."""
    loads = [{"0": [0.5, 0.5]}, {"0": [math.nan, 1.0]}, {"0": [math.inf, 1.0]}]
    history = history_of(*(record(i, **{"expert load": load}) for i, load in enumerate(loads, 1)))
    assert history.expert_load == {"0": [0.5, 0.5]}
    assert history.last_iteration == 3
    page.as_json(page_data([history]))


def test_texts_are_cut() -> None:
    start = {**START, "settings": {"--data-path": "x" * 5000}, "changed": []}
    history = history_of(start, event("failure", 1, "y" * 5000))
    assert history.settings == {"--data-path": "x" * 2000}
    assert history.events[1].text == "y" * 2000


def test_the_loss_scale_s_changes_and_evaluations_are_events() -> None:
    scales = (8.0, 8.0, 4.0)
    records = [record(i, **{"loss-scale": scale}) for i, scale in enumerate(scales, 1)]
    evaluations = (
        {"iteration": 3, "lm loss test": 2.0, "lm loss validation": 1.5},
        {"iteration": 3, "lm loss validation-wiki": 1.0, "lm loss validation-wiki ppl": 2.7},
    )
    events = history_of(*records, *evaluations).events
    assert [(each.kind, each.iteration, each.text) for each in events] == [
        ("loss scale", 3, "8 to 4"),
        ("evaluation", 3, "lm loss test 2.0000, lm loss validation 1.5000"),
        ("evaluation", 3, "lm loss validation-wiki 1.0000"),
    ]


def test_a_file_that_another_run_has_replaced_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", [record(1), record(2)], "x\n") / "metrics.jsonl"
    source = MetricsFile("run", path)
    assert (source.read(), source.read()) == (True, False)
    assert source.history.damaged == 1
    size = path.stat().st_size
    path.write_text(json.dumps(record(1, **{"other loss": 1.0})).ljust(size - 2) + "\n")
    assert source.read()  # although it is only a byte shorter
    assert source.history.damaged == 0
    assert list(source.history.curves["lm loss"].iterations) == [1]
    for text, is_new, is_incomplete in (('{"iteration": 2', False, True), ("}\n", True, False)):
        with path.open("a") as file:
            file.write(text)
        assert source.read() == is_new
        assert source.history.incomplete == is_incomplete
    assert "other loss" in source.history.curves


def test_event_files_are_read_as_they_grow(tmp_path: Path) -> None:
    (first,) = write_events(tmp_path, 3).iterdir()
    # Files are read in the order of their names: the time in seconds, and a process's counter.
    first.rename(tmp_path / "events.out.tfevents.1000000000.host.1.0")
    source = EventFiles("run", tmp_path)
    assert (source.read(), source.read()) == (True, False)
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path), filename_suffix=".later") as writer:
        writer.add_scalar("lm loss", 1.0, 4, walltime=3e9)
        writer.add_scalar("other loss", 1.0, 4, walltime=2e9)
        settings = "| flag | value |\n| --- | --- |\n| **--lr** | 2 |\n| --seed | 1 |"
        facts = "| fact | value |\n| --- | --- |\n| layout | TP 2 |"
        writer.add_text("settings", f"{settings}\n\n{facts}", 3)
    assert source.read()
    history = source.history
    assert list(history.curves["lm loss"].iterations) == [1, 2, 3, 4]
    assert list(history.curves["other loss"].iterations) == [4]
    assert history.curves["time"].values[-1] == 3e9
    assert page_data([history])["runs"][0]["damaged"] == 0
    assert [each.kind for each in history.events] == ["start", "checkpoint", "resumed"]
    assert history.settings == {"--lr": "2", "--seed": "1"}
    assert history.changed == {"--lr"}
    assert history.facts == {"layout": "TP 2"}
    with SummaryWriter(str(tmp_path), filename_suffix=".last") as writer:
        writer.add_text("events", "end: completed", 4)
    assert source.read()
    assert source.history.state == "ended: completed"
    assert not source.read()


def test_runs_are_named_by_their_folders_and_files(tmp_path: Path) -> None:
    lines = json.dumps(record(1)) + "\n"
    for name in ("one/a", "two/a", "two/b"):
        path = tmp_path / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text(lines)
    write_events(tmp_path / "one", 1)  # not read, because there is a metrics file

    def names(*paths: Path) -> list[str]:
        return [source.history.name for source in open_runs(paths)]

    assert names(tmp_path) == ["one", "two/a.jsonl", "two/b.jsonl"]
    assert names(tmp_path / "one") == ["one"]
    assert names(tmp_path / "two" / "b.jsonl") == ["two"]
    assert names(tmp_path / "two", tmp_path / "one") == ["two/a.jsonl", "two/b.jsonl", "one"]


@pytest.mark.parametrize(
    ("tag", "title", "unit"),
    [
        ("lm loss", "LM loss", ""),
        ("lm loss validation", "LM loss", ""),
        ("lm loss validation-wiki", "LM loss", ""),
        ("lm loss validation-0 ppl", "LM loss, perplexity", ""),
        ("lm loss test ppl", "LM loss, perplexity", ""),
        ("load-balancing loss", "Load balancing loss", ""),
        ("decoupled-learning-rate", "Learning rate", ""),
        ("forward-backward-time", "Time of an iteration", "s"),
        ("expert-load/idlest", "Expert load", "relative to an even share"),
        ("throughput", "Throughput", "TFLOP/s per GPU"),
        (" test", " test", ""),
    ],
)
def test_the_chart_of_a_tag(tag: str, title: str, unit: str) -> None:
    assert chart_of(tag) == (title, unit)


def test_settings_that_never_change_are_no_charts() -> None:
    steady = [record(i, **{"loss-scale": 8.0, "batch-size": 4 * i}) for i in (1, 2)]
    charts, constants = make_charts([history_of(*steady), history_of(*steady)])
    assert constants == {"loss-scale": 8.0}
    assert [chart["title"] for chart in charts] == ["LM loss", "Gradient norm", "Batch size"]
    smooth = {chart["title"]: chart["curves"][0]["smooth"] for chart in charts}
    assert smooth == {"LM loss": True, "Gradient norm": True, "Batch size": False}
    other = [record(i, **{"loss-scale": 4.0}) for i in (1, 2)]
    charts, constants = make_charts([history_of(*steady), history_of(*other)])
    assert "loss-scale" not in constants
    (scale,) = (chart for chart in charts if chart["title"] == "Loss scale")
    assert [curve["smooth"] for curve in scale["curves"]] == [False, False]


def test_the_iterations_without_a_number_are_listed() -> None:
    reduced = reduce_curve(curve_of([1.0, math.nan, 1 / 3, math.inf]), 2)
    assert reduced == {"x": [1, 2, 3, 4], "y": [1.0, None, 0.333333, None], "bad": [2, 4]}
    assert "low" not in reduce_curve(curve_of([1.0] * 6), 2)
    assert len(reduce_curve(curve_of([1.0] * 7), 2)["low"]) == 2


def test_a_page_has_the_latest_events_and_counts_all() -> None:
    records = [event("checkpoint", i) for i in range(1, 503)]
    (run,) = page_data([history_of(record(1), *records)])["runs"]
    assert [each["iteration"] for each in run["events"]] == list(range(3, 503))
    assert run["eventCounts"] == {"checkpoint": 502}


@pytest.mark.parametrize(("count", "points"), [(1500, 1500), (1501, 500)])
def test_a_long_run_s_clock_is_reduced(count: int, points: int) -> None:
    history = history_of(*(record(i, time=1e9 + i) for i in range(1, count + 1)))
    (run,) = page_data([history])["runs"]
    assert {name: len(curve["x"]) for name, curve in run["clock"].items()} == {
        "hours": points,
        "samples": points,
    }


def test_a_page_converts_iterations_to_samples_and_hours() -> None:
    times = [1e9 + 1800 * i for i in range(3)]
    (run,) = page_data([history_of(*(record(i + 1, time=t) for i, t in enumerate(times)))])["runs"]
    assert run["clock"]["hours"] == {"x": [1, 2, 3], "y": [0.0, 0.5, 1.0]}
    assert run["clock"]["samples"] == {"x": [1, 2, 3], "y": [4.0, 8.0, 12.0]}
    assert run["lastTime"] == times[-1]
    assert run["tokensPerSample"] == 0  # unknown


def test_a_summary_omits_what_is_unknown() -> None:
    losses = {"lm loss": math.nan, "lm loss validation ppl": 3.0, "loss-scale": 1.0}
    found = dict(summarize(history_of({"iteration": 1200, **losses})))
    assert found == {"state": "running, or interrupted", "iterations": "1,200"}


def test_a_metrics_file_that_cannot_be_read_is_no_run(tmp_path: Path) -> None:
    if os.getuid() == 0:
        (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    else:
        (tmp_path / "gone.jsonl").touch(mode=0)
    (tmp_path / "list.jsonl").write_text("[1, 2]\n")
    assert open_runs([tmp_path], may_be_empty=True) == []


def test_the_mean_of_an_interval_is_over_its_finite_values() -> None:
    few = [math.nan, 5.0, math.nan, math.nan]
    reduced = reduce_curve(curve_of([*[2.0, math.nan, 3.0, math.inf] * 5, *few * 5]), 10)
    assert reduced["y"] == [2.5] * 5 + [5.0] * 5
    assert reduced["low"] == [2.0] * 5 + [5.0] * 5
    assert reduced["high"] == [3.0] * 5 + [5.0] * 5
    assert reduced["bad"] == reduced["x"] == list(range(1, 41, 4))


@pytest.mark.parametrize(("curves", "length"), [(1, 150), (8, 25), (100, 10)])
def test_many_curves_are_reduced_further(
    curves: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(charts, "_POINTS", 600)
    monkeypatch.setattr(charts, "_BINS", (10, 150))
    history = History("run")
    history.curves |= {f"tag {number}": curve_of([1.0] * 1000) for number in range(curves)}
    found, _ = make_charts([history])
    assert {len(chart["curves"][0]["x"]) for chart in found} == {length}


def test_losses_come_first_and_unknown_tags_last() -> None:
    values = {"other": 1.0, "throughput": 1.0, "learning-rate": 1.0, "lm loss": 1.0}
    found, constants = make_charts([history_of({"iteration": 1, "loss-scale": 8.0, **values})])
    titles = [chart["title"] for chart in found]
    assert titles == ["LM loss", "Learning rate", "Throughput", "Other"]
    assert constants == {"loss-scale": 8.0}


def test_events_without_a_usable_time_are_shown() -> None:
    history = history_of(record(1), {"iteration": 1, "event": "checkpoint"})
    history.events += [Event("end", 1, time) for time in (math.inf, math.nan, 1e18, -1e308, 1e9)]
    history.add(record(2, time=1e18))
    (run,) = page_data([history])["runs"]
    assert [each["time"] for each in run["events"]] == [*[None] * 5, 1e9]
    assert run["lastTime"] is None
    page.as_json(run)
