"""`--decoupled-lr`: only word embeddings and the output layer have their own learning rate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.errors import CheckpointError
from megatron.parallel.layout import Layout
from megatron.tools.checkpoint import util
from megatron.training.step import Updates
from tests.distributed import run_sharing_memory
from tests.parity.layouts import LOSS_TOLERANCE, LayoutCase, largest_difference, single_process
from tests.parity.layouts import compare as compare_layouts
from tests.training.toy import build_toy, fingerprint, losses_of, train_toy

_APART = ["--decoupled-lr", "3e-2", "--decoupled-min-lr", "2e-3"]
_UNTIED = "--untie-embeddings-and-output-weights"
_WORDS = "embedding.word.weight"


@pytest.mark.parametrize(
    ("kind", "flag", "apart"),
    [
        ("gpt", "", {_WORDS}),
        ("gpt", _UNTIED, {_WORDS, "output.weight"}),
        ("bert", "", {_WORDS}),  # but not its output bias, positions and other heads
        ("t5", _UNTIED, {_WORDS, "output.weight"}),
    ],
)
def test_which_parameters_have_the_decoupled_rate(kind: str, flag: str, apart: set[str]) -> None:
    run = build_toy(Layout.single(), [*_APART, *flag.split()], kind)
    groups = [own.group for own in run.optimizer._groups]
    assert [(g.is_decayed, g.is_decoupled) for g in groups] == [
        (True, False),
        (False, False),
        (True, True),
    ]
    assert set(groups[-1].names) == apart
    assert len(build_toy(Layout.single(), [], kind).optimizer._groups) == 2


def _after_two(layout: Layout, words: list[str]) -> dict[str, Tensor]:
    """Return this process's weights after two updates; the first has the warm-up's rate of 0."""
    run = build_toy(layout, words)
    updates = Updates(run)
    for _ in range(2):
        updates.make(look_ahead=False)
    run.optimizer.wait_for_weights()
    return {name: run.gradients.part(p).clone() for name, p in run.named_parameters()}


def _three(layout: Layout, cases: list[str]) -> list[list[dict[str, Tensor]]]:
    rates = (["--lr", "1e-2", *_APART], ["--lr", "1e-2"], ["--lr", "3e-2"])
    return [[_after_two(layout, [*case.split(), *rate]) for rate in rates] for case in cases]


def _assert_each_at_its_rate(three: list[dict[str, Tensor]]) -> None:
    ours, slow, fast = three
    for name, tensor in ours.items():
        is_apart = name in (_WORDS, "output.weight")
        expected, other = (fast, slow) if is_apart else (slow, fast)
        assert torch.equal(tensor, expected[name]), name
        if tensor.numel() and name.endswith(".weight"):
            assert not torch.equal(tensor, other[name]), name


def test_each_parameter_is_updated_as_by_a_run_of_its_rate() -> None:
    cases = ["", f"--bf16 {_UNTIED}", "--optimizer sgd", "--optimizer-cpu-offload"]
    for three in _three(Layout.single(), cases):
        _assert_each_at_its_rate(three)


@pytest.mark.parametrize(
    ("sizes", "cases"),
    [
        (
            {},
            [
                *(f"--zero-stage {stage} --bf16" for stage in range(4)),
                "--zero-stage 1 --overlap-grad-reduce --overlap-param-gather",
                "--zero-stage 2 --optimizer-cpu-offload",
            ],
        ),
        ({"tensor": 2}, [f"--tensor-model-parallel-size 2 --sequence-parallel {_UNTIED}"]),
        ({"pipeline": 2}, ["--pipeline-model-parallel-size 2"]),  # with the tied copy
    ],
    ids=["data", "tensor", "pipeline"],
)
def test_so_it_is_in_every_layout(sizes: dict[str, int], cases: list[str]) -> None:
    for rank in run_sharing_memory(2, _three, cases, **sizes):
        for three in rank:
            _assert_each_at_its_rate(three)


def test_a_layout_equals_one_process() -> None:
    network = " ".join(_APART)
    case = LayoutCase(4, tensor=2, pipeline=2, flags="--sequence-parallel", network=network)
    assert compare_layouts(case, run_sharing_memory, 8).loss < LOSS_TOLERANCE
    plain = single_process("", iterations=8)
    apart = single_process(case.network, iterations=8)
    assert largest_difference(apart.losses, plain.losses) > 100 * LOSS_TOLERANCE


def test_the_same_rate_twice_changes_no_bit() -> None:
    same = ["--decoupled-lr", "1e-2", "--decoupled-min-lr", "1e-3"]
    ours, plain = (train_toy(Layout.single(), words)[1] for words in (same, []))
    assert fingerprint(ours) == fingerprint(plain)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a checkpoint from iteration 3 of 6."""
    root = tmp_path_factory.mktemp("saved")
    leave = ["--save", str(root), "--save-interval", "3", "--exit-interval", "3"]
    train_toy(Layout.single(), [*_APART, *leave])
    return root


