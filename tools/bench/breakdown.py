"""Break down the time of a step into parts that add up to it, from a trace written by `--profile`.

Kernels of several streams run at the same time, so each instant is attributed to a single part: the
first of `PARTS` that is running. Communication comes last, before idle, so it gets only the time in
which nothing else ran. The remaining communication is hidden behind other work.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.errors import DataError

PARTS = (
    "matrix products",
    "attention",
    "cross entropy",
    "optimizer",
    "elementwise and normalization",
    "copies, casts and fills",
    "communication",
    "idle",
)
# The first pattern that matches a kernel's name determines its part. Attention precedes matrix
# products, because its kernels are also built from CUTLASS.
_PATTERNS = tuple(
    (part, re.compile(pattern, re.IGNORECASE))
    for part, pattern in (
        (
            "communication",
            r"nccl|nvshmem|symm_mem|multimem|(one|two)_shot_|all_?reduce|all_?gather|reduce_scatter"
            r"|symmetric_memory|(put|wait)_signal|memcpy ptop",
        ),
        ("attention", r"flash|fmha|sdpa|compute_dot_do_o|convert_dq|attention"),
        (
            "cross entropy",
            r"cross_entropy|softmaxforward|softmaxbackward|log_?softmax|nll_loss"
            r"|(?<![a-z_])(statistics|gradient)_kernel",
        ),
        ("optimizer", r"adam|multi_tensor|lpnorm|normtwoops|pieces_kernel|finish_kernel"),
        (
            "matrix products",
            r"nvjet|gemm|gemv|gemvx|splitk|cublas|cutlass|xmma|triton_mm|triton_tem|scaled_mm|dot_kernel",
        ),
        (
            "copies, casts and fills",
            r"memcpy|memset|fillfunctor|copy|catarray|amax|cast_(rows_)?kernel|transpose_kernel",
        ),
    )
)
# Kernels of these parts count as the optimizer's if the optimizer step launched them. Their names
# do not show this.
_FOLLOW_THE_PHASE = {"elementwise and normalization", "copies, casts and fills"}
_OPTIMIZER_PHASE = "optimizer"
_LISTED = 15  # number of most time-consuming kernels to list
_MARK = re.compile(r"^iteration (\d+)$")
_KERNEL_KINDS = {"kernel", "gpu_memcpy", "gpu_memset"}
_LAUNCH_KINDS = {"cuda_runtime", "cuda_driver"}


@dataclass(frozen=True)
class Kernel:
    """An operation that the device ran, from `start` to `end` in microseconds."""

    name: str
    part: str
    start: float
    end: float


@dataclass(frozen=True)
class Breakdown:
    """The breakdown of the average step, in seconds.

    Attributes:
        step: Time from the first kernel of one step to the first kernel of the next.
        parts: Time of each part, by its name in PARTS. The times add up to `step`.
        hidden: Time in which copies and communication ran at the same time as other work, by part.
        kernels: (name, part, seconds, launches) per step of the most time-consuming kernels.
    """

    step: float
    parts: Mapping[str, float]
    hidden: Mapping[str, float]
    kernels: Sequence[tuple[str, str, float, float]]


def classify(name: str) -> str:
    """Return the part of a step to which a kernel belongs, according to its name."""
    matches = (part for part, pattern in _PATTERNS if pattern.search(name))
    return next(matches, "elementwise and normalization")


def read_breakdown(path: Path) -> Breakdown:
    """Read a trace file and return its breakdown.

    Raises:
        DataError: The trace has no kernels, or fewer than three marked iterations.
    """
    import orjson

    events = orjson.loads(path.read_bytes())["traceEvents"]
    try:
        return break_down(events)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None


def break_down(events: Sequence[Mapping[str, Any]]) -> Breakdown:
    """Break down the events of a trace, over all marked iterations except the first and the last.

    The first iteration includes the start of the profiler, and the last has no known end.

    Raises:
        DataError: The trace has no kernels, or fewer than three marked iterations.
    """
    events = [event for event in events if event.get("ph") == "X"]
    kernels = _kernels(events)
    if not kernels:
        raise DataError("contains no GPU kernels")
    starts = _iteration_starts(events)
    if len(starts) < 3:
        raise DataError(f"contains {len(starts)} marked iterations, expected at least 3")
    start, end, steps = starts[1], starts[-1], len(starts) - 2
    inside = [
        Kernel(k.name, k.part, max(k.start, start), min(k.end, end))
        for k in kernels
        if k.end > start and k.start < end
    ]
    scale = 1e-6 / steps
    attributed, hidden = attribute_time(inside, start, end)
    return Breakdown(
        step=(end - start) * scale,
        parts={part: attributed[part] * scale for part in PARTS},
        hidden={part: hidden[part] * scale for part in PARTS[-3:-1]},
        kernels=_largest(inside, scale, steps),
    )


def _kernels(events: Iterable[Mapping[str, Any]]) -> list[Kernel]:
    """Return the operations that ran on the device, each with its part."""
    launch_times = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in _LAUNCH_KINDS and "correlation" in event.get("args", {})
    }
    phases = [
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") == "user_annotation" and event["name"] == _OPTIMIZER_PHASE
    ]
    kernels = []
    for event in events:
        if event.get("cat") not in _KERNEL_KINDS:
            continue
        part = classify(event["name"])
        launch_time = launch_times.get(event.get("args", {}).get("correlation"), -1.0)
        if part in _FOLLOW_THE_PHASE and any(
            first <= launch_time <= last for first, last in phases
        ):
            part = "optimizer"
        kernels.append(Kernel(event["name"], part, event["ts"], event["ts"] + event["dur"]))
    return kernels


def _iteration_starts(events: Iterable[Mapping[str, Any]]) -> list[float]:
    """Return the start times of the marked iterations, in order.

    The times are from the device, or from the host if the trace has only host times.
    """
    for kind in ("gpu_user_annotation", "user_annotation"):
        starts: dict[int, float] = {}
        for event in events:
            mark = _MARK.match(event["name"]) if event.get("cat") == kind else None
            if mark:
                iteration = int(mark[1])
                starts[iteration] = min(event["ts"], starts.get(iteration, event["ts"]))
        if starts:
            return sorted(starts.values())
    return []


def attribute_time(
    kernels: Iterable[Kernel], start: float, end: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Attribute the time from `start` to `end` to parts.

    Returns:
        The microseconds attributed to each part, and the hidden microseconds of each part, during
        which it was running but an earlier part was given the time.
    """
    edges: list[tuple[float, int, str]] = []
    for kernel in kernels:
        edges += [(kernel.start, 1, kernel.part), (kernel.end, -1, kernel.part)]
    edges.sort(key=lambda edge: edge[0])
    attributed, hidden = dict.fromkeys(PARTS, 0.0), dict.fromkeys(PARTS, 0.0)
    running: Counter[str] = Counter()
    now = start
    for time, change, part in [*edges, (end, 0, "idle")]:
        active = [name for name in PARTS if running[name] > 0] or ["idle"]
        attributed[active[0]] += time - now
        for name in active[1:]:
            hidden[name] += time - now
        running[part] += change
        now = time
    return attributed, hidden


def _largest(
    kernels: Iterable[Kernel], scale: float, steps: int
) -> list[tuple[str, str, float, float]]:
    seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
    launches: Counter[tuple[str, str]] = Counter()
    for kernel in kernels:
        seconds[kernel.name, kernel.part] += (kernel.end - kernel.start) * scale
        launches[kernel.name, kernel.part] += 1
    longest = sorted(seconds, key=seconds.__getitem__, reverse=True)[:_LISTED]
    return [(*key, seconds[key], launches[key] / steps) for key in longest]
