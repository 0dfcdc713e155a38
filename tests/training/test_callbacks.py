"""What a run reports and keeps: TensorBoard, Weights & Biases, JSON lines, timers, profiles."""

import json
import os
import re
import resource
import sys
import time
import types
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from megatron.device import Device
from megatron.errors import ConfigError, StorageError
from megatron.models.plan import LANGUAGE_MODEL_HEAD, HeadSpec
from megatron.models.plans import model_plan
from megatron.parallel.layout import Layout
from megatron.training import panel
from megatron.training.callbacks import memory
from megatron.training.callbacks.logging import ProgressBar
from megatron.training.callbacks.profiling import Profile
from megatron.training.checkpointing import save_run
from megatron.training.evaluation import final_evaluation
from megatron.training.loop import standard_callbacks, train
from megatron.training.panel import start_panel
from megatron.training.timers import Timers, format_timers
from megatron.training.writers import JsonLinesWriter, open_writers
from tests.distributed import run_distributed
from tests.training.toy import build_toy, train_toy


def _train_with_writers(*flags):
    run = build_toy(Layout.single(), flags)
    writers = open_writers(run.config, is_log_rank=True)
    train(run, standard_callbacks(run, writers)[0])
    for writer in writers:
        writer.close()
    return run


def test_tensorboard_has_megatrons_tags(tmp_path):
    _train_with_writers(
        "--tensorboard-dir", str(tmp_path), "--log-timers-to-tensorboard", "--log-params-norm",
        "--log-num-zeros-in-grad", "--log-batch-size-to-tensorboard",
        "--log-world-size-to-tensorboard", "--log-validation-ppl-to-tensorboard",
        "--log-memory-to-tensorboard", "--timing-log-level", "1", "--log-interval", "4",
        "--log-optimizer-states-to-tensorboard",
    )  # fmt: skip
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path)).Reload()
    tags = set(events.Tags()["scalars"])
    expected = {"lm loss", "lm loss vs samples", "learning-rate", "loss-scale", "grad-norm",
                "num-zeros", "params-norm", "batch-size", "world-size", "iteration-time",
                "lm loss validation", "lm loss validation ppl", "mem-reserved-bytes",
                "mem-allocated-bytes", "forward-backward-time", "optimizer-time",
                "tokens-per-second-per-gpu", "throughput"}  # fmt: skip
    assert expected <= tags
    states = ("weight", "momentum", "variance", "variance_sqrt")
    sizes = {f"optimizer/{name}_{of}" for name in states for of in ("l1", "l2", "abs_max")}
    assert sizes == {tag for tag in tags if re.fullmatch(r"optimizer/\w+", tag)}
    assert [event.step for event in events.Scalars("lm loss")] == [1, 2, 3, 4, 5, 6]
    assert [event.step for event in events.Scalars("lm loss vs samples")] == [4, 8, 12, 16, 20, 24]
    whole, part = events.Scalars("iteration-time"), events.Scalars("forward-backward-time")
    assert len(part) == 6
    for last in (4, 6):  # the timer is the mean over the iterations since the log line
        first = 0 if last == 4 else 4
        assert 0 < part[last - 1].value * (last - first) <= sum(e.value for e in whole[first:last])


