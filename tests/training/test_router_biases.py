"""Router biases are training state: saved, restored and continued in every layout."""

from __future__ import annotations

import pytest
import torch

from megatron.checkpoint.loading import open_checkpoint
from megatron.parallel.layout import Layout
from tests.checkpoint.states import read_whole
from tests.distributed import run_sharing_memory
from tests.training.toy import train_toy

_MIXTURE = """
    --num-layers 4 --hidden-dropout 0 --attention-dropout 0 --eval-iters 0 --train-iters 6
    --swiglu --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 0.05
""".split()
_SAVES = ["--save-interval", "3", "--exit-interval", "3"]
_LAYOUTS = {
    "one process": (1, {}, ""),
    "PP 2": (2, {"pipeline": 2}, "--pipeline-model-parallel-size 2"),
    "TP 2": (2, {"tensor": 2}, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "EP 2, ZeRO 1": (2, {"expert": 2}, "--expert-model-parallel-size 2 --zero-stage 1"),
    "virtual stages": (
        2,
        {"pipeline": 2},
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    ),
}


def _train(layout: Layout, flags: list[str]) -> tuple[list[float], list[list[float]]]:
    """Return the losses, and the final biases of this process's routers in layer order."""
    recorder, run = train_toy(layout, [*_MIXTURE, *flags])
    return recorder.values("lm loss"), [s.bias.tolist() for s in run.layers.routers.states]


@pytest.fixture(scope="module")
def uninterrupted() -> tuple[list[float], list[list[float]]]:
    (found,) = run_sharing_memory(1, _train, [])
    return found


def test_the_biases_make_a_difference(uninterrupted):
    losses, biases = uninterrupted
    (without,) = run_sharing_memory(1, _train, ["--moe-router-bias-update-rate", "0"])
    assert losses[-1] != pytest.approx(without[0][-1], rel=1e-5)
    assert all(any(layer) for layer in biases)


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_a_resumed_run_continues_with_them(uninterrupted, layout, tmp_path):
    processes, sizes, flags = _LAYOUTS[layout]
    losses, biases = uninterrupted
    words = [*flags.split(), "--save", str(tmp_path)]
    run_sharing_memory(processes, _train, [*words, *_SAVES], **sizes)
    reader = open_checkpoint(tmp_path)
    saved = [read_whole(reader, f"model.layers.{i}.mlp.router.expert_bias") for i in range(4)]
    assert all(bool(one.any()) for one in saved)
    # What this layout saved is continued in one process and in this layout.
    (alone,) = run_sharing_memory(1, _train, ["--load", str(tmp_path)])
    assert alone[0] == pytest.approx(losses[3:], rel=1e-5)
    assert alone[1] == [pytest.approx(one) for one in biases]
    words = [*flags.split(), "--load", str(tmp_path)]
    found = run_sharing_memory(processes, _train, words, **sizes)
    assert found[-1][0] == pytest.approx(losses[3:], rel=1e-5)
    assert {tuple(one) for rank in found for one in rank[1]} == {tuple(one) for one in alone[1]}


def test_finetuning_and_weights_alone_keep_them(tmp_path):
    run_sharing_memory(1, _train, ["--save", str(tmp_path), *_SAVES, "--no-save-optim"])
    flags = ["--load", str(tmp_path), "--finetune", "--moe-router-bias-update-rate", "0"]
    ((_, biases),) = run_sharing_memory(1, _train, flags)
    reader = open_checkpoint(tmp_path)
    for layer, bias in enumerate(biases):
        saved = read_whole(reader, f"model.layers.{layer}.mlp.router.expert_bias")
        assert torch.equal(torch.tensor(bias), saved)
