"""The measurements of `tools/benchmark_overlap.py`: variants of split layers' matrix products."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.device import Device
from megatron.errors import ConfigError
from megatron.parallel.collectives import all_gather, reduce_scatter
from megatron.parallel.exchange import Exchange, GroupExchange
from megatron.parallel.layout import Layout
from megatron.parallel.linear import ScatteredProduct, gathered_product
from megatron.processes.launch import prepare, read_launch

Variant = Callable[[], Tensor]


def gather_variants(
    rows: Tensor, weight: Tensor, layout: Layout, exchange: Exchange
) -> dict[str, tuple[Variant, bool]]:
    """Return variants of the product of all ranks' rows, [m, in] each, with a weight [in, out].

    Each variant comes with a flag that says whether it communicates.
    """
    axis, all_rows = layout.tensor, all_gather(rows, layout.tensor)

    def multiply(x: Tensor, into: Tensor) -> None:
        torch.mm(x, weight, out=into)

    def overlapped() -> Tensor:
        out = rows.new_empty(all_rows.shape[0], weight.shape[1])
        gathered_product(rows, multiply, out, exchange).close()
        return out

    def fused() -> Tensor:
        name = axis.group.group_name if axis.group is not None else ""
        results = torch.ops.symm_mem.fused_all_gather_matmul(
            rows, [weight], 0, name, return_A=False
        )
        product: Tensor = results[1][0]
        return product

    return {
        "product alone": (lambda: all_rows @ weight, False),
        "collective": (lambda: all_gather(rows, axis) @ weight, True),
        "PyTorch, fused": (fused, True),
        "cut": (overlapped, True),
    }


def scatter_variants(
    rows: Tensor, weight: Tensor, layout: Layout, exchange: Exchange
) -> dict[str, tuple[Variant, bool]]:
    """Return variants of a matrix product of rows [t m, in] that is summed over the t ranks.

    Each rank gets m rows of the sum (a reduce-scatter). Each variant comes with a flag that says
    whether it communicates.
    """
    axis = layout.tensor

    def multiply(x: Tensor, into: Tensor) -> None:
        torch.mm(x, weight, out=into)

    def fused() -> Tensor:
        name = axis.group.group_name if axis.group is not None else ""
        product: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(
            rows, weight, "sum", 0, name
        )
        return product

    return {
        "product alone": (lambda: rows @ weight, False),
        "collective": (lambda: reduce_scatter(rows @ weight, axis), True),
        "PyTorch, fused": (fused, True),
        "cut": (
            lambda: ScatteredProduct(
                rows, multiply, weight.shape[1], exchange, rows.dtype
            ).finish(),
            True,
        ),
    }


def measure(
    variants: dict[str, tuple[Variant, bool]], device: Device, rounds: int
) -> dict[str, str]:
    """Return the microseconds of each variant as text, with a note if its result is bit-identical.

    Results are compared with that of the collective. Times are medians over the rounds.
    """
    if not device.is_gpu:
        del variants["PyTorch, fused"]
    expected = variants["collective"][0]()
    notes = {}
    for name, (variant, communicates) in variants.items():
        result = variant()
        is_equal = communicates and torch.equal(result, expected)
        notes[name] = ", same bits" if is_equal and name != "collective" else ""
        if communicates:
            torch.testing.assert_close(result, expected, rtol=0.05, atol=0.05)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, (variant, _) in variants.items():
            variant()
            dist.barrier()
            start = device.mark()
            for _ in range(20):
                variant()
            end = device.mark()
            device.synchronize()
            times[name].append(device.seconds_between(start, end) / 20 * 1e6)
    return {name: f"{statistics.median(times[name]):,.0f}{notes[name]}" for name in variants}


def run(options: argparse.Namespace) -> None:
    """Measure the variants of each matrix product and print a table.

    Raises:
        ConfigError: There is only one process, a size is not a multiple of the number of processes,
            or --rounds is below 1.
    """
    launch = read_launch()
    size = launch.world_size
    if size < 2:
        raise ConfigError("a single process does not communicate: start several with torchrun")
    for name in ("tokens", "hidden_size", "qkv_size", "ffn_hidden_size"):
        value, flag = getattr(options, name), f"--{name.replace('_', '-')}"
        if value < 1 or value % size:
            raise ConfigError(f"{flag} {value} is not a multiple of the {size} processes")
    if options.rounds < 1:
        raise ConfigError(f"--rounds {options.rounds}: must be at least 1")
    prepare(launch, deterministic=False)
    device = Device.pick(launch.local_rank)
    device.activate()
    backend = f"cpu:gloo,{device.type}:nccl" if device.is_gpu else "gloo"
    dist.init_process_group(backend, timeout=timedelta(minutes=5))
    layout = Layout.at(launch.rank, size, tensor=size).connect(device.type)
    torch.manual_seed(1 + launch.rank)
    rows = {
        label: measure(variants, device, options.rounds)
        for label, variants in cases(options, layout, device)
    }
    if launch.rank == 0:
        names = list(next(iter(rows.values())))
        print(f"{device.name}, {size} processes, torch {torch.__version__}")
        print(f"| us | {' | '.join(names)} |\n| --- |{' --- |' * len(names)}")
        for label, times in rows.items():
            print(f"| {label} | {' | '.join(times[name] for name in names)} |")
    dist.barrier()
    dist.destroy_process_group()


def cases(
    options: argparse.Namespace, layout: Layout, device: Device
) -> Iterator[tuple[str, dict[str, tuple[Variant, bool]]]]:
    """Yield the name and variants of each matrix product of a layer that involves communication."""
    size, hidden, ffn = layout.tensor.size, options.hidden_size, options.ffn_hidden_size
    part = options.tokens // size
    dtype = torch.bfloat16 if device.is_gpu else torch.float32
    exchange: Exchange = GroupExchange(layout.tensor)
    if device.is_gpu:
        from megatron.parallel.symmetric_memory import SymmetricExchange

        exchange = SymmetricExchange(
            layout.tensor, device.torch_device, part * hidden * 2, seconds=60.0
        )

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device.torch_device, dtype=dtype)

    for name, out in (("query-key-value", options.qkv_size), ("MLP up", 2 * ffn)):
        weight = (random(out // size, hidden) / hidden**0.5).t()
        yield f"gather, {name}", gather_variants(random(part, hidden), weight, layout, exchange)
    for name, width in (("attention's output", hidden), ("MLP down", ffn)):
        weight = (random(hidden, width // size) / width**0.5).t()
        whole = random(options.tokens, width // size)
        yield f"{name}, scatter", scatter_variants(whole, weight, layout, exchange)
        grad, weight = random(part, hidden), random(hidden, width // size) / hidden**0.5
        yield f"gather, input's gradient of {name}", gather_variants(grad, weight, layout, exchange)
