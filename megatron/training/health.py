"""A test of a run's machines: speed, results, links, disk, clock and versions of each rank.

`megatron health` runs the test, and so does training with --health-check. It takes less than 10 s.
All ranks compute at the same time, as in training. A rank is reported if it is slower than the
others by more than a given factor, if its results, clock or versions differ, or if it computes the
same product twice with different results.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryFile

import torch
import torch.distributed as dist

from megatron import __version__
from megatron.checkpoint.exchange import JsonExchange
from megatron.config.reliability import HEALTH_FACTOR
from megatron.device import Device, library_versions
from megatron.durable import writing_to
from megatron.errors import StorageError, warn
from megatron.parallel.collectives import all_reduce
from megatron.parallel.layout import Layout
from megatron.processes.watchdog import ranks_text
from megatron.training.timers import ReadyClock

_SECONDS = 0.4  # time spent measuring each speed of a device
_REPEATS = 10  # the number of repetitions of each message
_MAX_CLOCK_SECONDS = 1.0  # maximum difference between clocks; rendezvous fails at 15 s
_DISK_BYTES = 16 << 20
# Ranks of a machine share its disk, and all ranks take part in an all-reduce.
_DISK, _ALL_REDUCE = "disk MB/s", "all-reduce GB/s"


@dataclass(frozen=True)
class Health:
    """The measurements of a rank.

    Attributes:
        host: The name of the machine.
        device: The name of the device.
        speeds: Speeds by name and unit, for example {"bf16 TFLOP/s": 611.3}.
        links: The speed in GB/s in each direction to and from neighboring ranks, by rank.
        digest: A digest of the result of a fixed product.
        is_stable: Whether the product had the same bits each time.
        clock: Seconds since 1970, read at the same moment on all ranks.
        versions: Versions of software by name.
    """

    host: str
    device: str
    speeds: dict[str, float]
    links: dict[int, float]
    digest: int
    is_stable: bool
    clock: float
    versions: dict[str, str] = field(default_factory=dict)


def check_health(layout: Layout, device: Device, folder: Path | None) -> list[Health]:
    """Test all ranks, and return the measurements of each. Collective.

    Args:
        layout: The grid of processes.
        device: The device of this process.
        folder: A folder whose disk is tested, if any. It is created if it does not exist. If it
            cannot be written to, its speed is 0, and this process prints the reason.
    """
    layout.journal.enter("health check")
    layout.world.barrier()
    speeds = _speeds_of(device)
    digests = {_digest(device) for _ in range(3)}
    if folder is not None:
        try:
            speeds[_DISK] = _disk_speed(folder) / 1e6
        except StorageError as error:  # a test must not end the run, or keep other ranks waiting
            warn(str(error))
            speeds[_DISK] = 0.0
    if layout.world.size > 1:
        speeds[_ALL_REDUCE] = _all_reduce_speed(layout, device) / 1e9
    local = Health(
        host=platform.node(),
        device=device.name,
        speeds=speeds,
        links=_link_speeds(layout, device),
        digest=min(digests),
        is_stable=len(digests) == 1,
        clock=_clock(layout),
        versions={
            "megatron": __version__,
            "Python": platform.python_version(),
            **library_versions(),
        },
    )
    rows = JsonExchange(layout.world).gather(asdict(local))
    return [
        Health(**(row | {"links": {int(rank): speed for rank, speed in row["links"].items()}}))
        for row in rows
    ]


def _speed(work: Callable[[], object], amount: float, device: Device) -> float:
    """Return the amount of work per second in the fastest of several repetitions.

    On a CPU, time during which other processes had the cores does not count.
    """
    work()  # a warm-up, in which libraries choose their kernels
    device.synchronize()
    fastest, deadline, ready = float("inf"), time.perf_counter() + _SECONDS, ReadyClock()
    while True:
        # Read the waits inside the timed span, so that only waits that were timed are subtracted.
        start, waited = time.perf_counter(), ready.seconds()
        work()
        device.synchronize()
        waited, end = ready.seconds() - waited, time.perf_counter()
        fastest = min(fastest, end - start - waited)
        if end > deadline:
            return amount / fastest


def _speeds_of(device: Device) -> dict[str, float]:
    """Measure the speeds of square matrix products and of a copy in the device's memory."""
    side, times, size = (8192, 4, 256 << 20) if device.is_gpu else (512, 1, 32 << 20)
    speeds = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        a = torch.ones(side, side, dtype=dtype, device=device.torch_device)
        out = torch.empty_like(a)

        def multiply(a: torch.Tensor = a, out: torch.Tensor = out) -> None:
            for _ in range(times):
                torch.mm(a, a, out=out)

        speeds[f"{name} TFLOP/s"] = _speed(multiply, times * 2e-12 * side**3, device)
        del a, out
    source = torch.ones(size, dtype=torch.uint8, device=device.torch_device)
    target = torch.empty_like(source)
    speeds["memory GB/s"] = _speed(lambda: target.copy_(source), 2e-9 * size, device)
    return speeds