def test_records_begin_with_all_settings_and_tell_what_happened(tmp_path):
    """This holds for the JSON lines, and for text in TensorBoard."""
    path, folder = tmp_path / "metrics.jsonl", tmp_path / "tensorboard"
    _train_with_writers(
        "--metrics-jsonl", str(path), "--tensorboard-dir", str(folder), "--iterations-to-skip", "2",
        "--save", str(tmp_path / "save"), "--save-interval", "4", "--exit-interval", "5",
    )  # fmt: skip
    records = [json.loads(line) for line in path.read_text().splitlines()]
    events = [record for record in records if "event" in record]
    assert records[0] == events[0]
    assert [(event["event"], event["iteration"]) for event in events] == [
        ("start", 0), ("skipped iteration", 3), ("checkpoint", 4), ("checkpoint", 5), ("end", 5)
    ]  # fmt: skip
    start = events[0]
    assert (start["iterations"], start["tokens_per_sample"]) == (6, 16)
    assert start["settings"]["--hidden-size"] == 32
    assert "--hidden-size" in start["changed"]
    assert "--adam-beta1" not in start["changed"]
    assert {"versions", "layout", "parameters", "device"} <= set(start["facts"])
    assert events[-1]["text"] == "--exit-interval 5"

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    board = EventAccumulator(str(folder)).Reload()
    (settings,) = board.Tensors("settings/text_summary")
    text = make_ndarray(settings.tensor_proto).item().decode()
    assert text.startswith("| flag | value |\n| --- | --- |\n")
    assert "| **--hidden-size** | 32 |" in text
    assert "| --adam-beta1 | 0.9 |" in text
    assert len(board.Tensors("events/text_summary")) == 4


def test_a_failure_is_recorded(tmp_path):
    path = tmp_path / "metrics.jsonl"
    run = build_toy(Layout.single(), ["--metrics-jsonl", str(path)])
    writers = open_writers(run.config, is_log_rank=True)
    callbacks, _ = standard_callbacks(run, writers)

    def fail(*_):
        raise ValueError("as planned")

    callbacks[-1].after_step = fail
    with pytest.raises(ValueError, match="as planned"):
        train(run, callbacks)
    last = json.loads(path.read_text().splitlines()[-1])
    assert (last["event"], last["text"]) == ("failure", "ValueError: as planned")


def test_json_lines_hold_full_precision(tmp_path):
    path = tmp_path / "deep" / "metrics.jsonl"
    recorder, _ = train_toy(Layout.single())
    _train_with_writers("--metrics-jsonl", str(path))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["lm loss"] for r in lines if "lm loss" in r] == recorder.values("lm loss")


def test_json_lines_have_time_speed_and_one_last_validation(tmp_path):
    """This includes an --eval-interval that causes an evaluation at the last iteration."""
    path = tmp_path / "metrics.jsonl"
    begun = time.time()
    run = build_toy(Layout.single(), ["--metrics-jsonl", str(path), "--eval-interval", "3"])
    writers = open_writers(run.config, is_log_rank=True)
    callbacks, listeners = standard_callbacks(run, writers)
    train(run, callbacks)
    final_evaluation(run, listeners)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    times = [record["time"] for record in records]
    assert begun - 1 <= times[0] <= times[-1] <= time.time() + 1
    assert times == [round(when, 3) for when in times]
    assert times == sorted(times)
    steps = [record for record in records if "lm loss" in record]
    assert not any("end of training" in record for record in steps)
    assert all(0 < record["tokens-per-second-per-gpu"] < 1e9 for record in steps)
    validations = [record for record in records if "lm loss validation" in record]
    assert [record["iteration"] for record in validations] == [3, 6, 6]
    assert [record.get("end of training") for record in validations] == [None, None, True]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has this device")
def test_a_full_disk_costs_numbers_not_the_run(capfd):
    run = _train_with_writers("--metrics-jsonl", "/dev/full")
    assert run.progress.iteration == run.train_iterations
    warnings = [line for line in capfd.readouterr().out.splitlines() if "WARNING" in line]
    assert len(warnings) == 1
    assert warnings[0].startswith("WARNING: --metrics-jsonl /dev/full cannot be written (")


def test_a_disk_with_room_for_half_a_line_gets_none_of_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonLinesWriter(str(path))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for iteration, room in enumerate((1000, 80, 1000)):
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
        try:
            with nullcontext() if room == 1000 else pytest.raises(StorageError, match="metrics-js"):
                writer.write({"lm loss": 1.0}, iteration, 8)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    writer.close()
    assert [json.loads(line)["iteration"] for line in path.read_text().splitlines()] == [0, 2]


@pytest.mark.parametrize("text", ['{"text": "my data"}\n', "notes", "[1]\n", "3\n", "\n"])
def test_metrics_are_not_appended_to_a_file_of_another_kind(text, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"--metrics-jsonl .*data.jsonl: line 1 is not a metrics"):
        JsonLinesWriter(str(path))
    assert path.read_text() == text


