"""The grid of tensor, context, data and pipeline ranks, and this process's position in it.

Ranks are numbered as in Megatron: the tensor rank varies fastest, then context, data, pipeline. For
tensor size T, context size C and data size D, rank = ((p * D + d) * C + c) * T + t. With the
pipeline before data (--use-tp-pp-dp-mapping), rank = ((d * P + p) * C + c) * T + t.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from megatron.parallel.journal import Journal, Transfer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

AXES = ("pipeline", "data", "context", "tensor")  # slowest to fastest, unless pipeline_before_data
_EXPERT_AXES = ("expert_replica", "expert", "expert_tensor")  # slowest to fastest


@dataclass(frozen=True)
class Axis:
    """One dimension of the grid, as this process sees it.

    Attributes:
        size: The number of processes along the axis.
        rank: The index of this process among them.
        ranks: The global ranks of the processes along the axis, in order.
        group: The process group for collectives; `None` if the axis has a single process or the
            layout is not connected.
        journal: The record of this process's communication, shared by all axes.
    """

    size: int = 1
    rank: int = 0
    ranks: tuple[int, ...] = (0,)
    group: ProcessGroup | None = None
    journal: Journal = field(default_factory=Journal, compare=False, repr=False)

    @property
    def is_first(self) -> bool:
        """Whether this process is the first on the axis."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this process is the last on the axis."""
        return self.rank == self.size - 1

    def transfer(self, kind: str, work: Any) -> Transfer:
        """Record a collective over this axis that has been started, and return it as a `Transfer`.

        Args:
            kind: The name of the collective, such as "all-reduce".
            work: The `torch.distributed.Work` of the collective.
        """
        return self.journal.transfer(kind, self.ranks, work)

    def external_collective(self, kind: str) -> AbstractContextManager[None]:
        """Return a context manager that records a collective of another library over this axis.

        Args:
            kind: The name of the collective.
        """
        return self.journal.external_collective(kind, self.ranks)

    def barrier(self) -> None:
        """Wait until every process of the axis has called this method."""
        if self.size > 1:
            import torch.distributed as dist

            self.transfer("barrier", dist.barrier(group=self.group, async_op=True)).wait()