def _digest(device: Device) -> int:
    """Return a bitwise digest of the product of fixed random matrices."""
    generator = torch.Generator().manual_seed(1234)
    a, b = (torch.randn(512, 512, generator=generator).to(device.torch_device) for _ in range(2))
    return zlib.crc32((a @ b).cpu().numpy().tobytes())


def _disk_speed(folder: Path) -> float:
    """Return the bytes per second at which a file is written and flushed."""
    content = os.urandom(_DISK_BYTES)
    with writing_to("--save", folder):
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder) as file:
            start = time.perf_counter()
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            return len(content) / (time.perf_counter() - start)


def _clock(layout: Layout) -> float:
    layout.world.barrier()
    return time.time()


def _all_reduce_speed(layout: Layout, device: Device) -> float:
    """Return the bytes per second that each rank sends in a ring all-reduce."""
    numbers = _message(device)
    fastest = float("inf")
    for _ in range(1 + _REPEATS):
        device.synchronize()
        layout.world.barrier()
        start = time.perf_counter()
        all_reduce(numbers, layout.world)
        device.synchronize()
        fastest = min(fastest, time.perf_counter() - start)
    ranks = layout.world.size
    return 2 * (ranks - 1) / ranks * numbers.nbytes / fastest


def _message(device: Device) -> torch.Tensor:
    return torch.zeros((128 if device.is_gpu else 2) << 18, device=device.torch_device)


def neighbors(rank: int, ranks: int) -> list[int | None]:
    """Return the partner of a rank in each of the two rounds of link tests, `None` if it has none.

    The two rounds test the links to the two neighboring ranks. No rank has two partners in a round.

    Args:
        rank: The rank.
        ranks: The number of ranks.
    """
    even = rank - rank % 2
    first = even + 1 - rank % 2
    odd = rank + 1 if rank % 2 else rank - 1
    if ranks % 2 == 0 and ranks > 2:
        odd %= ranks
    return [partner if 0 <= partner < ranks else None for partner in (first, odd)]


def _link_speeds(layout: Layout, device: Device) -> dict[int, float]:
    """Return the speed, in GB/s, in each direction between this rank and each of its neighbors."""
    world, speeds = layout.world, {}
    for partner in neighbors(world.rank, world.size):
        fastest = float("inf")
        for _ in range(1 + _REPEATS if world.size > 1 else 0):
            device.synchronize()
            layout.world.barrier()
            if partner is None:
                continue
            sent, received = _message(device), _message(device)
            start = time.perf_counter()
            operations = [
                dist.P2POp(dist.isend, sent, partner),
                dist.P2POp(dist.irecv, received, partner),
            ]
            for work in dist.batch_isend_irecv(operations):
                world.journal.message("message", partner, work).wait()
            device.synchronize()
            fastest = min(fastest, time.perf_counter() - start)
        if partner is not None and world.size > 1:
            speeds[partner] = _message(device).nbytes / fastest / 1e9
    return speeds


