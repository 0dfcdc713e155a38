"""An operation at a given shape, its implementations, and their timing."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice

import torch
from torch import Tensor

from megatron.device import Device

Inputs = Sequence[Tensor | None]
Implementation = Callable[..., Tensor | tuple[Tensor, ...]]
ROTATED_BYTES = 512 * 2**20  # bytes of all input sets together: several times the L2 cache
REPEATS = 30
WARM_UP = 3


@dataclass(frozen=True)
class Operation:
    """An operation, with one row in the table (forward or both passes) or two (one per pass).

    Attributes:
        name: Name of the operation.
        shape: A description of the sizes and types.
        forward_bytes: Minimum number of bytes to move: each input read once, each output written
            once.
        backward_bytes: The same for the backward pass, or 0 if there is none.
        make_inputs: Function that returns new random inputs. Floating-point inputs get gradients if
            there is a backward pass.
        ours: The fused kernel.
        eager: PyTorch's operations one by one, or `None`. torch.compile compiles this function.
        libraries: The best library kernels for the operation, by name.
        forward_products: Number of floating-point operations in 16-bit matrix products, if they may
            set the floor instead of the bytes.
        backward_products: The same for the backward pass.
        combines_passes: Whether both passes form a single row, because an implementation does part
            of one pass's work in the other. Each then returns one tensor, whose sum is
            differentiated.
        missing: Function that returns what this machine lacks for the operation, or "" if nothing.
            It is called before `make_inputs` and the implementations.
    """

    name: str
    shape: str
    forward_bytes: int
    backward_bytes: int
    make_inputs: Callable[[], Inputs]
    ours: Implementation
    eager: Implementation | None
    libraries: dict[str, Implementation] = field(default_factory=dict)
    forward_products: int = 0
    backward_products: int = 0
    combines_passes: bool = False
    missing: Callable[[], str] = str


class Stopwatch:
    """A timer, based on events, for work on one GPU.

    A matrix product is queued first. It keeps the GPU busy while the host queues the work, so that
    the host's own time is not measured.
    """

    def __init__(self, device: torch.device) -> None:
        """Allocate the matrices whose product keeps the GPU busy."""
        self.device = device
        self._square = torch.randn(8192, 8192, dtype=torch.bfloat16, device=device)
        self._product = torch.empty_like(self._square)

    def median(self, works: Sequence[Callable[[], object]]) -> float:
        """Return the median seconds per call, over calls that cycle through `works`."""
        for work in islice(cycle(works), max(WARM_UP, len(works))):
            work()
        pairs = [(self._event(), self._event()) for _ in range(REPEATS)]
        Device(self.device).synchronize()
        for _ in range(10):  # about 15 ms
            torch.mm(self._square, self._square, out=self._product)
        for (start, end), work in zip(pairs, cycle(works), strict=False):
            start.record()
            work()
            end.record()
        Device(self.device).synchronize()
        return statistics.median(start.elapsed_time(end) / 1000 for start, end in pairs)

    def _event(self) -> torch.Event:
        return torch.Event(self.device.type, enable_timing=True)

    def copy_bandwidth(self) -> float:
        """Return the bytes per second (read plus written) of a large copy."""
        source = torch.randint(255, (2**30,), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.numel() / self.median([lambda: target.copy_(source)])

    def product_rate(self) -> float:
        """Return the floating-point operations per second of a large bf16 matrix product."""
        seconds = self.median([lambda: torch.mm(self._square, self._square, out=self._product)])
        return 2 * self._square.shape[0] ** 3 / seconds


@dataclass(frozen=True)
class Ceilings:
    """The highest rates of this GPU: bytes/s of a copy and operations/s of a matrix product."""

    bandwidth: float
    products: float

    def floor(self, moved: int, computed: int) -> float:
        """Return the minimum seconds for moving these bytes and running these operations."""
        return max(moved / self.bandwidth, computed / self.products)


@dataclass(frozen=True)
class Timed:
    """The time of each implementation of a pass by name, and the floor, in seconds."""

    operation: Operation
    direction: str
    floor: float
    seconds: dict[str, float]


def measure(
    operation: Operation, watch: Stopwatch, ceilings: Ceilings, *, compiled: bool
) -> Iterator[Timed]:
    """Time every implementation of an operation and yield a result for each of its rows."""
    torch.compiler.reset()  # otherwise earlier shapes use up the recompile limit
    implementations: dict[str, Implementation] = {"ours": operation.ours}
    if operation.eager is not None:
        implementations["eager"] = operation.eager
        if compiled:
            implementations["compile"] = torch.compile(operation.eager, dynamic=False)
    implementations |= operation.libraries
    count = min(16, max(2, -(-ROTATED_BYTES // operation.forward_bytes)))
    input_sets = [operation.make_inputs() for _ in range(count)]
    for x in (x for inputs in input_sets for x in inputs if x is not None):
        if x.is_floating_point() and operation.backward_bytes:
            x.requires_grad_()
    for pass_ in _passes(operation):
        seconds = {
            name: watch.median([pass_.call(implementation, inputs) for inputs in input_sets])
            for name, implementation in implementations.items()
        }
        floor = ceilings.floor(pass_.moved, pass_.computed)
        yield Timed(operation, pass_.name, floor, seconds)


@dataclass(frozen=True)
class _Pass:
    """A pass to time: its name, its minimum bytes and FLOPs, and how to call an implementation."""

    name: str
    moved: int
    computed: int
    call: Callable[[Implementation, Inputs], Callable[[], object]]


def _passes(operation: Operation) -> list[_Pass]:
    forward = _Pass("forward", operation.forward_bytes, operation.forward_products, _forward_call)
    if not operation.backward_bytes:
        return [forward]
    moved, computed = operation.backward_bytes, operation.backward_products
    if operation.combines_passes:
        moved, computed = moved + forward.moved, computed + forward.computed
        return [_Pass("forward and backward", moved, computed, _forward_backward_call)]
    return [forward, _Pass("backward", moved, computed, _backward_call)]


def _forward_call(implementation: Implementation, inputs: Inputs) -> Callable[[], object]:
    def call() -> object:
        with torch.no_grad():
            return implementation(*inputs)

    return call


def _forward_backward_call(implementation: Implementation, inputs: Inputs) -> Callable[[], object]:
    leaves = [x for x in inputs if x is not None and x.requires_grad]

    def call() -> object:
        out = implementation(*inputs)
        assert isinstance(out, Tensor), "with combines_passes, an implementation returns one tensor"
        return torch.autograd.grad(out.sum(), leaves)

    return call


def _backward_call(implementation: Implementation, inputs: Inputs) -> Callable[[], object]:
    out = implementation(*inputs)
    outputs = [out] if isinstance(out, Tensor) else list(out)
    grads = [torch.randn_like(x) for x in outputs]
    leaves = [x for x in inputs if x is not None and x.requires_grad]
    return lambda: torch.autograd.grad(outputs, leaves, grads, retain_graph=True)


HEADER = """\
| operation | shape | pass | floor | ours | of floor | eager | compile | library |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def table_row(row: Timed) -> str:
    """Return a Markdown row for `HEADER`, with times in microseconds."""
    ours = row.seconds["ours"]
    times = [_micro(row.seconds.get(name)) for name in ("eager", "compile")]
    names = sorted(row.operation.libraries, key=lambda name: row.seconds[name])
    library = "; ".join(f"{_micro(row.seconds[name])} ({name})" for name in names) or "-"
    return (
        f"| {row.operation.name} | {row.operation.shape} | {row.direction} "
        f"| {_micro(row.floor)} | {_micro(ours)} | {row.floor / ours:.0%} "
        f"| {' | '.join(times)} | {library} |"
    )


def _micro(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e6:.1f}"
