"""The report of a run: what it reads, what it keeps of long curves, and what its page may do."""

from __future__ import annotations

import html
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megatron.command import run_command
from megatron.report.__main__ import build_parser, run
from megatron.report.charts import make_charts, reduce_curve
from megatron.report.history import Curve, History
from megatron.report.page import GENERATOR, as_json, page_data, summarize
from megatron.report.sources import open_runs
from megatron.report.timeline import find_timelines


def read_run(folder: Path) -> History:
    (source,) = open_runs([folder])
    return source.history


def record(iteration: int, **more: object) -> dict[str, object]:
    fields = {"iteration": iteration, "consumed samples": 4 * iteration, "time": 1e9 + iteration}
    return {**fields, "lm loss": 8 - iteration / 1000, "grad-norm": 1.0, **more}


def write_run(folder: Path, records: list[dict[str, object]], tail: str = "") -> Path:
    folder.mkdir(parents=True)
    text = "".join(json.dumps(each) + "\n" for each in records)
    (folder / "metrics.jsonl").write_text(text + tail)
    return folder


def report(*words: object) -> int:
    options = build_parser().read([str(word) for word in words])
    return run_command(lambda: run(options))


def data_of(page: Path) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text())
    assert found
    return json.loads(found[1])


def curve_of(values: list[float]) -> Curve:
    curve = Curve()
    for iteration, value in enumerate(values, 1):
        curve.add(iteration, value)
    return curve


def test_a_page_with_loss_learning_rate_norm_and_speed(tmp_path, capsys):
    extra = {"learning-rate": 1e-3, "tokens-per-second-per-gpu": 5e4}
    folder = write_run(tmp_path / "my run", [record(i, **extra) for i in range(1, 21)])
    assert report(folder) == 0
    assert capsys.readouterr().out.startswith(f"wrote {folder / 'report.html'}")
    data = data_of(folder / "report.html")
    titles = [chart["title"] for chart in data["charts"]]
    assert titles == ["LM loss", "Learning rate", "Gradient norm", "Speed"]
    assert data["charts"][0]["curves"][0]["x"] == list(range(1, 21))
    assert data["runs"][0]["name"] == "my run"
    page = (folder / "report.html").read_text()
    assert "connect-src &#39;none&#39;" in page  # only a live page asks for data
    assert "<body data-live>" not in page


def test_a_spike_and_a_nan_survive_any_reduction():
    values = [5.0] * 100_000
    values[54_321], values[54_322] = 99.0, -3.0
    values[70_000], values[80_000] = math.nan, math.inf
    reduced = reduce_curve(curve_of(values), 100)
    assert len(reduced["x"]) == 100
    assert max(reduced["high"]) == 99.0
    assert min(reduced["low"]) == -3.0
    assert reduced["y"][0] == 5.0
    assert [round(x, -3) for x in reduced["bad"]] == [70_000, 80_000]
    assert curve_of(values[:50]).values.tolist() == reduce_curve(curve_of(values[:50]), 50)["y"]


def test_an_interval_without_a_finite_value_is_a_gap():
    reduced = reduce_curve(curve_of([1.0] * 100 + [math.nan] * 100 + [2.0] * 100), 3)
    assert reduced["y"] == [1.0, None, 2.0]
    assert reduced["low"] == reduced["high"] == [1.0, None, 2.0]


def test_a_resumed_run_replaces_what_it_repeats(tmp_path):
    first = [record(i) for i in range(1, 11)]
    again = [record(i, **{"lm loss": 1.0}) for i in range(6, 8)]
    curve = read_run(write_run(tmp_path / "run", first + again)).curves["lm loss"]
    assert list(curve.iterations) == [1, 2, 3, 4, 5, 6, 7]
    assert list(curve.values)[-2:] == [1.0, 1.0]


