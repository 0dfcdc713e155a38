"""Named timers of one process, and their spread over all ranks.

Level 0 times the iteration, level 1 its parts, level 2 parts of those. Timers above the level
asked for do not wait for the device. All of them are named ranges in a profile.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.autograd.profiler import record_function  # torch.profiler takes long to import

from megatron.device import Device
from megatron.parallel.collectives import all_gather
from megatron.parallel.layout import Axis


class Timers:
    """Accumulated seconds by name since the last `reset`.

    Args:
        level: highest level that is timed.
        device: waited for before and after a level-1 or level-2 timer.
        world: ranks to compare over; with `barrier` they also start level-1 timers together.
    """

    def __init__(
        self, *, level: int, device: Device, world: Axis | None = None, barrier: bool = False
    ) -> None:
        self._level = level
        self._device = device
        self._world = world or Axis()
        self._barrier = barrier and self._world.size > 1
        self._seconds: dict[str, float] = {}
        self.resets = 0

    @contextmanager
    def measure(self, name: str, level: int = 1) -> Iterator[None]:
        """Add the time inside to `name`."""
        if level > self._level:  # not timed: no synchronization either
            with record_function(name):
                yield
            return
        self._wait(level)
        start = time.perf_counter()
        with record_function(name):
            yield
        self._wait(level)
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def _wait(self, level: int) -> None:
        self._device.synchronize()
        if self._barrier and level == 1:
            self._world.barrier()

    @property
    def seconds(self) -> dict[str, float]:
        return dict(self._seconds)

    def reset(self) -> None:
        self._seconds.clear()
        self.resets += 1

    def over_ranks(self) -> dict[str, list[float]]:
        """Seconds of every rank, by name. Collective; all ranks time the same names."""
        names = sorted(self._seconds)
        mine = torch.tensor([self._seconds[name] for name in names], dtype=torch.float64)
        if self._world.size == 1 or not names:
            return {name: [value] for name, value in zip(names, mine.tolist(), strict=True)}
        columns = all_gather(mine[None], self._world).T.tolist()
        return dict(zip(names, columns, strict=True))


def format_timers(over_ranks: dict[str, list[float]], option: str, iterations: int) -> str:
    """The `time (ms)` block of the log: `option` is max, minmax or all."""
    lines = [f"{'times across ranks' if option == 'all' else '(min, max) time across ranks'} (ms):"]
    if option == "max":
        lines = ["max time across ranks (ms):"]
    for name, values in over_ranks.items():
        per_iteration = [1000.0 * value / iterations for value in values]
        low, high = min(per_iteration), max(per_iteration)
        if option == "all":
            text = ", ".join(f"{value:.2f}" for value in per_iteration)
        elif option == "max":
            text = f"{high:.2f}"
        else:
            text = f"({low:.2f}, {high:.2f})"
        lines.append(f"    {(name + ' ').ljust(40, '.')}: {text}")
    return "\n".join(lines)
