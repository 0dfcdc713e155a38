"""Mixture-of-experts flags: which layers are mixtures, and the message for each mistake."""

import time

import pytest

from megatron.config.experts import ExpertOptions, mixture_layers
from tests.config.command import parse, problems

MIXTURE = "--num-experts 8"
GATED = f"{MIXTURE} --moe-router-gating deepspeed --moe-expert-capacity-factor 1"
SINKHORN = f"{MIXTURE} --moe-router-load-balancing-type sinkhorn"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
SIGMOID = f"{MIXTURE} --moe-router-score-function sigmoid"


def _layers(text, layers):
    return mixture_layers(ExpertOptions(num_experts=(8,), moe_layer_freq=text), layers)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", "111111"),
        ("2", "101010"),
        ("last-of-1", "111111"),
        ("last-of-2", "010101"),
        ("last-of-4", "000100"),
        ("last-of-7", "000000"),
        ("3", "100100"),
        ("7", "100000"),
        ("[0,1,1,0,1,1]", "011011"),
        ("([0]*1+[1]*5)", "011111"),
        ("[0]*1+[1]*5", "011111"),
        ("[0,1]*3", "010101"),
        ("([0,1]*2+[1]*2)", "010111"),
        ("([1])*6", "111111"),
        ("([0]+[1]*2)*2", "011011"),
        ("[0]+([1]+[0]*2)+[1]*2", "010011"),
        ("[0]*2*2+[1]*2", "000011"),
        ("+".join(["[1]"] * 6), "111111"),
        ("((([1]*3)))+[0]*3", "111000"),
        (" ( [0] * 3 + [ 1 ] * 3 ) ", "000111"),
        ("[1]*0+[0]*6", "000000"),
    ],
)
def test_frequency_and_pattern_as_megatron_core_reads_them(text, expected):
    assert "".join("01"[is_mixture] for is_mixture in _layers(text, 6)) == expected
    if text[0] in "[(":
        assert [bool(bit) for bit in eval(text)] == list(_layers(text, 6))  # noqa: S307


def test_without_experts_all_layers_are_dense():
    assert mixture_layers(ExpertOptions(moe_layer_freq="[1]*9"), 4) == (False,) * 4


_HOSTILE = [
    "",
    "0",
    "-1",
    "1.5",
    "+1",
    "0x2",
    "1e1",
    "1_0",
    "last-of-0",
    "last-of-",
    "last-of-2-of-3",
    "\u0662",  # a digit from another script
    "[2]*4",
    "[-1]*4",
    "[1]*-4",
    "[1]*\u0664",
    "[1]**4",
    "[1]*(2+2)",
    "[1]+",
    "+[1]",
    "[1]++[1]",
    "[]",
    "[]*4",
    "[1,]*4",
    "[1 if 1 else 0]*4",
    "[[1]]*4",
    "([1]*4",
    "[1]*4)",
    "[1]*2*[1]",
    "([1]*2)([1]*2)",
    "(" * 100 + "[1]*4" + ")" * 100,
    "[0]*9999" * 9,
    "([0]*9999)*9999",
    "+".join(["[0]*9999"] * 9),
    "__import__('os').system('true')",
    "[__import__('os').system('true')]*4",
    "[1]*4;import os",
    "[1]*4\x00",
    "lambda: [1]*4",
    "[1]*999999",
    "[1]*20000",
    "[1]*99999",
    "+".join(["[1]*99999"] * 50),
    "[" + ",".join("1" * 20_000) + "]",
    "[1]+" * 20_000 + "[1]",
    "(" * 50_000,
    "[1]*" * 50_000,
    "9" * 50_000,
]


@pytest.mark.parametrize("text", _HOSTILE, ids=range(len(_HOSTILE)))
def test_anything_else_is_refused_at_once(text):
    begin = time.process_time()
    with pytest.raises(ValueError, match=r"expected a|expected at most|names \d+ layers"):
        _layers(text, 4)
    assert time.process_time() - begin < 1


def test_the_pattern_must_name_every_layer():
    with pytest.raises(ValueError, match="it names 5 layers, but the model has 4"):
        _layers("[0]*1+[1]*4", 4)


