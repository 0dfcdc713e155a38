"""Rules at both sides of each of their conditions: the exact problems, or the exact notices."""

from __future__ import annotations

import math
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from megatron.config.arguments import minimum_problems
from megatron.config.checks import find_problems
from megatron.config.experts import ExpertOptions, layer_experts
from megatron.config.fields import Field, FlagInfo
from megatron.config.other_flags import read_entry
from megatron.config.resolve import resolve
from megatron.config.run import flatten, values_of, with_values
from megatron.config.stages import ModelPart, even_parts
from tests.config.command import parse, problems

_MUP = "--use-mup"
_AVERAGED = "--load x --load-averaged-weights"
_SPLIT_EXPERTS = "--num-experts 4 --moe-router-bias --overlap-moe-expert-parallel-comm"
_DIST = "--save x --save-interval 5 --ckpt-format torch_dist"
_MAMBA = (
    "--ckpt-format torch_dist with Mamba-2 in 16 bits: Megatron Core keeps some of its weights in "
    "fp32, and saves their optimizer states only with the distributed optimizer: add "
    "--use-distributed-optimizer or --no-save-optim"
)
_HYBRID = "--hybrid-layer-pattern"
_CURRICULUM = "--curriculum-schedule fixed_linear --curriculum-steps 10"
_GROUPS = "--num-experts 4 --moe-router-bias --moe-router-num-groups 2 --moe-router-group-topk"
_DELTA = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 4 "
    "--position-embedding-type rope"
)
_WORKDIR = str(Path(__file__).parent / "retro_workdir")
_RETRO = f"--retro-workdir {_WORKDIR} --num-layers 6"
_OF_RETRO: dict[str, Any] = {
    "architecture": "retro",
    "without": ["--mock-data", "--seq-length", "--num-layers"],
}

_Row = tuple[str, dict[str, Any], list[str]]  # words, options of the parser, messages

