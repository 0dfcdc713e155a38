"""Answers of the model during training (--sample-prompts), in layouts that split it."""

from __future__ import annotations

from functools import cache

import pytest

from megatron.parallel.layout import Layout
from tests.distributed import run_sharing_memory
from tests.training.toy import train_toy

FLAGS = """
    --num-layers 4 --train-iters 2 --eval-interval 1 --eval-iters 0 --sample-tokens 5
    --hidden-dropout 0 --attention-dropout 0 --lr 3e-2
""".split()
MIXTURE = "--num-experts 4 --moe-router-topk 2"
HYBRID = """--hybrid-layer-pattern M*-M --mamba-num-heads 4 --mamba-num-groups 2
    --mamba-state-dim 8 --mamba-head-dim 16"""


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("5 17 42 8\n63\n9 9 1\n")
    return str(path)


def _answers(layout: Layout, prompts: str, words: str) -> list[str]:
    flags = [*FLAGS, *words.split(), "--sample-prompts", prompts]
    return [text for _, kind, text in train_toy(layout, flags)[0].events if kind == "sample"]


@cache
def _alone(prompts: str, network: str) -> list[str]:
    return _answers(Layout.single(), prompts, network)


@pytest.mark.parametrize(
    ("network", "flags", "sizes"),
    [
        ("", "--num-layers-per-virtual-pipeline-stage 1", {"pipeline": 2}),
        ("", "", {"context": 2}),
        (HYBRID, "", {"context": 2}),
        (MIXTURE, "", {"expert": 2}),
        (MIXTURE, "--use-distributed-optimizer", {"expert": 2, "pipeline": 2}),
    ],
)
def test_answers_are_those_of_one_process(
    network: str, flags: str, sizes: dict[str, int], prompts: str
) -> None:
    expected = _alone(prompts, network)
    assert len(expected) == 2 * 3
    assert expected[:3] != expected[3:], "the weights have changed"
    names = {"context": "--context-parallel-size"}
    named = [f"{names.get(a, f'--{a}-model-parallel-size')} {size}" for a, size in sizes.items()]
    words = " ".join([network, flags, *named])
    for found in run_sharing_memory(2 ** len(sizes), _answers, prompts, words, **sizes):
        assert found == expected
