"""Whole updates on a GPU, through kernels: the host waits for it once, at the end of each."""

import pytest
import torch

from megatron.device import Device
from megatron.parallel.layout import Layout
from megatron.training.step import Updates
from tests.training.toy import build_toy

DEVICE = Device.pick()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not DEVICE.is_gpu, reason="needs a GPU"),
]
_WIDE = "--hidden-size 64 --kv-channels 16 --bf16"  # a head that flash kernels take


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
        ("bert", ""),
        ("t5", ""),
        ("t5", "--position-embedding-type relative --geglu"),
    ],
)
def test_an_update_waits_once(kind, flags, monkeypatch):
    run = build_toy(Layout.single(), [*_WIDE.split(), *flags.split()], kind, DEVICE)
    updates = Updates(run)
    for _ in range(3):  # these may compile, choose, allocate, record
        updates.make(look_ahead=True)

    def refuse(*_):
        raise AssertionError("the host waited for the whole device")

    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    torch.cuda.set_sync_debug_mode("error")  # does not mind the event that ends an update
    try:
        outcome = updates.make(look_ahead=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert outcome.applied
