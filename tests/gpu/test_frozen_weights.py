"""Frozen weights in 8 or 4 bits on a GPU: the same bits as on a CPU, and less memory."""

import pytest
import torch
import torch.nn.functional as F

from megatron.device import Device
from megatron.kernels.quantize import dequantize, quantize
from megatron.parallel.layout import Layout
from megatron.parallel.quantized import PackedWeight
from tests.training.toy import build_toy, train_toy

DEVICE = Device.pick()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not DEVICE.is_gpu, reason="needs a GPU"),
]
WIDE = """
    --num-layers 8 --hidden-size 2048 --num-attention-heads 16 --bf16 --lora-rank 4
    --lora-target-modules linear_qkv --train-iters 2 --eval-iters 0
"""


@pytest.mark.parametrize("form", ["nf4", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_and_values_are_those_of_a_cpu(form, dtype):
    matrix = torch.randn(512, 1024).to(dtype)
    codes, scales = quantize(matrix, form)
    found = quantize(matrix.to(DEVICE.torch_device), form)
    assert found[0].cpu().equal(codes)
    assert found[1].cpu().equal(scales)
    assert dequantize(*found, form).cpu().equal(dequantize(codes, scales, form))


@pytest.mark.parametrize("form", ["nf4", "fp8"])
def test_memory_is_that_of_the_codes(form):
    """Neither loading nor training ever keeps more than a few matrices in 16 bits."""
    device = DEVICE.torch_device
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run = build_toy(Layout.single(), [*WIDE.split(), "--frozen-weights-dtype", form], "gpt", DEVICE)
    held = [p for p in run.parameters() if isinstance(p, PackedWeight)]
    packed, plain = sum(p.packed_bytes for p in held), 2 * sum(p.numel() for p in held)
    assert packed < {"nf4": 0.27, "fp8": 0.52}[form] * plain
    assert torch.cuda.memory_allocated(device) - before < packed + 0.15 * plain
    assert torch.cuda.max_memory_allocated(device) - before < packed + 0.6 * plain
    del run, held
    recorder, _ = train_toy(
        Layout.single(), [*WIDE.split(), "--frozen-weights-dtype", form], "gpt", DEVICE
    )
    assert len(recorder.values("lm loss")) == 2


def test_a_product_is_that_of_the_values():
    device = DEVICE.torch_device
    weight = PackedWeight.empty((512, 256), "nf4", dtype=torch.bfloat16, device=device)
    weight.copy_(torch.randn(512, 256))
    x = torch.randn(64, 256, device=device, dtype=torch.bfloat16)
    assert F.linear(x, weight).equal(F.linear(x, weight.values()))
