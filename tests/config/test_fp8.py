"""What `--fp8-format` and its recipes refuse, and what inference programs ignore."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.config import run
from megatron.config.fields import fields_of
from megatron.config.precision import PrecisionConfig
from tests.config.command import parse, problems

_EARLIER = "requires --fp8-recipe delayed: add it, or drop the flag"
_DELAYED = "--bf16 --fp8-format hybrid --fp8-recipe delayed"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "--bf16 --fp8-format hybrid --fp8-amax-history-len 16",
            f"--fp8-amax-history-len 16 {_EARLIER}",
        ),
        ("--fp8-amax-compute-algo max", f"--fp8-amax-compute-algo max {_EARLIER}"),
        (
            "--fp8-recipe delayed",
            "--fp8-recipe delayed requires --fp8-format: add it, or drop the flag",
        ),
        (f"{_DELAYED} --fp8-interval 0", "--fp8-interval 0: must be at least 1"),
        (f"{_DELAYED} --fp8-margin -1", "--fp8-margin -1: must be at least 0"),
        (f"{_DELAYED} --fp8-amax-history-len 0", "--fp8-amax-history-len 0: must be at least 1"),
    ],
)
def test_a_mistake_and_its_line(words: str, line: str) -> None:
    assert problems(words) == [line]


def test_the_minimum_is_not_taken_for_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """A history of 1 stays valid and is reported if the default is Transformer Engine's 1024."""
    (field,) = (one for one in fields_of(PrecisionConfig) if one.name == "fp8_amax_history_len")
    others = tuple(
        (f"precision.{one.name}", replace(one, default=1024) if one == field else one)
        for one in fields_of(PrecisionConfig)
    )
    entries = {**run._fields_by_path(), "precision": others}
    monkeypatch.setattr(run, "_fields_by_path", lambda: entries)
    assert parse(f"{_DELAYED} --fp8-amax-history-len 1")
    (line,) = problems("--bf16 --fp8-format hybrid --fp8-amax-history-len 1")
    assert line == f"--fp8-amax-history-len 1 {_EARLIER}"


_GATHER = "--fp8-param-gather"
_SHARED = "--use-distributed-optimizer"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (f"--bf16 {_SHARED} {_GATHER}", "requires --fp8-format: add it, or drop the flag"),
        (f"{_DELAYED} {_GATHER}", "add --use-distributed-optimizer, or drop the flag"),
        (f"{_DELAYED} {_SHARED} --fp8-recipe rowwise {_GATHER}", "use tensorwise or delayed"),
        (f"{_DELAYED} --zero-stage 3 {_GATHER}", "use --zero-stage 1 or 2"),
    ],
)
def test_what_is_not_gathered_in_8_bits(words: str, line: str) -> None:
    (found,) = problems(words)
    assert line in found


def test_what_is_gathered_in_8_bits() -> None:
    for words in (_SHARED, "--zero-stage 2 --overlap-param-gather --fp8-recipe tensorwise"):
        assert parse(f"{_DELAYED} {words} {_GATHER}").config.precision.fp8_param_gather


def test_every_matrix_has_sizes_that_8_bit_products_support() -> None:
    """This includes the keys and values that heads share, and a T5's decoder."""
    words = "--bf16 --fp8-format hybrid --kv-channels 20 --group-query-attention"
    (line,) = problems(f"{words} --num-query-groups 1")
    assert line == (
        "--fp8-format hybrid: (--num-attention-heads + 2 x --num-query-groups) x --kv-channels 120 "
        "is not a multiple of 16: use a multiple of 16, or drop --fp8-format"
    )
    assert parse(f"{words} --num-query-groups 2")
    (line,) = problems("--bf16 --fp8-format hybrid --decoder-seq-length 21", architecture="t5")
    assert line.startswith("--fp8-format hybrid: --micro-batch-size x --decoder-seq-length 84 is")
    (line,) = problems("--bf16 --fp8-format hybrid --eval-micro-batch-size 1 --seq-length 520")
    assert line.startswith("--fp8-format hybrid: --eval-micro-batch-size x --seq-length 520 is")


_WIDTHS = "--bf16 --fp8-format hybrid --micro-batch-size 1"
LATENT_WIDTHS = (
    "--position-embedding-type rope --multi-latent-attention --normalization RMSNorm "
    "--disable-bias-linear --num-attention-heads 5 --hidden-size 80 --qk-head-dim 6 "
    "--qk-pos-emb-head-dim 2 --v-head-dim 3 --q-lora-rank 9 --kv-lora-rank 7"
)
DELTA_WIDTHS = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 "
    "--linear-num-key-heads 1 --linear-key-head-dim 3 --linear-num-value-heads 5 "
    "--linear-value-head-dim 7 --normalization RMSNorm --disable-bias-linear --swiglu"
)
EXPERT_WIDTHS = (
    "--num-experts 4 --moe-ffn-hidden-size 24 --moe-shared-expert-intermediate-size 40 "
    "--ffn-hidden-size 48 --tensor-model-parallel-size 2 --sequence-parallel"
)


