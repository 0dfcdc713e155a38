"""The rates and links of a machine: built in, or read from a file of measured ceilings."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from megatron.errors import ConfigError, DataError

_GIB = 1024.0**3
_CEILINGS = ("attention_forward", "attention_backward", "copy")
_KERNEL_RATE = 0.87  # the rate of kernels without matrix products, relative to a copy


@dataclass(frozen=True)
class Link:
    """A connection from a GPU to other GPUs.

    Attributes:
        bandwidth: Bytes/s that a GPU sends while it receives at the same rate.
        latency: Seconds that a collective operation takes even if it sends nothing.
    """

    bandwidth: float
    latency: float


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The rates that a machine sustains for several seconds, which are below the datasheet's.

    Attributes:
        name: Name of the GPU.
        memory: Bytes of memory that a process may use.
        peak: Dense 16-bit FLOP/s from the datasheet, for MFU.
        products: FLOP/s of large 16-bit matrix products.
        products_fp8: The same in FP8; `None` if the device does not support FP8.
        experts_in_fp8: Whether the device also supports FP8 in the grouped products of experts.
        grouped: FLOP/s of the grouped products of experts.
        attention: FLOP/s of attention with heads of 128 channels and long sequences, forward and
            backward together. The 5 products of the backward pass count as 4, as in model FLOPs.
        ring: Rate of the kernel that ring attention uses, as a fraction of `attention`.
        copy: Bytes/s that kernels without matrix products read and write.
        kernel: Seconds that every kernel takes to start and end.
        launch: Seconds that the host takes to launch a kernel.
        link: Connection to the GPUs of the same node.
        network: Connection of a GPU to GPUs of other nodes.
        pair: Bytes/s of a message between two GPUs of a node, as sent by pipelines.
        node: GPUs per node.
    """

    name: str
    memory: float
    peak: float
    products: float
    products_fp8: float | None
    experts_in_fp8: bool = True
    grouped: float
    attention: float
    ring: float = 0.6
    copy: float
    kernel: float = 5e-6
    launch: float = 35e-6
    link: Link
    network: Link
    pair: float
    node: int = 8

    def connection(self, size: int, stride: int) -> Link:
        """Return the connection among `size` processes that are `stride` ranks apart.

        If the processes span several nodes, those on the same node divide its traffic among their
        network links.
        """
        within = max(1, min(size, self.node // stride))
        if within == size:
            return self.link
        hops = math.log2(size / within)
        return Link(
            min(self.link.bandwidth, self.network.bandwidth * within),
            self.link.latency + hops * self.network.latency,
        )


# Fitted to measurements, as docs/planner.md explains. The rates of the H100 are those that Megatron
# Core reached on it; those of the A100 and B200 are scaled by their datasheets.
MACHINES = {
    "A100": Machine(
        name="A100",
        memory=74 * _GIB,
        peak=312e12,
        products=245e12,
        products_fp8=None,
        grouped=215e12,
        attention=150e12,
        copy=1.5e12,
        link=Link(230e9, 45e-6),
        network=Link(22e9, 15e-6),
        pair=60e9,
    ),
    "H100": Machine(
        name="H100",
        memory=74 * _GIB,
        peak=989e12,
        products=610e12,
        products_fp8=1150e12,
        grouped=520e12,
        attention=250e12,
        copy=2.6e12,
        link=Link(345e9, 45e-6),
        network=Link(45e9, 15e-6),
        pair=90e9,
    ),
    "H200": Machine(
        name="H200",
        memory=135 * _GIB,
        peak=989e12,
        products=700e12,
        products_fp8=1340e12,
        grouped=610e12,
        attention=413e12,
        copy=3.7e12,
        link=Link(345e9, 45e-6),
        network=Link(45e9, 15e-6),
        pair=90e9,
    ),
    "B200": Machine(
        name="B200",
        memory=174 * _GIB,
        peak=2250e12,
        products=1500e12,
        products_fp8=2900e12,
        experts_in_fp8=False,
        grouped=1300e12,
        attention=900e12,
        copy=6.2e12,
        link=Link(690e9, 45e-6),
        network=Link(45e9, 15e-6),
        pair=180e9,
    ),
}
DEFAULT = MACHINES["H200"]
# Launch times of the fastest and the slowest host on which benchmarks ran, relative to
# `Machine.launch`. Three hosts with the same GPUs needed 25, 35 and 63 us.
HOST_SPREAD = (0.7, 1.8)


def like_device(name: str, memory: float) -> Machine:
    """Return the built-in machine for a device's name, or the default, with `memory` bytes."""
    built_in = next((machine for kind, machine in MACHINES.items() if kind in name), DEFAULT)
    return replace(built_in, memory=memory)


def find_machine(name: str) -> Machine:
    """Return the built-in machine called `name`, ignoring case.

    Raises:
        ConfigError: There is no such machine.
    """
    if name.upper() not in MACHINES:
        names = ", ".join(MACHINES)
        raise ConfigError(
            f"--gpus: unknown GPU {name!r}: use one of {names}, or give its rates with --machine "
            "FILE and only the number of GPUs here"
        )
    return MACHINES[name.upper()]


def read_machine(path: Path, start: Machine) -> Machine:
    """Return `start` with its rates replaced by those that `tools/benchmark.py --ceilings` wrote.

    The file may also contain fields of `Machine`, which replace those of `start`.

    Raises:
        DataError: The file cannot be read, contains no such rates, or has an invalid value.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"--machine {path}: cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise DataError(f"--machine {path}: must contain a JSON object")
    not_rates = {"name", "link", "network", "experts_in_fp8"}
    rates = {entry.name for entry in fields(Machine)} - not_rates
    in_fp8 = content.get("experts_in_fp8", start.experts_in_fp8)
    if not isinstance(in_fp8, bool):
        raise DataError(
            f"--machine {path}: experts_in_fp8 {json.dumps(in_fp8)}: must be true or false"
        )
    numbers: dict[str, Any] = {"peak": content.get("datasheet")} | {
        name: content[name] for name in rates & set(content)
    }
    is_measured = "attention_forward" in content
    measured: dict[str, Any] = {name: content.get(name) for name in _CEILINGS * is_measured}
    links = {name: content[name] for name in ("link", "network") if name in content}
    for name, link in links.items():
        if not isinstance(link, dict) or set(link) != {"bandwidth", "latency"}:
            raise DataError(f"--machine {path}: {name}: give it a bandwidth and a latency")
        measured |= {f"{name}.{part}": value for part, value in link.items()}
    numbers = {name: value for name, value in numbers.items() if value is not None}
    if not numbers and not measured:
        raise DataError(
            f"--machine {path}: no rates found: write the file with tools/benchmark.py --ceilings"
        )
    invalid = [
        name
        for name, value in (numbers | measured).items()
        if type(value) not in (int, float)
        or not math.isfinite(value)
        or value < 0
        or (value == 0 and not name.endswith(".latency"))
    ]
    if invalid:
        raise DataError(f"--machine {path}: {', '.join(invalid)}: must be a number above 0")
    if not isinstance(numbers.get("node", 1), int):
        raise DataError(f"--machine {path}: node {numbers['node']}: must be a whole number")
    if is_measured:  # ceilings count 2 products in the forward pass and 5 in the backward pass
        seconds = 2 / measured["attention_forward"] + 5 / measured["attention_backward"]
        numbers |= {"attention": 6 / seconds, "copy": _KERNEL_RATE * measured["copy"]}
    name = str(content.get("device", content.get("name", start.name)))
    changed: dict[str, Any] = numbers | {link_name: Link(**links[link_name]) for link_name in links}
    return replace(start, name=name, experts_in_fp8=in_fp8, **changed)
