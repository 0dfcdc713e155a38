"""Training with sharded optimizer states and overlap: the results of a single process."""

from contextlib import contextmanager

import pytest
import torch

from megatron.checkpoint.loading import open_checkpoint
from megatron.config.parser import parse_config
from megatron.errors import ConfigError
from megatron.parallel.gradients import GradientBuffer, Reducer
from megatron.parallel.layout import Layout
from megatron.training import gradient_sharing
from megatron.training.checkpointing import save_run
from tests.checkpoint.states import read_whole
from tests.distributed import run_sharing_memory, toy_device
from tests.training.toy import TOY, build_toy, fingerprint, train_toy

STAGE_1 = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
STAGE_2 = ["--zero-stage", "2", "--overlap-grad-reduce", "--overlap-param-gather"]
FP16 = ["--fp16", "--initial-loss-scale", "1024"]
# Shards sum the norm in another order, which clipping would carry into the weights.
UNCLIPPED = ["--clip-grad", "0", "--eval-interval", "100", "--eval-iters", "0"]


def _small_buckets():
    """Use small buckets, only in this process."""
    gradient_sharing.BUCKET_BYTES = 2**13


def _train(layout, arguments):
    _small_buckets()
    recorder, run = train_toy(layout, [*UNCLIPPED, *arguments])
    assert len(run.gradients.plan.flats[0].buckets) > 5
    return recorder.values("lm loss"), recorder.values("grad-norm"), fingerprint(run)


@pytest.mark.parametrize("precision", [[], ["--bf16"], FP16], ids=["fp32", "bf16", "fp16"])
def test_stages_and_overlap_change_nothing(precision):
    """Four processes with one micro-batch each give equal bits."""
    recorder, _ = train_toy(Layout.single(), [*UNCLIPPED, *precision])
    losses, norms = recorder.values("lm loss"), recorder.values("grad-norm")
    (reference, *_), *_ = run_sharing_memory(4, _train, precision)
    assert reference == pytest.approx(losses, rel=1e-5 if not precision else 1e-3)
    for flags in (["--overlap-grad-reduce"], ["--zero-stage", "1"], STAGE_1, STAGE_2):
        for rank_losses, rank_norms, _ in run_sharing_memory(4, _train, [*precision, *flags]):
            if toy_device().is_gpu and "--fp16" in precision:
                assert rank_losses == pytest.approx(reference, rel=1e-5), flags
            else:
                assert rank_losses == reference, flags
            assert rank_norms == pytest.approx(norms, rel=1e-4 if not precision else 1e-2)


@pytest.mark.parametrize("flags", [STAGE_1, STAGE_2], ids=["stage 1", "stage 2"])
def test_several_micro_batches_and_clipping(flags):
    recorder, _ = train_toy(Layout.single(), ["--clip-grad", "0.5"])
    losses = recorder.values("lm loss")
    for ours, *_ in run_sharing_memory(2, _train, [*flags, "--clip-grad", "0.5"]):
        assert ours == pytest.approx(losses, rel=1e-5)


def _steps(folder):
    return ["--save", str(folder), "--save-interval", "3", "--exit-interval", "3"]


@pytest.mark.parametrize("flags", [STAGE_1, [*STAGE_2, "--bf16"]], ids=["fp32 1", "bf16 2"])
def test_resuming_in_the_same_layout_is_bit_for_bit(tmp_path, flags):
    whole = run_sharing_memory(2, _train, flags)
    first = run_sharing_memory(2, _train, [*flags, *_steps(tmp_path)])
    second = run_sharing_memory(2, _train, [*flags, "--load", str(tmp_path)])
    for a, b, joined in zip(first, second, whole, strict=True):
        assert len(a[0]) == 3
        assert a[0] + b[0] == joined[0]
        assert b[2] == joined[2]


def _train_pipeline(layout, arguments):
    """Return losses, norms, tied embeddings here, and whole buckets after each backward wave."""
    _small_buckets()
    left = []
    run_wave = GradientBuffer.micro_batch

    @contextmanager
    def watched(buffer, **options):
        with run_wave(buffer, **options):
            yield
        left.append(sum(bucket.whole is not None for bucket in buffer._reducer.buckets))

    GradientBuffer.micro_batch = watched  # only in this process
    recorder, run = train_toy(layout, [*DEEPER, "--pipeline-model-parallel-size", "2", *arguments])
    buffer = run.gradients
    assert len(buffer.plan.order) > 4
    kept = sum(storage.numel() for storage in buffer._storages)
    assert kept * layout.replica.size == sum(flat.elements for flat in buffer.plan.flats)
    tied = [tie.copy.detach().float().sum(dim=0).tolist() for tie in run.ties]
    return recorder.values("lm loss"), recorder.values("grad-norm"), tied, left


DEEPER = "--num-layers 4 --global-batch-size 8 --hidden-dropout 0 --attention-dropout 0".split()
VIRTUAL = ["--num-layers-per-virtual-pipeline-stage", "1", "--overlap-grad-reduce"]


