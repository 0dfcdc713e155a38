"""How long a pipeline's stages would wait, by the arithmetic of their layers; and which layout of
the same layers would wait less."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby

from megatron.config import RunConfig
from megatron.config.run import known
from megatron.config.stages import LAYOUT_FLAG, dealing_flags, plan_model, with_layout
from megatron.models.arithmetic import layer_matrix_parameters
from megatron.models.sizes import IN_WORDS, Ending, sizes_of
from megatron.parallel.pipeline.schedule import ScheduleKind, make_schedule, schedule_kind
from megatron.parallel.pipeline.simulate import Course, Times, time_table
from megatron.training.memory import largest_process

# Time of a floating-point operation, where one of a 16-bit matrix product takes 1: measured on an
# H200 as docs/benchmarks.md, "What the numbers mean", says of ceilings (670 TFLOP/s, attention 450,
# products in fp8 1,250).
_OF_ATTENTION, _OF_FP8 = 1.5, 0.54
_ROUNDS = 2  # micro-batches a stage that are simulated; more of them take the slowest stage's time
_WORTH_SAYING = 0.03  # of the time
_SIMULATED = 3  # candidates

Counts = tuple[int, ...]  # layers of each part


@dataclass(frozen=True)
class Costs:
    """Time of one micro-batch's forward, in any one unit.

    Attributes:
        layer: of one layer; all are alike.
        head: of the output and the loss.
        again: forward passes of a layer that backward makes: 1 where all is recomputed.
    """

    layer: float
    head: float
    again: int = 0

    @classmethod
    def of(cls, config: RunConfig, outputs: int) -> Costs:
        """By FLOPs. The embedding takes no time to speak of. `outputs` of a token, at the end."""
        model = config.model
        sizes, length = sizes_of(model), known(config.data.seq_length)
        scores = length * sizes.query * (2 if model.architecture == "bert" else 1)
        products: float = layer_matrix_parameters(sizes)
        if config.precision.fp8_format is not None:
            products *= _OF_FP8
        return cls(
            layer=products + _OF_ATTENTION * scores,
            head=outputs * sizes.hidden,
            again=int(config.training.recompute_granularity == "full"),
        )

    def of_parts(self, counts: Counts, *, again: int = 0) -> list[float]:
        """Of each part, the last of which has the head, with its layers so many times more."""
        times = [(1 + again) * self.layer * count for count in counts]
        times[-1] += self.head
        return times

    def of_updates(self, counts: Counts) -> list[float]:
        """Of forward and both halves of backward."""
        passes = (self.of_parts(counts), self.of_parts(counts, again=self.again))
        return [2 * forward + inputs for forward, inputs in zip(*passes, strict=True)]


@dataclass(frozen=True)
class Pipeline:
    """What a schedule is made of, see `make_schedule`."""

    kind: ScheduleKind
    stages: int
    chunks: int
    micro_batches: int
    _known: dict[tuple[Counts, Costs], float] = field(default_factory=dict, compare=False)

    def time(self, counts: Counts, costs: Costs) -> float:
        """Of one update."""
        if (counts, costs) not in self._known:
            self._known[counts, costs] = self._time(counts, costs)
        return self._known[counts, costs]

    def _time(self, counts: Counts, costs: Costs) -> float:
        forward, inputs = (
            time_table(LAYOUT_FLAG, costs.of_parts(counts, again=n), self.stages, self.chunks)
            for n in (0, costs.again)
        )
        total = self._course.total(Times(forward, inputs, forward))
        return total + (self.micro_batches - self._rounds) * self._slowest(counts, costs)

    @property
    def _rounds(self) -> int:
        # A last group that is not full costs more than its share: it is simulated too.
        return min(self.micro_batches, _ROUNDS * self.stages + self.micro_batches % self.stages)

    @cached_property
    def _course(self) -> Course:
        """Found once, for all layouts: it takes longer than the simulation."""
        return Course(make_schedule(self.kind, self.stages, self.chunks, self._rounds))

    def bubble(self, counts: Counts, costs: Costs) -> float:
        """Share of all stages' time in which they wait."""
        busy = sum(costs.of_updates(counts)) * self.micro_batches
        return 1 - busy / (self.stages * self.time(counts, costs))

    def _slowest(self, counts: Counts, costs: Costs) -> float:
        parts = costs.of_updates(counts)
        return max(sum(parts[stage :: self.stages]) for stage in range(self.stages))

    def best(self, layers: int, costs: Costs) -> Counts:
        """The fastest of some ways to deal out the layers: the head counts as so many layers as it
        takes the time of, and those left over stand side by side somewhere."""
        found = sorted(
            filter(self._can_be, _candidates(layers, self.stages * self.chunks, costs)),
            key=lambda counts: self._slowest(counts, costs),
        )
        return min(found[:_SIMULATED], key=lambda counts: self.time(counts, costs))

    def _can_be(self, counts: Counts) -> bool:
        """No stage has nothing: the first has the embedding, the last the head."""
        return all(any(counts[stage :: self.stages]) for stage in range(1, self.stages - 1))


