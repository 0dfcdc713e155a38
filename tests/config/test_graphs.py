"""Passes that are recorded and run again: which runs cannot have them, and who says so."""

from __future__ import annotations

import pytest

from tests.config.command import parse, problems

_LINES = {
    "--cuda-graph-impl transformer_engine": (
        "--cuda-graph-impl transformer_engine: Transformer Engine is not used: use local"
    ),
    "--cuda-graph-impl full_iteration": (
        "--cuda-graph-impl full_iteration: what is recorded is a micro-batch, not all of an "
        "iteration: use local"
    ),
    "--cuda-graph-warmup-steps 4": "--cuda-graph-warmup-steps 4 needs --cuda-graph-impl local",
    "--cuda-graph-impl local --cuda-graph-warmup-steps 0": (
        "--cuda-graph-warmup-steps 0: libraries set themselves up in a first iteration: use 1 or "
        "more"
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
    "--tensor-model-parallel-size 2",
    "--pipeline-model-parallel-size 2",
    "--context-parallel-size 2",
    "--pipeline-schedule gpipe",
    "--pipeline-schedule zero-bubble",
    "--zero-stage 2",
    "--zero-stage 3",
    "--DDP-impl torch",
    "--overlap-grad-reduce",
    "--overlap-param-gather",
    "--reset-attention-mask",
    "--fp8-format hybrid",
)


@pytest.mark.parametrize("words", _LINES)
def test_a_mistake_and_its_line(words: str) -> None:
    assert problems(words) == [_LINES[words]]


@pytest.mark.parametrize("words", _EXCLUDED)
def test_what_cannot_be_recorded(words: str) -> None:
    more = {"--fp8-format hybrid": "--bf16", "--overlap-param-gather": "--zero-stage 1"}
    lines = problems(
        "--cuda-graph-impl local --attention-dropout 0", words, more.get(words, ""), world_size=2
    )
    (line,) = [line for line in lines if line.startswith("--cuda-graph-impl local with")]
    assert line.startswith(f"--cuda-graph-impl local with {words}: ")
    assert line.endswith(": drop one")


def test_what_can() -> None:
    words = "--cuda-graph-impl local --te-rng-tracker --use-distributed-optimizer --bf16"
    run = parse(words, "--global-batch-size 16 --deterministic-mode", world_size=2)
    assert run.config.training.cuda_graph_impl == "local"
    assert run.config.training.cuda_graph_warmup_steps == 3