@pytest.mark.parametrize(
    "flags",
    [["--bf16"], VIRTUAL, ["--bf16", "--pipeline-schedule", "zero-bubble"]],
    ids=["1f1b bf16", "interleaved", "zero-bubble bf16"],
)
def test_stage_2_in_a_pipeline_keeps_shards_only(flags):
    """Each wave has several buckets; embeddings at both ends are tied; no bucket stays whole."""
    numbers = [flag for flag in flags if flag == "--bf16"]
    recorder, _ = train_toy(Layout.single(), [*DEEPER, *numbers])
    losses, norms = recorder.values("lm loss"), recorder.values("grad-norm")
    flags = ["--zero-stage", "2", *flags]
    ranks = run_sharing_memory(4, _train_pipeline, flags, pipeline=2)
    assert len(ranks[0][2]) == 1
    for ours, our_norms, tied, left in ranks:
        assert ours == pytest.approx(losses, rel=2e-3 if numbers else 1e-5)
        assert our_norms == pytest.approx(norms, rel=3e-2 if numbers else 1e-4)
        assert tied == ranks[0][2]
        assert len(left) >= 24
        assert not any(left)


def _most_whole_buckets(layout, words):
    """Return how many buckets of stage 2 are whole at once at most, and how many there are."""
    gradient_sharing.BUCKET_BYTES = 2**10
    most, whole = 0, Reducer.whole

    def watched(reducer, bucket):
        nonlocal most
        gradients = whole(reducer, bucket)
        most = max(most, sum(one.whole is not None for one in reducer.buckets))
        return gradients

    Reducer.whole = watched  # only in this process
    kind = "t5" if "relative" in words else "gpt"
    _, run = train_toy(layout, [*DEEPER, *words, "--train-iters", "1"], kind)
    return most, len(run.gradients.plan.order)


RELATIVE = (
    "--position-embedding-type relative --relative-attention-num-buckets 8 --micro-batch-size 2 "
    "--relative-attention-max-distance 9"
).split()


FP8 = ["--bf16", "--fp8-format", "hybrid", "--fp8-param-gather"]


@pytest.mark.parametrize(
    ("words", "others"), [([], 0), (RELATIVE, 0), (FP8, 1)], ids=["gpt", "t5", "fp8"]
)
def test_stage_2_fills_one_bucket_at_a_time(words, others):
    """Words and tables that stages share are placed where backward finishes them.

    Parameters that are not gathered in 8 bits have a separate buffer.
    """
    words = [*STAGE_2[:3], "--pipeline-model-parallel-size", "2", *words]
    for most, count in run_sharing_memory(4, _most_whole_buckets, words, pipeline=2):
        assert count > 5
        assert most <= 2 + others


def _load_and_save(layout, arguments, folder):
    _small_buckets()
    run = build_toy(layout, [*arguments, "--save", folder, "--save-interval", "1"])
    save_run(run)


def test_a_sharded_checkpoint_loads_in_any_layout(tmp_path):
    flags = ["--bf16", "--zero-stage", "1"]
    whole = run_sharing_memory(4, _train, flags)[0][0]
    run_sharing_memory(4, _train, [*flags, *_steps(tmp_path / "four")])
    saved = open_checkpoint(tmp_path / "four")
    names = saved.names()
    kinds = {name.rpartition(".")[2] for name in names if name.startswith("optimizer.")}
    assert kinds == {"exp_avg", "exp_avg_sq", "master"}
    load = ["--bf16", "--load", str(tmp_path / "four")]
    layouts = [(1, ["--zero-stage", "0"]), (2, ["--zero-stage", "1"]), (4, ["--zero-stage", "0"])]
    for size, more in layouts:
        folder = tmp_path / f"{size}{more[-1]}"
        run_sharing_memory(size, _load_and_save, [*load, *more], str(folder))
        again = open_checkpoint(folder)
        assert again.names() == names
        for name in names:
            assert torch.equal(read_whole(again, name), read_whole(saved, name)), name
        for losses, *_ in run_sharing_memory(size, _train, [*load, *more]):
            assert losses == pytest.approx(whole[3:], rel=1e-3)


def test_fp32_losses_continue_after_resharding(tmp_path):
    whole = run_sharing_memory(4, _train, ["--zero-stage", "1"])[0][0]
    run_sharing_memory(4, _train, ["--zero-stage", "1", *_steps(tmp_path)])
    for size, flags in ((1, []), (2, STAGE_2)):
        for losses, *_ in run_sharing_memory(size, _train, [*flags, "--load", str(tmp_path)]):
            assert losses == pytest.approx(whole[3:], rel=1e-5)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--overlap-param-gather", "requires --use-distributed-optimizer"),
        ("--use-distributed-optimizer --zero-stage 0", "cannot be combined"),
    ],
)
def test_what_does_not_go_together_is_refused(flags, message):
    with pytest.raises(ConfigError, match=message):
        parse_config([*TOY, "--train-iters", "1", *flags.split()], world_size=2)


def test_the_stage_follows_from_megatrons_flag():
    def stage(*flags):
        return parse_config([*TOY, "--train-iters", "1", *flags], world_size=2).config.parallel

    assert stage().zero_stage == 0
    assert stage("--use-distributed-optimizer").zero_stage == 1
    assert stage("--use-distributed-optimizer", "--zero-stage", "2").zero_stage == 2