def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(saved: Path) -> None:
    whole, ours = (
        train_toy(Layout.single(), [*_APART, *load])[1] for load in ([], ["--load", str(saved)])
    )
    assert fingerprint(ours) == fingerprint(whole)


def test_it_continues_in_another_layout(saved: Path) -> None:
    expected = losses_of(Layout.single(), _APART)[3:]
    words = [*_APART, "--load", str(saved), "--zero-stage", "1"]
    for losses in run_sharing_memory(2, losses_of, words):
        assert largest_difference(losses, expected) < LOSS_TOLERANCE


def test_a_rate_that_comes_or_goes_is_reported(saved: Path) -> None:
    load = ["--load", str(saved)]
    with pytest.raises(CheckpointError) as caught:
        build_toy(Layout.single(), load)
    assert "  --decoupled-lr is unset here and 0.03 in the checkpoint\n" in str(caught.value)
    with pytest.raises(CheckpointError, match="but this run has none: give --decoupled-lr 0"):
        build_toy(Layout.single(), [*load, "--use-checkpoint-opt_param-scheduler"])
    run = build_toy(Layout.single(), [*load, "--override-opt_param-scheduler"])
    assert run.schedules.decoupled_at(8) is None
    other = ["--decoupled-lr", "0.5", "--use-checkpoint-opt_param-scheduler"]
    run = build_toy(Layout.single(), [*load, *other])
    assert (run.schedules.decoupled.peak, run.schedules.decoupled.minimum) == (0.03, 0.002)


def test_a_conversion_to_megatron_s_files_takes_the_weights_alone(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"--model-type GPT --loader native --load-dir {saved} --save-dir {tmp_path / 'out'}"
    assert util.main([*words.split(), "--keep-optimizer"]) != 0
    assert "has a --decoupled-lr, which Megatron-LM 23.08 does not have" in capsys.readouterr().err
    assert util.main(words.split()) == 0


def test_shape_and_logs(capsys: pytest.CaptureFixture[str]) -> None:
    recorder, run = train_toy(Layout.single(), ["--lr-warmup-fraction", "0", *_APART])
    ours, others = recorder.values("decoupled-learning-rate"), recorder.values("learning-rate")
    heights = [(rate - 1e-3) / (1e-2 - 1e-3) for rate in others]
    assert ours == pytest.approx([2e-3 + height * (3e-2 - 2e-3) for height in heights])
    assert (ours[-1], others[-1]) == pytest.approx((2e-3, 1e-3))
    last = "learning rate: 1.000E-03 | decoupled learning rate: 2.000E-03 | global batch size:"
    assert last in capsys.readouterr().out
    minimum = build_toy(Layout.single(), ["--decoupled-lr", "3e-2"]).schedules.decoupled.minimum
    assert minimum == 1e-3  # the value of --min-lr
