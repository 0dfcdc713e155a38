"""Whole updates on a GPU, with kernels: the host waits for it only once, at the end of each."""

import pytest

from megatron.device import Device, gpu_count
from megatron.parallel.layout import Layout
from tests.gpu.processes import run_processes
from tests.gpu.waits import WIDE, expect_no_wait
from tests.training.toy import build_toy

DEVICE = Device.pick()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not DEVICE.is_gpu, reason="needs a GPU"),
]


_MIXTURE = "--swiglu --num-experts 8 --moe-ffn-hidden-size 64 --moe-aux-loss-coeff 0.01 "


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("gpt", ""),
        ("gpt", "--swiglu --normalization RMSNorm --position-embedding-type rope"),
        ("gpt", "--use-flash-attn --attention-dropout 0"),
        ("gpt", "--reset-attention-mask --reset-position-ids --eod-mask-loss"),
        ("gpt", "--cross-entropy-fusion-impl linear --recompute-activations"),
        ("gpt", "--no-masked-softmax-fusion --optimizer sgd"),
        *(("gpt", f"--fp8-format hybrid --fp8-recipe {x}") for x in ("tensorwise", "rowwise")),
        ("gpt", "--fp8-format e4m3 --fp8-recipe delayed"),
        ("gpt", "--cuda-graph-impl local --cuda-graph-warmup-steps 1"),
        ("gpt", "--eod-mask-loss --calculate-per-token-loss"),
        ("gpt", _MIXTURE + "--moe-z-loss-coeff 1e-3 --disable-bias-linear --qk-layernorm"),
        ("gpt", _MIXTURE + "--fp8-format hybrid"),
        (
            "gpt",
            _MIXTURE + "--moe-expert-capacity-factor 1 --moe-shared-expert-intermediate-size 64",
        ),
        (
            "gpt",
            _MIXTURE + "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        ),
        ("bert", ""),
        ("t5", ""),
        ("t5", "--position-embedding-type relative --geglu"),
    ],
)
def test_an_update_waits_once(kind, flags):
    expect_no_wait(build_toy(Layout.single(), [*WIDE, *flags.split()], kind, DEVICE))


_OVERLAPS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"


@pytest.mark.skipif(gpu_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "flags",
    [
        _OVERLAPS,
        f"{_OVERLAPS} --fp8-format hybrid --fp8-param-gather",
        "--zero-stage 3",
        "--tensor-model-parallel-size 2 --sequence-parallel",
        "--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap",
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --num-layers 4",
        "--context-parallel-size 2 --attention-dropout 0",
        "--context-parallel-size 2 --attention-dropout 0 --reset-attention-mask",
    ],
)
def test_so_does_one_of_two_processes(flags):
    """Communication between them does not block the host either."""
    output = run_processes(2, ["--module", "tests.gpu.waits", *flags.split()])
    assert "rank 0 of 2: no wait" in output
    assert "rank 1 of 2: no wait" in output
