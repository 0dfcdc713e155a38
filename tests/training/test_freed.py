"""The memory of a finished run is freed at once, whatever hooks hold parts of it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import pytest

from megatron.parallel.layout import Layout
from tests.distributed import run_distributed
from tests.training.toy import train_toy

LEFT = tuple[list[str], list[str]]  # before and after a garbage collection


def _left(layout: Layout, flags: str) -> LEFT:
    """Return the parts of a run that still exist once nobody references it."""
    _, run = train_toy(layout, ["--train-iters", "2", *flags.split()])
    parts = {
        "run": run,
        "model": run.parts[0],
        "optimizer": run.optimizer,
        "gradients": run.gradients,
        "parameter": next(run.parameters()),
        "batches": run.train_batches,
    }
    alive = {name: weakref.ref(part) for name, part in parts.items()}
    gc.collect()
    gc.disable()
    try:
        del run, parts
        at_once = [name for name, part in alive.items() if part() is not None]
    finally:
        gc.enable()
    gc.collect()
    return at_once, [name for name, part in alive.items() if part() is not None]


@pytest.mark.parametrize("flags", ["", "--bf16 --no-gradient-accumulation-fusion"])
def test_one_process_frees_all(flags: str) -> None:
    assert _left(Layout.single(), flags) == ([], [])


def _each(layout: Layout, several: Sequence[str]) -> list[LEFT]:
    return [_left(layout, flags) for flags in several]


def test_processes_that_share_free_all() -> None:
    several = [
        "--bf16 --overlap-grad-reduce",
        "--zero-stage 1 --overlap-param-gather",
        "--zero-stage 2 --bf16",
        "--zero-stage 1 --bf16 --fp8-format hybrid --fp8-param-gather",
        "--DDP-impl torch",
        "--zero-stage 3",
    ]
    *ours, (at_once, later) = run_distributed(2, _each, several)[0]
    assert ours == [([], [])] * len(ours)
    # PyTorch's `fully_shard` has reference cycles, which are left to the garbage collector.
    assert {*at_once} <= {"model", "parameter"}
    assert later == []