def problems_of(rows: Sequence[Health], factor: float = HEALTH_FACTOR) -> list[str]:
    """Return a line for each slow, faulty or inconsistent rank, link, disk, clock or version.

    Args:
        rows: The measurements of each rank.
        factor: The fraction of the median speed of the others below which a speed counts as slow.
    """
    lines = []
    for name in [name for name in rows[0].speeds if name not in (_DISK, _ALL_REDUCE)]:
        values = [row.speeds[name] for row in rows]
        kinds = [row.device for row in rows]
        lines += [
            f"rank {rank} (on {rows[rank].host}) is slow: {name} {values[rank]:.3g} instead of "
            f"{usual:.3g}"
            for rank, usual in _slow(values, kinds, factor)
        ]
    hosts = list(dict.fromkeys(row.host for row in rows))
    disks = [max(row.speeds.get(_DISK, 0.0) for row in rows if row.host == host) for host in hosts]
    lines += [
        f"the disk of --save is slow on {hosts[index]}: {disks[index]:.3g} MB/s instead of "
        f"{usual:.3g}"
        for index, usual in _slow(disks, ["all"] * len(disks), factor)
        if disks[index]
    ]
    unwritable = [host for host, speed in zip(hosts, disks, strict=True) if not speed]
    if _DISK in rows[0].speeds:
        lines += [f"the folder of --save cannot be written to on {host}" for host in unwritable]
    pairs = [(a, b) for a, row in enumerate(rows) for b in row.links if a < b]
    machines = ["one" if rows[a].host == rows[b].host else "two" for a, b in pairs]
    speeds = [min(rows[a].links[b], rows[b].links[a]) for a, b in pairs]
    lines += [
        f"the link between ranks {pairs[index][0]} and {pairs[index][1]} (on "
        f"{rows[pairs[index][0]].host} "
        f"and {rows[pairs[index][1]].host}) is slow: {speeds[index]:.3g} GB/s instead of "
        f"{usual:.3g}"
        for index, usual in _slow(speeds, machines, factor)
    ]
    unstable = [rank for rank, row in enumerate(rows) if not row.is_stable]
    lines += [
        f"rank {rank} (on {rows[rank].host}) computes wrong results: the same product had "
        "different bits when it was repeated"
        for rank in unstable
    ]
    # CPUs of different machines may add up in different orders.
    kinds = [row.device if row.device != "CPU" else row.host for row in rows]
    lines += _differing("results", [str(row.digest) for row in rows], kinds, rows)
    median = statistics.median(row.clock for row in rows)
    lines += [
        f"the clock of rank {rank} (on {row.host}) is {abs(row.clock - median):.1f} s "
        f"{'ahead of' if row.clock > median else 'behind'} the others"
        for rank, row in enumerate(rows)
        if abs(row.clock - median) > _MAX_CLOCK_SECONDS
    ]
    for name in dict.fromkeys(name for row in rows for name in row.versions):
        versions = [row.versions.get(name, "none") for row in rows]
        lines += _differing(f"version of {name}", versions, ["all"] * len(rows), rows)
    return lines


def _slow(
    values: Sequence[float], kinds: Sequence[str], factor: float
) -> Iterable[tuple[int, float]]:
    """Yield the index of each value far below the median of its peers, and this median.

    Args:
        values: The measured speeds.
        kinds: The kind of each value. Only values of the same kind are peers.
        factor: The fraction of the median below which a speed counts as slow.
    """
    for index, value in enumerate(values):
        peers = [
            peer
            for peer_index, peer in enumerate(values)
            if peer_index != index and kinds[peer_index] == kinds[index]
        ]
        if peers and value < factor * statistics.median(peers):
            yield index, statistics.median(peers)


def _differing(
    quantity: str, values: Sequence[str], kinds: Sequence[str], rows: Sequence[Health]
) -> Iterable[str]:
    """Yield a line for each kind of rank in which some ranks differ from the majority.

    Args:
        quantity: The name of the compared quantity.
        values: The value of each rank.
        kinds: The kind of each rank. Only ranks of the same kind are compared.
        rows: The measurements of each rank.
    """
    for kind in dict.fromkeys(kinds):
        ranks = [rank for rank, kind_of_rank in enumerate(kinds) if kind_of_rank == kind]
        usual, count = Counter(values[rank] for rank in ranks).most_common(1)[0]
        if count == len(ranks):
            continue
        minority = [rank for rank in ranks if values[rank] != usual]
        hosts = ", ".join(dict.fromkeys(rows[rank].host for rank in minority))
        minority_values = ", ".join(dict.fromkeys(values[rank] for rank in minority))
        majority = ranks_text(frozenset(ranks) - set(minority))
        text = f"{ranks_text(minority)} (on {hosts}): different {quantity} from {majority}"
        yield f"{text}: {minority_values} instead of {usual}"


def health_table(rows: Sequence[Health]) -> str:
    """Return a table with one line per rank, followed by a line of versions."""
    median = statistics.median(row.clock for row in rows)
    header = ["rank", "host", "device", *rows[0].speeds, "links GB/s", "clock ms", "results"]
    lines = [header]
    for rank, row in enumerate(rows):
        links = ", ".join(f"{speed:.3g} ({peer})" for peer, speed in row.links.items()) or "-"
        speeds = [f"{speed:.3g}" for speed in row.speeds.values()]
        clock = f"{1000 * (row.clock - median):+.0f}"
        result = f"{row.digest:08x}" if row.is_stable else "unstable"
        lines.append([str(rank), row.host, row.device, *speeds, links, clock, result])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    versions = ", ".join(f"{name} {version}" for name, version in rows[0].versions.items())
    return "\n".join([*text, f"versions of rank 0: {versions}"])
