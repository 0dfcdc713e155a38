"""One rank of the runs that test_waits.py starts with several processes."""

import sys

import pytest
import torch

from megatron.config.parser import parse_config
from megatron.processes.launch import read_launch
from megatron.processes.process import processes
from megatron.training.run import Run
from megatron.training.step import Updates
from tests.training.toy import TOY, build_toy

# A head size that flash kernels support; passes are not recorded unless a test asks for it.
WIDE = "--hidden-size 64 --kv-channels 16 --bf16 --cuda-graph-impl none".split()


def expect_no_wait(run: Run) -> None:
    """Run an update in which the host may only wait for the event at its end."""
    updates = Updates(run)
    for _ in range(3):  # these may compile, choose, allocate, record
        updates.make(look_ahead=True)

    def refuse(*_: object) -> None:
        raise AssertionError("the host waited for the whole device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", refuse)
        torch.cuda.set_sync_debug_mode("error")  # ignores that event
        try:
            outcome = updates.make(look_ahead=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert outcome.applied
    assert updates.make(look_ahead=False).applied


def main(flags: list[str]) -> None:
    """Build the toy in the layout given by the flags, and check one of its updates."""
    launch = read_launch()
    words = [*TOY, *WIDE, *flags, "--train-iters", "6"]
    config = parse_config(words, world_size=launch.world_size, architecture="gpt").config
    with processes(config, launch) as (device, layout):
        expect_no_wait(build_toy(layout, [*WIDE, *flags], device=device))
    print(f"rank {launch.rank} of {launch.world_size}: no wait", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
