"""Answers of the model during training (--sample-prompts), in layouts that split it."""

from __future__ import annotations

from functools import cache

import pytest

from megatron.parallel.layout import Layout
from megatron.training.callbacks.base import EarlyExit
from megatron.training.callbacks.samples import SampleAnswers
from megatron.training.callbacks.scalars import Scalars
from megatron.training.run import Run
from tests.distributed import run_sharing_memory
from tests.training.toy import Recorder, build_toy, train_toy

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


@cache
def _toy(prompts: str) -> Run:
    words = "--sample-interval 2 --sample-tokens 2 --sample-prompts".split()
    return build_toy(Layout.single(), [*words, prompts])


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


@pytest.mark.parametrize(
    ("iteration", "early_exit", "count"),
    [
        (2, None, 3),
        (3, None, 0),
        (2, EarlyExit("--exit-interval"), 3),
        (2, EarlyExit("SIGTERM", 3), 0),
    ],
)
def test_a_run_that_must_end_at_once_gives_no_answers(
    iteration: int, early_exit: EarlyExit | None, count: int, prompts: str
) -> None:
    run, recorder = _toy(prompts), Recorder()
    answers = SampleAnswers(run, Scalars([recorder]))
    run.progress.iteration = iteration
    answers.after_step(run, None, early_exit)  # type: ignore[arg-type]
    assert len(recorder.events) == count
