"""Tokens sent to experts on another GPU through mapped memory (`SymmetricExchange`)."""

import re

import pytest
import torch

from megatron.device import Device, gpu_count
from megatron.kernels.grouped import combine
from megatron.parallel.expert_exchange import ExpertExchange
from megatron.parallel.layout import Layout
from tests.gpu.processes import run_processes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(gpu_count() < 2, reason="needs two GPUs"),
]
EXPERTS, CHOSEN, TOKENS, HIDDEN = 8, 4, 96, 256


def test_rows_and_gradients_are_those_of_collectives() -> None:
    output = run_processes(2, ["-m", "tests.gpu.test_expert_exchange"])
    assert output.count("as with collectives") == 2


def test_a_whole_run() -> None:
    """Experts on two GPUs train like experts on one."""
    words = "pretrain_gpt.py --config examples/gpt_tiny.yaml --attention-dropout 0 "
    words += "--hidden-dropout 0 --num-experts 8 --moe-router-topk 4 --train-iters 6 "
    words += "--global-batch-size 8"
    losses = []
    for count, more in ((1, []), (2, ["--expert-model-parallel-size", "2"])):
        output = run_processes(count, [*words.split(), *more])
        losses.append([float(loss) for loss in re.findall(r"lm loss: (\S+)", output)])
    assert len(losses[0]) == 6
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def passes(exchange: ExpertExchange, layout: Layout, rounds: int) -> list[torch.Tensor]:
    """Return sums and gradients of some passes, with the ranks increasingly out of step."""
    results: list[torch.Tensor] = []
    rank, device = layout.expert.rank, Device.pick(layout.expert.rank).torch_device
    random = torch.Generator(device).manual_seed(1 + rank)
    for step in range(rounds):
        options = {"device": device, "generator": random}
        tokens = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, **options).requires_grad_()
        choices = torch.rand(TOKENS, EXPERTS, **options).topk(CHOSEN, dim=1).indices
        weights = torch.rand(TOKENS, CHOSEN, **options).requires_grad_()
        if rank == step % 2:
            torch.cuda._sleep(2_000_000)
        arrived = exchange.dispatch(tokens, choices, weights, equal_counts=True)
        rows, grouping = arrived.rows(exchange.local, None)
        if rank == step // 2 % 2:
            torch.cuda._sleep(2_000_000)
        out = exchange.combine(combine(rows * 2, arrived.weights, grouping), arrived)()
        out.backward(torch.randn(out.shape, dtype=out.dtype, **options))
        assert tokens.grad is not None
        assert weights.grad is not None
        results += [out.detach(), tokens.grad, weights.grad]
    return results


def _compare() -> None:
    """Compare both exchanges; `run_processes` starts this."""
    import os

    import torch.distributed as dist

    from megatron.parallel.symmetric_memory import SymmetricExchange

    rank = int(os.environ["RANK"])
    device = Device.pick(rank)
    device.activate()
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device.torch_device)
    layout = Layout.at(rank, 2, expert=2).connect(device.type)
    memory = SymmetricExchange(layout.expert, device.torch_device, TOKENS * HIDDEN * 2, seconds=30)
    collectives = ExpertExchange(layout, EXPERTS, CHOSEN)
    mapped = ExpertExchange(layout, EXPERTS, CHOSEN, exchange=memory)
    expected = passes(collectives, layout, 24)
    for ours, theirs in zip(passes(mapped, layout, 24), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    torch.cuda.synchronize()
    print("as with collectives")
    dist.destroy_process_group()


if __name__ == "__main__":
    _compare()
