"""Passes recorded and replayed on a GPU (CUDA graphs) train to the same bits as without."""

import re
from collections.abc import Iterator, Sequence

import pytest
import torch.distributed as dist
from torch import Tensor

from megatron.device import Device, StreamMarks, gpu_count
from megatron.kernels.amax import FusedAmax
from megatron.models.mlp import MLP
from megatron.parallel.journal import Journal
from megatron.parallel.layout import Axis, Layout
from megatron.training.recorded_passes import RecordedPasses
from megatron.training.run import Run
from megatron.training.step import Updates
from tests.gpu.processes import run_processes
from tests.parity.documents import DOCUMENTS
from tests.training.toy import Recorder, build_toy, fingerprint, train_toy

DEVICE = Device.pick()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not DEVICE.is_gpu, reason="needs a GPU"),
]
GRAPHS = "--cuda-graph-impl local --cuda-graph-warmup-steps 2".split()
# Two micro-batches per update, the second of which accumulates gradients; evaluations in between.
TOY = (
    "--hidden-size 64 --micro-batch-size 2 --global-batch-size 4 "
    "--eval-interval 4 --attention-dropout 0.1 --hidden-dropout 0.1"
).split()
MIXTURE = (
    "--bf16 --swiglu --num-experts 8 --moe-ffn-hidden-size 64 --moe-aux-loss-coeff 0.01 "
    "--moe-z-loss-coeff 1e-3 "
)
FP8 = "--bf16 --fp8-format hybrid --fp8-recipe "


def _train(arguments: Sequence[str], kind: str) -> tuple[Recorder, Run]:
    how = [] if "--cuda-graph-impl" in arguments else ["--cuda-graph-impl", "none"]
    return train_toy(Layout.single(), [*TOY, *how, *arguments], kind, DEVICE)


def _results(arguments: Sequence[str], kind: str) -> tuple[object, ...]:
    recorder, run = _train(arguments, kind)
    names = ("lm loss", "grad-norm", "lm loss validation")
    return (*(recorder.values(name) for name in names), fingerprint(run))


@pytest.mark.parametrize("kind", ["gpt", "bert", "t5"])
@pytest.mark.parametrize("precision", ["--bf16", "--fp16 --initial-loss-scale 65536", ""])
def test_training_has_the_same_bits(kind: str, precision: str) -> None:
    plain = _results(precision.split(), kind)
    assert _results([*precision.split(), *GRAPHS], kind) == plain


@pytest.mark.parametrize(
    "words",
    [
        FP8 + "tensorwise",
        FP8 + "rowwise",
        FP8 + "delayed --fp8-amax-history-len 3",
        "--bf16 --no-gradient-accumulation-fusion",
        "--bf16 --no-masked-softmax-fusion --no-bias-dropout-fusion",
        "--bf16 --swiglu --normalization RMSNorm --use-rotary-position-embeddings "
        "--disable-bias-linear --untie-embeddings-and-output-weights",
        "--bf16 --train-samples 40 --rampup-batch-size 2 2 16",
        "--bf16 --cross-entropy-fusion-impl linear --eod-mask-loss",
        "--bf16 --eod-mask-loss --calculate-per-token-loss",
        f"--bf16 {DOCUMENTS}",
        f"--bf16 {DOCUMENTS} --eod-mask-loss --position-embedding-type rope",
        f"{DOCUMENTS} --attention-dropout 0",  # with a mask, because fp32 has no flash kernel
        f"{MIXTURE} {DOCUMENTS}",
        MIXTURE,
        MIXTURE + "--fp8-format hybrid --moe-shared-expert-intermediate-size 64",
        MIXTURE + "--moe-expert-capacity-factor 1.0 --eod-mask-loss --calculate-per-token-loss",
        MIXTURE + "--moe-router-score-function sigmoid --moe-router-enable-expert-bias",
        "--bf16 --lora-rank 4 --lora-dropout 0.1",
        "--bf16 --lora-rank 4 --use-dora",
        MIXTURE + "--lora-rank 4",
        "--bf16 --lora-rank 4 --use-dora --frozen-weights-dtype nf4",
        MIXTURE + "--lora-rank 4 --frozen-weights-dtype fp8",
    ],
)
def test_so_does_every_kind_of_training(words: str) -> None:
    assert _results([*words.split(), *GRAPHS], "gpt") == _results(words.split(), "gpt")


