"""Passes recorded as CUDA graphs: which runs cannot use them, and the message for each."""

from __future__ import annotations

import pytest

from tests.config.command import parse, problems

_LINES = {
    "--cuda-graph-impl transformer_engine": (
        "--cuda-graph-impl transformer_engine: Transformer Engine is not used: use local"
    ),
    "--cuda-graph-impl full_iteration": (
        "--cuda-graph-impl full_iteration: only micro-batches can be recorded, not whole "
        "iterations: use local"
    ),
    "--cuda-graph-warmup-steps 4": "--cuda-graph-warmup-steps 4 requires --cuda-graph-impl local: "
    "add it, or drop the flag",
    "--cuda-graph-impl local --cuda-graph-warmup-steps 0": (
        "--cuda-graph-warmup-steps 0: libraries initialize in the first iteration: use 1 or more"
    ),
    "--external-cuda-graph": (
        "--external-cuda-graph: Transformer Engine is not used: record passes with "
        "--cuda-graph-impl local"
    ),
    "--cuda-graph-scope attn mlp": (
        "--cuda-graph-scope attn mlp: --cuda-graph-impl local records whole passes: drop the flag"
    ),
    "--cuda-graph-modules attn": (
        "--cuda-graph-modules attn: --cuda-graph-impl local records whole passes: drop the flag"
    ),
}
_EXCLUDED = (
    "--recompute-granularity selective",
    "--tensor-model-parallel-size 2 and --attention-dropout 0.1",
    "--tensor-model-parallel-size 2 and --hidden-dropout 0.1",
    "--tensor-model-parallel-size 2 and --lora-dropout 0.1",
    "--distributed-backend gloo",
    "--pipeline-model-parallel-size 2",
    "--context-parallel-size 2",
    "--pipeline-schedule gpipe",
    "--pipeline-schedule zero-bubble",
    "--zero-stage 2",
    "--zero-stage 3",
    "--DDP-impl torch",
    "--overlap-grad-reduce",
    "--overlap-param-gather",
)


@pytest.mark.parametrize("words", _LINES)
def test_a_mistake_and_its_line(words: str) -> None:
    assert problems(words) == [_LINES[words]]


# Flags that some of them need to take effect.
_MORE = {
    "--overlap-param-gather": "--zero-stage 1",
    "--distributed-backend gloo": "--tensor-model-parallel-size 2",
    "--tensor-model-parallel-size 2 and --hidden-dropout 0.1": "--sequence-parallel",
    "--tensor-model-parallel-size 2 and --lora-dropout 0.1": "--lora-rank 4",
}


@pytest.mark.parametrize("words", _EXCLUDED)
def test_what_cannot_be_recorded(words: str) -> None:
    graphs = "--cuda-graph-impl local --attention-dropout 0 --hidden-dropout 0"
    given = (graphs, words.replace(" and ", " "), _MORE.get(words, ""))
    (line,) = problems(*given, world_size=2)
    assert line.startswith(f"--cuda-graph-impl local cannot be combined with {words}: ")
    assert line.endswith(": drop one of them")


@pytest.mark.parametrize(
    "words",
    [
        "--use-distributed-optimizer --bf16 --fp8-format hybrid",
        "--tensor-model-parallel-size 2 --attention-dropout 0",
        "--tensor-model-parallel-size 2 --sequence-parallel --attention-dropout 0 "
        "--hidden-dropout 0",
        "--reset-attention-mask --reset-position-ids",
    ],
)
def test_what_can(words: str) -> None:
    run = parse("--cuda-graph-impl local --te-rng-tracker", words, world_size=2)
    assert run.config.training.cuda_graph_impl == "local"
    assert run.config.training.cuda_graph_warmup_steps == 3