@pytest.fixture
def wandb(monkeypatch):
    """Replace the package with a fake."""
    fake = types.ModuleType("wandb")
    fake.Error = type("Error", (Exception,), {})
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_weights_and_biases_gets_config_and_scalars(wandb, tmp_path):
    logged, started = [], {}

    class FakeRun:
        def log(self, scalars, step):
            logged.append((step, scalars.get("lm loss")))

        def finish(self):
            logged.append("finished")

    wandb.init = lambda **options: started.update(options) or FakeRun()
    folder = str(tmp_path / "deep" / "w")
    names = ["--wandb-exp-name", "run 7", "--wandb-entity", "us", "--wandb-id", "abc"]
    _train_with_writers("--wandb-project", "toys", *names, "--wandb-save-dir", folder)
    assert (started["name"], started["entity"]) == ("run 7", "us")
    assert (started["project"], started["id"], started["resume"]) == ("toys", "abc", "allow")
    assert started["dir"] == folder
    assert os.path.isdir(folder)  # otherwise wandb would use another one
    assert started["config"]["model.num_layers"] == 2
    assert [entry[0] for entry in logged[:-1] if entry[1] is not None] == [1, 2, 3, 4, 5, 6]
    assert logged[-1] == "finished"


def test_weights_and_biases_files_go_to_the_checkpoints_where_nothing_is_said(wandb, tmp_path):
    folders = []
    wandb.init = lambda **options: folders.append(options["dir"])
    save = ["--save", str(tmp_path / "run"), "--save-interval", "5"]
    for words in ([], save, save):
        config = build_toy(Layout.single(), ["--wandb-project", "toys", *words]).config
        open_writers(config, is_log_rank=True)
        open_writers(config, is_log_rank=False)
    assert folders == [None, *[str(tmp_path / "run" / "wandb")] * 2]
    assert os.path.isdir(folders[1])


def test_weights_and_biases_without_a_key_is_an_error_in_one_line(wandb):
    def refuse(**options):
        raise wandb.Error("No API key configured.")

    wandb.init = refuse
    with pytest.raises(ConfigError) as refusal:
        _train_with_writers("--wandb-project", "toys")
    assert str(refusal.value) == (
        "--wandb-project toys: No API key configured. (without a server: set WANDB_MODE=offline, "
        "or drop the flag)"
    )


def test_weights_and_biases_missing_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="pip install wandb"):
        _train_with_writers("--wandb-project", "toys")


def test_profile_writes_a_trace(tmp_path):
    folder = tmp_path / "deep" / "profile"
    train_toy(Layout.single(), ["--profile", "--profile-step-start", "2", "--profile-step-end",
                                "4", "--profile-dir", str(folder)])  # fmt: skip
    trace = json.loads((folder / "rank0.3.pt.trace.json").read_text())
    operations = [e for e in trace["traceEvents"] if "aten::" in str(e.get("name"))]
    assert any("Input Dims" in event.get("args", {}) for event in operations)
    ranges = [e["name"] for e in trace["traceEvents"] if e.get("cat") == "user_annotation"]
    assert [name for name in ranges if name.startswith("iteration")] == [
        "iteration 2",
        "iteration 3",
    ]
    assert ranges.count("optimizer") == 2


def test_a_profile_from_0_begins_with_the_first_iteration(tmp_path):
    train_toy(Layout.single(), ["--profile", "--profile-step-start", "0", "--profile-step-end",
                                "2", "--profile-dir", str(tmp_path)])  # fmt: skip
    assert (tmp_path / "rank0.1.pt.trace.json").exists()


