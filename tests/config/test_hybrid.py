"""Flags of hybrid models: their pattern, and the sizes of Mamba-2."""

from __future__ import annotations

import pytest

from megatron.config.hybrid import layer_symbols, pattern_parts, pipeline_layout
from megatron.config.parser import parse_config
from megatron.config.run import RunConfig
from megatron.config.stages import plan_model
from megatron.errors import ConfigError

_BASE = (
    "--hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--global-batch-size 4 --lr 1e-3 --train-iters 2 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 100 --mamba-head-dim 8"
)


def _config(flags: str, world_size: int = 1) -> RunConfig:
    return parse_config(f"{_BASE} {flags}".split(), world_size=world_size).config


def _problems(flags: str, world_size: int = 1) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        _config(flags, world_size)
    return list(caught.value.problems)


def test_sizes_follow_from_the_pattern_and_the_hidden_size() -> None:
    model = _config("--hybrid-layer-pattern M-M*-").model
    assert (model.num_layers, model.mamba_num_heads, model.mamba_num_groups) == (5, 8, 8)
    assert _config("--hybrid-override-pattern MM").model.hybrid_layer_pattern == "MM"
    assert _config("--num-layers 3 --hybrid-layer-pattern MM* --mamba-num-heads 16").model == (
        _config("--hybrid-layer-pattern MM* --mamba-num-heads 16").model
    )


def test_the_mixtures_are_those_of_the_pattern() -> None:
    model = _config("--hybrid-layer-pattern ME*E --num-experts 4").model
    assert model.moe_layer_freq == "[0,1,0,1]"


@pytest.mark.parametrize("pattern", ["M-|M*", "M|-M|*|-", "MM|M-*M"])
def test_bars_say_where_pipeline_parts_end(pattern: str) -> None:
    config = _config(f"--hybrid-layer-pattern {pattern} --pipeline-model-parallel-size 2", 2)
    assert config.model.hybrid_layer_pattern == pattern.replace("|", "")
    parts = plan_model(config.model, config.parallel)
    assert [len(part.layers) for part in parts] == [len(part) for part in pattern.split("|")]
    alone = _config(f"--hybrid-layer-pattern {pattern}")
    assert alone.model == config.model
    assert len(plan_model(alone.model, alone.parallel)) == 1


def test_patterns_are_read_and_never_run() -> None:
    assert pattern_parts(" M * | - ") == ["M*", "-"]
    assert pipeline_layout("M*|-") == "Ett|tL"
    assert pipeline_layout("M*-") is None
    for text in ("__import__('os')", "[M]*3", "M" * 10_001, "|", ""):
        assert layer_symbols(text) == ""
    assert layer_symbols("M" * 10_000) == "M" * 10_000


_BESIDE = "--num-layers 2 --parallel-mamba --disable-bias-linear"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--hybrid-layer-pattern MX", "cannot read 'X': use M for Mamba-2, * for attention"),
        ("--hybrid-layer-pattern MM/M*", "multi-token prediction (after /) are not supported"),
        ("--hybrid-layer-pattern |", "it names no layers"),
        ("--hybrid-layer-pattern MM --num-layers 3", "names 2 layers, and --num-layers is 3"),
        ("--hybrid-layer-pattern ME", "has mixtures of experts (E): give --num-experts"),
        ("--hybrid-layer-pattern MM --num-experts 4", "has no mixtures of experts (E)"),
        (
            "--hybrid-layer-pattern ME --num-experts 4 --moe-layer-freq 2",
            "the two name different mixtures",
        ),
        (
            "--hybrid-layer-pattern M* --mtp-num-layers 1 --position-embedding-type none",
            "predict one token",
        ),
        ("--hybrid-layer-pattern M* --use-mup", "muP has no rules for Mamba-2"),
        ("--hybrid-layer-pattern M* --parallel-residual", "a layer has either a mixer or an MLP"),
        ("--hybrid-layer-pattern M* --save x --ckpt-format legacy", "in this format"),
        ("--hybrid-layer-pattern M* --bf16 --fp8-format hybrid", "not computed in 8 bits"),
        (
            "--hybrid-layer-pattern M* --mamba-num-heads 6 --mamba-num-groups 4",
            "--mamba-num-heads 6 is not divisible by --mamba-num-groups 4",
        ),
        (f"{_BESIDE} --hybrid-layer-pattern MM", "the pattern names the kind of each layer"),
        (f"{_BESIDE} --add-bias-linear", "its linear layers have no biases"),
        (f"{_BESIDE} --qk-layernorm", "--key-multiplier is part of the scale of the scores"),
        (f"{_BESIDE} --num-experts 4", "its layers have no mixtures of experts"),
        (f"{_BESIDE} --save x --ckpt-format torch_dist", "in this format"),
        (f"{_BESIDE} --mlp-multipliers 1", "--mlp-multipliers has 1 value: give 2"),
        (f"{_BESIDE} --mamba-multipliers 1 2 3", "--mamba-multipliers has 3 values: give 5"),
        (f"{_BESIDE} --mamba-num-heads 6 --mamba-num-groups 4", "6 is not divisible by"),
        (f"{_BESIDE} --lora-rank 2 --load x --finetune", "its layers do not support adapters"),
        (f"{_BESIDE} --use-mup", "muP has no rules for Mamba-2"),
        ("--num-layers 2 --key-multiplier 2", "--key-multiplier 2 requires --parallel-mamba"),
        ("--num-layers 2 --disable-mamba-norm", "requires --hybrid-layer-pattern or --parallel"),
        ("--num-layers 2 --hybrid-attention-ratio 0.1", "write one symbol for each layer"),
        ("--num-layers 2 --hybrid-mlp-ratio 0.1", "write one symbol for each layer"),
        ("--num-layers 2 --is-hybrid-model", "requires --hybrid-layer-pattern"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(flags: str, message: str) -> None:
    assert any(message in line for line in _problems(flags)), _problems(flags)


def test_a_process_holds_whole_groups() -> None:
    flags = "--hybrid-layer-pattern M* --mamba-num-groups 2"
    (line,) = _problems(f"{flags} --tensor-model-parallel-size 4", 4)
    assert "--mamba-num-groups 2 is not divisible by --tensor-model-parallel-size 4" in line
    both = "--tensor-model-parallel-size 2 --context-parallel-size 2"
    (line,) = _problems(f"{flags} {both}", 4)
    assert "x --context-parallel-size 2" in line
    assert "use a multiple of 4 groups" in line


def test_bars_exclude_other_ways_to_distribute_layers() -> None:
    flags = "--hybrid-layer-pattern M|* --pipeline-model-parallel-size 2"
    (line,) = _problems(f"{flags} --pipeline-model-parallel-layout Et|tL", 2)
    assert "drop one of them" in line
    (line,) = _problems("--hybrid-layer-pattern M|*|- --pipeline-model-parallel-size 2", 2)
    assert "3 parts do not divide evenly" in line


def test_sizes_of_mamba_change_nothing_in_other_models() -> None:
    parsed = parse_config(f"{_BASE} --num-layers 2".split(), world_size=1)
    assert any("--mamba-head-dim 8 has no effect" in line for line in parsed.notices)