def test_damaged_and_half_written_lines_are_counted(tmp_path):
    folder = write_run(tmp_path / "run", [record(1)], 'x\n[1]\n{"iteration": 2, "lm l')
    history = read_run(folder)
    assert (history.damaged, history.incomplete) == (2, True)
    assert page_data([history])["runs"][0]["damaged"] == 3
    assert list(history.curves["lm loss"].iterations) == [1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "no such file or folder"),
        (lambda folder: folder.mkdir(), "no metrics: train with --metrics-jsonl"),
        (lambda folder: write_run(folder, [{"iteration": 1}]), "no record of an iteration yet"),
    ],
)
def test_a_run_without_metrics_is_an_error_with_the_remedy(tmp_path, capsys, make, message):
    make(tmp_path / "run")
    assert report(tmp_path / "run") == 6
    assert message in capsys.readouterr().err


def test_damaged_event_files_are_named(tmp_path, capsys):
    (tmp_path / "events.out.tfevents.1").write_text("junk")
    assert report(tmp_path) == 6
    assert f"{tmp_path}: no record of an iteration yet" in capsys.readouterr().err


def test_a_file_of_damaged_lines_and_a_port_without_a_server(tmp_path, capsys):
    path = tmp_path / "broken.jsonl"
    path.write_text("x\ny\n")
    assert report(path) == 6
    assert "2 damaged lines and no record of an iteration: give a file" in capsys.readouterr().err
    assert report(write_run(tmp_path / "run", [record(1)]), "--port", 80) == 9
    assert "--port 80: only --live serves a page" in capsys.readouterr().err


def test_only_an_earlier_report_is_replaced(tmp_path, capsys):
    folder = write_run(tmp_path / "run", [record(1)])
    assert report(folder) == report(folder) == 0
    (folder / "report.html").write_text("mine")
    assert report(folder) == 9
    assert "already exists" in capsys.readouterr().err
    assert report(folder, "--overwrite") == 0
    assert report(folder, "--output", folder) == 9
    assert f"--output: {folder} already exists" in capsys.readouterr().err
    for size, code in ((1024, 0), (1025, 9)):  # only the beginning counts
        (folder / "report.html").write_text(GENERATOR.rjust(size))
        assert report(folder) == code


