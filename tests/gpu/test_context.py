"""Blocks of context parallelism: the flash kernel gives what the plain form gives."""

import pytest
import torch

from megatron.device import Device
from megatron.parallel.context.block import (
    QueryRows,
    choose_block,
    flash_backward,
    flash_forward,
    reference_backward,
    reference_forward,
)
from tests.parallel.context.inputs import heads, weights_of
from tests.parallel.context.test_block import (
    by_head,
    dropped_factors,
    formula_in_two_blocks,
    in_two_blocks,
    pairs_of_two_blocks,
)

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
        options = {"causal": causal, "dropout": 0.0}
        out, logsumexp, drawn = block.forward(*inputs, **options)
        expected, expected_sum, nothing = reference_forward(*inputs, **options)
        assert close(out, expected)
        assert (logsumexp - expected_sum).abs().max() < 1e-3
        query, key, value = inputs
        rows = QueryRows(grad, query, out, logsumexp)
        got = block.backward(rows, key, value, **options, drawn=drawn)
        rows = QueryRows(grad, query, expected, expected_sum)
        wanted = reference_backward(rows, key, value, **options, drawn=nothing)
        assert all(map(close, got, wanted))
    got = in_two_blocks(flash_forward, flash_backward, inputs, grad)
    wanted = in_two_blocks(reference_forward, reference_backward, inputs, grad)
    assert all(map(close, got, (x.float() for x in wanted)))


@pytest.mark.parametrize("form", ["flash", "plain"])
@pytest.mark.parametrize("groups", [1, 4])
def test_blocks_drop_the_same_weights_in_both_directions(form, groups):
    """As the test of the same name on a CPU; the flash kernel's masks come from its counter."""
    forward, backward = {
        "flash": (flash_forward, flash_backward),
        "plain": (reference_forward, reference_backward),
    }[form]
    inputs = [x.to(DEVICE.torch_device, torch.bfloat16) for x in by_head(heads(256, groups, d=256))]
    generator = DEVICE.default_generator
    state = generator.get_state()
    factors = dropped_factors(forward, inputs, dropout=0.25, rtol=2e-2)
    exist = pairs_of_two_blocks(256).to(factors.device)
    dropped = (factors[exist.expand_as(factors)] == 0).double().mean().item()
    assert dropped == pytest.approx(0.25, abs=0.01)
    assert not torch.equal(factors[:, :, 128:, :128], factors[:, :, :128, :128])
    generator.set_state(state)
    grad = weights_of(inputs[0].cpu()).to(DEVICE.torch_device, torch.bfloat16)
    got = in_two_blocks(forward, backward, inputs, grad, dropout=0.25)
    wanted = formula_in_two_blocks(inputs, grad, factors)
    assert all(map(close, got, wanted))


def test_fp32_and_odd_heads_take_the_plain_form():
    device = DEVICE.torch_device
    assert choose_block(64, torch.float32, device).name == "plain"
    assert choose_block(12, torch.bfloat16, device).name == "plain"
    assert choose_block(512, torch.bfloat16, device).name == "plain"
