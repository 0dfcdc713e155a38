"""The last value that each rule accepts, and the first that it refuses."""

from __future__ import annotations

import pytest

from tests.config.command import parse, problems

_SAMPLES = "--train-samples 1000 "
_WSD = "--lr-decay-style WSD "
_RAMP = f"{_SAMPLES}--global-batch-size 64 --rampup-batch-size "
_MUON = "--optimizer muon "
_GROUPS = f"{_MUON}--tensor-model-parallel-size 4 --group-query-attention --num-query-groups "
_ROPE = "--position-embedding-type rope "  # 16 channels in a head
_LATENT = (
    f"{_ROPE}--multi-latent-attention --normalization RMSNorm --disable-bias-linear "
    "--qk-head-dim 16 --v-head-dim 16 --qk-pos-emb-head-dim "
)
_YARN = f"{_ROPE}--rope-type yarn --yarn-original-max-position-embeddings 64 "
_DYNAMIC = f"{_ROPE}--rope-type dynamic --rotary-scaling-factor 2 "
_EXPERTS = "--num-experts 4 --micro-batch-size 1 "
_SAVE = "--save x --save-interval 5 "
_CURRICULUM = "--curriculum-schedule fixed_linear --curriculum-min-length 8 --curriculum-steps 10 "
_DISCRETE = "--curriculum-schedule fixed_discrete --curriculum-until 5 --curriculum-lengths "
_FP8_VARIANCE = "--use-precision-aware-optimizer --exp-avg-sq-dtype fp8 --adam-beta2"
_OFFLOADED = "--fine-grained-activation-offloading --offload-modules"
_SAMPLED = "--sample-prompts prompts --bf16"
_VIRTUAL = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "

# The flags before the value, the last accepted value, the first refused one, and the message.
_PAIRS = [
    ("--min-lr", "0.001", "0.0011", "is above --lr 0.001: lower it"),
    ("--lr-warmup-init", "0.001", "0.0011", "is above --lr 0.001: lower it"),
    ("--decoupled-lr 1e-4 --min-lr", "1e-4", "2e-4", "give --decoupled-min-lr"),
    ("--decoupled-lr 1e-4 --decoupled-min-lr", "1e-4", "2e-4", "is above --decoupled-lr 0.0001"),
    ("--lr-warmup-iters", "39", "40", "must be less than --train-iters 40"),
    ("--lr-decay-iters 20 --lr-warmup-iters", "19", "20", "must be less than --lr-decay-iters 20"),
    (f"{_WSD}--lr-wsd-decay-iters", "40", "41", "must be at most --train-iters 40"),
    (f"{_WSD}--lr-warmup-iters 10 --lr-wsd-decay-iters", "30", "31", "overlap: lower one of them"),
    (
        "--weight-decay-incr-style linear --start-weight-decay 0.1 --end-weight-decay",
        "0.1",
        "0.09",
        "is below --start-weight-decay 0.1",
    ),
    ("--start-weight-decay", "0.01", "0.02", "differs from --weight-decay 0.01"),
    ("--end-weight-decay", "0.01", "0.02", "differs from --weight-decay 0.01"),
    (f"{_RAMP}64 8", "100", "0", "must be at least 1"),
    (f"{_RAMP}16", "16 100", "15 100", "does not reach --global-batch-size 64"),
    (f"{_RAMP}16", "4 100", "6 100", "start and increment must be multiples of"),
    ("--global-batch-size", "64", "66", "is not divisible by --micro-batch-size 4"),
    (
        "--micro-batch-size 1 --global-batch-size",
        str(2**20),
        str(2**20 + 1),
        f"use at most {2**20}, or a larger",
    ),
    ("--recompute-granularity full --recompute-method block --recompute-num-layers", "4", "5",
     "is above --num-layers 4"),
    ("--profile --profile-step-end", "11", "10", "must be above --profile-step-start 10"),
    ("--profile --profile-windows", "4-6 6-8", "4-6 5-8", "in order that do not overlap"),
    ("--profile --profile-windows", "4-5", "4-4", "END above FIRST"),
    ("--profile --profile-ranks", "0", "1", "the ranks of this run are 0 to 0: use those"),
    ("--fault-inject", "step:0:40:kill", "step:0:41:kill", "the run ends after --train-iters 40"),
    ("--fault-inject", "step:0:4:kill", "step:1:4:kill", "there is no rank 1"),
    (f"{_MUON}--muon-num-ns-steps", "10", "11", "is not divisible by 5"),
    (f"{_MUON}--muon-num-ns-steps", "11 --muon-coefficient-type simple", "11", "use simple"),
    ("--fp16 --initial-loss-scale 8 --min-loss-scale", "8", "16", "is above --initial-loss-scale"),
    ("--max-position-embeddings", "128", "127", "is less than --seq-length 128"),
    (f"{_DYNAMIC}--max-position-embeddings", "64", "63", "63 x --rotary-scaling-factor 2 is less"),
    (f"{_DYNAMIC}--rotary-percent", "0.25", "0.125", "only 2 channels rotate"),
    (f"{_ROPE}--rotary-percent", "0.125", "0.0625", "rotates 1 channels"),
    (f"{_ROPE}--rotary-percent", "0.25", "0.2", "rotates 3 channels"),
    (f"{_LATENT}", "8", "7", "channels rotate in pairs"),
    (f"{_YARN}--yarn-beta-slow 2 --yarn-beta-fast", "3", "2", "is not above --yarn-beta-slow 2"),
    (f"{_EXPERTS}--moe-router-topk", "4", "5", "is above --num-experts 4"),
    ("--context-parallel-size 2 --seq-length", "132", "130", "use a multiple of 4"),
    (
        "--tensor-model-parallel-size 2 --sequence-parallel --seq-length",
        "130",
        "129",
        "as --sequence-parallel requires: use 128 or 130",
    ),
    (f"{_GROUPS}", "4", "2", "a process has no whole group"),
    (f"{_GROUPS}", "2 --muon-no-split-qkv", "2", "or --muon-no-split-qkv"),
    (f"{_GROUPS}", "2 --muon-tp-mode duplicated", "2", "use --muon-tp-mode duplicated"),
    (f"{_VIRTUAL}--pipeline-schedule", "interleaved", "1f1b", "supports one part per stage"),
    (
        "--pipeline-model-parallel-size 2 --pipeline-schedule",
        "1f1b",
        "interleaved",
        "interleaved requires virtual stages",
    ),
    (f"{_SAVE}--save-retain-interval", "5", "4", "is not divisible by --save-interval 5: use 5"),
    (f"{_SAVE}--save-retain-interval", "15", "12", "use 10 or 15"),
    (f"{_CURRICULUM}--curriculum-max-length", "128", "136", "is above --seq-length 128"),
    (f"{_CURRICULUM}--curriculum-max-length", "8", "7", "--curriculum-min-length 8 is above"),
    (f"{_CURRICULUM}--curriculum-length-step", "16", "24", "a step that divides it"),
    (f"{_CURRICULUM}--curriculum-max-length 127 --curriculum-length-step", "1", "2", "divides it"),
    (f"{_CURRICULUM}--curriculum-length-step", "8", "0", "--curriculum-length-step 0: must be"),
    (
        f"{_CURRICULUM}--bf16 --fp8-format hybrid --curriculum-length-step",
        "4",
        "2",
        "--curriculum-length-step 2 is not divisible by 4, as --fp8-format hybrid requires: use 4",
    ),
    (f"{_DISCRETE}", "8 128", "8 129", "--curriculum-lengths 129 is above --seq-length 128"),
    (f"{_DISCRETE}", "8 16", "16 16", "each number must exceed the previous one"),
    (f"{_DISCRETE}", "8 16", "8 16 32", "got 3 lengths and 1 iterations"),
    *(
        (f"{_OFFLOADED} core_attn --zero-stage", fits, "3", "would be taken for activations")
        for fits in ("1", "2")
    ),
    *(
        (f"{_SAMPLED} --zero-stage", fits, "3", "no process holds whole weights")
        for fits in ("1", "2")
    ),
    ("--DDP-impl torch --zero-stage", "0", "1", "it shards nothing"),
    ("--cuda-graph-impl local --zero-stage", "1", "2", "do not keep their addresses"),
    ("--split", "1", "0", "up to three shares of at least 0, not all 0"),
    ("--split", "0,1,0", "0,1,0,0", "up to three shares"),
    ("--split", "9/1", "9/-1", "up to three shares"),
]  # fmt: skip