def test_each_window_has_a_trace_with_all_that_was_asked_for(tmp_path):
    words = "--profile --pytorch-profiler-collect-callstack --profile-memory --profile-flops"
    words += " --profile-modules --profile-windows 1-2 3-5"
    train_toy(Layout.single(), [*words.split(), "--tensorboard-dir", str(tmp_path)])
    paths = sorted((tmp_path / "profile").iterdir())
    assert [path.name for path in paths] == ["rank0.1.pt.trace.json", "rank0.4.pt.trace.json"]
    trace = json.loads(paths[1].read_text())
    names = {event.get("name", "") for event in trace["traceEvents"]}
    assert {"iteration 3", "iteration 4", "[memory]", "nn.Module: GPTModel_0"} <= names
    assert not {"iteration 1", "iteration 2", "iteration 5"} & names
    assert any("loop.py" in name for name in names)  # call stacks
    assert trace["with_flops"] == 1


def test_a_window_begins_and_ends_with_iterations_that_are_not_skipped(
    tmp_path, monkeypatch, capsys
):
    """A window is named after its last iteration, even if that was skipped. A run may end in it."""
    recorded, files = [], []

    class Profiler(nullcontext):
        def __init__(self, **asked):
            super().__init__()
            recorded.append([])

        def export_chrome_trace(self, path):
            files.append(os.path.basename(path))
            if len(files) == 1:  # the disk is full later
                Path(path).touch()

        def key_averages(self):
            return types.SimpleNamespace(table=lambda **_: "")

    monkeypatch.setattr("torch.profiler.profile", Profiler)
    monkeypatch.setattr(
        "torch.autograd.profiler.record_function",
        lambda name: recorded[-1].append(name) or nullcontext(),
    )
    words = "--profile --train-iters 20 --profile-windows 1-4 5-9 12-14".split()
    run = build_toy(Layout.single(), [*words, "--profile-dir", str(tmp_path)])
    callback = Profile()
    callback.on_start(run)
    (tmp_path / "rank0.7.pt.trace.json").touch()  # of an earlier run
    for iteration in range(1, 8):
        if iteration not in (1, 3):
            callback.before_step(run)
        run.progress.iteration = iteration
        if iteration in (1, 3):
            callback.after_skipped(run)
        else:
            callback.after_step(run, None, "SIGTERM" if iteration == 7 else None)
    assert files == ["rank0.3.pt.trace.json", "rank0.7.pt.trace.json"]
    lines = [line for line in capsys.readouterr().out.splitlines() if "profile" in line]
    assert lines == [
        f"profile of rank 0: {tmp_path / files[0]}",
        f"WARNING: --profile-dir: the profile {tmp_path / files[1]} could not be written: free "
        "space or give another folder. Training continues",
    ]
    assert recorded == [["iteration 2"], ["iteration 5", "iteration 6", "iteration 7"]]


def test_the_profiler_plugin_of_tensorboard_reads_a_trace(tmp_path):
    pytest.importorskip("torch_tb_profiler", reason="pip install torch-tb-profiler")
    import torch_tb_profiler.plugin  # noqa: F401 - the other modules import each other in a circle
    from torch_tb_profiler.consts import WORKER_PATTERN
    from torch_tb_profiler.profiler.data import RunProfileData
    from torch_tb_profiler.profiler.run_generator import RunGenerator

    words = "--profile --profile-memory --profile-modules --profile-windows 3-5"
    train_toy(Layout.single(), [*words.split(), "--profile-dir", str(tmp_path)])
    (path,) = tmp_path.iterdir()
    worker, span = WORKER_PATTERN.match(path.name).groups()
    assert (worker, span) == ("rank0", ".4")
    data = RunProfileData.parse(worker, span, str(path), str(tmp_path))
    data.process()
    views = RunGenerator(worker, span, data).generate_run_profile().views
    names = {view.display_name for view in views}
    assert {"Overview", "Operator", "Trace", "Memory", "Module"} <= names


def _sample_ids(layout, folder):
    flags = ["--log-sample-ids", "--save", folder, "--save-interval", "100"]
    train_toy(layout, flags)