RULES = [
    (f"{MIXTURE} --moe-layer-freq [1]*3", 1, ["--moe-layer-freq [1]*3: it names 3 layers"]),
    (
        f"{MIXTURE} --moe-layer-freq x",
        1,
        ["--moe-layer-freq x: expected a number, last-of-N, or a pattern"],
    ),
    (
        f"{MIXTURE} --moe-router-topk 9",
        1,
        ["--moe-router-topk 9 is above --num-experts 8: lower it"],
    ),
    (
        f"{MIXTURE} --moe-router-enable-expert-bias",
        1,
        ["--moe-router-enable-expert-bias requires --moe-router-score-function sigmoid"],
    ),
    (
        f"{MIXTURE} --moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 1",
        1,
        ["--moe-aux-loss-coeff has 1 value, and --moe-router-load-balancing-type 2: give one"],
    ),
    (
        f"{MIXTURE} --moe-router-load-balancing-type aux_loss aux_loss --moe-aux-loss-coeff 1 1",
        1,
        ["--moe-router-load-balancing-type names a loss twice"],
    ),
    (
        f"{MIXTURE} --moe-router-num-groups 2",
        1,
        ["--moe-router-num-groups and --moe-router-group-topk must be combined: give both"],
    ),
    (
        f"{MIXTURE} --moe-router-group-topk 2",
        1,
        ["--moe-router-num-groups and --moe-router-group-topk must be combined: give both"],
    ),
    (
        f"{MIXTURE} --moe-router-num-groups 3 --moe-router-group-topk 1",
        1,
        ["--num-experts 8 is not divisible by --moe-router-num-groups 3: use 1, 2, 4 or 8"],
    ),
    (
        f"{MIXTURE} --moe-router-num-groups 2 --moe-router-group-topk 3",
        1,
        ["--moe-router-group-topk 3 is above --moe-router-num-groups 2: lower it"],
    ),
    (
        f"{MIXTURE} --moe-router-topk 3 --moe-router-num-groups 4 --moe-router-group-topk 2",
        1,
        ["--moe-router-topk 3: each of the --moe-router-group-topk 2 groups of 2 experts"],
    ),
    (
        f"{MIXTURE} --moe-router-topk 6 --moe-router-num-groups 4 --moe-router-group-topk 2",
        1,
        ["use a multiple of 2 up to 4"],
    ),
    (
        f"{MIXTURE} --expert-model-parallel-size 3",
        3,
        ["--num-experts 8 is not divisible by --expert-model-parallel-size 3: use 1, 2, 4 or 8"],
    ),
    (
        f"{MIXTURE} --tensor-model-parallel-size 4 --expert-tensor-parallel-size 3",
        4,
        [
            "--expert-tensor-parallel-size 3 does not divide --tensor-model-parallel-size 4: use "
            "1, 2 or 4"
        ],
    ),
    (
        f"{MIXTURE} --tensor-model-parallel-size 4 --expert-tensor-parallel-size 2",
        4,
        ["requires --sequence-parallel, with which tensor ranks have different tokens: add it"],
    ),
    (
        f"{MIXTURE} --tensor-model-parallel-size 4 --sequence-parallel "
        "--expert-tensor-parallel-size 2 --expert-model-parallel-size 4",
        4,
        ["--expert-model-parallel-size 4 x 2 parts of an expert do not divide the 4 processes"],
    ),
    (
        f"{MIXTURE} --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1",
        2,
        ["requires --sequence-parallel, with which tensor ranks have different tokens: add it"],
    ),
    (
        f"{MIXTURE} --tensor-model-parallel-size 2 --moe-ffn-hidden-size 33",
        2,
        ["--moe-ffn-hidden-size 33 is not divisible by 2 tensor-parallel parts of an expert"],
    ),
    (
        f"{MIXTURE} --tensor-model-parallel-size 2 --moe-shared-expert-intermediate-size 33",
        2,
        ["--moe-shared-expert-intermediate-size 33 is not divisible by"],
    ),
    (
        f"{MIXTURE} --expert-model-parallel-size 4 --pipeline-model-parallel-size 2",
        4,
        ["--expert-model-parallel-size 4 x 1 parts of an expert do not divide the 2 processes"],
    ),
    (
        f"{MIXTURE} --expert-model-parallel-size 2 --tensor-model-parallel-size 2",
        2,
        ["--expert-model-parallel-size 2 x 2 parts of an expert do not divide the 2 processes"],
    ),
    (f"{MIXTURE} --fp16 --fp8-format hybrid", 1, ["use --bf16 in place of --fp16"]),
    (
        f"{MIXTURE} --bf16 --fp8-format hybrid --fp8-param-gather --zero-stage 1",
        2,
        ["experts have a scale for each row"],
    ),
    (
        f"{MIXTURE} --bf16 --fp8-format hybrid --moe-ffn-hidden-size 24",
        1,
        ["--moe-ffn-hidden-size 24 is not a multiple of 16"],
    ),
    (f"{SELECTIVE} moe", 1, ["--recompute-modules moe requires --num-experts"]),
    (
        f"{SELECTIVE} core_attn mla_up_proj",
        1,
        ["--recompute-modules mla_up_proj requires --multi-latent-attention"],
    ),
    (
        f"{SELECTIVE} mla_up_proj --multi-latent-attention --lora-rank 2 --lora-dropout 0.1",
        1,
        ["--recompute-modules mla_up_proj with --lora-dropout 0.1"],
    ),
    (
        f"{MIXTURE} {SELECTIVE} shared_experts",
        1,
        ["shared_experts requires --moe-shared-expert-intermediate-size"],
    ),
    (
        f"{SELECTIVE} layernorm --bf16 --fp8-format hybrid",
        1,
        ["its output is kept in 8 bits only: drop layernorm"],
    ),
    (f"{MIXTURE} --moe-layer-recompute", 1, ["--recompute-modules moe"]),
    (f"{MIXTURE} --DDP-impl torch", 2, ["experts are averaged over different processes"]),
    (f"{MIXTURE} --cuda-graph-impl local", 1, ["only bf16 products do not have to wait"]),
    (
        f"{MIXTURE} --bf16 --cuda-graph-impl local --moe-router-load-balancing-type sinkhorn",
        1,
        ["--moe-router-load-balancing-type sinkhorn: it waits for the device"],
    ),
    (
        f"{MIXTURE} --bf16 --cuda-graph-impl local --expert-model-parallel-size 2",
        2,
        ["the number of tokens that arrive differs"],
    ),
    (
        f"{MIXTURE} --ckpt-format legacy --save x --save-interval 5",
        1,
        ["such experts cannot be written in this format"],
    ),
    ("--num-experts 1 1", 1, ["--num-experts 1 1: no layer has more than one expert"]),
    (
        "--num-experts 4 8 --moe-layer-freq ([0]*1+[1]*3)",
        1,
        ["it chooses 3 layers, but --num-experts has 2 numbers"],
    ),
    (
        "--num-experts 4 4 --moe-layer-freq ([0]*1+[1]*3)",
        1,
        ["it chooses 3 layers, but --num-experts has 2 numbers"],
    ),
    (
        "--num-experts 4 2 8 --moe-layer-freq ([0]*1+[1]*3) --moe-router-topk 3",
        1,
        ["--moe-router-topk 3 is above --num-experts 2"],
    ),
    (
        "--num-experts 4 8 12 --moe-layer-freq ([0]*1+[1]*3) --expert-model-parallel-size 8",
        8,
        ["--num-experts 4 8 12 is not divisible by --expert-model-parallel-size 8: use 1, 2 or 4"],
    ),
    ("--num-experts 0", 1, ["--num-experts"]),
    (f"{MIXTURE} --moe-input-jitter-eps 1", 1, ["--moe-input-jitter-eps"]),
    (f"{MIXTURE} --moe-expert-capacity-factor 0", 1, ["--moe-expert-capacity-factor"]),
    (f"{MIXTURE} --moe-aux-loss-coeff -1", 1, ["--moe-aux-loss-coeff"]),
    ("--moe-z-loss-coeff 1e-3", 1, ["--num-experts"]),
    ("--expert-model-parallel-size 2", 2, ["--num-experts"]),
    (f"{MIXTURE} --moe-shared-expert-gate", 1, ["--moe-shared-expert-intermediate-size"]),
    ("--mlp-type residual", 1, ["--num-experts"]),
    (f"{SINKHORN} --moe-aux-loss-coeff 1", 1, ["balances without a loss: drop --moe-aux-loss"]),
    (f"{SINKHORN} aux_loss --moe-aux-loss-coeff 0 1", 1, ["sinkhorn aux_loss: sinkhorn balances"]),
    (
        f"{SINKHORN} --moe-router-score-function sigmoid",
        1,
        ["(a sigmoid for a single expert): drop one"],
    ),
    (f"{SINKHORN} --moe-router-gating deepspeed", 1, ["DeepSpeed has no such router: drop one"]),
    ("--moe-per-layer-logging", 1, ["--num-experts"]),
    (
        f"{MIXTURE} --moe-pad-expert-input-to-capacity",
        1,
        ["requires --moe-expert-capacity-factor: add it, or drop the flag"],
    ),
    (f"{GATED} --moe-router-score-function sigmoid", 1, ["its scores are a softmax: drop one"]),
    (f"{GATED} --moe-token-drop-policy position", 1, ["the kept tokens in its own way: drop one"]),
    (f"{GATED} --moe-router-topk-scaling-factor 2", 1, ["its weights are the scores: drop one"]),
    (
        f"{GATED} --moe-router-enable-expert-bias --moe-router-score-function sigmoid",
        1,
        ["its scores are a softmax", "it has no biases: drop one"],
    ),
    (
        f"{GATED} --moe-router-num-groups 4 --moe-router-group-topk 2",
        1,
        ["cannot be combined with --moe-router-num-groups 4: it has no groups: drop one"],
    ),
    (
        f"{GATED} --noisy-gate-policy RSample",
        1,
        ["--noisy-gate-policy RSample with --moe-router-topk 2: it draws a token's only expert"],
    ),
    (
        f"{GATED} --noisy-gate-policy Jitter --moe-input-jitter-eps 0.1",
        1,
        ["both multiply the router's input by noise: drop one"],
    ),
    (
        f"{MIXTURE} --noisy-gate-policy Jitter",
        1,
        ["--noisy-gate-policy Jitter requires --moe-router-gating deepspeed: add it, or drop"],
    ),
    (f"{GATED} --noisy-gate-policy loud", 1, ["--noisy-gate-policy"]),
    (
        f"{MIXTURE} --mlp-type residual --moe-shared-expert-intermediate-size 32",
        1,
        ["--mlp-type residual with --moe-shared-expert-intermediate-size 32: both are MLPs"],
    ),
    ("--moe-router-enable-expert-bias", 1, ["--num-experts"]),
]