def _world(words: str) -> int:
    sizes = ("tensor-model", "context", "pipeline-model")
    return 4 if any(f"--{name}-parallel-size" in words for name in sizes) else 1


def _without(words: str) -> list[str]:
    """Return the flags of the small run that these replace."""
    return ["--train-iters"] if _SAMPLES in words else []


@pytest.mark.parametrize(
    ("words", "fits", "beyond", "said"), _PAIRS, ids=[f"{pair[0]} {pair[1]}" for pair in _PAIRS]
)
def test_the_last_value_that_fits_and_the_first_that_does_not(
    words: str, fits: str, beyond: str, said: str
) -> None:
    world, without = _world(words), _without(words)
    parse(f"{words} {fits}", without=without, world_size=world)
    found = problems(f"{words} {beyond}", without=without, world_size=world)
    assert any(said in line for line in found), found


@pytest.mark.parametrize(
    ("words", "fits", "beyond", "said"),
    [
        ("--relative-attention-num-buckets", "4", "2", "an even number of at least 4"),
        ("--relative-attention-num-buckets", "32", "31", "an even number of at least 4"),
        ("--relative-attention-max-distance", "17", "16", "use at least 17"),
        ("--decoder-seq-length", "64", "129", "is less than --decoder-seq-length 129"),
        ("--context-parallel-size", "1", "2", "does not support the padding masks of T5"),
    ],
)
def test_the_limits_of_a_t5(words: str, fits: str, beyond: str, said: str) -> None:
    words = (
        "--decoder-seq-length 128 --vocab-extra-ids 0 --max-position-embeddings 128 "
        f"--position-embedding-type relative {words} "
    )
    parse(f"{words}{fits}", architecture="t5")
    found = problems(f"{words}{beyond}", architecture="t5", world_size=2)
    assert any(said in line for line in found), found


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", None),
        ("2 a", None),
        ("1 a 2 b", None),
        ("a b c", None),
        ("1 a 2", "has 3 words: give one prefix, or pairs"),
        ("0 a", "'0' must be a weight above 0"),
        ("1 a -1 b", "'-1' must be a weight above 0"),
        ("1 a x b", "'x' must be a weight above 0"),
        ("1 ''", "contains an empty word"),
    ],
)
def test_the_words_that_name_corpora(words: str, said: str | None) -> None:
    words = f"--data-path {words or 'a'}"
    if said is None:
        parse(words, without=["--mock-data"])
    else:
        (line,) = problems(words, without=["--mock-data"])
        assert said in line


@pytest.mark.parametrize(
    ("words", "notice"),
    [
        ("--iterations-to-skip 0 39", None),
        ("--iterations-to-skip 40", "--iterations-to-skip 40 has no effect"),
        ("--profile --profile-windows 40-41", None),
        ("--profile --profile-windows 41-42", "--profile has no effect: the run ends at"),
        ("--profile --profile-step-start 41 --profile-step-end 42", "before --profile-step-start"),
        (f"{_FP8_VARIANCE} 0.98", None),
        (f"{_FP8_VARIANCE} 0.981", "use --adam-beta2 0.95"),
        (f"--bf16 {_DISCRETE} 8 128", None),
        (f"--bf16 {_DISCRETE} 4 128", "--curriculum-lengths 4: 16-bit matrix products"),
        (f"{_DISCRETE} 4 128", None),
    ],
)
def test_the_first_value_that_changes_nothing_or_is_slow(words: str, notice: str | None) -> None:
    notices = parse(words).notices
    assert (notice is None) == (not notices), notices
    assert all(notice is not None and notice in line for line in notices)