# The exact problems.
_REFUSED: list[_Row] = [
    (
        _AVERAGED,
        {},
        [
            "--load-averaged-weights: the optimizer's states belong to other weights: add "
            "--finetune, --no-load-optim or --skip-train, or drop the flag"
        ],
    ),
    (
        f"{_MUP} --mup-embedding-mult 2",
        {},
        [
            "--use-mup with --mup-embedding-mult 2: it multiplies words, but not learned "
            "positions: use --position-embedding-type rope, or drop the factor"
        ],
    ),
    (
        f"{_MUP} --optimizer muon --muon-scale-mode spectral",
        {},
        [
            "--use-mup with --muon-scale-mode spectral: its updates grow with the width: use "
            "--muon-scale-mode unit_rms_norm"
        ],
    ),
    (
        "--global-batch-size 40000000",
        {"without": ["--micro-batch-size"]},
        ["--micro-batch-size is required: give it a value"],
    ),
    (
        "--eval-global-batch-size 7",
        {"without": ["--micro-batch-size"], "world_size": 2},
        ["--micro-batch-size is required: give it a value"],
    ),
    (
        '--step-batch-size-schedule "0:3" --train-samples 9',
        {"without": ["--micro-batch-size", "--train-iters"]},
        ["--micro-batch-size is required: give it a value"],
    ),
    (
        "--rampup-batch-size 2 2 8 --global-batch-size 1 --micro-batch-size 1 --train-samples 99",
        {"without": ["--train-iters"]},
        ["--rampup-batch-size 2 2 8 starts above --global-batch-size 1: start with at most 1"],
    ),
    (
        "--rampup-batch-size 3 2 8 --global-batch-size 0 --micro-batch-size 1 --train-samples 99",
        {"without": ["--train-iters"]},
        ["--global-batch-size 0: must be at least 1"],
    ),
    (
        "--decoder-seq-length 128 --vocab-extra-ids 0 --sequence-parallel "
        "--tensor-model-parallel-size 0",
        {"architecture": "t5"},
        ["--tensor-model-parallel-size 0: must be at least 1"],
    ),
    (
        "--zero-stage 3 --pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble",
        {"world_size": 4},
        [
            "--zero-stage 3 with --pipeline-schedule zero-bubble: a layer's weights are freed "
            "before its weight gradients are computed: use 1f1b, or --zero-stage 1"
        ],
    ),
    (
        "--vocab-extra-ids 1",
        {},
        [
            "--vocab-extra-ids 1: --tokenizer-type NullTokenizer does not support extra entries: "
            "drop it"
        ],
    ),
    (
        "--eval-iters 2000000000000000000 --eval-interval 10",
        {},
        [
            "--eval-iters 2000000000000000000 x --global-batch-size 4 x 5 evaluations is more than "
            "9223372036854775807 samples: use at most 461168601842738790, or a larger "
            "--eval-interval"
        ],
    ),
    (
        f"{_CURRICULUM} --curriculum-min-length 8 --curriculum-length-step 2 "
        "--context-parallel-size 2",
        {"world_size": 2},
        [
            "--curriculum-length-step 2 is not divisible by 4, as --context-parallel-size 2 "
            "requires: use 4"
        ],
    ),
    (
        "--num-attention-heads 1 --tensor-model-parallel-size 2",
        {"world_size": 2},
        ["--num-attention-heads 1 is not divisible by --tensor-model-parallel-size 2: use 1"],
    ),
    (
        "--bf16 --use-precision-aware-optimizer --main-params-dtype fp16 --zero-stage 3",
        {"world_size": 2},
        [
            "--main-params-dtype fp16 with --zero-stage 3, whose shards already are the fp32 "
            "weights: use --zero-stage 1 or 2, or drop the flag"
        ],
    ),
    (
        f"{_GROUPS} 3",
        {},
        ["--moe-router-group-topk 3 is above --moe-router-num-groups 2: lower it"],
    ),
    (
        "--position-embedding-type rope --rope-type proportional --rotary-percent 0.4 "
        "--kv-channels 5",
        {},
        [
            "--rope-type proportional with --kv-channels 5: channels of a whole head form pairs: "
            "choose an even number"
        ],
    ),
    (
        f"{_DELTA} --linear-num-key-heads 2 --linear-num-value-heads 4 "
        "--tensor-model-parallel-size 2 --context-parallel-size 2",
        {"world_size": 4},
        [
            "--linear-num-key-heads 2 is not divisible by --tensor-model-parallel-size 2 x "
            "--context-parallel-size 2, over which the heads of gated delta nets are split: use a "
            "multiple of 4, or fewer processes"
        ],
    ),
    (
        f"{_DELTA} --linear-num-key-heads 2 --linear-num-value-heads 4 "
        "--tensor-model-parallel-size 4",
        {"world_size": 4},
        [
            "--linear-num-key-heads 2 is not divisible by --tensor-model-parallel-size 4, over "
            "which the heads of gated delta nets are split: use a multiple of 4, or fewer processes"
        ],
    ),
    (
        "--lawa-interval 5 --save x --save-interval 5 --ckpt-format torch_dist",
        {},
        [
            "--lawa-interval with --ckpt-format torch_dist, whose files cannot contain averages: "
            "use native"
        ],
    ),
    (
        f"{_GROUPS} 1 --moe-router-group-score-topk 3",
        {},
        ["--moe-router-group-score-topk 3 is above the 2 experts of a group: lower it"],
    ),
    (
        "--lora-rank 2 --group-query-attention --num-query-groups 1 --tensor-model-parallel-size 2",
        {"world_size": 2},
        ["--lora-rank 2: --tensor-model-parallel-size 2 splits the 1 query groups: use at most 1"],
    ),
    (
        "--train-tokens 5120 --lr-warmup-iters 5",
        {"without": ["--train-iters"]},
        ["--lr-warmup-iters 5 cannot be combined with --train-tokens: use --lr-warmup-tokens 2560"],
    ),
    (f"{_DIST} --bf16 {_HYBRID} M*M- --mamba-head-dim 8", {"without": ["--num-layers"]}, [_MAMBA]),
    (f"{_DIST} --fp16 {_HYBRID} M*M- --mamba-head-dim 8", {"without": ["--num-layers"]}, [_MAMBA]),
    (
        "--teacher-load x --logits-load-dir y --bf16",
        {},
        [
            "--logits-load-dir y cannot be combined with --teacher-load x: a run learns from "
            "files, learns from a model, or writes files: drop one of them"
        ],
    ),
    (
        "--step-batch-size-schedule 0:4",
        {},
        [
            '--step-batch-size-schedule "0:4" counts tokens: give the length as --train-samples '
            "or --train-tokens, not --train-iters"
        ],
    ),
    (
        "--num-attention-heads 12 --hidden-size 96 --group-query-attention --num-query-groups 6 "
        "--tensor-model-parallel-size 4",
        {"world_size": 4},
        [
            "--num-query-groups 6 neither divides nor is divided by --tensor-model-parallel-size "
            "4: use 1, 2, 3 or 6, or a multiple of 6"
        ],
    ),
    (
        "--save x --save-interval 5 --ckpt-format legacy --add-qkv-bias --disable-bias-linear",
        {},
        [
            "--add-qkv-bias: Megatron-LM 23.08, the target of --ckpt-format legacy, does not "
            "support such weights: use --ckpt-format native"
        ],
    ),
    *(
        (
            f"--non-persistent-save-interval 5 --non-persistent-ckpt-type global {flag} "
            "--save x --save-interval 5",
            {},
            [
                f"--non-persistent-save-interval 5 cannot be combined with {flag}, because runs "
                "resume from them: drop one"
            ],
        )
        for flag in ("--no-save-optim", "--no-save-rng")
    ),
    (
        "--lr-wsd-branch-from old --save new --load other --save-interval 5 --lr-decay-style WSD "
        "--lr-wsd-decay-iters 5",
        {"without": ["--train-iters"]},
        [
            "--lr-wsd-branch-from old with --load other: a branch that is started again continues "
            "from --save: drop --load"
        ],
    ),
    (
        "--lr-wsd-branch-from old --save old --save-interval 5 --lr-decay-style WSD "
        "--lr-wsd-decay-iters 5",
        {"without": ["--train-iters"]},
        [
            "--lr-wsd-branch-from old: give --save another folder, so that further branches can "
            "start there"
        ],
    ),
    (
        "--rampup-batch-size 0 4 9 --train-samples 99",
        {"without": ["--train-iters"]},
        ["--rampup-batch-size 0 4 9: start, increment and samples must be at least 1"],
    ),
    (
        "--train-tokens 5120 --lr-warmup-iters 5",
        {"without": ["--train-iters", "--seq-length"]},
        [
            "--seq-length is required: give it a value",
            "--lr-warmup-iters 5 cannot be combined with --train-tokens: use --lr-warmup-tokens",
        ],
    ),
    (
        "--train-tokens 20480 --eval-iters 2000000000000000000 --eval-interval 10",
        {"without": ["--train-iters"]},
        [
            "--eval-iters 2000000000000000000 x --global-batch-size 4 x 5 evaluations is more than "
            "9223372036854775807 samples: use at most 461168601842738790, or a larger "
            "--eval-interval"
        ],
    ),
    (
        "--train-samples 160 --eval-iters 2000000000000000000 --eval-interval 10",
        {"without": ["--train-iters"]},
        [
            "--eval-iters 2000000000000000000 x --global-batch-size 4 x 5 evaluations is more than "
            "9223372036854775807 samples: use at most 461168601842738790, or a larger "
            "--eval-interval"
        ],
    ),
    (
        '--step-batch-size-schedule "0:4 1000:8 1010:16" --train-samples 99',
        {"without": ["--train-iters"]},
        [
            '--step-batch-size-schedule "0:4 1000:8 1010:16": two sizes begin within the same '
            "sample of 128 tokens: drop one of them"
        ],
    ),
]