@pytest.mark.parametrize(("words", "processes", "expected"), RULES, ids=range(len(RULES)))
def test_each_mistake_is_reported(words, processes, expected):
    found = problems(words, world_size=processes)
    assert len(found) == len(expected), found
    for text, line in zip(expected, found, strict=True):
        assert text in line


@pytest.mark.parametrize("architecture", ["bert", "t5"])
def test_only_a_gpt_has_mixtures(architecture):
    words = ("--decoder-seq-length 64",) if architecture == "t5" else ()
    found = problems(MIXTURE, *words, architecture=architecture)
    kind = architecture.upper()
    assert found == [
        f"--num-experts 8: only a GPT has mixture layers, and this model is a {kind}: drop the flag"
    ]


def test_all_mistakes_are_reported_at_once():
    words = "--moe-router-topk 9 --moe-layer-freq x --expert-model-parallel-size 3"
    assert len(problems(MIXTURE, words, world_size=3)) == 3


@pytest.mark.parametrize(
    ("words", "processes"),
    [
        (f"{MIXTURE} --moe-router-num-groups 4 --moe-router-group-topk 2", 1),
        (f"{MIXTURE} --moe-router-topk 4 --moe-router-num-groups 4 --moe-router-group-topk 2", 1),
        (f"{SIGMOID} --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.01", 1),
        (f"{MIXTURE} --expert-model-parallel-size 2 --pipeline-model-parallel-size 2", 4),
        (
            f"{MIXTURE} --expert-model-parallel-size 4 --tensor-model-parallel-size 2 "
            "--expert-tensor-parallel-size 1 --sequence-parallel",
            4,
        ),
        (f"{MIXTURE} --moe-layer-freq ([0]*1+[1]*3)", 1),
        (f"{GATED} --moe-router-topk 1 --noisy-gate-policy RSample --no-moe-use-rts", 1),
        (f"{GATED} --disable-moe-top2-2nd-expert-sampling --noisy-gate-policy Jitter", 1),
        (f"{SIGMOID[:-7]} sqrtsoftplus --moe-router-enable-expert-bias", 1),
        (f"{MIXTURE} --moe-per-layer-logging", 1),
        (f"{SINKHORN} --moe-router-topk 1 --moe-z-loss-coeff 1e-3", 1),
        (f"{GATED} --moe-pad-expert-input-to-capacity", 1),
        (f"{GATED} --moe-eval-capacity-factor 2 --moe-min-capacity 4", 1),
    ],
)
def test_what_fits_is_taken(words, processes):
    assert parse(words, world_size=processes).config.model.num_experts == (8,)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (f"{MIXTURE} --moe-min-capacity 4", "--moe-min-capacity 4 has no effect without"),
        (f"{MIXTURE} --moe-min-capacity 4 --moe-eval-capacity-factor 2", None),
        (f"{MIXTURE} --moe-token-drop-policy position --moe-eval-capacity-factor 2", None),
        (f"{GATED} --moe-router-topk 1 --no-moe-use-rts", None),
        (f"{GATED} --moe-router-topk 2 --no-moe-use-rts", "--no-moe-use-rts has no effect"),
        (f"{GATED} --moe-router-topk 2 --disable-moe-top2-2nd-expert-sampling", None),
        (
            f"{GATED} --moe-router-topk 1 --disable-moe-top2-2nd-expert-sampling",
            "--disable-moe-top2-2nd-expert-sampling has no effect without",
        ),
        (f"{MIXTURE} {SELECTIVE} mlp", "--recompute-modules mlp has no effect: no layer has"),
        (f"{MIXTURE} --moe-layer-freq 2 {SELECTIVE} mlp", None),
    ],
)
def test_what_changes_nothing_is_reported(words, line):
    said = [each for each in parse(words).notices if "has no effect" in each]
    assert (line is None) == (not said)
    assert line is None or said[0].startswith(line)


