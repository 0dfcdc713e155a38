"""The estimated bubble of a pipeline, and a distribution of its layers with a smaller bubble.

Times come from `cost`; nothing is run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, groupby
from operator import add
from typing import NamedTuple

from megatron.config import RunConfig
from megatron.config.stages import LAYOUT_FLAG, distributing_flags, plan_model, with_layout
from megatron.models.plan import ModelPlan
from megatron.parallel.pipeline.schedule import ScheduleKind, make_schedule, schedule_kind
from megatron.parallel.pipeline.simulate import RunnableSchedule, Times, time_table
from megatron.planner.cost import PassTimes, model_passes
from megatron.planner.machine import DEFAULT, Machine
from megatron.planner.memory import largest_process

# Micro-batches per stage to simulate; each additional one adds the slowest stage's time.
_ROUNDS = 2
_MIN_GAIN = 0.03  # the minimum fraction of the time that a proposed layout must save
_SIMULATED = 3  # candidates to simulate

Counts = tuple[int, ...]  # number of layers in each part of the model


class Durations(NamedTuple):
    """Times of a micro-batch in a layer, in the head or in a part of the model.

    Attributes:
        forward: The time of the forward pass.
        inputs: The time of the gradients of the inputs, including recomputation.
        weights: The time of the gradients of the weights.
    """

    forward: float
    inputs: float
    weights: float

    @classmethod
    def of(cls, passes: PassTimes) -> Durations:
        """Return the total of each pass."""
        return cls(passes.forward.total, passes.inputs.total, passes.weights.total)

    def at_least(self, host: float) -> Durations:
        """Return these times, lengthened so that they sum to at least the launch time, `host`."""
        delay = max(0.0, host - sum(self))
        return Durations(self.forward + delay / 3, self.inputs + delay * 2 / 3, self.weights)


@dataclass(frozen=True)
class Costs:
    """The times of a micro-batch in each layer and in the head, in any unit.

    Attributes:
        layers: The times of each layer, in order.
        head: The times of the output layer and the loss.
        message: The time of a message to the next stage.
        host: The host's time for each layer and for the head; empty to ignore the host.
    """

    layers: tuple[Durations, ...]
    head: Durations
    message: float = 0.0
    host: tuple[float, ...] = ()

    @classmethod
    def of(cls, config: RunConfig, plan: ModelPlan, machine: Machine = DEFAULT) -> Costs:
        """Estimate the device's times in seconds, without waits for messages or the host."""
        return replace(cls.from_passes(*model_passes(config, plan, machine)), host=())

    @classmethod
    def from_passes(
        cls, layers: Iterable[PassTimes], head: PassTimes, message: float = 0.0
    ) -> Costs:
        """Return the costs of the passes through the layers and the head, in seconds."""
        layers = tuple(layers)
        host = (*(passes.host for passes in layers), head.host)
        return cls(tuple(map(Durations.of, layers)), Durations.of(head), message, host)

    @cached_property
    def head_in_layers(self) -> float:
        """The head's time, in multiples of an average layer's."""
        return sum(self.head) * len(self.layers) / math.fsum(map(sum, self.layers))

    def part_times(self, counts: Counts) -> list[Durations]:
        """Return the times of each part on a device that may have to wait for the host.

        The last part includes the head.
        """
        zero = Durations(0.0, 0.0, 0.0)
        layer_ranges = [
            slice(end - n, end) for n, end in zip(counts, accumulate(counts), strict=True)
        ]
        parts = [
            Durations(*map(math.fsum, zip(zero, *self.layers[layer_range], strict=True)))
            for layer_range in layer_ranges
        ]
        parts[-1] = Durations(*map(add, parts[-1], self.head))
        host = [math.fsum(self.host[layer_range]) for layer_range in layer_ranges]
        host[-1] += sum(self.host[-1:])
        return [part.at_least(host_time) for part, host_time in zip(parts, host, strict=True)]


