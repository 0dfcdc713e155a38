"""Extreme numbers: beyond 64 bits, beyond what is counted, and beyond any use."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.config.checks import find_problems
from megatron.config.fields import fields_of
from megatron.config.resolve import resolve
from megatron.config.rules_training import samples
from megatron.config.run import RunOptions, sections, with_values
from tests.config.command import BASE, parse, problems
from tests.config.test_fp8 import DELTA_WIDTHS


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "--train-iters 10000000000000000000",
            "--train-iters 10000000000000000000: expected a whole number of 64 bits (at most "
            "9223372036854775807), got 10000000000000000000",
        ),
        (
            "--train-iters 5000000000000000000",
            "--train-iters 5000000000000000000 x --global-batch-size 32 are more than "
            "9223372036854775807 samples: use at most 288230376151711743 (--exit-interval, "
            "--exit-duration-in-mins and SIGTERM end a run before that, with a checkpoint)",
        ),
        (
            "--eval-iters 5000000000000000000",
            "--eval-iters 5000000000000000000 x --global-batch-size 32 x 1 evaluation is more "
            "than 9223372036854775807 samples: use at most 288230376151711743, or a larger "
            "--eval-interval",
        ),
        (
            "--global-batch-size 40000000",
            "--global-batch-size 40000000 gives each process 1250000 micro-batches per update: "
            "use at most 33554432, or a larger --micro-batch-size",
        ),
        (
            "--eval-global-batch-size 40000000 --eval-micro-batch-size 1 --eval-iters 1",
            "--eval-global-batch-size 40000000 gives each process 5000000 micro-batches per "
            "evaluation batch: use at most 8388608, or a larger --eval-micro-batch-size",
        ),
        (
            "--eval-iters 5000000000000000000 --eval-global-batch-size 64",
            "--eval-iters 5000000000000000000 x --eval-global-batch-size 64 x 1 evaluation is "
            "more than 9223372036854775807 samples: use at most 144115188075855871, or a larger "
            "--eval-interval",
        ),
    ],
)
def test_a_number_that_is_too_large_and_its_remedy(words: str, line: str) -> None:
    assert problems(words, world_size=8) == [line]


@pytest.mark.parametrize(
    ("length", "evaluations"),
    [
        ({"training.train_tokens": 60, "data.seq_length": 5}, 5),
        ({"training.train_tokens": 60}, 21),
        ({"training.train_samples": 60}, 21),
        ({"training.train_iters": 60}, 61),
        ({"training.train_iters": 60, "evaluation.full_validation": True}, 1),
        ({"training.train_iters": 60, "evaluation.eval_interval": 0}, 1),
        ({}, 1),
    ],
)
def test_samples_of_all_evaluations_can_be_counted(
    length: dict[str, object], evaluations: int
) -> None:
    base = {"training.global_batch_size": 3, "evaluation.eval_interval": 1} | length

    def found(iterations: int) -> list[str]:
        run = with_values(RunOptions(), base | {"evaluation.eval_iters": iterations})
        return list(samples(run, 1))

    most = (2**63 - 1) // (3 * evaluations)
    assert found(most) == []
    assert found(most + 1) == [
        f"--eval-iters {most + 1} x --global-batch-size 3 x {evaluations} "
        f"evaluation{'' if evaluations == 1 else 's'} is more than 9223372036854775807 samples: "
        f"use at most {most}, or a larger --eval-interval"
    ]


def test_samples_of_training_can_be_counted() -> None:
    def found(iterations: int) -> list[str]:
        run = RunOptions()
        values = {"training.train_iters": iterations, "training.global_batch_size": 7}
        return list(samples(with_values(run, values | {"evaluation.eval_iters": 0}), 1))

    most = (2**63 - 1) // 7  # 7 divides it
    assert found(most) == []
    (line,) = found(most + 1)
    assert line.startswith(f"--train-iters {most + 1} x --global-batch-size 7 are more than")


@pytest.mark.parametrize("value", [2**63, -(2**63)])
def test_no_flag_takes_a_whole_number_beyond_64_bits(value: int, tmp_path: Path) -> None:
    fields = {
        f"{name}.{field.name}": field
        for name, section in sections().items()
        for field in fields_of(section)
        if field.kind is int and field.info.choices is None
    }
    assert len(fields) > 50
    words = [f"{field.names[0]}={value}" for field in fields.values()]
    assert len(set(problems(*words, without=list(BASE)))) >= len(fields)
    path = tmp_path / "run.yaml"
    path.write_text(
        "".join(
            f"{name}:\n"
            + "".join(f"  {p.split('.')[1]}: {value}\n" for p in fields if p.startswith(f"{name}."))
            for name in dict.fromkeys(path.split(".")[0] for path in fields)
        )
    )
    lines = problems(f"--config {path}")
    refused = "expected a whole number of 64 bits"
    assert [p for p in fields if not any(f" {p}: {refused}" in line for line in lines)] == []


def test_the_largest_number_of_each_flag_is_checked() -> None:
    """No list of that length is built, messages stay short, and nothing overflows."""
    for name, section in sections().items():
        for field in (field for field in fields_of(section) if field.kind is int):
            value = (2**63 - 1,) * 3 if field.many else 2**63 - 1
            config = with_values(parse().config, {f"{name}.{field.name}": value})
            for line in find_problems(resolve(config, 1), 1):
                assert len(line) < 400


@pytest.mark.parametrize(
    "flag",
    [
        "--moe-router-num-groups 0",
        "--moe-router-group-topk 0",
        "--expert-model-parallel-size 0",
        "--tensor-model-parallel-size 0",
        "--pipeline-model-parallel-size 0",
        "--num-experts -1",
    ],
)
def test_rules_of_experts_accept_no_divisor_below_one(flag: str) -> None:
    base = "--num-experts 4 --moe-router-num-groups 2 --moe-router-group-topk 1"
    assert f"{flag}: must be at least 1" in problems(base, flag)


@pytest.mark.parametrize("name", ["tensor-model-parallel-size", "context-parallel-size",
                                  "linear-num-key-heads"])  # fmt: skip
def test_rules_of_gated_delta_nets_divide_by_no_number_below_one(name: str) -> None:
    assert f"--{name} 0: must be at least 1" in problems(DELTA_WIDTHS, f"--{name} 0")