@pytest.mark.parametrize(
    ("words", "world", "widths"),
    [
        (
            "--hidden-size 36 --num-attention-heads 3 --kv-channels 5 --attention-output-gate "
            "--group-query-attention --num-query-groups 1 --ffn-hidden-size 40 --seq-length 130 "
            "--eval-micro-batch-size 3 --global-batch-size 3",
            1,
            [
                "--hidden-size 36",
                "--ffn-hidden-size 40",
                "--num-attention-heads x --kv-channels 15",
                "(2 x --num-attention-heads + 2 x --num-query-groups) x --kv-channels 40",
                "--micro-batch-size x --seq-length 130",
                "--eval-micro-batch-size x --seq-length 390",
            ],
        ),
        (
            LATENT_WIDTHS,
            1,
            [
                "--num-attention-heads x --v-head-dim 15",
                "--q-lora-rank 9",
                "--kv-lora-rank 7",
                "--kv-lora-rank + --qk-pos-emb-head-dim 9",
                "--num-attention-heads x (--qk-head-dim + --qk-pos-emb-head-dim) 40",
                "--num-attention-heads x (--qk-head-dim + --v-head-dim) 45",
            ],
        ),
        (
            DELTA_WIDTHS,
            1,
            [
                "--linear-num-value-heads x --linear-value-head-dim 35",
                "the input projection of gated delta nets, with width 86",
            ],
        ),
        (
            EXPERT_WIDTHS,
            2,
            [
                "--ffn-hidden-size 48",
                "--moe-ffn-hidden-size 24",
                "--moe-shared-expert-intermediate-size 40",
            ],
        ),
        (
            "--context-parallel-size 2 --seq-length 144 --attention-dropout 0",
            2,
            ["--micro-batch-size x --seq-length 144"],
        ),
    ],
)
def test_each_width_that_does_not_fit_is_named(words: str, world: int, widths: list[str]) -> None:
    share = " on each of 2 processes: use a multiple of 32" if world == 2 else ": use a multiple of"
    found = problems(_WIDTHS, words, world_size=world)
    assert [line.partition(" is not a multiple of 16")[0] for line in found] == [
        f"--fp8-format hybrid: {width}" for width in widths
    ]
    assert all(f" is not a multiple of 16{share}" in line for line in found)


@pytest.mark.parametrize(
    "more",
    ["", f"{LATENT_WIDTHS.partition(' --num-att')[0]} --kv-lora-rank 64", "--num-experts 2"],
)
@pytest.mark.parametrize("words", ["--fp8-format hybrid", "--lora-rank 2 --frozen-weights-dtype"])
def test_sizes_that_are_not_known_are_only_reported_as_missing(words: str, more: str) -> None:
    without = "--num-layers --hidden-size --num-attention-heads --seq-length --micro-batch-size"
    fp8 = "--bf16 --first-last-layers-bf16" if "fp8" in words else "nf4"
    assert problems(words, fp8, "--kv-channels 5", more, without=without.split()) == [
        f"{flag} is required: give it a value" for flag in without.split()
    ]


def test_products_in_8_bits_belong_to_a_run_in_16_bits() -> None:
    assert problems("--fp8-format hybrid") == [
        "--fp8-format hybrid requires 16-bit weights: add --bf16"
    ]
    (line,) = problems("--fp8-format hybrid --fp16 --num-experts 4")
    assert line.endswith("with --num-experts requires bf16: use --bf16 in place of --fp16")
    assert parse("--fp8-format hybrid --fp16")


def test_a_script_for_megatron_may_name_the_defaults() -> None:
    words = "--fp8-margin 0 --fp8-interval 1 --fp8-amax-history-len 1"
    config = parse(f"--bf16 --fp8-format hybrid {words} --fp8-amax-compute-algo most_recent").config
    assert config.precision.fp8_recipe == "tensorwise"


def test_nothing_of_fp8_is_left_without_it() -> None:
    precision = parse(f"{_DELAYED} --fp8-amax-history-len 8 --no-fp8-wgrad {_SHARED} {_GATHER}")
    precision = precision.config.precision
    assert precision.without_fp8() == parse("--bf16").config.precision