# The exact notices.
_ACCEPTED: list[_Row] = [
    (f"{_AVERAGED} --finetune", {}, []),
    (f"{_AVERAGED} --no-load-optim", {}, []),
    (f"{_AVERAGED} --skip-train", {}, []),
    (f"{_MUP} --mup-embedding-mult 2 --position-embedding-type rope", {}, []),
    (f"{_MUP} --optimizer muon --muon-scale-mode unit_rms_norm", {}, []),
    (
        _SPLIT_EXPERTS,
        {},
        ["--overlap-moe-expert-parallel-comm: no effect without --expert-model-parallel-size"],
    ),
    (f"{_SPLIT_EXPERTS} --expert-model-parallel-size 2", {"world_size": 2}, []),
    (
        "--eval-iters 0 --eval-global-batch-size 6",
        {},
        ["--eval-global-batch-size 6 has no effect without --eval-iters above 0"],
    ),
    (
        "--zero-stage 2 --pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble",
        {"world_size": 4},
        [],
    ),
    (
        "--bf16 --use-precision-aware-optimizer --main-params-dtype fp16 --zero-stage 2",
        {"world_size": 2},
        [],
    ),
    (f"{_GROUPS} 2", {}, []),
    (f"{_GROUPS} 1 --moe-router-group-score-topk 2", {}, []),
    (
        "--lora-rank 2 --group-query-attention --num-query-groups 2 --tensor-model-parallel-size 2",
        {"world_size": 2},
        [],
    ),
    ("--attn-logit-softcapping 30", {}, []),
    (
        f"--sequence-parallel {_CURRICULUM} --curriculum-min-length 7 --curriculum-length-step 1",
        {},
        ["--sequence-parallel: no effect with a single tensor-parallel process"],
    ),
    ("--cuda-graph-impl local --cuda-graph-warmup-steps 1", {}, []),
    (
        "--lr-decay-style range-test --lr-range-test-min-lr 1e-4 --min-lr 1e-5",
        {},
        ["--lr 0.001, --min-lr 1e-05: no effect with --lr-decay-style range-test"],
    ),
    (f"{_DIST} --bf16", {}, []),
    (f"{_DIST} {_HYBRID} M*M- --mamba-head-dim 8", {"without": ["--num-layers"]}, []),
    (
        f"{_DIST} --bf16 --no-save-optim {_HYBRID} M*M- --mamba-head-dim 8",
        {"without": ["--num-layers"]},
        [],
    ),
    ("--logits-load-dir y", {}, []),
    (
        "--save x --save-interval 5 --ckpt-format legacy --add-qkv-bias",
        {},
        [
            "--add-qkv-bias has no effect without --disable-bias-linear: all linear layers have "
            "biases"
        ],
    ),
    (
        "--lr-wsd-branch-from old --save new --load new --save-interval 5 --lr-decay-style WSD "
        "--lr-wsd-decay-iters 5",
        {"without": ["--train-iters"]},
        [],
    ),
    (
        "--rampup-batch-size 1 1 1 --train-samples 99 --micro-batch-size 1",
        {"without": ["--train-iters"]},
        [],
    ),
    ("--lawa-interval 5", {}, []),
    ("--ema-decay 0.9", {}, []),
    (
        "--num-experts 2 --moe-router-bias --expert-model-parallel-size 2 --zero-stage 1",
        {"world_size": 2},
        [],
    ),
    (
        "--position-embedding-type rope --rope-type proportional --rotary-percent 0.5 "
        "--kv-channels 8",
        {},
        [],
    ),
    (f"{_RETRO} --retro-num-retrieved-chunks 4", _OF_RETRO, []),
    (f"{_RETRO} --context-parallel-size 2", {**_OF_RETRO, "world_size": 2}, []),
]


