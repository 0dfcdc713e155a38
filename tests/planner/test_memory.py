"""The memory estimate: exact where it is arithmetic, and growing with what costs memory."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.store import plan_save
from megatron.config.parser import parse_config
from megatron.config.stages import even_parts, whole_model
from megatron.device import Device
from megatron.models.arithmetic import (
    count_parameters,
    count_part_matrices,
    count_part_parameters,
)
from megatron.models.costs import WeightSplit
from megatron.models.freezing import trained_share
from megatron.models.plan import HeadSpec
from megatron.models.plans import model_plan
from megatron.parallel.layout import Layout
from megatron.planner.memory import amount, checkpoint_bytes, estimate_memory, largest_process
from megatron.training.checkpointing import state_of
from tests.training.toy import FLAGS_BY_KIND, TOY, build_toy, train_toy


def _estimate(*flags, world_size=1):
    words = [*TOY, "--train-iters", "1", *flags]
    config = parse_config(words, world_size=world_size).config
    return largest_process(config, model_plan(config.model, 104), world_size)


PARAMETERS = count_parameters(
    model_plan(parse_config([*TOY, "--train-iters", "1"], world_size=1).config.model, 104)
)


def _bytes(estimate):
    kept = (estimate.parameters, estimate.gradients, estimate.optimizer)
    return tuple(size / PARAMETERS for size in kept)


def test_bytes_of_what_is_kept_for_each_parameter():
    assert _bytes(_estimate()) == (4, 4, 8)
    assert _bytes(_estimate("--bf16")) == (2, 4, 12)
    assert _bytes(_estimate("--fp16")) == (2, 2, 12)
    assert _bytes(_estimate("--optimizer", "sgd")) == (4, 4, 4)
    assert _bytes(_estimate("--optimizer", "sgd", "--sgd-momentum", "0")) == (4, 4, 0)


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_the_other_kinds_are_counted_whole(kind):
    """Count one process, then two stages: together all layers, and the tied words twice."""
    words = [*TOY, "--train-iters", "1", "--num-layers", "8", *FLAGS_BY_KIND[kind]]
    config = parse_config(words, world_size=1, architecture=kind).config
    plan = model_plan(config.model, 104)
    parameters = count_parameters(plan)
    whole = largest_process(config, plan, 1)
    assert (whole.parameters, whole.optimizer) == (4 * parameters, 8 * parameters)
    words += ["--pipeline-model-parallel-size", "2"]
    half = parse_config(words, world_size=2, architecture=kind).config
    assert 0.5 < largest_process(half, plan, 2).parameters / whole.parameters < 0.8
    words += ["--recompute-granularity", "full", "--recompute-method", "uniform"]
    less = parse_config(words, world_size=2, architecture=kind).config
    assert largest_process(less, plan, 2).activations < largest_process(half, plan, 2).activations


def test_shared_states_shrink_with_the_processes():
    first = _estimate("--bf16", "--use-distributed-optimizer", world_size=4)
    second = _estimate("--bf16", "--zero-stage", "2", world_size=4)
    assert _bytes(first) == (2, 4, 3)
    assert _bytes(second) == (2, 1 + 4, 3)  # its shard, and one bucket that holds everything
    assert _estimate("--bf16", world_size=4) == _estimate("--bf16")


def test_whole_gradients_pass_two_buckets_at_a_time():
    """This holds in stage 2 with and without a pipeline."""
    sizes = ("--hidden-size", "1024", "--num-layers", "16", "--zero-stage", "2")
    for stages, world_size in ((1, 4), (2, 8)):
        words = (*sizes, "--pipeline-model-parallel-size", str(stages))
        estimate = _estimate(*words, world_size=world_size)
        assert estimate.gradients == estimate.parameters // 4 + 2 * 64 * 2**20
    wide = (*sizes, "--hidden-size", "8192")  # the MLP's 8192 x 32768 exceed a bucket
    estimate = _estimate(*wide, world_size=4)
    assert estimate.gradients == estimate.parameters // 4 + 2 * 4 * 8192 * 32768


def test_8_bit_layers_hold_their_matrices_and_transposes_besides():
    """However weights are gathered, the 8 bits that arrive are what is multiplied.

    The other parameters are then in a separate buffer, with a bucket of its own in backward.
    """
    matrices = 2 * 12 * 32 * 32
    for flags, size in (([], 1), (["--tensor-model-parallel-size", "2"], 2)):
        words = ["--bf16", *flags]
        fp8 = _estimate(*words, "--fp8-format", "hybrid", world_size=size)
        more = fp8.parameters - _estimate(*words, world_size=size).parameters
        assert more == 2 * matrices // size
    shared = "--bf16 --fp8-format hybrid --hidden-size 1024 --num-layers 16 --zero-stage".split()
    for stage, buckets in (("1", 0), ("2", 1)):
        plain = _estimate(*shared, stage, world_size=4)
        gathered = _estimate(*shared, stage, "--fp8-param-gather", world_size=4)
        apart = buckets * 4 * 16 * 13 * 1024  # biases and norms
        assert gathered == replace(plain, gradients=plain.gradients + apart)


@pytest.mark.parametrize("kind", ["gpt", "t5"])
def test_8_bit_layers_are_counted_as_they_are_built(kind):
    flags = ["--bf16", "--fp8-format", "hybrid", "--micro-batch-size", "4"]
    run = build_toy(Layout.single(), flags, kind)
    built = sum(weight.numel() for weight in run.layers.fp8_weights())
    plan = model_plan(run.config.model, run.plan.embedding.vocabulary)
    counted = count_part_matrices(plan, whole_model(len(plan.layers)), WeightSplit())
    assert counted == built


def test_sharded_weights_are_whole_a_few_layers_at_a_time():
    sizes = ("--num-layers", "64")
    alone = _estimate("--bf16", *sizes).parameters // 2
    third = _estimate("--bf16", "--zero-stage", "3", *sizes, world_size=4)
    assert third.parameters + third.gradients == pytest.approx(8 * alone // 4, rel=0.15)
    assert third.optimizer == 8 * (alone // 4)
    assert _estimate("--bf16", "--zero-stage", "3", *sizes).optimizer == 12 * alone


def test_offloading_moves_states_and_copies_to_the_host():
    for flags, states in ((["--bf16"], 12), ([], 12), (["--bf16", "--zero-stage", "3"], 12)):
        here = _estimate(*flags)
        there = _estimate(*flags, "--optimizer-cpu-offload")
        assert there.optimizer == 0
        assert there.parameters == here.parameters
        assert there.host == (states + 4) * PARAMETERS  # including gradients in transit
        assert "of host memory" in there.describe()
    # Gradients in transit have 16 bits, except where they are summed in shards of fp32.
    offloaded = ("--fp16", "--optimizer-cpu-offload")
    assert _estimate(*offloaded).host == (12 + 2) * PARAMETERS
    assert _estimate(*offloaded, "--zero-stage", "3", world_size=2).host == 16 * PARAMETERS // 2


def test_torch_ddp_has_buckets_of_its_own():
    theirs = _estimate("--DDP-impl", "torch", world_size=2)
    assert theirs.gradients == 2 * _estimate(world_size=2).gradients
    assert _estimate("--DDP-impl", "torch") == _estimate()


def test_a_split_model_needs_less_of_everything():
    alone = _estimate("--global-batch-size", "1")
    for flags in (
        ["--tensor-model-parallel-size", "2"],
        ["--pipeline-model-parallel-size", "2"],
    ):
        split = _estimate("--global-batch-size", "1", *flags, world_size=2)
        assert split.parameters < alone.parameters
        assert split.activations < alone.activations
    context = ["--context-parallel-size", "2", "--attention-dropout", "0"]
    assert _estimate(*context, world_size=2).activations < _estimate().activations


@pytest.mark.parametrize("kind", ["gpt", "bert"])
def test_gpipe_holds_what_every_loss_keeps_and_other_schedules_one(kind):
    """Measure what doubling the vocabulary adds on the last of two stages, in fp32."""
    micro_batches, tokens, hidden = 6, 16, 32
    logits, gradient = 4 * tokens * 104, 4 * 104 * hidden  # per micro-batch, per head
    for schedule, held in (
        ("gpipe", micro_batches),
        ("1f1b", 1),
        ("interleaved --num-layers 4 --num-layers-per-virtual-pipeline-stage 1", 1),
        ("zero-bubble", 1),
    ):
        words = f"--pipeline-model-parallel-size 2 --pipeline-schedule {schedule}".split()
        words = [*TOY, "--train-iters", "1", "--global-batch-size", str(micro_batches), *words]
        for more, expected in (
            ([], held * logits),
            (["--cross-entropy-fusion-impl", "linear"], logits + held * gradient),
        ):
            config = parse_config([*words, *more], world_size=2, architecture=kind).config
            small, large = (
                estimate_memory(
                    config,
                    model_plan(config.model, rows),
                    Layout.at(1, 2, pipeline=2),
                    micro_batches,
                )
                for rows in (104, 208)
            )
            assert large.activations - small.activations == expected, (schedule, more)


def test_recomputation_and_plain_attention_move_the_activations():
    full = ("--recompute-granularity", "full", "--recompute-method", "uniform",
            "--recompute-num-layers", "1")  # fmt: skip
    plain = _estimate("--no-masked-softmax-fusion").activations
    assert _estimate(*full).activations < _estimate().activations < plain
    selective = ("--no-masked-softmax-fusion", "--recompute-granularity", "selective")
    assert _estimate(*selective).activations < plain
    assert _estimate("--micro-batch-size", "2").activations == 2 * _estimate().activations


@pytest.mark.parametrize(("dropout", "each"), [("0", 8), ("0.1", 9)])
def test_plain_attention_keeps_scores_weights_and_a_mask(dropout, each):
    flags = ("--micro-batch-size", "2", "--attention-dropout", dropout)
    plain = _estimate(*flags, "--no-masked-softmax-fusion").activations
    scores = 2 * 2 * 16 * 16 * 4  # layers, samples, queries, keys, heads
    assert plain - _estimate(*flags).activations == each * scores


@pytest.mark.parametrize("method", ["uniform", "block"])
def test_tensor_ranks_may_divide_what_recomputation_keeps(method):
    flags = ["--tensor-model-parallel-size", "2", "--num-layers", "6"]
    flags += ["--recompute-granularity", "full", "--recompute-method", method]
    flags += ["--recompute-num-layers", "2"]
    whole, divided, along_sequence = (
        _estimate(*flags, *more, world_size=2).activations
        for more in (
            [],
            ["--distribute-saved-activations"],
            ["--distribute-saved-activations", "--sequence-parallel"],
        )
    )
    groups, boundary = {"uniform": 3, "block": 2}[method], 4 * 16 * 32
    assert whole - divided == groups * boundary // 2
    assert along_sequence == _estimate(*flags, "--sequence-parallel", world_size=2).activations


def test_each_text_of_a_sample_is_a_sequence():
    words = [*TOY, "--train-iters", "1", "--micro-batch-size", "2"]
    config = parse_config(words, world_size=1, architecture="bert").config
    four = largest_process(config, model_plan(config.model, 104, HeadSpec(1, sequences=4)), 1)
    words += ["--micro-batch-size", "8", "--global-batch-size", "8"]
    of_one = parse_config(words, world_size=1, architecture="bert").config
    assert four == largest_process(of_one, model_plan(config.model, 104, HeadSpec(1)), 1)


def test_what_neighbors_write_into_is_counted():
    flags = ("--bf16", "--tensor-model-parallel-size", "2", "--sequence-parallel")
    without = _estimate(*flags, world_size=2)
    estimate = _estimate(*flags, "--tp-comm-overlap", world_size=2)
    assert estimate.messages == 3 * 2 * 16 * 32  # slots, bytes, tokens, hidden size
    assert estimate.total == without.total + estimate.messages
    assert "messages" in estimate.describe()
    assert "messages" not in without.describe()


def test_units_are_readable():
    assert "MiB" in _estimate().describe()
    sizes = (1 << 20, (1 << 30) - 1, 1 << 30, 5 << 29)
    assert [amount(size) for size in sizes] == ["1.0 MiB", "1024.0 MiB", "1.00 GiB", "2.50 GiB"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_relative_positions_keep_their_biases(world_size):
    words = [*TOY, "--train-iters", "1", *FLAGS_BY_KIND["t5"], "--micro-batch-size", "2"]
    words += ["--tensor-model-parallel-size", str(world_size)]
    kept = []
    for kind in ("none", "relative"):
        flags = ["--position-embedding-type", kind]
        config = parse_config([*words, *flags], world_size=world_size, architecture="t5").config
        kept.append(largest_process(config, model_plan(config.model, 104), world_size).activations)
    bias = 4 * 4 * (2 * 16**2 + 12**2)  # bytes, heads, scores of both halves
    assert kept[1] - kept[0] == bias // world_size


def test_context_ranks_divide_the_activations():
    halves = _estimate("--context-parallel-size", "2", world_size=2).activations
    assert halves == _estimate().activations // 2


def test_sublayers_that_share_a_normalization_keep_its_output_once():
    kept = []
    for shares in (False, True):
        config = parse_config([*TOY, "--train-iters", "1"], world_size=1).config
        model = replace(config.model, parallel_residual=True, shared_parallel_norm=shares)
        config = replace(config, model=model)
        kept.append(largest_process(config, model_plan(model, 104), 1).activations)
    assert kept[0] - kept[1] == 2 * 4 * 16 * 32  # layers, bytes, tokens, hidden size


def test_a_system_without_proc_tells_the_peak_alone(monkeypatch):
    """This is the case on macOS."""
    monkeypatch.setattr(Path, "exists", lambda path: False)
    report = Device(torch.device("cpu")).memory()
    assert report.allocated == report.peak_allocated == report.reserved > 2**20


MIXTURE = "--num-layers 2 --num-experts 8 --moe-ffn-hidden-size 16 --disable-bias-linear".split()
EXPERTS = 2 * 8 * 2 * 16 * 32


def test_experts_are_counted_where_they_are():
    """Processes divide them, and their optimizer states are shared by fewer processes."""
    alone = _estimate(*MIXTURE)
    others = alone.parameters // 4 - EXPERTS
    for sizes, world, held, parts in (
        ("--expert-model-parallel-size 4", 4, EXPERTS // 4, 1),
        ("--expert-model-parallel-size 2", 4, EXPERTS // 2, 2),
        ("--expert-model-parallel-size 2 --use-distributed-optimizer", 4, EXPERTS // 2, 2),
    ):
        estimate = _estimate(*MIXTURE, *sizes.split(), world_size=world)
        assert estimate.parameters == 4 * (others + held), sizes
        states = others + held
        if "distributed" in sizes:
            states = others // world + held // parts
        assert estimate.optimizer == 8 * states, sizes


def test_split_experts_hold_fewer_activations():
    """Compare one process per part of the tokens with one process per part of an expert."""
    tensor = [*MIXTURE, "--tensor-model-parallel-size", "2", "--sequence-parallel"]
    split = _estimate(*tensor, world_size=2)
    whole = _estimate(*tensor, "--expert-tensor-parallel-size", "1", world_size=2)
    divided = [*tensor, "--expert-tensor-parallel-size", "1", "--expert-model-parallel-size", "2"]
    assert whole.parameters - split.parameters == 4 * EXPERTS // 2
    assert _estimate(*divided, world_size=2).parameters == split.parameters
    # Rows and outputs [k tokens, hidden] are not split; activations [k tokens, inner] are.
    tokens = 16
    rows = 2 * 4 * 2 * tokens // 2 * 2 * 32
    assert split.activations - whole.activations == rows


@pytest.mark.parametrize(
    "words",
    [
        "--freeze embedding",
        "--freeze layers.0 layers.2.mlp",
        "--lora-rank 4",
        "--lora-rank 4 --freeze layers.1",
    ],
)
def test_frozen_weights_have_no_gradients_or_states(words):
    """This holds for the estimate of each stage as for its part of the model."""
    flags = ["--num-layers", "4", *words.split()]
    config = parse_config([*TOY, "--train-iters", "1", *flags], world_size=1).config
    plan = model_plan(config.model, 104)
    parts = even_parts(4, 2)
    model = build_toy(Layout.single(), flags).parts[0]
    trained = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}

    def of(part):
        kinds = [f"layers.{i}." for i in part.layers]
        kinds += ["embedding."] * part.embedding
        kinds += ["final_norm.", "output."] * part.head
        return sum(size for name, size in trained.items() if name.startswith(tuple(kinds)))

    expected = [of(part) for part in parts]
    if any(name.startswith("embedding.") for name in trained):
        expected[1] += trained["embedding.word.weight"]  # the tied output layer
    shares = [trained_share(config.model, plan, [part]) for part in parts]
    sizes = [count_part_parameters(plan, part, WeightSplit()) for part in parts]
    assert [share * size for share, size in zip(shares, sizes, strict=True)] == pytest.approx(
        expected
    )
    found = largest_process(config, plan, 1)
    assert found.gradients == 4 * sum(trained.values())
    assert found.optimizer == 8 * sum(trained.values())


def test_a_teacher_is_counted_on_every_stage():
    """Each stage counts its part's weights; only the last stage holds logits."""
    flags = ["--num-layers", "4", "--pipeline-model-parallel-size", "2"]
    config = parse_config([*TOY, "--train-iters", "1", *flags], world_size=2).config
    wide = ["--num-layers", "3", "--hidden-size", "64"]
    theirs = parse_config([*TOY, "--train-iters", "1", *wide], world_size=1).config.model
    plan, teacher = model_plan(config.model, 104), model_plan(theirs, 104)
    both = replace(plan, teacher=teacher)
    found = [
        [estimate_memory(config, one, Layout.at(stage, 2, pipeline=2), 4) for one in (plan, both)]
        for stage in range(2)
    ]
    weights = [4 * count_part_parameters(teacher, part, WeightSplit()) for part in even_parts(3, 2)]
    logits, hidden = 4 * 16 * 104, 4 * 16 * 64
    assert [with_it.teacher for _, with_it in found] == [weights[0], weights[1] + logits + hidden]
    for without, with_it in found:
        assert with_it.total - without.total == with_it.teacher
        assert "teacher" in with_it.describe()
        assert "teacher" not in without.describe()