def test_sample_ids_are_the_same_for_any_number_of_processes(tmp_path):
    for size in (1, 2, 4):
        run_distributed(size, _sample_ids, str(tmp_path / str(size)))
    one, two, four = ((tmp_path / str(n) / "samples.jsonl").read_text() for n in (1, 2, 4))
    assert one == two == four
    assert json.loads(one.splitlines()[1]) == {"iteration": 2, "ids": [4, 5, 6, 7]}


def test_sample_ids_that_cannot_be_written_are_an_error_of_storage(tmp_path):
    (tmp_path / "samples.jsonl").mkdir()
    with pytest.raises(StorageError, match=r"^--log-sample-ids .*samples.jsonl cannot be written"):
        _sample_ids(Layout.single(), str(tmp_path))


@pytest.mark.parametrize(("interval", "collected"), [("2", 1 + 3), ("4", 1 + 1), ("0", 1)])
def test_garbage_collection_is_given_back(monkeypatch, interval, collected):
    calls = []
    names = ("collect", "freeze", "disable", "unfreeze", "enable")
    fake = types.SimpleNamespace(**{name: partial(calls.append, name) for name in names})
    monkeypatch.setattr(memory, "gc", fake)
    train_toy(Layout.single(), ["--manual-gc-interval", interval])
    assert calls[:3] == ["collect", "freeze", "disable"]
    assert calls[3:-2] == ["collect"] * (collected - 1)
    assert calls[-2:] == ["unfreeze", "enable"]


def test_log_line_timers_and_memory(capsys):
    train_toy(Layout.single(), ["--timing-log-level", "2"])
    text = capsys.readouterr().out
    assert text.count(" iteration        1/       6 |") == 1
    assert "lm loss: " in text
    assert "forward-compute" in text
    assert text.count("memory (MB)") == 1  # after the first line only
    assert "validation loss at iteration 3 | lm loss value: " in text


def test_a_loss_scale_that_is_too_high_leaves_no_gradient_norm(capsys):
    flags = [
        "--fp16",
        "--loss-scale-window",
        "1000",
        "--hysteresis",
        "1",
        "--log-num-zeros-in-grad",
    ]
    recorder, _ = train_toy(Layout.single(), [*flags, "--initial-loss-scale", "1e30"])
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith(" iteration        1/")]
    assert "grad norm" not in line
    assert "num zeros" not in line
    assert "number of skipped iterations:   1 | number of nan iterations:   0 |" in line
    assert recorder.records[0]["iteration"] == 1
    assert not {"grad-norm", "num-zeros"} & set(recorder.records[0])
    # As in Megatron, the scale of the next update.
    assert recorder.values("loss-scale")[:2] == [5e29, 2.5e29]


def test_start_panel_tells_the_decisions():
    panel = start_panel(build_toy(Layout.single()), 1.0)
    for expected in (
        "CPU",
        "fp32",
        "attention",
        "no kernels for cpu",
        "1 process: TP 1",
        "4 samples",
        "NullTokenizer",
    ):
        assert expected in panel
    assert "plain PyTorch (no kernels for cpu)" in panel


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", "every 2 iterations, and at the end"),
        ("--keep-latest 3", "iterations, keeping the newest 3, and at the end"),
        (
            "--save-retain-interval 4 --async-save",
            "in the background, keeping the newest and those at multiples of 4 iterations, and at",
        ),
        ("--save-retain-interval 4 --keep-latest 3", "the newest 3 and those at multiples of 4"),
    ],
)
def test_start_panel_tells_which_checkpoints_stay(tmp_path, words, told):
    saving = ["--save", str(tmp_path), "--save-interval", "2", *words.split()]
    assert told in " ".join(start_panel(build_toy(Layout.single(), saving), 1.0).split())


def test_start_panel_tells_where_the_weights_come_from(tmp_path):
    def told(run):
        return " ".join(start_panel(run, 1.0).split())

    run = build_toy(Layout.single(), ["--save", str(tmp_path), "--save-interval", "1"])
    assert "starting from random weights" in told(run)
    assert "weights from words/bert" in told(replace(run, pretrained="words/bert"))
    save_run(run)
    loading = ["--load", str(tmp_path), "--finetune"]
    assert f"weights from {tmp_path}; not saving" in told(build_toy(Layout.single(), loading))


