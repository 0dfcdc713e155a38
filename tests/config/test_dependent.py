"""Flags without effect are reported, each with what it depends on."""

from __future__ import annotations

import pytest

from megatron.config.checks import find_notices, requirements
from megatron.config.fields import Field, fields_of
from megatron.config.parser import Program, parse_config
from megatron.config.run import RunOptions, sections, values_of, with_values
from tests.config.command import command, parse


def _changed(field: Field) -> object:
    """Return a different value of the same kind."""
    if field.many:
        return ("3",)
    if field.kind is bool:
        return not field.default
    return "x" if field.kind is str else (field.default or 0) + 1


_NEEDY = [
    (f"{section}.{field.name}", field)
    for section, config_type in sections().items()
    for field in fields_of(config_type)
    if field.info.needs is not None
]


def test_all_needs_are_tried_here() -> None:
    assert len(_NEEDY) >= 75
    assert len({field.info.needs for _, field in _NEEDY}) >= 33


@pytest.mark.parametrize(("path", "field"), _NEEDY, ids=[path for path, _ in _NEEDY])
def test_each_is_reported_where_it_has_no_effect(path: str, field: Field) -> None:
    start, need = RunOptions(), field.info.needs
    assert need is not None
    if need.is_met(start):  # turn off what is on by default
        turned = {"training.manual_gc": False, "optimizer.optimizer": "sgd"}
        turned["evaluation.eval_iters"] = 0
        start = with_values(start, {**turned, "model.use_flash_attn": True})
    config = with_values(start, {path: _changed(field)})
    (line,) = [one for one in find_notices(config, 1, start) if "has no effect" in one]
    assert line.startswith(field.spell(_changed(field)))
    assert line.endswith(f" has no effect without {need.description}")
    assert [one for one in find_notices(config, 1, config) if "has no effect" in one] == []


@pytest.mark.parametrize(
    "words",
    [
        "--position-embedding-type rope --rotary-percent 0.5 --rotary-base 500",
        "--fp16 --hysteresis 1 --initial-loss-scale 128",
        "--bf16 --loss-scale 128",
        "--optimizer sgd --sgd-momentum 0",
        "--adam-beta2 0.95 --lr-warmup-iters 2 --lr-warmup-init 1e-5",
        "--load x --finetune --no-load-optim --override-opt_param-scheduler",
        "--save x --save-interval 4 --keep-latest 2 --no-save-rng --async-save",
        "--save x --save-interval 4 --save-retain-interval 8",
        "--metrics-jsonl x --log-memory-to-tensorboard --tensorboard-log-interval 2",
        "--timing-log-level 1 --timing-log-option all",
        "--profile --profile-step-start 2 --profile-dir x",
        "--dataloader-type cyclic --no-data-sharding",
        "--on-nonfinite skip --max-nonfinite-skips 3",
        "--eval-iters 1 --eval-interval 5",
    ],
)
def test_what_has_an_effect_is_taken_in_silence(words: str) -> None:
    assert parse(words).notices == ()


def test_files_that_the_tokenizer_does_not_read() -> None:
    words = "--tokenizer-type Llama2Tokenizer --tokenizer-model m --merge-file b --vocab-size 9"
    run = parse(words, without=["--vocab-size"])
    assert run.notices == (
        "--merge-file b has no effect with --tokenizer-type Llama2Tokenizer",
        "--vocab-size 9 has no effect with --tokenizer-type Llama2Tokenizer",
    )


def test_what_a_checkpoint_brings_along_was_not_given() -> None:
    inherited = with_values(RunOptions(), {"precision.hysteresis": 5})
    run = parse_config(command(), world_size=1, program=Program(find_start=lambda _: inherited))
    assert run.notices == ()


def test_what_use_checkpoint_args_fills_in_was_not_given() -> None:
    def read(_: object) -> dict[str, object]:
        return {"model.rotary_base": 500.0, "model.num_query_groups": 2}

    words = command("--load x --use-checkpoint-args")
    filled = parse_config(words, world_size=1, read_checkpoint=read)
    assert filled.config.model.rotary_base == 500
    (line,) = filled.notices
    assert line.startswith("--use-checkpoint-args: from the checkpoint: --rotary-base 500")
    given = [*words, "--rotary-base", "500", "--rotary-percent", "0.5"]
    notices = parse_config(given, world_size=1, read_checkpoint=read).notices
    vain = [line for line in notices if "has no effect" in line]
    assert [line.split()[0] for line in vain] == ["--rotary-percent", "--rotary-base"]


def test_a_flag_with_nothing_to_do_is_noted_where_it_was_given_alone() -> None:
    inherited = with_values(RunOptions(), {"parallel.use_cpu_initialization": True})
    run = parse_config(command(), world_size=1, program=Program(find_start=lambda _: inherited))
    assert run.notices == ()


_STRICT = [
    (path, field) for path, field, _ in values_of(RunOptions()) if field.info.requires is not None
]

# The defaults already satisfy these flags' requirements.
_UNMET: dict[str, dict[str, object]] = {
    "model.layernorm_bias": {"model.normalization": "RMSNorm"},
    "model.add_bias_attention": {"model.add_bias_linear": False},
    "model.multi_latent_attention": {"model.position_embedding_type": "alibi"},
}


@pytest.mark.parametrize(("path", "field"), _STRICT, ids=[path for path, _ in _STRICT])
def test_each_is_refused_without_what_it_requires(path: str, field: Field) -> None:
    kind = (field.info.only_for or ("gpt",))[0]
    changed = {path: _changed(field), "model.architecture": kind, **_UNMET.get(path, {})}
    config = with_values(RunOptions(), changed)
    assert field.info.requires is not None
    shown, what = field.spell(_changed(field)), field.info.requires.description
    line = f"{shown} requires {what}: add it, or drop the flag"
    assert list(requirements(config, 1)) == [line]
    assert list(requirements(config, 1, paths=())) == []