@dataclass(frozen=True)
class Layout:
    """The process grid of a run, built once and passed to all code that needs it.

    For experts, the ranks of a pipeline stage, in ascending order, form another grid, in which the
    expert tensor rank varies fastest, then the expert rank, then the expert replica (Megatron
    Core's parallel folding).

    Attributes:
        world: All ranks.
        tensor: The ranks that split each layer.
        context: The ranks that split each sequence.
        data: The ranks that process different samples.
        pipeline: The ranks that hold different layers.
        replica: The ranks that hold the same weights: data x context, with context varying fastest.
        embedding: The first and the last pipeline stage, which both hold tied word embeddings. On
            the stages in between, and without a pipeline, this axis has a single process.
        expert: The ranks among which experts are divided.
        expert_tensor: The ranks that split each expert: all or some of the tensor ranks.
        expert_replica: The ranks that hold the same experts, or the same shards of them.
        sequence_parallel: Whether tensor ranks also split the activations between tensor-parallel
            layers along the sequence.
        pipeline_before_data: Whether the pipeline rank varies faster than the data rank.
    """

    world: Axis = Axis()
    tensor: Axis = Axis()
    context: Axis = Axis()
    data: Axis = Axis()
    pipeline: Axis = Axis()
    replica: Axis = Axis()
    embedding: Axis = Axis()
    expert: Axis = Axis()
    expert_tensor: Axis = Axis()
    expert_replica: Axis = Axis()
    sequence_parallel: bool = False
    pipeline_before_data: bool = False

    @property
    def divides_experts(self) -> bool:
        """Whether expert weights are replicated over different ranks than other weights."""
        return self.expert.size > 1 or self.expert_tensor.size != self.tensor.size

    @property
    def stages(self) -> list[list[int]]:
        """The ranks of each stage, ascending. The n-th ranks of all stages form a pipeline."""
        stages = range(self.pipeline.size)
        return [[x for x in self.world.ranks if self.stage_of(x) == stage] for stage in stages]

    def stage_of(self, rank: int) -> int:
        """Return the pipeline stage that a process holds."""
        stages = self.pipeline.ranks
        stride = stages[1] - stages[0] if len(stages) > 1 else self.world.size
        return rank // stride % len(stages)

    @property
    def sequence(self) -> Axis:
        """The tensor ranks if they divide the sequence between split layers; otherwise one rank."""
        return self.tensor if self.sequence_parallel else Axis()

    @classmethod
    def single(cls) -> Layout:
        """Return the layout of a single process, for tests, tools and laptops."""
        return cls()

    @classmethod
    def at(
        cls,
        rank: int,
        world_size: int,
        *,
        tensor: int = 1,
        context: int = 1,
        pipeline: int = 1,
        expert: int = 1,
        expert_tensor: int | None = None,
        sequence_parallel: bool = False,
        pipeline_before_data: bool = False,
    ) -> Layout:
        """Return the layout as seen by process `rank` of `world_size`, without process groups.

        The other arguments are the sizes of the axes and the layout's settings. The data axis gets
        the remaining processes. `expert_tensor` defaults to `tensor`.
        """

        def axis(*ranks: int) -> Axis:
            return Axis(len(ranks), ranks.index(rank), ranks)

        sizes = grid_sizes(world_size, tensor=tensor, context=context, pipeline=pipeline)
        expert_tensor_size = tensor if expert_tensor is None else expert_tensor
        replicas = world_size // pipeline // (expert_tensor_size * expert)
        expert_sizes = dict(zip(_EXPERT_AXES, (replicas, expert, expert_tensor_size), strict=True))
        axes: dict[str, Any] = {"world": axis(*range(world_size))}

        def add_grid(ranks: Sequence[int], sizes: dict[str, int]) -> None:
            stride, index = 1, ranks.index(rank)
            for name, size in reversed(sizes.items()):
                reach = size * stride
                first = index // reach * reach + index % stride
                axes[name] = axis(*ranks[first : first + reach : stride])
                stride = reach

        add_grid(range(world_size), {name: sizes[name] for name in _order(pipeline_before_data)})
        stage_of = cls(world=axes["world"], pipeline=axes["pipeline"]).stage_of
        add_grid([x for x in range(world_size) if stage_of(x) == stage_of(rank)], expert_sizes)
        data, contexts, stages = (axes[name].ranks for name in ("data", "context", "pipeline"))
        axes["replica"] = axis(*(d + c - rank for d in data for c in contexts))
        ends = sorted({stages[0], stages[-1]})
        axes["embedding"] = axis(*(ends if rank in ends else [rank]))
        return cls(
            **axes,
            sequence_parallel=sequence_parallel,
            pipeline_before_data=pipeline_before_data,
        )

    def as_seen_by(self, rank: int) -> Layout:
        """Return this grid as seen by another process, without process groups."""
        names = ("tensor", "context", "pipeline", "expert", "expert_tensor")
        return Layout.at(
            rank,
            self.world.size,
            **{name: getattr(self, name).size for name in names},
            sequence_parallel=self.sequence_parallel,
            pipeline_before_data=self.pipeline_before_data,
        )

    def connect(self, device_type: str, journal: Journal | None = None) -> Layout:
        """Return a copy of this layout with process groups. Collective.

        Call `init_process_group` first, except in a single process, which needs no groups.

        Args:
            device_type: The device type of the tensors to communicate, such as "cuda".
            journal: The record of communication; `None` creates a new one.
        """
        groups = _new_groups(self, device_type) if self.world.size > 1 else {}
        journal = journal or Journal()
        axes = {
            name: replace(getattr(self, name), group=groups.get(name), journal=journal)
            for name in (*AXES, "world", "replica", "embedding", *_EXPERT_AXES)
        }
        return replace(self, **axes)

    @property
    def journal(self) -> Journal:
        """The record of what this process is doing, for the watchdog."""
        return self.world.journal

    def for_thread(self, timeout: timedelta) -> Layout:
        """Return a copy of this layout for a thread that runs alongside training. Collective.

        Only the `world` axis of the copy may communicate. It has its own gloo group, for CPU
        tensors, and its own journal. A single process gets this layout itself.

        Args:
            timeout: The timeout of each collective of the thread.
        """
        if self.world.size == 1:
            return self
        import torch.distributed as dist

        group = dist.new_group(backend="gloo", timeout=timeout)
        return replace(self, world=replace(self.world, group=group, journal=Journal()))

    def describe(self) -> str:
        """Describe the grid for the start-up panel: "2 processes: TP 1, CP 1, DP 2, PP 1".

        The axis whose rank varies fastest comes first. The expert axes are shown if processes
        divide experts: "..., EP 2, ETP 1".
        """
        axes = reversed(_order(self.pipeline_before_data))
        sizes = ", ".join(f"{name[0].upper()}P {getattr(self, name).size}" for name in axes)
        if self.divides_experts:
            sizes += f", EP {self.expert.size}, ETP {self.expert_tensor.size}"
        return f"{self.world.size} process{'es' * (self.world.size > 1)}: {sizes}"


