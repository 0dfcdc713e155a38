"""The layout benchmark: real runs at toy size, and how its table shows failures."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from megatron.config.parser import parse_config
from megatron.errors import StorageError
from megatron.planner.command import build_parser as plan_parser
from megatron.planner.command import run as run_planner
from tests.launch import run_command
from tools.benchmark_layouts import build_parser, choose, data_flags, main, run
from tools.layouts.measure import RunFailedError, error_line, launch, measure, read_measurement
from tools.layouts.models import BenchmarkLayout, models
from tools.layouts.table import Measurement, Row, as_markdown, loss_difference, verdict

MOCK = data_flags(build_parser().read(["--model", "toy"]))
TOY = [*models()["toy"].flags.split(), *MOCK, "--micro-batch-size", "2"]
MEASURED = Measurement((4.0, 2.0), (1.5, 1.25), 12.5, 4000.0, 45.25, 10.5, 10.0, 0.25, 0.2)


@pytest.fixture
def _in_forks(monkeypatch):
    """Let layouts train in forks of this process, where everything is imported."""

    def run_to_end(command, *, timeout, **environment):
        done = run_command(command, {**os.environ, **environment}, seconds=timeout)
        return [(0.0, line) for line in done.stdout.splitlines()], done.returncode

    monkeypatch.setattr("tools.layouts.measure.run_to_end", run_to_end)


@pytest.mark.parametrize("model", sorted(models()))
def test_every_layout_is_valid(model):
    entry = models()[model]
    for layout in entry.layouts:
        words = [*entry.flags.split(), *MOCK, *layout.flags.split(), "--train-iters", "12"]
        network = parse_config(words, world_size=layout.processes).config.model
        assert network.hidden_dropout == network.attention_dropout == 0
    assert len({layout.name for layout in entry.layouts}) == len(entry.layouts)


@pytest.mark.usefixtures("_in_forks")
def test_runs_layouts_one_after_another(tmp_path, capsys):
    out, lines = tmp_path / "table.md", tmp_path / "runs.jsonl"
    words = ["--model", "toy", "--processes", "2", "--train-iters", "3", "--pipeline-bubble"]
    words += ["--layouts", "one", "pipeline 2", "tensor 2 x pipeline 2"]
    words += ["--out", str(out), "--jsonl", str(lines), "--", "--num-workers", "0"]
    assert main(words) == 0
    one, pipeline, skipped = (json.loads(line) for line in lines.read_text().splitlines())
    assert pipeline["measured"]["losses"] == pytest.approx(one["measured"]["losses"], rel=1e-5)
    assert len(one["measured"]["losses"]) == 3
    assert one["measured"]["predicted_gib"] > 0
    assert one["measured"]["bubble"] is None
    assert 0 < pipeline["measured"]["predicted_bubble"] < 1
    assert skipped["problem"] == "skipped: 4 needed, 2 present"
    printed = capsys.readouterr().out
    assert printed == out.read_text()
    assert [row.split(" | ")[0] for row in printed.splitlines()[2:]] == [
        "| one", "| pipeline 2", "| tensor 2 x pipeline 2"
    ]  # fmt: skip


def _measure(flags, timeout=240.0):
    layout = BenchmarkLayout(1, "one", "")
    words = [*TOY, *flags]
    return measure(layout, words, available=1, iterations=2, timeout=timeout, bubble=True)


def test_a_refused_layout_says_why_in_its_row():
    row = _measure(["--tensor-model-parallel-size", "3"])
    assert row.failed
    assert "--tensor-model-parallel-size 3" in row.problem
    assert "--tensor-model-parallel-size 3" in as_markdown([row])


@pytest.mark.usefixtures("_in_forks")
def test_a_run_that_fails_leaves_its_error_line(tmp_path):
    row = _measure(["--load", str(tmp_path), "--exit-on-missing-checkpoint"])
    assert row.failed
    assert row.measured is None
    assert row.problem.startswith("error: --load")


def test_a_run_that_takes_too_long_is_ended():
    started = time.monotonic()
    with pytest.raises(RunFailedError, match="did not end within its 0.5 s"):
        launch([*TOY, "--train-iters", "1000000"], 1, 0.5)
    assert time.monotonic() - started < 200


def test_without_time_left_nothing_starts():
    row = _measure([], timeout=-1.0)
    assert row.problem == "skipped: no time left"
    assert not row.failed


def test_error_line_prefers_our_own():
    traceback = "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried\n"
    summary = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    assert error_line(traceback + summary, 1) == traceback.strip()
    assert error_line(f"{traceback}[rank 3] error: --load x: no\n", 4) == (
        "[rank 3] error: --load x: no"
    )
    assert error_line("nothing to see\n", 139) == "exit code 139"


def test_utilization_is_that_of_the_median_iteration():
    config = parse_config([*TOY, "--train-iters", "4"], world_size=1).config
    records = [
        {"lm loss": 4.0, "grad-norm": 1.0, "iteration-time": seconds}
        for seconds in (9.0, 2.0, 2.0, 4.0)
    ]
    found = read_measurement(config, 1, "MFU: 2.0% |\nMFU: 10.0% |\nMFU: 5.0% |", records)
    assert (found.milliseconds, found.mfu) == (2000.0, 10.0)


def test_table_compares_with_the_first_row_of_the_same_batch():
    first = Row("one", 1, "--a", "8 x 16", MEASURED)
    failed = Row("bad", 2, "--b", problem="out|of\nmemory", failed=True)
    other = replace(first, layout="long", batch="1 x 99")
    near = replace(first, layout="two", measured=replace(MEASURED, losses=(4.0, 2.1)))
    shorter = replace(first, measured=replace(MEASURED, losses=(4.0,)))
    rows = [failed, first, other, near, shorter]
    differences = [loss_difference(row, rows) for row in rows]
    assert differences == [None, None, None, pytest.approx(0.05), None]
    lines = as_markdown(rows).splitlines()
    assert lines[2].startswith("| bad | 2 | `--b` | out\\|of memory | - |")
    assert lines[5] == (
        "| two | 1 | `--a` | 2.100000 | 5.0e-02 | 1.250 | 12.5 | - | - | 4,000 | 45.2% "
        "| 10.50 | 10.00 | 25.0% | 20.0% |"
    )
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1


def _plan(path, *words):
    network = f"{models()['toy'].flags.replace('--global-batch-size 8', '')} --num-workers 0"
    text = f"--gpus 2xH200 --global-batch 8 --top 99 --jsonl {path} {' '.join(words)}"
    run_planner(plan_parser().read(text.replace(" --- ", f" -- {network} ").split()))
    return path


@pytest.mark.usefixtures("_in_forks")
def test_planned_layouts_are_measured_beside_their_predictions(tmp_path, capsys):
    plan = _plan(tmp_path / "plan.jsonl", "--- ")
    given = _plan(tmp_path / "given.jsonl", "--memory --time --- --context-parallel-size 2",
                  "--micro-batch-size 4")  # fmt: skip
    capsys.readouterr()
    names = ["PP 2 zero-bubble, uneven, DP 1, micro-batch 4", "CP 2 p2p, DP 1, micro-batch 4"]
    out = tmp_path / "table.md"
    words = ["--plan", str(plan), str(given), "--processes", "2", "--train-iters", "3"]
    assert main([*words, "--layouts", *names, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert printed == out.read_text()
    rows = [line.split(" | ") for line in printed.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows[2:]] == [f"| {name}" for name in names]
    records = [json.loads(line) for line in plan.read_text().splitlines()]
    (record,) = (record for record in records if record["layout"] == names[0])
    assert rows[2][2] == f"`{record['layout_flags']}`"
    assert rows[2][7] == f"{1000 * record['seconds']:,.1f}"
    assert float(rows[3][4]) < 1e-5  # both layouts train alike
    assert f"the planner's best of 2: {names[0]}: predicted {rows[2][7]} ms" in printed


def test_the_verdict_compares_the_planner_s_best_with_the_fastest():
    def row(name, predicted, measured):
        found = None if measured is None else replace(MEASURED, milliseconds=measured)
        return Row(name, 2, "", "8 x 16", found, predicted_milliseconds=predicted)

    rows = [row("a", 100.0, 125.0), row("b", 110.0, 100.0), row("c", 120.0, None)]
    assert verdict(rows) == (
        "the planner's best of 3: a: predicted 100.0 ms, measured 125.0 ms\n"
        "the fastest of 2 measured: b: 100.0 ms\n"
        "the planner's best takes 25.0% more than the fastest; errors of the predicted times: "
        "median 15.0%, largest 20.0%\n"
    )
    assert [each.error for each in rows] == [pytest.approx(-0.2), pytest.approx(0.1), None]
    unmeasured = [replace(row("z", 90.0, None), problem="skipped: no time left"), *rows]
    assert "z: predicted 90.0 ms, not measured (skipped: no time left)" in verdict(unmeasured)
    assert verdict([row("c", 120.0, None)]) == ""
    assert verdict([Row("d", 1, "", "", MEASURED)]) == ""


def test_no_run_starts_that_would_not_end_within_the_budget(monkeypatch):
    now = [0.0]

    def slow(layout, flags, *, timeout, **_):
        now[0] += 0.3
        return Row(layout.name, 2, "", problem="" if timeout > 0 else "skipped: no time left")

    monkeypatch.setattr("tools.layouts.measure.measure", slow)
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("tools.benchmark_layouts.time", clock)
    rows = run(build_parser().read(["--model", "toy", "--processes", "2", "--budget", "0.5"]))
    assert [row.problem for row in rows] == ["", *["skipped: no time left"] * 4]
    rows = run(build_parser().read(["--model", "toy", "--processes", "2", "--budget", "0"]))
    assert [row.problem for row in rows] == ["skipped: no time left"] * 5


def test_mistakes_in_a_plan_name_file_and_line(tmp_path, capsys):
    plan = _plan(tmp_path / "plan.jsonl", "--- ")
    for change, message in {
        ("--global-batch-size 8", "--global-batch-size 16"): "line 2 is a different run from",
        ("pretrain_gpt.py", "pretrain_t5.py"): "line 2 is for pretrain_t5.py: only pretrain_gpt",
        ('"seconds":', '"second":'): "line 2: not a layout: write the file with megatron plan",
        ("{", ""): "line 2: not a layout",
    }.items():
        first, second = plan.read_text().splitlines()[:2]
        wrong = tmp_path / "wrong.jsonl"
        wrong.write_text(f"{first}\n{second.replace(*change)}\n")
        assert main(["--plan", str(wrong), "--list"]) != 0
        said = capsys.readouterr().err
        assert f"--plan {wrong}: {message}" in said, said
    assert main(["--plan", str(tmp_path / "none"), "--list"]) != 0
    assert "cannot be read" in capsys.readouterr().err
    assert main(["--plan", str(plan), "--model", "toy", "--list"]) == 9
    assert "--model and --plan cannot be combined" in capsys.readouterr().err
    assert main(["--plan", str(plan), "--data-path", "x", "--processes", "1"]) == 9
    assert "are for --model" in capsys.readouterr().err


def test_mistakes_are_one_line(capsys):
    assert main(["--model", "toy", "--layouts", "seven", "--processes", "1"]) == 9
    assert "--layouts seven: choose from one, data 2" in capsys.readouterr().err
    assert main(["--model", "toy", "--data-path", "x", "--processes", "1"]) == 9
    assert "give all three" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--out", "--jsonl"])
def test_a_file_that_cannot_be_written_is_reported_before_the_runs(flag, tmp_path, capsys):
    words = ["--model", "toy", "--processes", "1", flag, str(tmp_path / "missing" / "file")]
    assert main(words) == StorageError.exit_code
    assert capsys.readouterr().err.startswith(f"error: {words[4]} {words[5]} cannot be written")


def test_a_list_needs_no_gpu(capsys):
    assert main(["--model", "7b", "--list"]) == 0
    names = capsys.readouterr().out.splitlines()
    assert len(names) == 1 + len(choose(build_parser().read(["--model", "7b"])))
    assert any(line.startswith("  tensor 8 (8 processes): ") for line in names)
    assert main(["--list"]) == 0
    said = capsys.readouterr().out
    assert all(f"--model {model}\n" in said for model in models())
    assert "\n".join(names) in said


def test_a_run_needs_a_model(capsys):
    assert main(["--processes", "1"]) == 9
    assert "--model is required: give one of" in capsys.readouterr().err