_PRECISION_AWARE = "--bf16 --use-precision-aware-optimizer --use-distributed-optimizer"


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("--bf16", "gpt"),
        ("--bf16 --zero-stage 3 --no-save-optim", "gpt"),
        ("--optimizer sgd --sgd-momentum 0", "gpt"),
        ("--optimizer muon --bf16 --untie-embeddings-and-output-weights", "gpt"),
        ("--bf16 --lora-rank 2 --lora-target-modules all-linear", "gpt"),
        ("--bf16 --freeze layers.0", "gpt"),
        ("--bf16 --num-experts 4 --moe-router-topk 2", "gpt"),
        (f"{_PRECISION_AWARE} --exp-avg-dtype bf16 --exp-avg-sq-dtype fp8", "gpt"),
        (f"{_PRECISION_AWARE} --exp-avg-sq-dtype fp16 --main-params-dtype fp16", "gpt"),
        (f"{_PRECISION_AWARE} --exp-avg-dtype bf16 --ckpt-format torch_dist", "gpt"),
        ("", "bert"),
        ("--bf16", "t5"),
        ("", "ict"),
    ],
)
def test_the_size_of_a_checkpoint_is_known_before_it_is_saved(words, kind):
    run = build_toy(Layout.single(), words.split(), kind)
    assert (
        checkpoint_bytes(run.config, run.plan) == plan_save(state_of(run), run.layout).total_bytes
    )


@pytest.mark.parametrize("words", ["--ema-decay 0.9", "--lawa-interval 1 --lawa-window 2"])
def test_averages_are_saved_too(words):
    _, run = train_toy(Layout.single(), [*words.split(), "--train-iters", "2"])
    assert (
        checkpoint_bytes(run.config, run.plan) == plan_save(state_of(run), run.layout).total_bytes
    )
