"""Train the toy model in every layout that the tests compare, and write the table of differences.

    python tools/compare_layouts.py --out docs/layouts.md --overwrite

This takes about half an hour on two CPU cores, with up to eight gloo processes and no GPU. The
layouts and the comparison are defined in `tests/parity`.
"""

from __future__ import annotations

import os
import platform
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if __package__ in (None, ""):
    # When this file is run as a script, the package next to its folder may not be installed.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.command import run_command
from megatron.config.arguments import ToolParser
from megatron.durable import check_writable, expect_no_file, writing_to
from megatron.errors import NumericsError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.parity.layouts import Difference, LayoutCase
    from tests.parity.mixtures import MixtureCase

_HEADING = """\
# Layouts compared with one process

Every layout trains on the same samples and starts from the same weights, which follow from the
seed alone, without a seed checkpoint. Each row is a toy GPT in fp32 on CPU processes (gloo) without
dropout, trained for {iterations} iterations. The row shows the largest relative difference of its
loss and gradient norm from those of one process, over all ranks and iterations. A difference of
more than {loss:.0e} in a loss or {norm:.0e} in a norm is an error, here and in the tests, which
train layouts of more than two processes for {short} iterations, over shared memory. The same tests
pass on GPUs, with kernels and NCCL ([command](benchmarks.md#goals-and-results)). This command
writes the page:

```bash
python tools/compare_layouts.py --out docs/layouts.md --overwrite
```

Sizes that a layout's name does not mention are 1. With dropout, a layout draws the same masks in
every run, and so do layouts that differ only in the number of data-parallel processes, with the
same `--micro-batch-size`. Each part of a pipeline and each context-parallel process draws its own
masks. So does each tensor-parallel process, for its attention heads and, with
`--sequence-parallel`, for its tokens. Their losses therefore differ from those of one process as
much as losses differ between two seeds.

The vocabulary is padded to a multiple of `--make-vocab-size-divisible-by` that the tensor-parallel
size divides, and padding takes part in the softmax. A tensor-parallel size that does not divide
that number (3 with the usual 128, for example) may therefore give different losses. To compare such
layouts, give all of them a multiple of both.

The run of one process is

```bash
{command}
```

The others add the flags of their row, with micro-batches as small as the number of micro-batches
requires.

"""
_MIXTURE_SECTION = """
## Mixtures of experts

The same comparison for a toy mixture with 8 experts in the last three of its four layers. `expert`
is `--expert-model-parallel-size`; `expert_tensor` is `--expert-tensor-parallel-size` where it is
not the tensor-parallel size. The row shows the largest difference of any loss, including the
routers'. The biases of routers, where there are any, are equal bit for bit. A row whose flags
change the network is compared with one process that also has these flags. The tests train each
layout for its first iterations.

A checkpoint that is saved in one layout is loaded in any other bit for bit.
[A test](../tests/parity/test_mixture_checkpoints.py) passes one from layout to layout, ZeRO stage 3
included, and back to the first.

The run of one process is

```bash
{command}
```

"""
_COLUMNS = ("layout", "processes", "flags", "loss", "gradient norm", "machine")


def machine() -> str:
    """Return a short description of this machine."""
    import torch

    return f"{os.cpu_count()} CPU cores ({platform.machine()}), torch {torch.__version__}"


def page(
    rows: Iterable[tuple[LayoutCase, Difference]],
    mixtures: Iterable[tuple[MixtureCase, Mapping[str, float]]],
    where: str,
) -> str:
    """Return the documentation page, with a row for each layout.

    Args:
        rows: The layouts of a dense GPT, each with its difference from one process.
        mixtures: The layouts of a mixture of experts, each with its largest differences by the name
            of the loss, "norm" or "biases".
        where: A description of the machine.
    """
    from tests.parity.layouts import (
        ITERATIONS,
        LOSS_TOLERANCE,
        NORM_TOLERANCE,
        OTHER_ITERATIONS,
        LayoutCase,
    )
    from tests.parity.mixtures import MixtureCase
    from tests.training.toy import TOY

    heading = _HEADING.format(
        iterations=ITERATIONS,
        short=OTHER_ITERATIONS,
        loss=LOSS_TOLERANCE,
        norm=NORM_TOLERANCE,
        command=_command([*TOY, *LayoutCase(1).words()]),
    )
    mixture_section = _MIXTURE_SECTION.format(command=_command([*TOY, *MixtureCase(1).words]))
    return "".join(
        [
            heading,
            _table(cells(case, difference, where) for case, difference in rows),
            mixture_section,
            _table(mixture_cells(case, differences, where) for case, differences in mixtures),
        ]
    )


