"""The table of checks: for each rule, a run that it refuses, with the line that the user sees."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.config.checks import find_problems
from megatron.config.fields import divisors
from megatron.config.parser import parse_config
from megatron.config.resolve import resolve
from megatron.config.run import RunOptions, with_values
from tests.config.command import BASE, parse, problems

_SAMPLES = ("--train-samples 1000", ("--train-iters",))
_OFFLOADED = "--fine-grained-activation-offloading --offload-modules"
_LINES = [
    # the optimizer
    ("--adam-beta1 1", "--adam-beta1 1.0: must be at least 0 and below 1"),
    ("--adam-beta2 1", "--adam-beta2 1.0: must be at least 0 and below 1"),
    ("--adam-beta2 -0.1", "--adam-beta2 -0.1: must be at least 0 and below 1"),
    ("--ema-decay 1", "--ema-decay 1.0: must be above 0 and below 1"),
    ("--ema-decay 0", "--ema-decay 0.0: must be above 0 and below 1"),
    ("--optimizer muon --muon-momentum 1.5", "--muon-momentum 1.5: must be above 0 and below 1"),
    (
        "--optimizer muon --optimizer-cpu-offload",
        "--optimizer muon with --optimizer-cpu-offload: a CPU is too slow for its matrix "
        "products: save memory with --zero-stage 1 to 3, or use --optimizer adam",
    ),
    (
        "--optimizer muon --muon-num-ns-steps 6",
        "--muon-num-ns-steps 6 is not divisible by 5, the coefficients of --muon-coefficient-type "
        "quintic: use simple, or another number",
    ),
    (
        "--optimizer muon --group-query-attention --num-query-groups 2 "
        "--tensor-model-parallel-size 4",
        "--muon-tp-mode blockwise with --num-query-groups 2 and --tensor-model-parallel-size 4: a "
        "process has no whole group of queries, keys and values: use --muon-tp-mode duplicated, or "
        "--muon-no-split-qkv",
    ),
    # layout and network, 8 processes
    (
        "--num-attention-heads 12 --hidden-size 96 --tensor-model-parallel-size 8",
        "--num-attention-heads 12 is not divisible by --tensor-model-parallel-size 8: "
        "use 1, 2, 3, 4, 6 or 12",
    ),
    (
        "--tensor-model-parallel-size 3",
        "--num-attention-heads 4, --ffn-hidden-size 256 and --hidden-size 64 are not divisible by "
        "--tensor-model-parallel-size 3: use 1, 2 or 4",
    ),
    (
        "--tensor-model-parallel-size 3 --num-attention-heads 6 --hidden-size 96",
        "--tensor-model-parallel-size 3 x --pipeline-model-parallel-size 1 x "
        "--context-parallel-size 1 = 3 does not divide the number of launched processes, 8: "
        "launch a multiple of 3",
    ),
    (
        "--num-layers 6 --pipeline-model-parallel-size 4",
        "--num-layers 6 does not divide evenly over --pipeline-model-parallel-size 4 x 1 virtual "
        "stage: use a multiple of 4, or set the layers of each stage with "
        "--pipeline-model-parallel-layout or --decoder-first-pipeline-num-layers and "
        "--decoder-last-pipeline-num-layers",
    ),
    (
        "--context-parallel-size 4 --attention-dropout 0 --seq-length 124",
        "--seq-length 124 is not divisible by 2 x --context-parallel-size 4: each process takes an "
        "early and a late piece: use a multiple of 8",
    ),
    (
        "--context-parallel-size 4 --cp-comm-type a2a --num-attention-heads 6 --hidden-size 96",
        "--num-attention-heads 6 is not divisible by --context-parallel-size 4 x "
        "--tensor-model-parallel-size 1 = 4, as --cp-comm-type a2a requires: use "
        "--cp-comm-type p2p, or fewer processes",
    ),
    (
        "--context-parallel-size 4 --cp-comm-type a2a --group-query-attention --num-query-groups 2",
        "--num-query-groups 2 is not divisible by --context-parallel-size 4 x "
        "--tensor-model-parallel-size 1 = 4, as --cp-comm-type a2a requires: use "
        "--cp-comm-type p2p, or fewer processes",
    ),
    (
        "--hidden-size 66",
        "--hidden-size 66 is not divisible by --num-attention-heads 4: use a multiple of 4, or "
        "set the size of a head with --kv-channels",
    ),
    (
        "--group-query-attention --num-query-groups 3",
        "--num-attention-heads 4 is not divisible by --num-query-groups 3: use 1, 2 or 4",
    ),
    (
        "--num-attention-heads 24 --hidden-size 96 --group-query-attention --num-query-groups 6 "
        "--tensor-model-parallel-size 4",
        "--num-query-groups 6 neither divides nor is divided by --tensor-model-parallel-size 4: "
        "use 1, 2, 3 or 6, or a multiple of 6",
    ),
    (
        "--group-query-attention --kv-channels 3 --tensor-model-parallel-size 4",
        "2 x --num-query-groups 1 x --kv-channels 3 = 6 rows of keys and values are not divisible "
        "by --tensor-model-parallel-size 4: use 1, 2, 3 or 6",
    ),
    (
        "--seq-length 130 --tensor-model-parallel-size 4 --sequence-parallel",
        "--seq-length 130 is not divisible by --tensor-model-parallel-size 4 x "
        "--context-parallel-size 1 = 4, as --sequence-parallel requires: use 128 or 132",
    ),
    (
        "--distribute-saved-activations --recompute-activations",
        "--distribute-saved-activations requires --recompute-granularity full: add it, or drop "
        "the flag",
    ),
    (
        "--max-position-embeddings 64",
        "--max-position-embeddings 64 is less than --seq-length 128: use at least 128",
    ),
    ("--rotary-percent 0", "--rotary-percent 0.0: must be above 0"),
    (
        "--position-embedding-type rope --rotary-percent 0",
        "--rotary-percent 0.0: must be above 0",
    ),
    ("--local-rank 32768", "--local_rank 32768: must be at most 32767"),
    (
        "--position-embedding-type rope --kv-channels 15",
        "--rotary-percent 1.0 of --kv-channels 15 rotates 15 channels, but channels rotate in "
        "pairs: choose values that give an even number",
    ),
    (
        "--use-rope-scaling",
        "--use-rope-scaling requires --position-embedding-type rope: add it, or drop the flag",
    ),
    (
        "--position-embedding-type rope --use-rope-scaling --rotary-seq-len-interpolation-factor 2",
        "--use-rope-scaling and --rotary-seq-len-interpolation-factor 2 both extend the context: "
        "use one of them",
    ),
    (
        "--swiglu --squared-relu",
        "--swiglu and --squared-relu: an MLP has a single activation function: use one of them",
    ),
    ("--num-layers 0", "--num-layers 0: must be at least 1"),
    ("--norm-epsilon 0", "--norm-epsilon 0.0: must be above 0"),
    ("--hidden-dropout 1", "--hidden-dropout 1.0: must be at least 0 and below 1"),
    ("--seed 4294967296", "--seed 4294967296: must be at most 4294967295"),
    (
        "--lr-decay-style WSD",
        "--lr-decay-style WSD requires the length of its final decay: give --lr-wsd-decay-iters "
        "or --lr-wsd-decay-samples",
    ),
    (
        "--lr-wsd-decay-iters 5",
        "--lr-wsd-decay-iters 5 requires --lr-decay-style WSD: add it, or drop the flag",
    ),
    (
        "--lr-decay-style cosine --lr-wsd-decay-style linear",
        "--lr-wsd-decay-style linear requires --lr-decay-style WSD: add it, or drop the flag",
    ),
    ("--lr-decay-style WSD --lr-wsd-decay-iters 0", "--lr-wsd-decay-iters 0: must be at least 1"),
    # precision
    ("--fp16 --bf16", "--fp16 and --bf16 cannot be combined: use one of them"),
    ("--use-flash-attn", "--use-flash-attn requires --fp16 or --bf16: add it, or drop the flag"),
    (
        "--fp32-residual-connection",
        "--fp32-residual-connection requires --fp16 or --bf16: add it, or drop the flag",
    ),
    (
        "--no-cross-entropy-loss-fusion --cross-entropy-fusion-impl linear",
        "--cross-entropy-fusion-impl linear cannot be combined with "
        "--no-cross-entropy-loss-fusion: drop one of them",
    ),
    (
        "--fp16-lm-cross-entropy --bf16",
        "--fp16-lm-cross-entropy requires --fp16: add it, or drop the flag",
    ),
    (
        "--fp16 --initial-loss-scale 4 --min-loss-scale 8",
        "--min-loss-scale 8 is above --initial-loss-scale 4: lower it",
    ),
    # batches, length, schedules
    (
        "--global-batch-size 48",
        "--global-batch-size 48 is not divisible by --micro-batch-size 4 x data-parallel "
        "size 8 = 32: use 32 or 64",
    ),
    (
        "--global-batch-size 8",
        "--global-batch-size 8 is not divisible by --micro-batch-size 4 x data-parallel "
        "size 8 = 32: use 32",
    ),
    (
        "--eval-global-batch-size 20",
        "--eval-global-batch-size 20 is not divisible by --micro-batch-size 4 x data-parallel "
        "size 8 = 32: give --eval-global-batch-size 32",
    ),
    (
        "--eval-global-batch-size 40 --eval-micro-batch-size 2",
        "--eval-global-batch-size 40 is not divisible by --eval-micro-batch-size 2 x data-parallel "
        "size 8 = 16: give --eval-global-batch-size 32 or 48",
    ),
    (
        "--eval-micro-batch-size 8",
        "--global-batch-size 32, with which evaluations run, is not divisible by "
        "--eval-micro-batch-size 8 x data-parallel size 8 = 64: give --eval-global-batch-size 64",
    ),
    (
        "--rampup-batch-size 32 32 1000 --global-batch-size 96",
        "--rampup-batch-size 32 32 1000 counts samples: give the length as --train-samples, not "
        "--train-iters",
    ),
    (
        "--train-samples 5",
        "--train-iters 40 and --train-samples 5 cannot be combined: use one of them",
    ),
    ("--train-iters 0", "--train-iters 0: must be at least 1; use --skip-train to evaluate only"),
    (
        "--lr-decay-samples 100",
        "--lr-decay-samples 100 requires --train-samples, but this run has --train-iters 40: use "
        "--lr-decay-iters",
    ),
    ("--min-lr 0.01", "--min-lr 0.01 is above --lr 0.001: lower it"),
    ("--lr-warmup-init 0.01", "--lr-warmup-init 0.01 is above --lr 0.001: lower it"),
    (
        "--override-opt_param-scheduler --use-checkpoint-opt_param-scheduler",
        "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler cannot be "
        "combined: use one of them",
    ),
    (
        "--lr-warmup-fraction 0.1 --lr-warmup-iters 3",
        "--lr-warmup-iters 3 and --lr-warmup-fraction 0.1 cannot be combined: use one of them",
    ),
    ("--lr-warmup-iters 40", "--lr-warmup-iters 40 must be less than --train-iters 40: lower it"),
    (
        "--lr-warmup-iters 20 --lr-decay-iters 20",
        "--lr-warmup-iters 20 must be less than --lr-decay-iters 20: lower it",
    ),
    (
        "--start-weight-decay 0.1",
        "--start-weight-decay 0.1 differs from --weight-decay 0.01: drop it with "
        "--weight-decay-incr-style constant, or use linear or cosine",
    ),
    (
        "--weight-decay-incr-style linear",
        "--weight-decay-incr-style linear requires both --start-weight-decay and "
        "--end-weight-decay",
    ),
    (
        "--weight-decay-incr-style cosine --start-weight-decay 0.2 --end-weight-decay 0.1",
        "--end-weight-decay 0.1 is below --start-weight-decay 0.2: raise it",
    ),
    # recomputation
    (
        "--recompute-activations --recompute-method block",
        "--recompute-method block requires --recompute-granularity full: add it, or drop the flag",
    ),
    (
        "--recompute-activations --recompute-granularity full --recompute-method block",
        "--recompute-activations means --recompute-granularity selective and cannot be combined "
        "with --recompute-granularity full: use one of them",
    ),
    (
        "--recompute-granularity full",
        "--recompute-granularity full requires --recompute-method uniform or block",
    ),
    (
        "--recompute-method block",
        "--recompute-method block requires --recompute-granularity full: add it, or drop the flag",
    ),
    (
        "--recompute-num-layers 2",
        "--recompute-num-layers 2 requires --recompute-granularity full: add it, or drop the flag",
    ),
    (
        "--recompute-granularity full --recompute-method block --recompute-num-layers 5",
        "--recompute-num-layers 5 is above --num-layers 4: use 1 to 4",
    ),
    (
        "--fine-grained-activation-offloading",
        "--fine-grained-activation-offloading requires --offload-modules: name at least one module",
    ),
    (
        "--fine-grained-activation-offloading --offload-modules expert_fc1",
        "--offload-modules expert_fc1 requires --num-experts: drop expert_fc1",
    ),
    (
        f"{_OFFLOADED} mlp_norm --parallel-residual --shared-parallel-norm",
        "--offload-modules mlp_norm with --shared-parallel-norm, which leaves only attn_norm: "
        "drop mlp_norm",
    ),
    (
        f"{_OFFLOADED} mlp_norm core_attn --norm-placement after",
        "--offload-modules attn_norm and mlp_norm are the normalizations before attention and "
        "MLP, which --norm-placement after leaves out: drop them",
    ),
    (
        "--num-layers-per-virtual-pipeline-stage 1",
        "4 virtual stages require a pipeline: give --pipeline-model-parallel-size, or drop "
        "--num-layers-per-virtual-pipeline-stage",
    ),
    # running
    (
        "--check-weight-hash-across-dp-replicas-interval 10 --zero-stage 3",
        "--check-weight-hash-across-dp-replicas-interval 10 with --zero-stage 3: each process "
        "holds its own shard of the weights, so there are no copies to compare: use --zero-stage "
        "0, 1 or 2, or drop the flag",
    ),
    ("--on-spike skip --spike-window 1", "--spike-window 1: must be at least 2"),
    ("--on-spike skip --max-spikes 0", "--max-spikes 0: must be at least 1"),
    (
        "--on-spike skip --spike-loss-threshold 0",
        "--spike-loss-threshold 0.0: must be above 0",
    ),
    (
        "--on-spike skip --spike-grad-norm-threshold 0",
        "--spike-grad-norm-threshold 0.0: must be above 0",
    ),
    (
        "--on-nonfinite skip --max-nonfinite-skips 0",
        "--max-nonfinite-skips 0: must be at least 1",
    ),
    (
        "--on-spike rewind",
        "--on-spike rewind goes back to the last checkpoint: give --save and --save-interval, or "
        "use --on-spike skip",
    ),
    (
        "--on-spike rewind --save here --save-interval 5 --no-save-optim",
        "--on-spike rewind with --no-save-optim: the checkpoints contain no optimizer state to "
        "go back to: drop --no-save-optim, or use --on-spike skip",
    ),
    (
        "--on-nonfinite skip --no-check-for-nan-in-loss-and-grad",
        "--on-nonfinite skip requires the check that --no-check-for-nan-in-loss-and-grad turns "
        "off: drop one of them",
    ),
    ("--log-sample-ids", "--log-sample-ids requires --save: add it, or drop the flag"),
    (
        "--dry-run-world-size 4",
        "--dry-run-world-size 4 requires --dry-run: add it, or drop the flag",
    ),
    (
        "--profile --profile-step-end 10",
        "--profile-step-end 10 must be above --profile-step-start 10: raise it",
    ),
    (
        "--profile --profile-windows 4-6 8",
        "--profile-windows 4-6 8: give each window as FIRST-END, for example 10-12 1000-1002",
    ),
    (
        "--profile --profile-windows 4-6 5-8",
        "--profile-windows 4-6 5-8: give windows in order that do not overlap, and END above FIRST",
    ),
    (
        "--profile --profile-ranks 0 8",
        "--profile-ranks 8: the ranks of this run are 0 to 7: use those",
    ),
    ("--wandb-name x", "--wandb-name x requires --wandb-project: add it, or drop the flag"),
    (
        "--iterations-to-skip 3 -1",
        "--iterations-to-skip -1: iterations are counted from 0: use the number in the log minus 1",
    ),
    # data
    ("--data-path corpus", "--mock-data and --data-path cannot be combined: use one of them"),
    (
        "--split 0,0,0",
        "--split '0,0,0': expected up to three shares of at least 0, not all 0, such as "
        "'969, 30, 1'",
    ),
    (
        "--tokenizer-type GPT2BPETokenizer --vocab-file v",
        "--tokenizer-type GPT2BPETokenizer requires --merge-file: add it",
    ),
]


@pytest.mark.parametrize(("words", "line"), _LINES, ids=[words for words, _ in _LINES])
def test_a_mistake_and_its_line(words: str, line: str) -> None:
    lines = problems(words, world_size=8)
    if "parallel-size" in words:  # model parallelism is refused as well
        assert line in lines
    else:
        assert lines == [line]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("8 8", "--rampup-batch-size 8 8: expected three numbers: START INCREMENT SAMPLES"),
        (
            "8 0 100",
            "--rampup-batch-size 8 0 100: start, increment and samples must be at least 1",
        ),
        ("8 8 0", "--rampup-batch-size 8 8 0: start, increment and samples must be at least 1"),
        (
            "72 8 100",
            "--rampup-batch-size 72 8 100 starts above --global-batch-size 64: start with at "
            "most 64",
        ),
        (
            "8 24 100",
            "--rampup-batch-size 8 24 100 does not reach --global-batch-size 64 in steps of 24: "
            "64 - 8 must be a multiple of 24",
        ),
        (
            "4 4 100",
            "--rampup-batch-size 4 4 100: start and increment must be multiples of "
            "--micro-batch-size x data-parallel processes = 8",
        ),
    ],
)
def test_the_form_of_a_ramp(words: str, line: str) -> None:
    words = f"--rampup-batch-size {words} --global-batch-size 64 {_SAMPLES[0]}"
    assert problems(words, without=_SAMPLES[1], world_size=2) == [line]


def test_a_ramp_to_the_smallest_batch() -> None:
    words = f"--rampup-batch-size 2 1 10 --micro-batch-size 1 --global-batch-size 1 {_SAMPLES[0]}"
    assert problems(words, without=_SAMPLES[1]) == [
        "--rampup-batch-size 2 1 10 starts above --global-batch-size 1: start with at most 1"
    ]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--lr-decay-iters 20", "--lr-decay-iters 20 requires --train-iters, but this run has"),
        ("--lr-warmup-iters 2", "--lr-warmup-iters 2 requires --train-iters, but this run has"),
    ],
)
def test_a_run_that_counts_samples(words: str, line: str) -> None:
    lines = problems(words, _SAMPLES[0], without=_SAMPLES[1])
    assert [text for text in lines if text.startswith(line)] == lines


@pytest.mark.parametrize(
    "name", [name for name in BASE if name not in ("--mock-data", "--vocab-size")]
)
def test_what_a_run_needs(name: str) -> None:
    (line,) = problems(without=[name])
    assert name in line
    assert "required" in line


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--num-query-groups 2", "--num-query-groups 2 has no effect without"),
        (
            "--num-query-groups 3 --dry-run --dry-run-world-size 2 --tensor-model-parallel-size 2",
            "--num-query-groups 3 has no effect without",
        ),
        ("--save-interval 5", "--save-interval 5 has no effect without --save"),
        (
            "--profile --profile-windows 2-3 --profile-step-start 5",
            "--profile-step-start 5 has no effect without --profile, or with --profile-windows",
        ),
        ("--ckpt-format legacy", "--ckpt-format legacy has no effect without --save"),
        (
            "--cp-comm-type a2a",
            "--cp-comm-type a2a has no effect without --context-parallel-size",
        ),
        (
            "--save x --save-interval 1 --ckpt-format legacy --bf16 --fp8-format hybrid "
            "--fp8-recipe delayed",
            "--ckpt-format legacy: Megatron-LM's files cannot store the amax history",
        ),
        (
            "--save x --save-interval 1 --ckpt-format legacy --lr-decay-style WSD "
            "--lr-wsd-decay-iters 2",
            "--ckpt-format legacy: Megatron-LM 23.08 does not support --lr-decay-style WSD",
        ),
        (
            "--iterations-to-skip 5 40 41",
            "--iterations-to-skip 40 41 has no effect: the run ends earlier, at --train-iters 40",
        ),
        ("--skip-train", "--skip-train without --load: evaluating an untrained model"),
        ("--no-persist-layer-norm", "--no-persist-layer-norm: there is a single LayerNorm kernel"),
        ("--use-cpu-initialization", "--use-cpu-initialization: every device draws"),
        (
            "--sequence-parallel",
            "--sequence-parallel: no effect with a single tensor-parallel process",
        ),
        (
            "--distribute-saved-activations --recompute-granularity full "
            "--recompute-method uniform",
            "--distribute-saved-activations: one tensor-parallel process: there is nothing left",
        ),
        ("--lazy-mpu-init yes", "--lazy-mpu-init: the entry script creates process groups once"),
    ],
)
def test_what_changes_nothing_is_reported_once(words: str, line: str) -> None:
    (notice,) = parse(words).notices
    assert notice.startswith(line)


@pytest.mark.parametrize(
    "words",
    [
        f"{_OFFLOADED} mlp_norm --parallel-residual",
        f"{_OFFLOADED} core_attn --norm-placement after",
        "--num-layers-per-virtual-pipeline-stage 4",
    ],
)
def test_what_is_almost_a_mistake_is_accepted(words: str) -> None:
    assert parse(words)


@pytest.mark.parametrize("words", ["", "--no-persist-layer-norm --lazy-mpu-init no"])
def test_a_quiet_run(words: str) -> None:
    assert len(parse(words).notices) == (1 if words else 0)


def test_a_dry_run_may_pretend_any_world() -> None:
    run = parse("--dry-run --dry-run-world-size 512", world_size=1)
    assert run.config.training.global_batch_size == 2048


def test_nonsense_values_give_lines_not_crashes() -> None:
    for value in (0, -1):
        paths = [
            "model.num_layers",
            "model.hidden_size",
            "model.num_attention_heads",
            "model.num_query_groups",
            "model.ffn_hidden_size",
            "model.kv_channels",
            "data.seq_length",
            "training.micro_batch_size",
            "training.global_batch_size",
            "parallel.tensor_model_parallel_size",
            "parallel.pipeline_model_parallel_size",
            "parallel.context_parallel_size",
        ]
        config = resolve(with_values(RunOptions(), dict.fromkeys(paths, value)), 8)
        assert len(find_problems(config, 8)) >= len(paths)


def test_huge_values_are_checked_at_once() -> None:
    assert divisors(12) == "1, 2, 3, 4, 6 or 12"
    assert divisors(1) == "1"
    assert divisors(2**60).endswith("or 1024")


def test_the_golden_run_parses_as_it_was(golden: Path) -> None:
    args = json.loads((golden / "gpt_fp32" / "run.json").read_text())["args"]
    words = [
        *("--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128").split(),
        *("--max-position-embeddings 128 --micro-batch-size 4 --global-batch-size 16").split(),
        *("--train-iters 40 --lr 0.001 --min-lr 0.0001 --lr-decay-style cosine").split(),
        *("--lr-decay-iters 40 --lr-warmup-fraction 0.1 --attention-dropout 0").split(),
        *("--hidden-dropout 0 --no-masked-softmax-fusion --no-bias-gelu-fusion").split(),
        *("--no-bias-dropout-fusion --no-gradient-accumulation-fusion").split(),
        *("--no-async-tensor-model-parallel-allreduce --no-persist-layer-norm").split(),
        *("--save ckpt --save-interval 20 --eval-iters 5 --eval-interval 20").split(),
        *("--log-interval 1 --distributed-timeout-minutes 3 --split 949,50,1").split(),
        *("--data-path data/gpt_text_document --data-cache-path cache").split(),
        *("--tokenizer-type GPT2BPETokenizer --vocab-file data/gpt2-tiny-vocab.json").split(),
        *("--merge-file data/gpt2-tiny-merges.txt --local_rank 0").split(),
    ]
    config = parse_config(words, world_size=1).config
    for section in vars(config).values():
        for name, value in vars(section).items():
            others = ("exit_signal_handler", "dataloader_type", "transformer_impl")
            if name not in args or name in others:
                continue
            recorded = args[name]
            recorded = tuple(recorded) if isinstance(recorded, list) else recorded
            assert value == recorded or (value, recorded) == (False, None), name


def test_the_llama_2_script_runs_as_written() -> None:
    run = parse(
        "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 "
        "--seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 "
        "--global-batch-size 1024 --lr 1e-4 --min-lr 3.3e-6 --lr-decay-style cosine "
        "--weight-decay 0.1 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95 --bf16 "
        "--use-flash-attn --use-rotary-position-embeddings --normalization RMSNorm "
        "--norm-epsilon 1e-5 --no-position-embedding --no-masked-softmax-fusion "
        "--no-query-key-layer-scaling --untie-embeddings-and-output-weights "
        "--disable-bias-linear --swiglu --attention-dropout 0 --hidden-dropout 0 "
        "--tokenizer-type Llama2Tokenizer --tokenizer-model tokenizer.model --use-mpi "
        "--train-iters 25000 --data-path 0.6 one 0.4 two --distributed-backend nccl "
        "--wandb-project p --wandb-entity e --wandb-name n --sequence-parallel",
        without=list(BASE),
        world_size=8,
    )
    assert run.config.model.position_embedding_type == "rope"
    assert run.config.model.ffn_hidden_size == 11008
    assert run.config.precision.apply_query_key_layer_scaling is False
    assert run.config.parallel.use_mpi
    assert len(run.notices) == 4


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_one_wrong_tensor_parallel_size_is_one_mistake(world: int) -> None:
    (line,) = problems("--tensor-model-parallel-size 3", world_size=world)
    assert line.endswith("--tensor-model-parallel-size 3: use 1, 2 or 4")