def _name(row: _Row) -> str:
    return row[0].replace(_WORKDIR, "folder")


@pytest.mark.parametrize(("words", "how", "said"), _REFUSED, ids=map(_name, _REFUSED))
def test_what_is_refused(words: str, how: dict[str, Any], said: list[str]) -> None:
    assert problems(words, **how) == said


@pytest.mark.parametrize(("words", "how", "said"), _ACCEPTED, ids=map(_name, _ACCEPTED))
def test_what_is_accepted(words: str, how: dict[str, Any], said: list[str]) -> None:
    assert list(parse(words, **how).notices) == said


@pytest.mark.parametrize(
    ("values", "world_size", "said"),
    [
        ({}, 1, []),
        ({"data.seq_length": 24}, 1, []),
        (
            {"data.seq_length": 36},
            1,
            [
                "--seq-length 36 is not divisible into chunks of 8 tokens of --retro-workdir: use "
                "a multiple of 8"
            ],
        ),
        ({"parallel.context_parallel_size": 2}, 2, []),
        (
            {"parallel.context_parallel_size": 2, "data.seq_length": 48},
            2,
            [
                "--context-parallel-size 2: the pieces of --seq-length 48, two for each process, "
                "do not end between chunks of 8 tokens: use fewer processes"
            ],
        ),
        ({"model.retro_num_retrieved_chunks": 4}, 1, []),
        (
            {"model.retro_num_retrieved_chunks": 5},
            1,
            [
                "--retro-num-retrieved-chunks 5: a neighbor has 40 tokens, more than "
                "--max-position-embeddings 32: use fewer"
            ],
        ),
        (
            {"model.retro_num_retrieved_chunks": 5, "model.position_embedding_type": "rope"},
            1,
            [],
        ),
    ],
)
def test_the_chunks_of_a_retro(values: dict[str, Any], world_size: int, said: list[str]) -> None:
    config = parse(_RETRO, **_OF_RETRO).config
    longest = {"model.max_position_embeddings": 48} if "data.seq_length" in values else {}
    assert list(find_problems(with_values(config, {**longest, **values}), world_size)) == said