def _command(args: Sequence[str]) -> str:
    lines = textwrap.wrap(" ".join(["python pretrain_gpt.py", *args]), 90, break_on_hyphens=False)
    return " \\\n    ".join(lines)


def _table(rows: Iterable[Sequence[str]]) -> str:
    return "\n".join([_row(_COLUMNS), _row(["---"] * len(_COLUMNS)), *map(_row, rows)]) + "\n"


def cells(case: LayoutCase, difference: Difference, where: str) -> list[str]:
    """Return the table cells for a layout."""
    numbers = (f"{difference.loss:.1e}", f"{difference.norm:.1e}")
    return [case.name, str(case.processes), _as_code(case.shown_flags), *numbers, where]


def mixture_cells(case: MixtureCase, differences: Mapping[str, float], where: str) -> list[str]:
    """Return the table cells for a layout of a mixture of experts."""
    loss = max(
        difference for name, difference in differences.items() if name not in ("norm", "biases")
    )
    numbers = (f"{loss:.1e}", f"{differences['norm']:.1e}")
    return [case.grid, str(case.processes), _as_code(case.shown_flags), *numbers, where]


def _as_code(flags: str) -> str:
    return f"`{flags}`".replace("|", "\\|") if flags else ""


def _row(values: Sequence[str]) -> str:
    return f"| {' | '.join(values)} |"


def run(argv: Sequence[str]) -> None:
    """Compare the layouts and write the page.

    Raises:
        NumericsError: A layout differs by more than the tolerance. The page is left unchanged.
    """
    parser = ToolParser("compare_layouts.py", __doc__)
    parser.add_argument(
        "--out", type=Path, required=True, metavar="PAGE.md", help="Page to write, for example "
        "docs/layouts.md."
    )  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="Replace an existing page.")
    options = parser.read(argv)
    expect_no_file("--out", [options.out], overwrite=options.overwrite)
    check_writable("--out", options.out)

    import torch

    from tests.parity.layouts import LAYOUTS, LOSS_TOLERANCE, NORM_TOLERANCE, compare
    from tests.parity.mixtures import IN_FP32, differences

    torch.set_num_threads(1)  # forked ranks cannot use the parent's threads
    rows = []
    for number, case in enumerate(LAYOUTS, 1):
        difference = compare(case)
        print(f"{number}/{len(LAYOUTS)} {case.name} {case.shown_flags}: {difference}", flush=True)
        rows.append((case, difference))
    differing = [
        f"{case.processes} processes, {case.name} {case.shown_flags}: {difference}"
        for case, difference in rows
        if not (difference.loss <= LOSS_TOLERANCE and difference.norm <= NORM_TOLERANCE)
    ]
    mixtures = []
    for number, mixture in enumerate(IN_FP32, 1):
        largest = differences(mixture)
        print(f"mixture {number}/{len(IN_FP32)} {mixture.name}: {dict(largest)}", flush=True)
        mixtures.append((mixture, largest))
    limits = {"norm": NORM_TOLERANCE, "biases": 0.0}
    differing += [
        f"{mixture.processes} processes, mixture, {mixture.name}: {dict(largest)}"
        for mixture, largest in mixtures
        if not all(value <= limits.get(name, LOSS_TOLERANCE) for name, value in largest.items())
    ]
    if differing:
        raise NumericsError("layouts that differ from one process:\n  " + "\n  ".join(differing))
    with writing_to("--out", options.out):
        options.out.write_text(page(rows, mixtures, machine()), encoding="utf-8")
    print(f"wrote {options.out}")


def main(argv: Sequence[str]) -> int:
    """Run the tool and return its exit code.

    The code is 0 for success, 7 if a layout differs, 8 for a storage error, 9 for bad flags.
    """
    return run_command(lambda: run(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
