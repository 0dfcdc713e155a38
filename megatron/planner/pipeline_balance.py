"""The estimated bubble of a pipeline, and a layout of its layers with a smaller bubble.

Times are estimated from the FLOPs of each layer; nothing is run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, groupby

from megatron.config import RunConfig
from megatron.config.stages import LAYOUT_FLAG, dealing_flags, plan_model, with_layout
from megatron.models.block import Block
from megatron.models.plan import ModelPlan
from megatron.parallel.pipeline.schedule import ScheduleKind, make_schedule, schedule_kind
from megatron.parallel.pipeline.simulate import Course, Times, time_table
from megatron.planner.memory import largest_process

# The time of a floating-point operation, relative to one in a 16-bit matrix product. It follows
# from the ceilings measured on an H200: 670 TFLOP/s, attention 450, fp8 products 1,250
# (docs/benchmarks.md, "What the numbers mean").
_OF_ATTENTION, _OF_FP8 = 1.5, 0.54
_ROUNDS = 2  # micro-batches per stage to simulate; each further one adds the slowest stage's time
_WORTH_SAYING = 0.03  # the least share of the time that a proposed layout must save
_SIMULATED = 3  # candidates to simulate

Counts = tuple[int, ...]  # number of layers in each part of the model


@dataclass(frozen=True)
class Costs:
    """The time of a micro-batch's forward pass, in arbitrary units.

    Attributes:
        layers: The time of each layer, in order.
        head: The time of the output layer and the loss.
        again: The number of forward passes that the backward pass repeats: 1 with full
            recomputation, otherwise 0.
    """

    layers: tuple[float, ...]
    head: float
    again: int = 0

    @classmethod
    def of(cls, config: RunConfig, plan: ModelPlan) -> Costs:
        """Estimate the times from FLOPs. Embedding and task heads are too cheap to count."""
        length = config.data.seq_length
        in_8_bits = 1.0 if config.precision.fp8_format is None else _OF_FP8
        each = 6 * length  # forward and backward are counted together
        works = [Block.work(layer, length) for layer in plan.layers]
        return cls(
            tuple(
                work.products / each * in_8_bits + _OF_ATTENTION * (work.scores / each)
                for work in works
            ),
            head=0 if plan.output is None else plan.output.vocabulary * plan.hidden,
            again=int(config.training.recompute_granularity == "full"),
        )

    @cached_property
    def head_in_layers(self) -> float:
        """The head's time as a number of average layers."""
        return self.head * len(self.layers) / math.fsum(self.layers)

    def part_times(self, counts: Counts, *, again: int = 0) -> list[float]:
        """Return the time of each part when its layers run `again` additional times.

        The last part includes the head.
        """
        ends = accumulate(counts)
        times = [
            (1 + again) * math.fsum(self.layers[end - count : end])
            for count, end in zip(counts, ends, strict=True)
        ]
        times[-1] += self.head
        return times

    def update_times(self, counts: Counts) -> list[float]:
        """Return each part's total time for its forward pass, input and weight gradients."""
        passes = (self.part_times(counts), self.part_times(counts, again=self.again))
        return [2 * forward + inputs for forward, inputs in zip(*passes, strict=True)]


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
        """Return the estimated time of an update."""
        if (counts, costs) not in self._times:
            forward, inputs = (
                time_table(LAYOUT_FLAG, costs.part_times(counts, again=n), self.stages, self.chunks)
                for n in (0, costs.again)
            )
            total = self.course.total(Times(forward, inputs, forward))
            left = self.micro_batches - self._rounds
            self._times[counts, costs] = total + left * self._slowest(counts, costs)
        return self._times[counts, costs]

    @property
    def _rounds(self) -> int:
        # A partial last group costs more than its share, so it is simulated too.
        return min(self.micro_batches, _ROUNDS * self.stages + self.micro_batches % self.stages)

    @cached_property
    def course(self) -> Course:
        """The course of the schedule, shared by all layouts because it is expensive to compute."""
        return Course(make_schedule(self.kind, self.stages, self.chunks, self._rounds))

    def bubble(self, counts: Counts, costs: Costs) -> float:
        """Return the fraction of time that the stages spend waiting."""
        busy = sum(costs.update_times(counts)) * self.micro_batches
        return 1 - busy / (self.stages * self.time(counts, costs))

    def _slowest(self, counts: Counts, costs: Costs) -> float:
        parts = costs.update_times(counts)
        return max(sum(parts[stage :: self.stages]) for stage in range(self.stages))

    def best(self, costs: Costs) -> Counts:
        """Return the fastest of several distributions of the layers over the parts.

        The head counts as the number of layers that take the same time, and the parts with an extra
        layer are adjacent. Every stage has a layer, except that the first may have only the
        embedding, and the last only the head.
        """
        found = [
            counts
            for counts in _candidates(len(costs.layers), self.stages * self.chunks, costs)
            if all(any(counts[stage :: self.stages]) for stage in range(1, self.stages - 1))
        ]
        found.sort(key=lambda counts: self._slowest(counts, costs))
        return min(found[:_SIMULATED], key=lambda counts: self.time(counts, costs))


def _candidates(layers: int, parts: int, costs: Costs) -> Iterator[Counts]:
    """Yield distributions of the layers over the parts.

    Distributions with extra layers in later parts come first: fewer micro-batches wait there.
    """
    even = (layers + costs.head_in_layers) / parts
    fewest = max(0, int(even - costs.head_in_layers))
    for last in range(fewest, min(fewest + 2, layers + 1)):
        each, left = divmod(layers - last, parts - 1)
        for start in range(parts - 1 - left, -1, -1):
            yield (*(each + (start <= i < start + left) for i in range(parts - 1)), last)


def layout_text(counts: Counts) -> str:
    """Return the value of `--pipeline-model-parallel-layout`, such as `Ett|(t|)*2L`."""
    middle = [(f"{'t' * count}|", len(list(same))) for count, same in groupby(counts[1:-1])]
    repeated = "".join(text if n == 1 else f"({text})*{n}" for text, n in middle)
    return f"E{'t' * counts[0]}|{repeated}{'t' * counts[-1]}L"


def pipeline_rows(
    config: RunConfig, plan: ModelPlan, micro_batches: int, world_size: int
) -> Iterator[tuple[str, str]]:
    """Yield the lines of the start-up panel that describe the pipeline.

    There are no lines without a pipeline, or for T5, whose encoder and decoder differ in length.

    Args:
        config: The run's configuration.
        plan: The plan of the whole network.
        micro_batches: The number of micro-batches per update.
        world_size: The number of processes.
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
    other = pipeline.best(costs)
    gain = 1 - pipeline.time(other, costs) / pipeline.time(counts, costs)
    if gain >= _WORTH_SAYING:
        layout = layout_text(other)
        others = " and ".join(dealing_flags(parallel))
        instead = f" instead of {others}" * bool(others)
        proposed = replace(config, parallel=with_layout(parallel, layout))
        memory = largest_process(proposed, plan, world_size)
        yield (
            "smaller bubble",
            f"{pipeline.bubble(other, costs):.1%}, and {gain:.0%} less time, with {LAYOUT_FLAG} "
            f"'{layout}'{instead} (memory per process at most about {memory.amount})",
        )