@pytest.mark.parametrize(
    ("words", "how", "path", "expected"),
    [
        (
            f"{_HYBRID} M*M- --mamba-head-dim 8",
            {"without": ["--num-layers"]},
            "model.mamba_num_heads",
            16,
        ),
    ],
)
def test_derived_values(words: str, how: dict[str, Any], path: str, expected: Any) -> None:
    assert flatten(parse(words, **how).config)[path] == expected


def test_the_tokens_of_a_sample_of_a_t5_are_those_of_both_sides() -> None:
    words = "--decoder-seq-length 32 --vocab-extra-ids 0"
    assert parse(words, architecture="t5").config.data.sample_tokens == 128 + 32
    assert parse().config.data.sample_tokens == 128


def test_a_layer_with_a_single_expert_is_dense() -> None:
    options = ExpertOptions(num_experts=(2, 1, 4))
    assert layer_experts(options, 3) == (2, 0, 4)


def test_a_part_of_a_t5_may_have_layers_of_both_halves() -> None:
    def halves(start: int, stop: int) -> tuple[range, range]:
        return ModelPart(range(start, stop), embedding=False, head=False).halves(4)

    assert halves(0, 6) == (range(4), range(2))
    assert halves(4, 6) == (range(4, 4), range(2))
    assert [list(layers) for layers in halves(1, 3)] == [[1, 2], []]
    assert [list(layers) for layers in halves(5, 8)] == [[], [1, 2, 3]]


def test_uneven_parts_are_smaller_at_the_end() -> None:
    assert [len(part.layers) for part in even_parts(8, 3)] == [3, 3, 2]
    assert [len(part.layers) for part in even_parts(7, 3)] == [3, 2, 2]


def test_the_least_values_of_a_tool() -> None:
    options = Namespace(rate=None, sizes=[4, 2], count=3, share=math.nan)
    assert minimum_problems(options, rate=1, sizes=2, count=3) == []
    assert minimum_problems(options, rate=1, sizes=3, count=4, share=0) == [
        "--sizes 4 2: give at least 3",
        "--count 3: give at least 4",
        "--share nan: give at least 0",
    ]


