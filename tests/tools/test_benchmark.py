"""The benchmark: what it launches, what it reads from a run, and a complete toy benchmark."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.data.indexed import IndexedDataset
from megatron.models.arithmetic import flops_per_token
from megatron.models.plans import model_plan
from megatron.tokenizer import padded_vocabulary
from tests.repository import ROOT
from tools import benchmark
from tools.bench import ceilings, report
from tools.bench.breakdown import PARTS, Breakdown
from tools.bench.launch import (
    BenchmarkError,
    RunMeasurements,
    entry_command,
    measure,
    read_log,
    run_process,
)
from tools.bench.workloads import (
    WORKLOADS,
    read_flags,
    tokens_of_step,
    training_flags,
    write_corpus,
)


def _config(name, gpus=1, *further):
    flags = training_flags(WORKLOADS[name], "bf16", gpus, Path("x"), further)
    return read_flags(flags, gpus)


# Sizes and GFLOP per token as in the peers' measurements.
@pytest.mark.parametrize(
    ("name", "gpus", "vocabulary", "gigaflops", "tokens"),
    [("S", 1, 131072, 10.2, 4 * 4096), ("L", 8, 128256, 51.5, 32 * 8192)],
)
def test_workloads_are_those_of_the_peers(name, gpus, vocabulary, gigaflops, tokens) -> None:
    config = _config(name, gpus)
    assert padded_vocabulary(config) == vocabulary
    assert tokens_of_step(config) == tokens
    flops = flops_per_token(model_plan(config.model, vocabulary), config.data.seq_length)
    assert round(flops / 1e9, 1) == gigaflops
    assert config.precision.bf16
    assert config.training.recompute_granularity is None
    assert (config.model.hidden_dropout, config.model.attention_dropout) == (0, 0)


def test_the_layout_does_not_change_the_vocabulary() -> None:
    words = "--tensor-model-parallel-size 8 --use-distributed-optimizer".split()
    assert padded_vocabulary(_config("L", 8, *words)) == 128256


def test_the_corpus_is_of_random_ids_as_frequent_as_words(tmp_path) -> None:
    write_corpus(tmp_path / "corpus", vocabulary=1000, tokens=100_000)
    data = IndexedDataset(tmp_path / "corpus")
    documents = [data.get(i) for i in range(len(data))]
    ids = np.concatenate(documents)
    assert len(ids) == 100_000
    assert len(documents) > 50
    assert all(document[-1] == 999 for document in documents)
    assert (ids == 999).sum() == len(documents)  # only at ends of documents
    counts = np.sort(np.bincount(ids[ids < 999]))[::-1]
    assert len(counts) > 900
    # A rank's share is log(1 + 1 / rank), normalized: log 2 / log 1000 for the first.
    assert counts[0] / len(ids) == pytest.approx(np.log(2) / np.log(1000), rel=0.05)
    assert counts[9] / len(ids) == pytest.approx(np.log(1.1) / np.log(1000), rel=0.1)


def _line(iteration, milliseconds, loss="6.5E+00"):
    return (
        f" iteration {iteration:8d}/      40 | consumed samples:          160 | "
        f"elapsed time per iteration (ms): {milliseconds} | learning rate: 3.000E-04 | "
        f"global batch size:     4 | lm loss: {loss} | loss scale: 1.0 | grad norm: 1.000 |"
    )


LOG = [
    (9.0, "set up"),
    (10.0, _line(1, 900.0, "1.1E+01")),
    (10.0, "[Rank 0] (after 1 iterations) memory (MB) | allocated: 1.0 | max allocated: 2.0 | "
     "reserved: 2.5 | max reserved: 3.0"),
    (10.4, _line(2, 390.0)),
    (10.8, _line(3, 300.0)),
    (11.1, _line(4, 200.0)),
    (11.6, _line(5, 400.0)),
    (99.0, _line(6, 9999.0, "5.0E+00")),
]  # fmt: skip


def test_a_run_is_measured_between_its_warm_up_and_its_profile() -> None:
    assert [line.iteration for line in read_log(LOG)] == [1, 2, 3, 4, 5, 6]
    measured = measure(LOG, warmup=2, last=5)
    assert measured.first_iteration == 10.0
    assert (measured.best, measured.median) == (0.2, 0.3)
    assert measured.mean == pytest.approx((11.6 - 10.4) / 3)
    assert (measured.peak_allocated, measured.peak_reserved) == (2 << 20, 3 << 20)
    assert (measured.first_loss, measured.last_loss) == (11.0, 5.0)


def test_peaks_of_memory_are_those_of_the_whole_run(tmp_path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"mem-max-allocated-bytes": 5000000, "mem-reserved-bytes": 7000000}\n{"lm loss": 1.0}\n'
        '{"mem-max-allocated-bytes": 6000000, "mem-reserved-bytes": 6500000}\n'
    )
    measured = benchmark._with_peak_memory(
        tmp_path / "metrics.jsonl", measure(LOG, warmup=2, last=5)
    )
    assert (measured.peak_allocated, measured.peak_reserved) == (6_000_000, 7_000_000)


def test_a_log_that_measures_nothing_is_refused() -> None:
    with pytest.raises(BenchmarkError, match="log lines are missing"):
        measure(LOG, warmup=6, last=9)
    with pytest.raises(BenchmarkError, match="up to iteration 9: the run ended early"):
        measure(LOG, warmup=2, last=9)
    with pytest.raises(BenchmarkError, match="not finite"):
        measure([*LOG, (100.0, _line(7, 1.0, "NAN"))], warmup=2, last=5)


def test_a_run_that_fails_or_hangs_shows_its_last_lines(tmp_path) -> None:
    def run(code, timeout):
        command = [sys.executable, "-c", code]
        return run_process(command, root=tmp_path, log=tmp_path / "log.txt", timeout=timeout)

    lines = run("print('one'); print('two')", 240)
    assert [text for _, text in lines] == ["one", "two"]
    assert 0 < lines[0][0] <= lines[1][0]
    with pytest.raises(BenchmarkError, match=r"exit code 7(?s:.)*why it failed"):
        run("import sys; print('why it failed', file=sys.stderr); sys.exit(7)", 240)
    with pytest.raises(BenchmarkError, match=r"did not end in 8 s(?s:.)*working"):
        run("import time; print('working', flush=True); time.sleep(600)", 8)
    assert "working" in (tmp_path / "log.txt").read_text()


def test_several_gpus_go_under_torchrun(tmp_path) -> None:
    one = entry_command(tmp_path, 1, ["--x"])
    assert one == [sys.executable, str(tmp_path / "pretrain_gpt.py"), "--x"]
    assert "torch.distributed.run" in entry_command(tmp_path, 8, [])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--repeat", "0"], "--repeat 0: give at least 1"),
        (["--timeout", "0"], "--timeout 0: give more than 0"),
        (["--ceiling-seconds", "nan"], "--ceiling-seconds nan: give more than 0"),
        (["--layout", "'--bf16"], "--layout '--bf16: No closing quotation"),
        (["--", "--num-layer", "3"], "did you mean --num-layers"),
        (["--gpus", "3", "--layout", "--tensor-model-parallel-size 2"], "--tensor-model-parallel"),
        (["--layout", "--sequence-paralel"], "did you mean --sequence-parallel"),
        (["--compare", "no-such-commit"], "--compare no-such-commit: neither a commit"),
        (["--", "--train-iters", "9"], "--train-iters: this tool sets the length"),
        (["--layout", "--exit-interval=7"], "use --iterations, --warmup and --no-profile"),
        (["--ceilings", "--compare", "HEAD"], "--ceilings measures no checkout"),
    ],
)
def test_mistakes_are_named_before_anything_runs(
    words, message, tmp_path, capsys, monkeypatch
) -> None:
    for step in ("run_once", "_known_ceilings"):
        monkeypatch.setattr(benchmark, step, lambda *_, **__: pytest.fail("it was run"))
    assert benchmark.main(["--workload", "demo", "--output", str(tmp_path), *words]) != 0
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("present", "remedy"),
    [(0, "0 GPUs: --workload demo or small or small-moe runs"), (1, "use at most that many")],
)
def test_too_few_gpus_are_named(present, remedy, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("megatron.device.gpu_count", lambda: present)
    words = ["--workload", "S", "--gpus", "64", "--output", str(tmp_path)]
    assert benchmark.main(words) == 9
    assert remedy in capsys.readouterr().err


CEILINGS = {
    "device": "a card", "seconds": 2.0, "datasheet": 100e12, "products": 80e12, "head": 70e12,
    "products_fp8": 150e12, "attention_forward": 50e12, "attention_backward": 40e12,
    "copy": 4e12, "roofline_step_16bit": 0.09, "roofline_step_fp8": 0.06,
}  # fmt: skip


def test_a_mistake_of_its_own_flags_ends_as_any_other(capsys) -> None:
    with pytest.raises(SystemExit) as left:
        benchmark.main(["--quik"])
    assert left.value.code == 9
    assert capsys.readouterr().err == "error: unknown flag --quik: did you mean --quick?\n"


def test_ceilings_are_measured_again_for_other_shapes_and_rooflines_follow_the_batch(
    tmp_path, monkeypatch
) -> None:
    measured = []

    def run_process(command, **_):
        words = command[2:]
        measured.append(words[words.index("--") + 1 :])
        options = benchmark.build_parser().read(words[: words.index("--")])
        plan = benchmark.make_plan(options, measured[-1])
        shapes = ceilings.shapes_of(plan.config, plan.workload.vocabulary)
        numbers = {field.name: 1.0 for field in dataclasses.fields(ceilings.Ceilings)}
        record = numbers | {"device": "a card", "seconds": options.ceiling_seconds}
        text = json.dumps(record | {"shapes": shapes})
        benchmark._ceilings_file(plan, options).write_text(text)

    monkeypatch.setattr(benchmark, "run_process", run_process)

    def step(further="", seconds="0.5"):
        words = ["--workload", "demo", "--precision", "fp32", "--output", str(tmp_path)]
        options = benchmark.build_parser().read([*words, "--ceiling-seconds", seconds])
        plan = benchmark.make_plan(options, further.split())
        known = benchmark._known_ceilings(plan, options, further.split())
        return known["roofline_step_16bit"]

    update = step("--global-batch-size 6") - 3 * 5  # two layers' products and attention, the head
    assert step() == pytest.approx(update + 5)
    assert len(measured) == 1
    step("--seq-length 32")
    assert len(measured) == 2
    step("--seq-length 32", seconds="0.6")
    assert measured == [["--global-batch-size", "6"], *[["--seq-length", "32"]] * 2]
    (kept,) = tmp_path.glob("ceilings-*.json")
    kept.write_text("{")
    step("--seq-length 32")
    assert len(measured) == 4


def test_what_is_given_beside_quick_counts(monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(benchmark, "benchmark", lambda options, _: seen.append(options))
    for words in (["--quick"], ["--quick", "--repeat", "3", "--iterations", "30"]):
        assert benchmark.main(words) == 0
    short, mixed = ([x.warmup, x.iterations, x.repeat, x.ceiling_seconds] for x in seen)
    assert short == [5, 15, 1, 0.5]
    assert mixed == [5, 30, 3, 0.5]


def test_a_share_of_the_roofline_is_of_the_precision_that_ran() -> None:
    ceilings = {"roofline_step_16bit": 0.09, "roofline_step_fp8": 0.06}
    for precision, expected in (("bf16", 0.09), ("fp8", 0.06), ("fp32", None)):
        flags = training_flags(WORKLOADS["demo"], precision, 1, Path("x"), [])
        facts = report.Facts.of(read_flags(flags, 1), precision, 1, ceilings)
        assert facts.roofline == expected


def _run(median):
    return RunMeasurements(10.0, median * 0.9, median, median * 1.1, 5 << 30, 6 << 30, 11.0, 9.0)


def _facts():
    return report.Facts(
        tokens=1000, flops=5 * 10**9, precision="bf16", gpus=1, ceilings=CEILINGS, roofline=0.09
    )


def test_speed_follows_from_seconds_tokens_and_ceilings() -> None:
    derived = _facts().derived(0.1)
    assert derived["tokens_per_second_per_gpu"] == pytest.approx(10_000)
    assert derived["model_tflops"] == pytest.approx(50)
    assert derived["mfu_datasheet"] == pytest.approx(0.5)
    assert derived["mfu_measured_products"] == pytest.approx(50 / 80)
    assert derived["share_of_roofline"] == pytest.approx(0.9)


def test_two_commits_beside_each_other() -> None:
    parts = dict.fromkeys(PARTS, 0.0) | {"matrix products": 0.08, "idle": 0.02}
    old = report.Result("aaa", [_run(0.1), _run(0.11), _run(0.12)], Breakdown(0.1, parts, {}, []))
    new = report.Result("bbb", [_run(0.088), _run(0.08), _run(0.09)], Breakdown(0.1, parts, {}, []))
    text = report.describe(_facts(), [old, new], ["--x"])
    rows = [row.split() for row in text.splitlines()]
    assert ["tokens/s,", "median", "run", "9,091", "11,364", "+25.00%"] in rows
    assert ["spread", "of", "the", "runs", "20.00%", "12.50%"] in rows
    assert ["ms:", "matrix", "products", "80.00", "80.00", "+0.00"] in rows
    assert "overlap" not in text
    new.runs[0] = _run(0.105)
    text = report.describe(_facts(), [old, new], [])
    assert "the runs overlap, so they show no difference" in text
    record = json.loads(report.to_json(_facts(), [old, new], ["--x"]))
    assert [result["summary"]["median_run"] for result in record["results"]] == [0.11, 0.09]


@pytest.mark.slow
def test_a_whole_benchmark_on_a_cpu(tmp_path, capsys) -> None:
    """It measures and caches ceilings, trains two processes, prints tables, and writes files."""
    words = "--workload demo --precision fp32 --gpus 2 --iterations 3 --warmup 1 --repeat 1"
    words += " --ceiling-seconds 0.01 --label mine"
    command = [*words.split(), "--output", str(tmp_path), "--timeout", "250"]
    assert benchmark.main([*command, "--", "--num-workers", "0"]) == 0
    out = capsys.readouterr().out
    for text in ("ceilings of CPU", "tokens/s per GPU", "MFU", "peak memory", "roofline"):
        assert text in out
    assert "breakdown of a step: not available (" in out  # no kernels on a CPU
    assert "contains no GPU kernels" in out
    folder = tmp_path / "demo-fp32-2gpu"
    record = json.loads((folder / "result.json").read_text())
    (result,) = record["results"]
    (run,) = result["runs"]
    assert min(run["first_iteration"], run["median"]) > 0
    assert run["peak_allocated"] > 1 << 20
    speed = record["tokens_per_step_per_gpu"] / run["median"]
    assert result["median"]["tokens_per_second_per_gpu"] == pytest.approx(speed)
    assert record["model_flops_per_token"] == flops_per_token(
        model_plan(_config("demo").model, 1024), 64
    )
    assert run["first_loss"] == pytest.approx(np.log(1024), rel=0.02)
    ceilings = json.loads((tmp_path / "ceilings-demo-m2-tp1-cp1.json").read_text())
    assert ceilings["products"] > 0
    assert ceilings["products_fp8"] is None
    assert (folder / "mine" / "run1" / "log.txt").is_file()


def test_another_commit_is_checked_out_for_the_time() -> None:
    if benchmark.commit_of(ROOT) == "here":
        pytest.skip("not a git checkout")
    with benchmark._other_checkout("HEAD") as other:
        assert (other.root / "pretrain_gpt.py").is_file()
        assert benchmark.commit_of(ROOT).startswith(other.name)
        folder = other.root
        with benchmark._other_checkout(str(folder)) as same:
            assert same.root == folder.resolve()
    assert not folder.exists()
