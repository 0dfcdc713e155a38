"""Matrix products overlapped with copy engines that send rows between two GPUs.

See `parallel.overlapped_products`.
"""

import re

import pytest
import torch

from megatron.config.precision import PrecisionConfig
from megatron.device import Device, gpu_count
from megatron.parallel.build import BuildContext, Kernels, choose_kernels
from megatron.parallel.layers import Linear
from megatron.parallel.layout import Layout
from megatron.parallel.parameter import Init
from tests.gpu.processes import run_processes
from tests.models.small import config as model_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(gpu_count() < 2, reason="needs two GPUs"),
]


def test_layers_have_the_numbers_of_collectives() -> None:
    output = run_processes(2, ["-m", "tests.gpu.test_tensor_overlap"])
    assert output.count("as with collectives") == 2


def test_a_whole_run() -> None:
    words = "pretrain_gpt.py --config examples/gpt_tiny.yaml --attention-dropout 0 "
    words += (
        "--hidden-dropout 0 --tensor-model-parallel-size 2 --sequence-parallel --train-iters 6 "
    )
    words += "--deterministic-mode"
    losses = []
    for more in ([], ["--tp-comm-overlap"], ["--tp-comm-overlap"]):
        output = run_processes(2, [*words.split(), *more])
        losses.append([float(loss) for loss in re.findall(r"lm loss: (\S+)", output)])
    assert len(losses[0]) == 6
    assert losses[1] == losses[2] == pytest.approx(losses[0], rel=1e-5)


def passes(layer: Linear, layout: Layout, rounds: int) -> list[torch.Tensor]:
    """Return outputs and gradients of some passes, with the ranks increasingly out of step."""
    results = []
    torch.manual_seed(1 + layout.tensor.rank)
    for step in range(rounds):
        rows, width = (64, 512) if layer.split == "column" else (128, 256)
        x = torch.randn(rows, 2, width, device=layer.weight.device, dtype=layer.weight.dtype)
        x.requires_grad_()
        if layout.tensor.rank == step % 2:
            torch.cuda._sleep(2_000_000)
        out = layer(x)
        if layout.tensor.rank == step // 2 % 2:
            torch.cuda._sleep(2_000_000)
        out.backward(torch.randn_like(out))
        assert x.grad is not None
        assert layer.weight.grad is not None
        results += [out.detach(), x.grad, layer.weight.grad.clone()]
        layer.weight.grad = None
    return results


def _compare() -> None:
    """Compare with and without overlap; `run_processes` starts this."""
    import os
    from dataclasses import replace

    import torch.distributed as dist

    from megatron.parallel.symmetric_memory import SymmetricExchange

    rank = int(os.environ["RANK"])
    device = Device.pick(rank)
    device.activate()
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device.torch_device)
    layout = Layout.at(rank, 2, tensor=2).connect(device.type)
    layout = replace(layout, sequence_parallel=True)
    exchange = SymmetricExchange(layout.tensor, device.torch_device, 4 * 64 * 2 * 512, seconds=30.0)
    numbers = PrecisionConfig(bf16=True, fp8_format="hybrid")
    in_8_bits = choose_kernels(model_config(), numbers, layout, device.torch_device)
    for dtype, kernels in (
        (torch.float32, Kernels()),
        (torch.bfloat16, Kernels()),
        (torch.bfloat16, in_8_bits),
    ):
        layers = []
        for split, sizes in (("column", (512, 768)), ("row", (512, 512))):
            for overlapped in (False, True):
                torch.manual_seed(3 + rank)
                layer = Linear(
                    *sizes,
                    BuildContext(
                        layout,
                        device.torch_device,
                        dtype=dtype,
                        kernels=kernels,
                        exchange=exchange if overlapped else None,
                    ),
                    split=split,
                    init=Init("normal", 0.1),
                    bias=False,
                )
                torch.nn.init.normal_(layer.weight, std=0.1)
                layers.append(layer)
        for plain, cut in (layers[:2], layers[2:]):
            expected = passes(plain, layout, 8)
            got, again = passes(cut, layout, 8), passes(cut, layout, 8)
            torch.testing.assert_close(got, expected)
            torch.testing.assert_close(again, got, rtol=0, atol=0)
    torch.cuda.synchronize()
    print("as with collectives")
    dist.destroy_process_group()


if __name__ == "__main__":
    _compare()