def _candidates(layers: int, parts: int, costs: Costs) -> Iterator[Counts]:
    """Later places of what is left over first: they make fewer micro-batches wait."""
    even = (layers + costs.head / costs.layer) / parts
    fewest = max(0, int(even - costs.head / costs.layer))
    for last in range(fewest, min(fewest + 2, layers + 1)):
        each, left = divmod(layers - last, parts - 1)
        for start in range(parts - 1 - left, -1, -1):
            yield (*(each + (start <= i < start + left) for i in range(parts - 1)), last)


def layout_text(counts: Counts) -> str:
    """As `--pipeline-model-parallel-layout` reads it: `Ett|(t|)*2L`."""
    middle = [(f"{'t' * count}|", len(list(same))) for count, same in groupby(counts[1:-1])]
    repeated = "".join(text if n == 1 else f"({text})*{n}" for text, n in middle)
    return f"E{'t' * counts[0]}|{repeated}{'t' * counts[-1]}L"


def pipeline_rows(
    config: RunConfig,
    padded_vocab_size: int,
    micro_batches: int,
    world_size: int,
    ending: Ending = IN_WORDS,
) -> Iterator[tuple[str, str]]:
    """What to tell about a pipeline, in lines of a panel; of a T5, whose layers are not all alike,
    and where there is no pipeline, nothing.

    Args:
        micro_batches: of an update.
        ending: of the model; a task's head takes no time to speak of.
    """
    parallel = config.parallel
    stages = parallel.pipeline_model_parallel_size
    if stages == 1 or config.model.architecture == "t5":
        return
    counts = tuple(len(part.layers) for part in plan_model(config.model, parallel))
    chunks = len(counts) // stages
    pipeline = Pipeline(schedule_kind(parallel, chunks), stages, chunks, micro_batches)
    costs = Costs.of(config, padded_vocab_size if ending.guesses_tokens else 0)
    virtual = f" x {chunks} virtual" if chunks > 1 else ""
    bubble = pipeline.bubble(counts, costs)
    yield (
        "pipeline",
        f"{pipeline.kind}, {stages} stages{virtual}: they wait {bubble:.1%} of the time, by the "
        "arithmetic of their layers",
    )
    other = pipeline.best(sum(counts), costs)
    gain = 1 - pipeline.time(other, costs) / pipeline.time(counts, costs)
    if gain >= _WORTH_SAYING:
        layout = layout_text(other)
        others = " and ".join(dealing_flags(parallel))
        instead = f" in the place of {others}" * bool(others)
        proposed = replace(config, parallel=with_layout(parallel, layout))
        memory = largest_process(proposed, padded_vocab_size, world_size, ending)
        yield (
            "less waiting",
            f"{pipeline.bubble(other, costs):.1%}, and {gain:.0%} less time, with {LAYOUT_FLAG} "
            f"'{layout}'{instead} (memory a process at most about {memory.amount})",
        )