def test_start_panel_tells_how_full_samples_of_documents_are():
    words = "--reset-attention-mask --reset-position-ids".split()
    told = [start_panel(build_toy(Layout.single(), given), 1.0) for given in ([], words)]
    full = "samples of 16 tokens, 100% full, with separate documents: training"
    assert [full in text for text in told] == [False, True]


@pytest.mark.parametrize(
    "head", [LANGUAGE_MODEL_HEAD, HeadSpec(outputs=3), HeadSpec(outputs=1, sequences=4)]
)
def test_start_panel_counts_by_what_the_model_ends_in(monkeypatch, head):
    run = build_toy(Layout.single(), kind="bert")
    monkeypatch.setattr(type(run.recipe), "head", head)
    run.plan = model_plan(run.config.model, run.plan.embedding.vocabulary, head)
    seen = []

    def rows(config, plan, *_):
        seen.append(plan.head_spec)
        return ()

    monkeypatch.setattr(panel, "pipeline_rows", rows)
    told = start_panel(run, 1.0)
    assert seen == [head]
    assert re.search(r"tokens per iteration +([\d,]+)\n", told)[1] == f"{4 * 16 * head.sequences}"
    assert ("samples of 4 x 16 tokens" in told) == (head.sequences == 4)


def _timed(layout):
    timers = Timers(1, Device.cpu(), layout.world, barrier=True)
    with timers.measure("part"):
        pass
    with timers.measure("too deep", level=2):
        pass
    return timers.over_ranks()


def test_timers_compare_ranks():
    for over_ranks in run_distributed(2, _timed):
        assert list(over_ranks) == ["part"]
        assert len(over_ranks["part"]) == 2


@pytest.mark.parametrize(
    ("option", "expected"),
    [("minmax", "(500.00, 1500.00)"), ("max", "1500.00"), ("all", "500.00, 1500.00")],
)
def test_timer_formats(option, expected):
    text = format_timers({"part": [1.0, 3.0]}, option, iterations=2)
    assert text.splitlines()[1].endswith(f": {expected}")


def test_a_progress_bar_counts_from_where_the_run_resumed(capsys):
    bar, progress = ProgressBar(), types.SimpleNamespace(iteration=5)
    run = types.SimpleNamespace(progress=progress, train_iterations=10)
    bar.on_start(run)
    bar.after_step(run, types.SimpleNamespace(losses={"lm loss": 1.23456}), None)
    bar.after_skipped(run)
    bar.on_end(run, None)
    last = capsys.readouterr().err.rpartition("\r")[2]
    assert last.startswith("training:  70%")
    assert " 7/10 [" in last
    assert "lm loss=1.2346" in last


def test_unused_memory_is_returned_after_each_iteration():
    calls = []
    device = types.SimpleNamespace(empty_cache=lambda: calls.append(1))
    for _ in range(2):
        memory.EmptyCache().after_step(types.SimpleNamespace(device=device), None, None)
    assert len(calls) == 2


def test_callbacks_say_after_which_updates_they_need_the_device(tmp_path):
    """The next update must not begin early after these."""
    (tmp_path / "prompts.txt").write_text("5 17\n")
    words = f"""--train-iters 12 --sample-prompts {tmp_path}/prompts.txt --sample-interval 3
        --check-weight-hash-across-dp-replicas-interval 4 --gpu-sniff-test-interval 5
        --save {tmp_path} --save-interval 6 --eval-interval 7"""
    run = build_toy(Layout.single(), words.split())
    found = {}
    for callback in standard_callbacks(run, [])[0]:
        for iteration in range(12):
            run.progress.iteration = iteration
            if callback.interrupts(run):
                found.setdefault(type(callback).__name__, []).append(iteration + 1)
    assert found == {
        "SampleAnswers": [3, 6, 9, 12],
        "ReplicaHashes": [4, 8, 12],
        "HealthCheck": [5, 10],
        "Checkpoints": [6, 12],
        "Evaluation": [7],
    }
