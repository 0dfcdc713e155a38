"""Blocks of context parallelism: the flash kernel gives what the plain form gives."""

import pytest
import torch

from megatron.device import Device
from megatron.parallel.context.block import (
    choose_block,
    flash_backward,
    flash_forward,
    reference_backward,
    reference_forward,
)
from tests.parallel.context.inputs import heads, weights_of
from tests.parallel.context.test_block import by_head, in_two_blocks

DEVICE = Device.pick()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not DEVICE.has_flash, reason="needs a GPU with flash attention"),
]


def close(ours, theirs):
    bound = 2e-2 * max(1, theirs.abs().max().item())
    return (ours.float() - theirs).abs().max().item() < bound


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flash_blocks_equal_plain_blocks(groups, size, dtype):
    block = choose_block(size, dtype, DEVICE.torch_device)
    assert block.forward is flash_forward
    inputs = [x.to(DEVICE.torch_device, dtype) for x in by_head(heads(256, groups, d=size))]
    grad = weights_of(inputs[0].cpu()).to(DEVICE.torch_device, dtype)
    for causal in (True, False):
        out, logsumexp = block.forward(*inputs, causal=causal)
        expected, expected_sum = reference_forward(*inputs, causal=causal)
        assert close(out, expected)
        assert (logsumexp - expected_sum).abs().max() < 1e-3
        got = block.backward(grad, *inputs, out, logsumexp, causal=causal)
        wanted = reference_backward(grad, *inputs, expected, expected_sum, causal=causal)
        assert all(map(close, got, wanted))
    got = in_two_blocks(flash_forward, flash_backward, inputs, grad)
    wanted = in_two_blocks(reference_forward, reference_backward, inputs, grad)
    assert all(map(close, got, (x.float() for x in wanted)))


def test_fp32_and_odd_heads_take_the_plain_form():
    device = DEVICE.torch_device
    assert choose_block(64, torch.float32, device).name == "plain"
    assert choose_block(12, torch.bfloat16, device).name == "plain"
    assert choose_block(512, torch.bfloat16, device).name == "plain"