def grid_sizes(world_size: int, *, tensor: int, context: int, pipeline: int) -> dict[str, int]:
    """Return the size of each axis in `AXES`. The data axis gets the remaining processes."""
    model = tensor * context * pipeline
    assert world_size % model == 0, "rules_parallel.layout: the sizes divide the world"
    return dict(zip(AXES, (pipeline, world_size // model, context, tensor), strict=True))


def _order(pipeline_before_data: bool) -> tuple[str, ...]:
    """Return the axes from slowest to fastest."""
    pipeline, data, *others = AXES
    return (data, pipeline, *others) if pipeline_before_data else AXES


def _new_groups(layout: Layout, device_type: str) -> dict[str, ProcessGroup | None]:
    """Return the process groups by axis name. All processes create all groups in the same order."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    order = _order(layout.pipeline_before_data)
    shape = tuple(getattr(layout, name).size for name in order)
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=order)
    groups: dict[str, ProcessGroup | None] = {
        name: mesh.get_group(name) for name, size in zip(order, shape, strict=True) if size > 1
    }
    groups["world"] = dist.group.WORLD
    stages = layout.stages
    if len(stages) > 1:
        for ends in zip(stages[0], stages[-1], strict=True):
            group = dist.new_group(list(ends))
            if layout.world.rank in ends:
                groups["embedding"] = group
    if layout.replica.size > 1:
        # If one of the two axes is the whole replica axis, reuse its group, because every group
        # uses memory.
        size = layout.replica.size
        equal_axes = [n for n in ("data", "context") if getattr(layout, n).size == size]
        flat = mesh[equal_axes[0]] if equal_axes else mesh["data", "context"]._flatten("replica")
        groups["replica"] = flat.get_group()
    known = {
        getattr(layout, name).ranks: groups[name]
        for name in (*AXES, "replica", "world")
        if name in groups
    }
    # An expert axis consists of every stride-th rank of a stage. If another axis consists of the
    # same ranks here, it does so in every process, so its group can be reused.
    stride = 1
    for name in reversed(_EXPERT_AXES):
        axis: Axis = getattr(layout, name)
        reach = axis.size * stride
        if axis.size > 1 and axis.ranks not in known:
            for stage in stages:
                for first in range(len(stage)):
                    if first % reach < stride:
                        ranks = tuple(stage[first : first + reach : stride])
                        known[ranks] = dist.new_group(list(ranks))
        if axis.size > 1:
            groups[name] = known[axis.ranks]
        stride = reach
    return groups
