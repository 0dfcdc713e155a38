"""Time every fused kernel against its floor and against PyTorch's own operations.

    python tools/benchmark_kernels.py                 # all kernels, as a Markdown table
    python tools/benchmark_kernels.py --only RMSNorm  # only operations whose names contain this

The floor is the time to move the necessary bytes at the bandwidth of a large copy on this GPU. For
attention and matrix products, it is the time of the necessary operations at the rate of a large
bf16 matrix product, if that is longer. Times are medians of GPU time over inputs larger than the L2
cache.
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

GROUPS = (
    "layers",
    "attention",
    "recurrence",
    "training",
    "generation",
)  # files of tools/kernel_benchmarks


def main() -> int:
    """Print the table and return the exit code, which is 9 if there are no kernels to time."""
    parser = ToolParser("benchmark_kernels.py", __doc__)
    parser.add_argument("--only", default="", help="Time operations whose names contain this.")
    parser.add_argument("--no-compile", action="store_true", help="Skip torch.compile.")
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
        raise ConfigError(f"no fused kernels to time on this machine: {choice.reason}")
    operations = [
        operation
        for group in GROUPS
        for operation in import_module(f"tools.kernel_benchmarks.{group}").operations(
            choice.library, device.torch_device
        )
        if only in operation.name
    ]
    if not operations:
        raise ConfigError(f"--only {only}: no operation's name contains this")
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
            print(f"skipped {operation.name} {operation.shape}: {missing}", file=sys.stderr)
            continue
        for row in measure(operation, watch, ceilings, compiled=compiled):
            print(table_row(row), flush=True)  # print now, because a later row may fail


if __name__ == "__main__":
    sys.exit(main())
