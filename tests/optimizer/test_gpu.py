"""The optimizer on a GPU: the CPU's numbers, and one host synchronization per step."""

import warnings

import pytest
import torch
from torch import nn

from megatron.config.optimizer import OptimizerConfig
from megatron.config.precision import PrecisionConfig
from megatron.parallel.layout import Layout
from tests.optimizer.stepping import step
from tests.parallel.buffers import new_buffer, new_optimizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

PRECISIONS = {
    "fp32": (PrecisionConfig(), torch.float32),
    "bf16": (PrecisionConfig(bf16=True), torch.bfloat16),
    "fp16": (PrecisionConfig(fp16=True, initial_loss_scale=64.0), torch.float16),
}


def _train(device, precision, dtype, rule):
    """Make five steps, the third with an inf; return norms, tensors and the last step's waits."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 32)).to(device, dtype)
    named = list(model.named_parameters())
    layout = Layout.single()
    gradients = new_buffer(named, layout, accumulate_in_fp32=precision.bf16)
    config = OptimizerConfig(optimizer=rule)
    optimizer = new_optimizer(named, gradients, config, precision, layout, count_zeros=True)
    results, waits = [], 0
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        optimizer.gradients.zero()
        for _, parameter in named:
            value = torch.randn(parameter.shape, generator=generator).to(dtype)
            gradients.gradient(parameter).copy_(value * optimizer.loss_scale)
        if seed == 2:
            gradients.gradient(named[0][1])[3, 3] = float("inf")
        if seed < 4:
            results.append(step(optimizer, 1e-2, 0.1))
        else:
            waits = _count_waits(lambda: results.append(step(optimizer, 1e-2, 0.1)))
    tensors = {name: tensor.cpu() for name, (tensor, _) in optimizer.named_tensors().items()}
    return results, tensors | {name: p.detach().cpu() for name, p in named}, waits


def _count_waits(function):
    """Run the function and return how often it made the host wait, as PyTorch reports it."""
    if not torch.cuda.is_initialized():
        function()
        return 0
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            function()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


@pytest.mark.parametrize("rule", ["adam", "sgd"])
@pytest.mark.parametrize("name", PRECISIONS)
def test_equals_the_cpu_and_waits_once(name, rule):
    precision, dtype = PRECISIONS[name]
    results, tensors, _ = _train("cpu", precision, dtype, rule)
    gpu_results, gpu_tensors, waits = _train("cuda", precision, dtype, rule)
    assert waits == 1
    for ours, theirs in zip(gpu_results, results, strict=True):
        assert (ours.applied, ours.zeros) == (theirs.applied, theirs.zeros)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5, nan_ok=True)
    assert [result.applied for result in results] == [True, True, False, True, True]
    for key, tensor in gpu_tensors.items():
        is_16bit = tensor.dtype != torch.float32
        tolerance = {"rtol": 1e-2, "atol": 1e-3} if is_16bit else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(tensor, tensors[key], **tolerance)
