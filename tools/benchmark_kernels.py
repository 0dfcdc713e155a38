"""Time every fused kernel against its memory-bandwidth floor and against what PyTorch has.

    python tools/benchmark_kernels.py                 # all, a table in markdown
    python tools/benchmark_kernels.py --only RMSNorm  # those with this in their name

Floor: the bytes that must move, over the bandwidth of a large copy on this very GPU; for attention
and products, their operations over the rate of a large bf16 product where that takes longer.
Medians of GPU time over inputs that rotate through more memory than the L2 cache holds.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.command import run_command
from megatron.config.arguments import ToolParser
from megatron.errors import ConfigError

GROUPS = ("layers", "attention", "training", "generation")  # files of tools/kernel_benchmarks


def main() -> int:
    """Print the table; exit code 9 where there are no kernels to time."""
    parser = ToolParser("benchmark_kernels.py", __doc__)
    parser.add_argument("--only", default="", help="Time operations with this in their name.")
    parser.add_argument("--no-compile", action="store_true", help="Leave torch.compile out.")
    args = parser.read()
    return run_command(lambda: _run(args.only, compiled=not args.no_compile))


def _run(only: str, *, compiled: bool) -> None:
    import torch

    from megatron.device import Device
    from megatron.kernels.library import find_library
    from tools.kernel_benchmarks.operation import HEADER, Ceilings, Stopwatch, measure, table_row

    device = Device.pick()
    choice = find_library(device.torch_device)
    if choice.library is None:
        raise ConfigError(f"there are no fused kernels to time here: {choice.reason}")
    operations = [
        operation
        for group in GROUPS
        for operation in import_module(f"tools.kernel_benchmarks.{group}").operations(
            choice.library, device.torch_device
        )
        if only in operation.name
    ]
    if not operations:
        raise ConfigError(f"--only {only}: no operation has this in its name")
    watch = Stopwatch(device.torch_device)
    ceilings = Ceilings(watch.copy_bandwidth(), watch.product_rate())
    print(
        f"{device.name}, torch {torch.__version__}, copy {ceilings.bandwidth / 1e12:.2f} TB/s, "
        f"product {ceilings.products / 1e12:.0f} TFLOP/s; times in us\n"
    )
    print(HEADER, flush=True)
    for operation in operations:
        missing = operation.missing()
        if missing:
            print(f"left out {operation.name} {operation.shape}: {missing}", file=sys.stderr)
            continue
        for row in measure(operation, watch, ceilings, compiled=compiled):
            print(table_row(row), flush=True)  # a later one may fail, or the time be up


if __name__ == "__main__":
    sys.exit(main())
