"""One process of a job: how it starts, meets the others, and ends."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from megatron import environment
from megatron.command import open_missing_streams, say, take_interrupts
from megatron.config import RunConfig, rules_device
from megatron.config.parser import asks_for_mpi
from megatron.device import Device
from megatron.environment import Launch, read_launch
from megatron.errors import ConfigError, UserError
from megatron.kernels.library import LibraryChoice, find_library
from megatron.parallel.collectives import all_reduce
from megatron.parallel.layout import Axis, Layout
from megatron.training.distributed import process_group
from megatron.training.failure import RunEndedError, report
from megatron.training.hang import ranks_text

_TURN = 2.0  # seconds


def run_process(arguments: Sequence[str], work: Callable[[Launch], int]) -> int:
    """Do `work` as the process that the launcher's variables name; the exit code.

    `work`'s own, or that of the error, whose message is printed once for all processes; 130 after
    Ctrl-C, where `work` lets it through.
    """
    open_missing_streams()
    launch = Launch()
    try:
        take_interrupts()
        launch = read_launch(use_mpi=asks_for_mpi(arguments))
        return work(launch)
    except UserError as error:  # before the processes have met, or with one alone
        if launch.rank == 0 or not isinstance(error, ConfigError):
            report(error, launch)
        else:
            time.sleep(_TURN)  # torchrun ends all when the first leaves: rank 0 is to print
        return error.exit_code
    except RunEndedError as ended:
        return ended.code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def show_notices(notices: Iterable[str], launch: Launch, tell: Callable[[str], None] = say) -> None:
    """Print what the command line brought up, on rank 0: a line each."""
    if launch.rank == 0:
        for notice in notices:
            tell(f"note: {notice}")


@contextmanager
def processes(
    config: RunConfig, launch: Launch, before_end: ExitStack | None = None
) -> Iterator[tuple[Device, Layout]]:
    """This process's device, and the layout that all of them form inside the block. Collective.

    Args:
        before_end: see `process_group`.

    Raises:
        ConfigError: the device has nothing for a flag.
        HangError: the processes did not come together.
        RunEndedError: a process failed. It has said why.
    """
    launch = environment.placed(launch, config.parallel.local_rank)
    environment.prepare(launch, deterministic=config.training.deterministic_mode)
    if config.training.deterministic_mode:
        _be_deterministic()
    device = Device.pick(launch.local_rank)
    misfits = list(rules_device.device(config, device, launch.local_world_size))
    kernels = None
    if not misfits:
        device.activate()
        kernels = find_library(device.torch_device)  # may compile for a minute: no group waits yet
    before_end = before_end or ExitStack()
    with process_group(config.parallel, launch, device, before_end, misfits) as layout:
        assert kernels is not None, "who has misfits has no groups"
        expect_same_kernels(kernels, layout.world)
        yield device, layout


def expect_same_kernels(kernels: LibraryChoice, world: Axis) -> None:
    """Collective.

    Raises:
        ConfigError: some processes have fused kernels and some have none: those draw other masks
            of dropout from the same seed, and copies of one value would differ.
    """
    if world.size == 1:
        return
    fused = torch.zeros(world.size, dtype=torch.int32)
    fused[world.rank] = kernels.library is not None
    without = all_reduce(fused, world).logical_not().nonzero().flatten().tolist()
    if 0 < len(without) < world.size:
        raise ConfigError(
            f"{ranks_text(without)} of {world.size} cannot use the fused kernels, and the others "
            "do: masks of dropout would differ. A line that begins with `fused kernels: off` says "
            "what their machine lacks (docs/kernels.md, Compiling)"
        )


def _be_deterministic() -> None:
    torch.use_deterministic_algorithms(True)
    # Filling buffers that are written anyway costs time and changes nothing.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
