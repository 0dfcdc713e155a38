"""Weights all-gathered in 8 bits across GPUs; see `parallel.weights`."""

import re
from pathlib import Path

import pytest

from megatron.device import gpu_count
from tests.gpu.processes import run_processes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(gpu_count() < 2, reason="needs two GPUs"),
]
RUN = (
    "pretrain_gpt.py --config examples/gpt_tiny.yaml --bf16 --deterministic-mode --num-layers 4 "
    "--global-batch-size 16 --attention-dropout 0 --hidden-dropout 0 --eval-interval 100 "
    "--fp8-format hybrid --fp8-param-gather --use-distributed-optimizer --overlap-grad-reduce "
    "--overlap-param-gather --train-iters 6 "
)


def _losses(words: str, processes: int) -> list[float]:
    output = run_processes(processes, words.split())
    return [float(loss) for loss in re.findall(r"lm loss: (\S+) \| loss scale", output)]


@pytest.mark.parametrize(
    ("layout", "processes"),
    [
        ("", 2),
        ("--fp8-recipe delayed --fp8-amax-history-len 3", 2),
        ("--tensor-model-parallel-size 2 --sequence-parallel", 4),
        ("--pipeline-model-parallel-size 2", 4),
    ],
)
def test_a_run_continues_from_its_checkpoint(layout: str, processes: int, tmp_path: Path) -> None:
    """Resuming is exact to the bit, although a checkpoint's weights are gathered in 16 bits."""
    if gpu_count() < processes:
        pytest.skip(f"needs {processes} GPUs")
    words = f"{RUN} {layout}"
    whole = _losses(words, processes)
    assert len(whole) == 6
    first = _losses(f"{words} --exit-interval 3 --save {tmp_path} --save-interval 3", processes)
    then = _losses(f"{words} --load {tmp_path}", processes)
    assert [*first, *then] == whole