@dataclass(frozen=True)
class Pipeline:
    """The shape of a pipeline, from which `make_schedule` builds its schedule.

    Attributes:
        kind: The kind of schedule.
        stages: The number of pipeline stages.
        chunks: The number of model parts on each stage.
        micro_batches: The number of micro-batches per update.
    """

    kind: ScheduleKind
    stages: int
    chunks: int
    micro_batches: int
    _times: dict[tuple[Counts, Costs], float] = field(default_factory=dict, compare=False)

    def time(self, counts: Counts, costs: Costs) -> float:
        """Return the estimated time of an update, in the unit of `costs`."""
        if (counts, costs) not in self._times:
            total = self._schedule.total(self.times(counts, costs))
            remaining = self.micro_batches - self._rounds
            self._times[counts, costs] = total + remaining * self._slowest(counts, costs)
        return self._times[counts, costs]

    def times(self, counts: Counts, costs: Costs) -> Times:
        """Return the time tables that the simulator needs as input."""
        forward, inputs, weights = (
            time_table(LAYOUT_FLAG, values, self.stages, self.chunks)
            for values in zip(*costs.part_times(counts), strict=True)
        )
        return Times(forward, inputs, weights, costs.message)

    @property
    def _rounds(self) -> int:
        # A partial last group of micro-batches takes more than its share of the time, so it is
        # also simulated.
        return min(self.micro_batches, _ROUNDS * self.stages + self.micro_batches % self.stages)

    @cached_property
    def _schedule(self) -> RunnableSchedule:
        """The schedule in a runnable order, computed once for all layouts because this is slow."""
        return RunnableSchedule(make_schedule(self.kind, self.stages, self.chunks, self._rounds))

    def bubble(self, counts: Counts, costs: Costs) -> float:
        """Return the fraction of time that the stages spend waiting."""
        busy = sum(map(sum, costs.part_times(counts))) * self.micro_batches
        return 1 - busy / (self.stages * self.time(counts, costs))

    def _slowest(self, counts: Counts, costs: Costs) -> float:
        parts = [sum(part) for part in costs.part_times(counts)]
        return max(sum(parts[stage :: self.stages]) for stage in range(self.stages))

    def best(self, costs: Costs) -> Counts:
        """Return the fastest of several distributions of the layers over the parts.

        The head counts as `Costs.head_in_layers` layers, and the parts with an extra layer are
        adjacent. Every stage has a layer, except that the first may have only the embedding and the
        last only the head.
        """
        balanced = [
            counts
            for counts in _candidates(len(costs.layers), self.stages * self.chunks, costs)
            if all(any(counts[stage :: self.stages]) for stage in range(1, self.stages - 1))
        ]
        balanced.sort(key=lambda counts: self._slowest(counts, costs))
        return min(balanced[:_SIMULATED], key=lambda counts: self.time(counts, costs))


def _candidates(layers: int, parts: int, costs: Costs) -> Iterator[Counts]:
    """Yield distributions of the layers over the parts.

    Distributions with the extra layers in later parts come first, because fewer micro-batches are
    in flight there.
    """
    even = (layers + costs.head_in_layers) / parts
    min_last = max(0, int(even - costs.head_in_layers))
    for last in range(min_last, min(min_last + 2, layers + 1)):
        per_part, remainder = divmod(layers - last, parts - 1)
        for start in range(parts - 1 - remainder, -1, -1) if remainder else (0,):
            yield (*(per_part + (start <= i < start + remainder) for i in range(parts - 1)), last)


def layout_text(counts: Counts) -> str:
    """Return the value of `--pipeline-model-parallel-layout`, such as `Ett|(t|)*2L`."""
    middle = [(f"{'t' * count}|", len(list(same))) for count, same in groupby(counts[1:-1])]
    repeated = "".join(text if n == 1 else f"({text})*{n}" for text, n in middle)
    return f"E{'t' * counts[0]}|{repeated}{'t' * counts[-1]}L"


def pipeline_rows(
    config: RunConfig, plan: ModelPlan, micro_batches: int, world_size: int
) -> Iterator[tuple[str, str]]:
    """Yield the lines of the start-up panel that describe the pipeline.

    A second line proposes another distribution of the layers if it saves at least `_MIN_GAIN` of
    the time. There are no lines without a pipeline or for T5, whose encoder and decoder differ in
    length.

    Args:
        config: The run's configuration.
        plan: The plan of the whole network.
        micro_batches: The number of micro-batches per update.
        world_size: The number of processes.

    Raises:
        ConfigError: The layers do not fit the stages.
    """
    parallel = config.parallel
    stages = parallel.pipeline_model_parallel_size
    if stages == 1 or plan.encoder_layers:
        return
    counts = tuple(len(part.layers) for part in plan_model(config.model, parallel))
    chunks = len(counts) // stages
    pipeline = Pipeline(schedule_kind(parallel, chunks), stages, chunks, micro_batches)
    costs = Costs.of(config, plan)
    virtual = f" x {chunks} virtual" if chunks > 1 else ""
    bubble = pipeline.bubble(counts, costs)
    yield (
        "pipeline",
        f"{pipeline.kind}, {stages} stages{virtual}; estimated pipeline bubble: {bubble:.1%}",
    )
    proposal = pipeline.best(costs)
    gain = 1 - pipeline.time(proposal, costs) / pipeline.time(counts, costs)
    if gain >= _MIN_GAIN:
        layout = layout_text(proposal)
        replaced_flags = " and ".join(distributing_flags(parallel))
        instead = f" instead of {replaced_flags}" * bool(replaced_flags)
        proposed = replace(config, parallel=with_layout(parallel, layout))
        memory = largest_process(proposed, plan, world_size)
        yield (
            "smaller bubble",
            f"{pipeline.bubble(proposal, costs):.1%}, and {gain:.0%} less time, with {LAYOUT_FLAG} "
            f"'{layout}'{instead} (memory per process at most about {memory.amount})",
        )
