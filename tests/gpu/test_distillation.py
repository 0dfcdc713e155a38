"""Distillation on a GPU: recorded passes, different number formats, the same losses as on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.device import Device
from megatron.finetuning.distillation import LOSS_NAMES, Distillation
from megatron.parallel.layout import Layout
from megatron.training.build import build_run
from megatron.training.loop import standard_callbacks, train
from megatron.training.recorded_passes import RecordedPasses
from megatron.training.run import Run
from pretrain_gpt import GPTRecipe
from tests.finetuning.test_distillation import parsed
from tests.parity.documents import DOCUMENTS
from tests.training.toy import Recorder, fingerprint, train_toy

DEVICE = Device.pick()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not DEVICE.is_gpu, reason="needs a GPU"),
]
GRAPHS = "--cuda-graph-impl local --cuda-graph-warmup-steps 2".split()
# Two micro-batches per update, the second of which accumulates gradients; evaluations in between.
TOY = (
    "--hidden-size 64 --micro-batch-size 2 --global-batch-size 4 --train-iters 8 --eval-interval 4 "
    "--kd-loss-alpha 0.7 --kd-temperature 2"
).split()
FP8 = "--bf16 --fp8-format hybrid --fp8-recipe tensorwise"
TEACHER = "--num-layers 3 --hidden-size 96 --train-iters 30 --save-interval 30".split()


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a teacher trained in fp32."""
    folder = str(tmp_path_factory.mktemp("teacher"))
    train_toy(Layout.single(), [*TEACHER, "--save", folder], "gpt", DEVICE)
    return folder


@pytest.fixture(scope="module")
def saved(teacher: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return files with its most likely tokens for the samples of all tests."""
    folder = str(tmp_path_factory.mktemp("logits"))
    words = ["--teacher-load", teacher, "--logits-save-dir", folder, "--logits-save-top-k", "20"]
    config = parsed(Layout.single(), [*TOY[:-4], "--kd-temperature", "2", *words])
    assert Distillation(GPTRecipe()).replace_training(config, DEVICE, Layout.single())
    return folder


def _begin(words: list[str], device: Device = DEVICE) -> Run:
    recipe = GPTRecipe()
    run = build_run(parsed(Layout.single(), [*TOY, *words]), recipe, device, Layout.single())
    Distillation(recipe).begin(run)
    return run


def _distill(words: list[str], device: Device = DEVICE) -> tuple[Run, dict[str, list[float]]]:
    run, recorder = _begin(words, device), Recorder()
    callbacks, _ = standard_callbacks(run, [recorder])
    train(run, callbacks)
    names = [*LOSS_NAMES, "grad-norm", "lm loss validation"]
    return run, {name: recorder.values(name) for name in names}


@pytest.mark.parametrize("source", ["model", "files"])
@pytest.mark.parametrize(
    "words",
    ["--bf16", "", FP8, "--bf16 --lora-rank 4", "--bf16 --calculate-per-token-loss"],
)
def test_recorded_passes_have_the_same_bits(
    words: str, source: str, teacher: str, saved: str
) -> None:
    flags = words.split()
    flags += ["--teacher-load", teacher] if source == "model" else ["--logits-load-dir", saved]
    plain, expected = _distill(flags)
    recorded, found = _distill([*flags, *GRAPHS])
    assert found == expected
    assert len(found[LOSS_NAMES[1]]) == 8
    assert fingerprint(recorded) == fingerprint(plain)
    assert isinstance(recorded.forward, RecordedPasses)


def test_recorded_passes_keep_documents_apart_in_the_teacher_too(tmp_path: Path) -> None:
    folder = str(tmp_path)
    train_toy(Layout.single(), [*TEACHER, *DOCUMENTS.split(), "--save", folder], "gpt", DEVICE)
    flags = ["--bf16", *DOCUMENTS.split(), "--teacher-load", folder]
    assert _distill([*flags, *GRAPHS])[1] == _distill(flags)[1]


@pytest.mark.parametrize("source", ["model", "files"])
def test_losses_are_those_of_a_cpu(source: str, teacher: str, saved: str) -> None:
    flags = ["--teacher-load", teacher] if source == "model" else ["--logits-load-dir", saved]
    expected, found = (_distill(flags, device)[1] for device in (Device.cpu(), DEVICE))
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("words", "dtype", "tolerance"),
    [
        ("--bf16", torch.bfloat16, 2e-2),
        ("--fp16 --initial-loss-scale 1024", torch.float16, 1e-2),
        (FP8, torch.bfloat16, 1e-1),
    ],
)
def test_a_student_may_differ_from_its_teacher_in_number_format(
    words: str, dtype: torch.dtype, tolerance: float, teacher: str, tmp_path: Path
) -> None:
    """The teacher was saved in fp32. Its weights are rounded to the run's format, never to fp8.

    Only the first four updates are compared: at this learning rate, each later one amplifies the
    rounding of those before it (to 18% in fp8 on an H200, at the sixth).
    """
    flags = ["--teacher-load", teacher]
    _, expected = _distill(flags)
    run, found = _distill([*words.split(), *flags])
    for part in run.recipe.teacher.parts:  # type: ignore[attr-defined]
        assert {parameter.dtype for parameter in part.parameters()} == {dtype}
    for name in LOSS_NAMES:
        assert found[name][:4] == pytest.approx(expected[name][:4], rel=tolerance)
        assert len(found[name]) == 8


def test_a_teacher_computes_the_same_beside_a_student_in_8_bits(teacher: str) -> None:
    """Its logits have the same bits as with a student in 16 bits."""
    tokens = torch.arange(32, device=DEVICE.torch_device).view(2, 16)
    found = []
    for words in ("--bf16", FP8):
        run = _begin([*words.split(), "--teacher-load", teacher])
        known = run.recipe.teacher  # type: ignore[attr-defined]
        batch = {"text": torch.cat((tokens, tokens[:, :1]), 1)}
        inputs = run.recipe.inputs(batch, run.config, run.tokenizer, run.layout)  # type: ignore[attr-defined]
        found.append(known.run(known.parts[0], inputs))
    assert torch.equal(*found)
