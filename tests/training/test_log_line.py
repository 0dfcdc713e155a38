"""The log lines that users grep, character by character."""

import math

from megatron.parallel.layout import Layout
from megatron.training.callbacks.logging import LogLine
from megatron.training.callbacks.scalars import Scalars
from megatron.training.log_line import perplexity, training_line, validation_lines
from tests.training.toy import Recorder, build_toy, toy_outcome

FIGURES = {
    "consumed-samples": 336,
    "consumed-train-tokens": None,
    "skipped-train-samples": None,
    "milliseconds": 123.456,
    "learning-rate": 5.5e-4,
    "decoupled-learning-rate": None,
    "batch-size": 16,
    "loss-scale": 1.0,
    "grad-norm": 1.6071,
    "num-zeros": None,
    "params-norm": None,
    "seqlen/curriculum_seqlen": None,
    "skipped-iterations": 0,
    "nan-iterations": 0,
    "tokens-per-second-per-gpu": 1234.56,
    "mfu": None,
}


def _line(**changes):
    figures = {name.replace("_", "-"): value for name, value in changes.items()}
    return training_line(21, 40, {"lm loss": 7.683999}, FIGURES | figures)


def test_training_line_is_megatrons_with_throughput_appended():
    assert _line() == (
        " iteration       21/      40 | consumed samples:          336 |"
        " elapsed time per iteration (ms): 123.5 | learning rate: 5.500E-04 |"
        " global batch size:    16 | lm loss: 7.683999E+00 | loss scale: 1.0 | grad norm: 1.607 |"
        " number of skipped iterations:   0 | number of nan iterations:   0 |"
        " tokens/s per GPU: 1234.6 | MFU: n/a |"
    )


def test_optional_fields_are_in_megatrons_order():
    line = _line(num_zeros=12, params_norm=34.5678, mfu=0.4567)
    assert "grad norm: 1.607 | num zeros: 12.0 | params norm: 34.568 | number of skipped" in line
    assert line.endswith("| MFU: 45.7% |")
    line = _line(skipped_train_samples=32, decoupled_learning_rate=1e-3)
    assert "consumed samples:          336 | skipped samples:           32 | elapsed" in line
    assert "learning rate: 5.500E-04 | decoupled learning rate: 1.000E-03 | global" in line
    line = _line(consumed_train_tokens=5376)
    assert "consumed samples:          336 | consumed tokens:         5376 | elapsed" in line


def test_validation_block():
    rule, text, closing = validation_lines("iteration 20", {"lm loss": 2.0}).split("\n")
    assert text == (
        " validation loss at iteration 20 | lm loss value: 2.000000E+00 |"
        " lm loss PPL: 7.389056E+00 | "
    )
    assert rule == closing == "-" * (len(text) + 1)


def test_perplexity_is_capped():
    assert perplexity(1000.0) == perplexity(20.0)


def test_a_line_tells_means_of_applied_updates_and_the_speed_of_one_process(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr("megatron.training.callbacks.logging.time.perf_counter", lambda: now[0])
    run = build_toy(Layout.single(), ["--log-interval", "3"])
    run.layout = Layout.at(3, 4)  # the last of these ranks reports
    recorder = Recorder()
    callback, scalars = LogLine(), Scalars([recorder])
    callback.on_start(run)
    nan = {"losses": {"lm loss": math.nan}, "applied": False, "found_nonfinite": True}
    changes = [{"losses": {"lm loss": 1.0}}, nan, {"losses": {"lm loss": 4.0}}]
    for run.progress.iteration, change in enumerate(changes, 1):
        for each in (callback, scalars):
            each.before_step(run)
        now[0] += 2.0
        for each in (scalars, callback):
            each.after_step(run, toy_outcome(tokens=120, **change), None)
    line = capsys.readouterr().out
    assert "lm loss: 2.500000E+00 |" in line  # of two, because the other is NaN
    assert "number of skipped iterations:   1 | number of nan iterations:   1 |" in line
    assert "elapsed time per iteration (ms): 2000.0 |" in line
    assert "tokens/s per GPU: 15.0 |" in line  # 360 tokens in 6 s on 4 processes
    assert recorder.values("tokens-per-second-per-gpu") == [15.0] * 3
