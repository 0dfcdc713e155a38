"""The log lines that users grep, to the character."""

import dataclasses

from megatron.training.log_line import LogRecord, perplexity, training_line, validation_lines

RECORD = LogRecord(
    iteration=21,
    train_iterations=40,
    consumed_samples=336,
    milliseconds=123.456,
    learning_rate=5.5e-4,
    global_batch_size=16,
    losses={"lm loss": 7.683999},
    loss_scale=1.0,
    skipped=0,
    nan=0,
    tokens_per_second=1234.56,
    mfu=None,
    grad_norm=1.6071,
)


def test_training_line_is_megatrons_with_throughput_appended():
    assert training_line(RECORD) == (
        " iteration       21/      40 | consumed samples:          336 |"
        " elapsed time per iteration (ms): 123.5 | learning rate: 5.500E-04 |"
        " global batch size:    16 | lm loss: 7.683999E+00 | loss scale: 1.0 | grad norm: 1.607 |"
        " number of skipped iterations:   0 | number of nan iterations:   0 |"
        " tokens/s per GPU: 1234.6 | MFU: n/a |"
    )


def test_optional_fields_stand_in_megatrons_order():
    record = dataclasses.replace(RECORD, zeros=12, params_norm=34.5678, mfu=0.4567)
    line = training_line(record)
    assert "grad norm: 1.607 | num zeros: 12.0 | params norm: 34.568 | number of skipped" in line
    assert line.endswith("| MFU: 45.7% |")


def test_validation_block():
    rule, text, closing = validation_lines("iteration 20", {"lm loss": 2.0}).split("\n")
    assert text == (
        " validation loss at iteration 20 | lm loss value: 2.000000E+00 |"
        " lm loss PPL: 7.389056E+00 | "
    )
    assert rule == closing == "-" * (len(text) + 1)


def test_perplexity_is_capped():
    assert perplexity(1000.0) == perplexity(20.0)