def test_losses_have_megatron_core_s_names():
    words = f"{MIXTURE} --moe-z-loss-coeff 1e-3 --moe-router-load-balancing-type seq_aux_loss"
    model = parse(words, "--moe-aux-loss-coeff 1e-2").config.model
    assert model.auxiliary_losses == ("z_loss", "seq_load_balancing_loss")
    assert model.balancing == (("seq_aux_loss", 1e-2),)
    off = parse(f"{MIXTURE} --moe-aux-loss-coeff 0").config.model
    assert off.auxiliary_losses == off.balancing == ()
    none = parse(f"{MIXTURE} --moe-router-load-balancing-type none --moe-aux-loss-coeff 1")
    assert none.config.model.balancing == ()
    words = "--moe-router-load-balancing-type aux_loss global_aux_loss --moe-aux-loss-coeff 1 2"
    both = parse(MIXTURE, words).config.model
    assert both.auxiliary_losses == ("load_balancing_loss", "global_load_balancing_loss")
    assert parse().config.model.auxiliary_losses == ()


@pytest.mark.parametrize(
    ("flags", "is_noted"),
    [
        (MIXTURE, True),
        (f"{MIXTURE} --moe-router-bias", False),
        (f"{MIXTURE} --disable-bias-linear", False),
        (GATED, False),
        ("", False),
    ],
)
def test_a_mixture_whose_routers_would_have_biases_in_megatron_core_gets_a_notice(flags, is_noted):
    notices = parse(flags).notices
    assert [line for line in notices if "--moe-router-bias" in line] == [
        "--num-experts with biases: Megatron Core 0.15 and later also has biases in routers: add "
        "--moe-router-bias to train the same network"
    ] * is_noted