class Elements(HTMLParser):
    """The elements of a page, and the resources they would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loaded += [
            value or "" for name, value in attrs if name in ("src", "href") and value[0] != "#"
        ]


def test_nothing_in_a_file_becomes_markup_or_script(tmp_path):
    plain = write_run(tmp_path / "plain", [record(1)])
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&<!--\u2028'\"{{7*7}}"
    hostile = write_run(tmp_path / re.sub("/", "", evil), [record(1, **{evil: 2.0})])
    pages = []
    for folder in (plain, hostile):
        assert report(folder) == 0
        pages.append((folder / "report.html").read_text())
    assert Elements(pages[0]).tags == Elements(pages[1]).tags
    assert Elements(pages[1]).loaded == ["data:,"]
    assert "script-src 'sha256-" in html.unescape(pages[1])
    data = data_of(hostile / "report.html")
    assert evil in [curve["tag"] for chart in data["charts"] for curve in chart["curves"]]


def test_two_runs_are_compared_in_the_same_charts(tmp_path):
    a = write_run(tmp_path / "a", [record(i) for i in range(1, 5)])
    b = write_run(tmp_path / "b", [record(i) for i in range(1, 9)])
    assert report(a, b, "--output", tmp_path / "both.html") == 0
    assert "<title>a and b: report</title>" in (tmp_path / "both.html").read_text()
    (loss, norm) = data_of(tmp_path / "both.html")["charts"]
    assert [(curve["run"], len(curve["x"])) for curve in loss["curves"]] == [(0, 4), (1, 8)]


def test_a_long_run_makes_a_small_page(tmp_path):
    tags = [f"tag {number}" for number in range(40)]
    lines = [
        json.dumps(record(i, **{tag: math.sin(i) * 1e-7 for tag in tags}))
        for i in range(1, 100_001, 20)  # as many points in a twentieth of the time
    ]
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert report(folder) == 0
    assert (folder / "report.html").stat().st_size < 1e6
    charts, _ = make_charts([read_run(folder)])
    assert len(charts) == 42


START = {
    "iteration": 0, "time": 1e9, "event": "start", "program": "pretrain_gpt.py", "iterations": 20,
    "tokens_per_sample": 16, "settings": {"--lr": 0.1, "--seed": 1}, "changed": ["--lr"],
    "facts": {"layout": "TP 2"},
}  # fmt: skip


def event(kind: str, iteration: int, text: str = "") -> dict[str, object]:
    return {"iteration": iteration, "time": 1e9 + iteration, "event": kind, "text": text}


def test_events_and_settings_are_shown(tmp_path):
    records = [
        START,
        *[record(i, **{"loss-scale": 64.0 if i < 8 else 32.0}) for i in range(1, 11)],
        {"iteration": 10, "time": 1e9 + 10, "lm loss validation": 7.5},
        event("checkpoint", 5, "saved in 1.00 s"),
        {**START, "iteration": 5},
        record(6),
        event("end", 6, "training is complete"),
    ]
    folder = write_run(tmp_path / "run", records)
    assert report(folder) == 0
    (run,) = data_of(folder / "report.html")["runs"]
    assert [(each["kind"], each["iteration"], each["text"]) for each in run["events"]] == [
        ("start", 0, ""),
        ("loss scale", 8, "64 to 32"),
        ("evaluation", 10, "lm loss validation 7.5000"),
        ("checkpoint", 5, "saved in 1.00 s"),
        ("resumed", 5, "repeats 5 iterations"),
        ("end", 6, "training is complete"),
    ]
    assert (run["settings"], run["changed"]) == ({"--lr": "0.1", "--seed": "1"}, ["--lr"])
    assert run["facts"] == {"layout": "TP 2"}
    assert dict(run["summary"])["iterations"] == "6 of 20"
    assert run["state"] == "ended: training is complete"
    assert run["tokensPerSample"] == 16


def test_a_summary_has_the_last_value_of_each_loss(tmp_path):
    losses = {1: (3.0, 7.5), 2: (2.5, 8.25)}
    records = [
        record(
            i,
            **{"lm loss": loss, "lm loss validation": held_out, "loss-scale": 64.0},
            **{"tokens-per-second-per-gpu": 1000.0 * i, "time": 1e9 + 5400 * i},
        )
        for i, (loss, held_out) in losses.items()
    ]
    summary = dict(summarize(read_run(write_run(tmp_path / "run", records))))
    assert summary["lm loss"] == "2.5000"
    assert summary["lm loss validation"] == "8.2500 (lowest 7.5000)"
    assert "loss-scale" not in summary
    assert summary["tokens/s per GPU"] == "1,500 (median)"
    assert summary["time"] == "1.50 h"


@pytest.mark.parametrize(
    "hostile",
    [
        {**START, "settings": 7},
        {**START, "iterations": "many"},
        {**START, "iterations": 7, "tokens_per_sample": "many"},
        {"iteration": 1, "expert load": {"0": ["x"]}},
        {"iteration": -1, "lm loss": 1.0},
        {"iteration": 1 << 48, "lm loss": 1.0},
        {"iteration": 1e400, "lm loss": 1.0},
    ],
)
def test_records_that_are_none_are_counted_and_change_nothing(tmp_path, hostile):
    history = read_run(write_run(tmp_path / "run", [record(1), hostile, record(2)]))
    assert history.damaged == 1
    assert list(history.curves["lm loss"].iterations) == [1, 2]
    assert not history.events
    assert history.iterations == 0


def test_an_odd_clock_or_loss_still_makes_a_page(tmp_path):
    odd = [
        record(i, time=value, **{"lm loss": value}) for i, value in enumerate((1e999, -1e308), 1)
    ]
    assert report(write_run(tmp_path / "run", [*odd, record(3, time="nan")])) == 0
    with pytest.raises(ValueError, match="not JSON compliant"):
        as_json([math.nan])  # browsers would not read it


def test_a_folder_of_runs_is_all_of_them(tmp_path):
    for name in ("b", "a"):
        write_run(tmp_path / "runs" / name, [record(1)])
    (tmp_path / "runs" / "a" / "samples.jsonl").write_text('{"iteration": 1, "ids": [3, 4]}\n')
    names = [source.history.name for source in open_runs([tmp_path / "runs"])]
    assert names == ["a", "b"]


def write_events(folder: Path, count: int = 20) -> Path:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        writer.add_text(
            "settings", "| flag | value |\n| --- | --- |\n| **--lr** | a\\|b |\n| --seed | 1 |"
        )
        for iteration in range(1, count + 1):
            writer.add_scalar("lm loss", 8 - iteration / 10, iteration)
            writer.add_scalar("lm loss vs samples", 8 - iteration / 10, 4 * iteration)
        writer.add_text("events", "checkpoint: saved in 1.00 s", count)
    return folder


def test_tensorboard_files_are_read_where_there_are_no_metrics(tmp_path):
    history = read_run(write_events(tmp_path / "run" / "tensorboard").parent)
    assert list(history.curves) == ["lm loss", "time"]
    assert list(history.curves["lm loss"].iterations) == list(range(1, 21))
    assert history.settings == {"--lr": "a|b", "--seed": "1"}
    assert history.changed == {"--lr"}
    assert [each.kind for each in history.events] == ["start", "checkpoint"]


def test_a_torn_tensorboard_file_is_read_up_to_the_tear(tmp_path):
    folder = write_events(tmp_path / "run")
    (file,) = folder.iterdir()
    file.write_bytes(file.read_bytes()[:-300])
    found = list(read_run(folder).curves["lm loss"].iterations)
    assert found == list(range(1, len(found) + 1))
    assert 5 < len(found) < 21


def test_a_texts_settings_of_megatron_lm_are_settings(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_text("hidden_size", "1024", 0)
        writer.add_scalar("lm loss", 1.0, 1)
    assert read_run(tmp_path).settings == {"hidden_size": "1024"}


def write_trace(folder: Path, rank: int, last: int, events: list[tuple], text: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    trace = {
        "baseTimeNanoseconds": 0,
        "traceEvents": [
            {"ph": "X", "cat": cat, "name": name, "ts": 1e3 * start, "dur": 1e3 * length}
            for cat, name, start, length in events
        ],
    }
    path = folder / f"rank{rank}.{last}.pt.trace.json"
    path.write_text(text or json.dumps(trace))


def test_the_timeline_of_the_last_profiled_iteration(tmp_path):
    run = write_run(tmp_path / "run", [record(1)])
    host, folder = "user_annotation", run / "tensorboard" / "profile"
    write_trace(folder, 0, 2, [(host, "iteration 2", 0, 5), (host, "old", 1, 1)])
    events = [
        (host, "iteration 8", 80, 10), (host, "iteration 9", 100, 50), (host, "forward", 105, 20),
        (host, "batch", 106, 2), (host, "gloo:send", 107, 30), (host, "optimizer", 130, 5),
        ("kernel", "gemm", 110, 4), ("kernel", "add", 112, 4), ("kernel", "early", 90, 1),
        ("cpu_op", "aten::mm", 110, 1),
    ]  # fmt: skip
    write_trace(folder, 0, 9, events)
    write_trace(
        folder, 1, 9, [(kind, name, start + 3, length) for kind, name, start, length in events]
    )
    write_trace(folder, 2, 9, [], text="{")
    write_trace(folder, 3, 4, events)  # from an earlier window
    history = read_run(run)
    first, second = history.timelines
    assert history.notes == [
        f"{folder / 'rank2.9.pt.trace.json'}: damaged, or without an iteration"
    ]
    assert (first["rank"], first["iteration"], first["total"]) == (0, 9, 50.0)
    assert first["rows"] == [
        {"name": "host", "spans": [(5.0, 20.0, "forward"), (30.0, 5.0, "optimizer")]},
        {"name": "", "spans": [(6.0, 2.0, "batch")]},
        {"name": "messages", "spans": [(7.0, 30.0, "gloo:send")]},
        {"name": "GPU", "spans": [(10.0, 6.0, "kernels")]},
    ]
    assert second["rows"][0]["spans"][0] == (8.0, 20.0, "forward")
    assert report(run) == 0
    assert len(data_of(run / "report.html")["runs"][0]["timelines"]) == 2


def test_spans_of_a_timeline_are_those_that_begin_in_the_iteration(tmp_path):
    host, folder = "user_annotation", tmp_path / "a" / "b"
    events = [
        (host, "iteration 4", 100, 50), (host, "early", 99, 5), (host, "first", 100, 10),
        (host, "next", 110, 10), (host, "inner", 110, 2), (host, "late", 150, 1),
        ("kernel", "w", 100, 1),
        ("kernel", "x", 120, 2), ("kernel", "y", 122, 2), ("kernel", "z", 125, 1),
        ("kernel", "late", 150, 1),
    ]  # fmt: skip
    write_trace(folder, 0, 4, events)
    write_trace(folder, 11, 4, events)  # ranks have any number of digits
    write_trace(folder / "c", 0, 3, events)  # of an earlier window
    write_trace(folder, 5, 3, events)  # a rank without a later one
    (folder / "rank1.5.pt.trace.json.gz").touch()
    first, second = find_timelines(tmp_path)[0]
    assert [first["rank"], second["rank"]] == [0, 11]
    assert first["rows"] == [
        {"name": "host", "spans": [(0.0, 10.0, "first"), (10.0, 10.0, "next")]},
        {"name": "", "spans": [(10.0, 2.0, "inner")]},
        {
            "name": "GPU",
            "spans": [(start, length, "kernels") for start, length in ((0, 1), (20, 4), (25, 1))],
        },
    ]


def test_ranks_of_a_timeline_have_one_clock(tmp_path):
    for rank, base in ((0, 5_000_000), (1, 7_000_000)):
        text = {
            "baseTimeNanoseconds": base,
            "traceEvents": [
                {"ph": "X", "cat": "user_annotation", "name": name, "ts": start, "dur": duration}
                for name, start, duration in (
                    ("iteration 1", 1000, 9000.4321),
                    ("forward", 1000.4321, 1500.4321),
                )
            ]
            + [{"ph": "i", "name": "no span"}, {"ph": "X", "cat": "cpu_op", "name": "no time"}],
        }
        write_trace(tmp_path, rank, 1, [], json.dumps(text))
    timelines, _ = find_timelines(tmp_path)
    assert [timeline["total"] for timeline in timelines] == [9.0, 9.0]
    spans = [timeline["rows"][0]["spans"] for timeline in timelines]
    assert spans == [[(0.0, 1.5, "forward")], [(2.0, 1.5, "forward")]]


@pytest.mark.parametrize("number", [-1, 1e26, "9" * 40, 10**400, "soon", None])
def test_a_trace_with_impossible_times_is_not_read(tmp_path, number):
    event = {"ph": "X", "cat": "user_annotation", "name": "iteration 1", "ts": 0, "dur": number}
    write_trace(tmp_path, 0, 1, [], json.dumps({"traceEvents": [event]}))
    timelines, notes = find_timelines(tmp_path)
    assert timelines == []
    assert notes == [f"{tmp_path / 'rank0.1.pt.trace.json'}: damaged, or without an iteration"]


def test_the_limits_of_timelines(tmp_path):
    host = "user_annotation"
    spans = [(host, f"span {begin}", begin, 0.5) for begin in range(1, 1502)]
    write_trace(tmp_path / "a" / "b" / "c", 0, 0, [(host, "iteration 0", 0, 2000), *spans])
    for rank in (1, 2, *range(4, 19)):
        write_trace(tmp_path, rank, 0, [(host, "iteration 0", 0, 1)])
    with (tmp_path / "a" / "rank3.0.pt.trace.json").open("wb") as file:
        file.truncate(256 << 20)
    write_trace(tmp_path / "a" / "b" / "c" / "d", 0, 1, [(host, "iteration 1", 0, 1)])  # too deep
    timelines, notes = find_timelines(tmp_path)
    assert [timeline["rank"] for timeline in timelines] == [0, 1, 2, *range(4, 17)]
    assert notes == [
        f"{file.name}: not read: the limit for all traces is 256 MiB",
        f"{tmp_path}: traces of 2 more ranks not read: the limit is 16 ranks",
    ]
    (row,) = timelines[0]["rows"]
    assert len(row["spans"]) == 93  # 1500 for 16 timelines
    write_trace(tmp_path, 0, 1, [(host, "iteration 1", 0, 2000), *spans])
    ((timeline,), notes) = find_timelines(tmp_path)
    assert (timeline["iteration"], notes) == (1, [])  # the others are from an earlier window
    assert len(timeline["rows"][0]["spans"]) == 1500


def test_a_page_has_room_for_the_longest_spans_of_a_few_traces(tmp_path, monkeypatch):
    host = "user_annotation"
    for rank in range(5):
        spans = [(host, f"of {length}", 10 + 10 * length, length) for length in range(1, 6)]
        write_trace(tmp_path, rank, 1, [(host, "iteration 1", 0, 100), *spans])
    size = (tmp_path / "rank0.1.pt.trace.json").stat().st_size
    monkeypatch.setattr("megatron.report.timeline._MAX_BYTES", 2 * size)
    monkeypatch.setattr("megatron.report.timeline._MAX_RANKS", 3)
    monkeypatch.setattr("megatron.report.timeline._MAX_SPANS", 6)
    timelines, notes = find_timelines(tmp_path)
    assert [timeline["rank"] for timeline in timelines] == [0, 1]
    assert [note.partition(": not read: the limit")[0] for note in notes] == [
        str(tmp_path / f"rank{rank}.1.pt.trace.json") for rank in (2, 3, 4)
    ]
    for timeline in timelines:
        names = [name for _, _, name in timeline["rows"][0]["spans"]]
        assert names == ["of 3", "of 4", "of 5"]


def test_the_page_of_a_metrics_file_is_next_to_it(tmp_path, capsys, monkeypatch):
    folder = write_run(tmp_path / "run", [record(1)])
    assert report(folder / "metrics.jsonl") == 0
    assert (folder / "report.html").exists()
    assert report(folder, "--output", tmp_path / "very" / "new" / "x.html") == 0
    assert (tmp_path / "very" / "new" / "x.html").exists()
    served = []
    monkeypatch.setattr("megatron.report.live.serve", lambda runs, port: served.append(port))
    for words in ([], ["--port", 0], ["--port", 65535]):
        assert report(folder, "--live", *words) == 0
    assert served == [6010, 0, 65535]
    assert report(folder, "--live", "--port", 65536) == 9
    assert "--port 65536: use 0 to 65535" in capsys.readouterr().err


def test_the_busiest_and_the_idlest_expert_are_curves():
    history = History("run")
    history.add(record(1, **{"expert load": {"0": [0.5, 0.25, 0.25], "3": [0.125, 0.875]}}))
    history.add(record(2, **{"expert load": {"0": []}}))
    assert history.curves["expert-load/busiest"].values[0] == 0.875
    assert history.curves["expert-load/idlest"].values[0] == 0.125


def test_evaluations_of_event_files_are_in_the_order_of_time(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        for step in (1, 2):
            for number, split in enumerate(("validation", "test")):
                when = 1e9 + 10 * step + number
                writer.add_scalar(f"lm loss {split}", 8.0 - step, step, walltime=when)
    events = read_run(tmp_path).events
    assert [(event.iteration, event.text.split()[2]) for event in events] == [
        (1, "validation"),
        (1, "test"),
        (2, "validation"),
        (2, "test"),
    ]