def test_recorded_fp8_takes_the_amaxes_that_kernels_hand_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is no dropout, so every kind of kernel passes one on."""
    flags = [*f"{FP8}tensorwise --attention-dropout 0 --hidden-dropout 0".split(), *GRAPHS]
    handed_over = _results(flags, "gpt")
    taken = []
    take = FusedAmax.pop

    def measure_instead(self: FusedAmax, x: Tensor) -> None:
        taken.append(take(self, x))

    monkeypatch.setattr(FusedAmax, "pop", measure_instead)
    assert _results(flags, "gpt") == handed_over
    assert any(amax is not None for amax in taken)


def test_micro_batches_with_different_numbers_of_documents_share_recordings() -> None:
    """There are three to five in each of two sequences: 16 segments, the last of them empty."""
    recorder, run = _train(["--bf16", *DOCUMENTS.split(), *GRAPHS], "gpt")
    assert isinstance(run.forward, RecordedPasses)
    assert len(run.forward._recordings) == 2
    assert all(loss > 0 for loss in recorder.values("lm loss"))


def test_passes_are_recorded_once_for_each_way_to_write_gradients() -> None:
    _, run = _train(["--bf16", *GRAPHS], "gpt")
    assert isinstance(run.forward, RecordedPasses)
    assert len(run.forward._recordings) == 2


def test_a_small_model_is_recorded_without_a_flag() -> None:
    """The host is slower than the GPU. With a flag that excludes recording, nothing is recorded."""
    auto = ["--bf16", "--cuda-graph-impl", "auto"]
    _, run = _train(auto, "gpt")
    assert isinstance(run.forward, RecordedPasses)
    assert len(run.forward._recordings) == 2
    excluded = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    _, run = _train([*auto, *excluded.split()], "gpt")
    assert not isinstance(run.forward, RecordedPasses)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_run_continues_if_recording_fails(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that reads a number on the host cannot be recorded, and runs unrecorded."""
    plain = _results(["--bf16"], "gpt")
    compute = MLP.forward

    def read(gradient: Tensor) -> None:
        gradient.sum().item()

    def waits(self: MLP, x: Tensor) -> Tensor:
        out: Tensor = compute(self, x)
        if where == "forward":
            out.sum().item()
        elif out.requires_grad:
            out.register_hook(read)
        return out

    monkeypatch.setattr(MLP, "forward", waits)
    assert _results(["--bf16", "--cuda-graph-impl", "auto"], "gpt") == plain


@pytest.fixture
def split_layout() -> Iterator[Layout]:
    """A grid of two tensor ranks with only one process: it sums over itself through NCCL.

    The model's values are meaningless, but its collectives are real.
    """
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    alone = {"group": dist.group.WORLD, "journal": Journal(StreamMarks(DEVICE.torch_device))}
    pair = Axis(size=2, rank=0, ranks=(0, 1), **alone)
    yield Layout(world=pair, tensor=pair)
    dist.destroy_process_group()


def test_collectives_of_split_layers_are_recorded(split_layout: Layout) -> None:
    def outcomes(*arguments: str) -> list[tuple[float, float]]:
        words = [*TOY, "--bf16", "--tensor-model-parallel-size", "2", "--attention-dropout", "0"]
        run = build_toy(split_layout, [*words, *arguments], device=DEVICE)
        updates = Updates(run)
        made = [updates.make(look_ahead=number < 5) for number in range(6)]
        recorded = isinstance(run.forward, RecordedPasses)
        assert not recorded or len(run.forward._recordings) == 2
        return [(outcome.losses["lm loss"], outcome.grad_norm) for outcome in made]

    assert outcomes(*GRAPHS) == outcomes("--cuda-graph-impl", "none")
    assert not split_layout.journal.device_is_behind


@pytest.mark.skipif(gpu_count() < 2, reason="needs two GPUs")
def test_processes_that_recorded_their_communication_leave() -> None:
    """NCCL cannot destroy a group while a recording contains its kernels."""
    words = "pretrain_gpt.py --config examples/gpt_tiny.yaml --bf16 --attention-dropout 0 "
    words += "--hidden-dropout 0 --tensor-model-parallel-size 2 --sequence-parallel"
    lines = []
    for more in ([], GRAPHS):
        output = run_processes(2, [*words.split(), *more])
        lines.append(re.findall(r"lm loss: (\S+)", output))
    assert lines[0] == lines[1] != []
