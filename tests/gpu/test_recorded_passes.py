"""Passes that a GPU records and runs again (CUDA graphs) train bit for bit as they do without."""

from collections.abc import Sequence

import pytest

from megatron.device import Device
from megatron.parallel.layout import Layout
from megatron.training.run import Run
from tests.training.toy import Recorder, fingerprint, train_toy

DEVICE = Device.pick()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not DEVICE.is_gpu, reason="needs a GPU"),
]
GRAPHS = "--cuda-graph-impl local --cuda-graph-warmup-steps 2".split()
# Two micro-batches an update, the second of which adds to gradients; evaluations in between.
TOY = (
    "--hidden-size 64 --micro-batch-size 2 --global-batch-size 4 "
    "--train-iters 8 --eval-interval 4 --attention-dropout 0.1 --hidden-dropout 0.1"
).split()


def _train(arguments: Sequence[str], kind: str) -> tuple[Recorder, Run]:
    return train_toy(Layout.single(), [*TOY, *arguments], kind, DEVICE)


def _results(arguments: Sequence[str], kind: str) -> tuple[object, ...]:
    recorder, run = _train(arguments, kind)
    names = ("lm loss", "grad-norm", "lm loss validation")
    return (*(recorder.values(name) for name in names), fingerprint(run))


@pytest.mark.parametrize("kind", ["gpt", "bert", "t5"])
@pytest.mark.parametrize("precision", ["--bf16", "--fp16 --initial-loss-scale 65536", ""])
def test_training_has_the_same_bits(kind: str, precision: str) -> None:
    plain = _results(precision.split(), kind)
    assert _results([*precision.split(), *GRAPHS], kind) == plain


def test_passes_are_recorded_once_for_each_way_to_write_gradients() -> None:
    _, run = _train(["--bf16", *GRAPHS], "gpt")
    assert run.recorded is not None
    assert len(run.recorded._recordings) == 2