def test_flags_without_a_field_are_described_in_a_line() -> None:
    def flag(name: str, kind: type, default: Any, *, many: bool = False, **info: Any) -> Field:
        is_valued = kind is not bool or name == "--c"
        return Field(name, kind, is_valued, many, default, FlagInfo(names=name, **info), "why")

    assert read_entry("--a", "why") == (flag("--a", bool, False),)
    assert read_entry("--[no-]a", "why") == (
        flag("--a", bool, False),
        flag("--no-a", bool, True),
    )
    assert read_entry("--b=3", "why") == (flag("--b", int, 3),)
    assert read_entry("--b=0.5", "why") == (flag("--b", float, 0.5),)
    assert read_entry("--b=x|y", "why") == (flag("--b", str, "x", choices=("x", "y")),)
    assert read_entry("--b:int", "why") == (flag("--b", int, None),)
    assert read_entry("--b:int...", "why") == (flag("--b", int, (), many=True),)
    assert read_entry("--b=7...", "why") == (flag("--b", int, (7,), many=True),)
    assert read_entry("--c:bool=true", "why") == (flag("--c", bool, True),)
    assert read_entry("--c:bool=false", "why") == (flag("--c", bool, False),)


_RICH: dict[str, dict[str, Any]] = {
    "": {},
    "--decoder-seq-length 128 --vocab-extra-ids 0": {"architecture": "t5"},
    "--sequence-parallel --tensor-model-parallel-size 2 --context-parallel-size 2 "
    "--group-query-attention --num-query-groups 2 --save x --save-interval 5 "
    "--save-retain-interval 10 --eval-global-batch-size 8": {"world_size": 8},
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
    "--recompute-granularity full --recompute-method block --recompute-num-layers 1 "
    f"{_CURRICULUM} --curriculum-min-length 8": {"world_size": 2},
    f"{_GROUPS} 1 --expert-model-parallel-size 2": {"world_size": 2},
    f"{_DELTA} --linear-num-key-heads 2 --linear-num-value-heads 4": {},
    f"{_HYBRID} M*M- --mamba-head-dim 8": {"without": ["--num-layers"]},
    "--rampup-batch-size 4 4 40 --train-samples 99 --optimizer muon --global-batch-size 16": {
        "without": ["--train-iters"]
    },
    _RETRO: _OF_RETRO,
    "--bf16 --fp8-format hybrid --eval-micro-batch-size 8 --eval-global-batch-size 8": {},
    "--bf16 --lora-rank 2 --frozen-weights-dtype nf4": {},
    '--step-batch-size-schedule "0:4 1K:8" --train-samples 99': {"without": ["--train-iters"]},
    "--window-size 8,0 --window-attn-skip-freq [1,0,1,1] --cuda-graph-impl local": {},
}


@pytest.mark.parametrize(("words", "how"), _RICH.items(), ids=range(len(_RICH)))
def test_numbers_below_their_bounds_are_reported_and_break_no_rule(
    words: str, how: dict[str, Any]
) -> None:
    """No rule divides by a zero, for example."""
    config, world = parse(words, **how).config, how.get("world_size", 1)
    for path, field, value in values_of(config):
        least = field.info.at_least
        if field.kind is not int or field.many or value is None or least not in (0, 1):
            continue
        changed = int(least) - 1
        found = list(find_problems(resolve(with_values(config, {path: changed}), world), world))
        assert f"{field.spell(changed)}: must be at least {least}" in found


@pytest.mark.parametrize("name", ["--num-layers", "--hidden-size", "--num-attention-heads",
                                  "--seq-length", "--micro-batch-size"])  # fmt: skip
@pytest.mark.parametrize(("words", "how"), _RICH.items(), ids=range(len(_RICH)))
def test_a_missing_number_is_reported_and_nothing_else(
    words: str, how: dict[str, Any], name: str
) -> None:
    """No rule treats it as a number."""
    without = how.get("without", [])
    if name not in without:
        found = problems(words, **{**how, "without": [*without, name]})
        assert found == [f"{name} is required: give it a value"]
