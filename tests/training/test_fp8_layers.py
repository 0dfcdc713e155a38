"""--first-last-layers-bf16: the first and last layers of an FP8 run multiply in 16 bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.kernels.grouped import Fp8GroupedProduct
from megatron.parallel.expert_linear import ExpertLinear
from megatron.parallel.fp8 import Fp8Products
from megatron.parallel.layers import Linear
from megatron.parallel.layout import Layout
from megatron.planner.cost import model_passes
from megatron.planner.machine import MACHINES
from megatron.planner.memory import largest_process
from tests.config.command import parse, problems
from tests.distributed import run_sharing_memory
from tests.training.toy import build_toy, fingerprint, train_toy

FP8 = (
    "--bf16 --num-layers 4 --fp8-format hybrid --train-iters 3 --hidden-dropout 0 "
    "--attention-dropout 0"
).split()
AT_START, AT_END = "--num-layers-at-start-in-bf16", "--num-layers-at-end-in-bf16"
FIRST_AND_LAST = "--first-last-layers-bf16"
UNEVEN = f"{FIRST_AND_LAST} {AT_START} 0 {AT_END} 2"
MIXTURE = "--num-experts 2 --moe-ffn-hidden-size 32"
DEPTH = "--mtp-num-layers 1 --position-embedding-type rope"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", "0123"),
        (FIRST_AND_LAST, "12"),
        (UNEVEN, "01"),
        (f"{UNEVEN} {MIXTURE}", "01"),
        (DEPTH, ["0", "1", "2", "3", "mtp"]),
        (f"{FIRST_AND_LAST} {DEPTH}", ["1", "2", "mtp"]),
    ],
)
def test_the_layers_in_8_bits(words: str, expected: str) -> None:
    run = build_toy(Layout.single(), [*FP8, *words.split()])
    formats: dict[str, set[bool]] = {}
    for name, module in run.parts[0].named_modules():
        is_fp8 = None
        if isinstance(module, Linear):
            is_fp8 = isinstance(module.products, Fp8Products)
        elif isinstance(module, ExpertLinear):
            is_fp8 = isinstance(module._product, Fp8GroupedProduct)
        layer = name[:3] if name.startswith("mtp") else name.partition("layers.")[2][:1]
        if is_fp8 is not None and layer:
            formats.setdefault(layer, set()).add(is_fp8)
    assert all(len(each) == 1 for each in formats.values())
    assert [layer for layer, each in formats.items() if each == {True}] == list(expected)


def _train(layout: Layout, words: str) -> tuple[list[float], str]:
    recorder, run = train_toy(layout, [*FP8, *words.split()])
    return recorder.values("lm loss"), fingerprint(run)


def test_no_layer_at_either_end_is_plain_fp8() -> None:
    single = Layout.single()
    plain = _train(single, "")
    assert _train(single, f"{FIRST_AND_LAST} {AT_START} 0 {AT_END} 0") == plain
    assert _train(single, UNEVEN) != plain


def test_stages_and_gathering_in_8_bits_change_no_loss() -> None:
    words = f"{UNEVEN} --fp8-recipe delayed --use-distributed-optimizer"
    (losses, _), _ = run_sharing_memory(2, _train, words)
    (gathered, _), _ = run_sharing_memory(2, _train, f"{words} --fp8-param-gather")
    assert gathered == losses
    stages = "--pipeline-model-parallel-size 2"
    losses, _ = run_sharing_memory(2, _train, f"{words} {stages}", pipeline=2)[1]
    assert losses == pytest.approx(_train(Layout.single(), words)[0], rel=1e-6)


def test_a_history_of_some_layers_is_begun_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*FP8, "--fp8-recipe", "delayed"]
    save = ["--save", str(tmp_path), "--save-interval", "100", "--exit-interval", "2"]
    train_toy(Layout.single(), [*words, *UNEVEN.split(), *save])
    recorder, _ = train_toy(Layout.single(), [*words, "--load", str(tmp_path)])
    assert len(recorder.values("lm loss")) == 1
    told = "the checkpoint holds no fp8 history of layers that were in 16 bits: the first iteration"
    assert told in capsys.readouterr().out
    train_toy(Layout.single(), [*words, *UNEVEN.split(), "--load", str(tmp_path)])
    assert told not in capsys.readouterr().out


def test_the_planner_counts_the_layers_in_16_bits() -> None:
    run = build_toy(Layout.single(), [*FP8, *UNEVEN.split()])
    layers, _ = model_passes(run.config, run.plan, MACHINES["H200"])
    products = [times.forward.products for times in layers]
    assert products[0] == products[1] < products[2] == products[3]
    in_8_bits = sum(weight.numel() for weight in run.layers.fp8_weights())
    estimates = [
        largest_process(build_toy(Layout.single(), [*words, *more]).config, run.plan, 1).parameters
        for words, more in (((*FP8[:3],), ()), (FP8, UNEVEN.split()), (FP8, ()))
    ]
    plain, some, every = estimates
    assert some - plain == 2 * in_8_bits
    assert every - plain == 2 * 2 * in_8_bits


def test_what_is_refused() -> None:
    fp8, none = "--bf16 --fp8-format hybrid", "requires --fp8-format: add it, or drop the flag"
    assert problems(f"--bf16 {FIRST_AND_LAST}") == [f"{FIRST_AND_LAST} {none}"]
    assert problems(f"{fp8} {AT_START} 2") == [
        f"{AT_START} 2 requires {FIRST_AND_LAST}: add it, or drop the flag"
    ]
    ends = f"{FIRST_AND_LAST} {AT_START} 3 {AT_END}"
    assert parse(f"{fp8} --num-layers 6 {ends} 2").config.precision.fp8_layers(6) == range(3, 4)
    assert problems(f"{fp8} --num-layers 6 {ends} 3") == [
        f"{AT_START} 3 and {AT_END} 3 leave none of --num-layers 6 in FP8: lower them, or drop "
        "--fp8-format hybrid"
    ]
