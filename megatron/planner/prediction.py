"""The time of a whole update with a breakdown, its memory, and the cost of failures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron.config import RunConfig
from megatron.config.checks import find_problems
from megatron.config.stages import ModelPart, parts_of_stage, plan_model
from megatron.errors import ConfigError
from megatron.kernels.quantize import BLOCK, bytes_of
from megatron.models.arithmetic import count_part_experts, count_part_parameters, flops_per_token
from megatron.models.costs import WeightSplit
from megatron.models.freezing import frozen_format, trained_share
from megatron.models.plan import ModelPlan
from megatron.parallel.buckets import BUCKET_BYTES
from megatron.parallel.pipeline.schedule import schedule_kind
from megatron.planner.cost import (
    FP8_CAST,
    IN_BUCKETS,
    MESSAGE_LAUNCHES,
    OPTIMIZER_BYTES,
    UPDATE_LAUNCHES,
    PassTimes,
    Seconds,
    model_passes,
    stage_message,
)
from megatron.planner.machine import HOST_SPREAD, Machine
from megatron.planner.memory import MemoryEstimate, largest_process
from megatron.planner.pipeline_balance import Costs, Pipeline

# Bytes that ZeRO stage 3 reads and writes per weight per micro-batch, besides communication.
# For all weights: two copies out of gathered buffers in 16 bits, and one of gradients into an fp32
# buffer. For a process's shard: two casts to 16 bits, and an addition to the sum of gradients.
_COPIED_WHOLE, _COPIED_SHARD = 14, 24

# --cuda-graph-impl auto records passes if the host takes at least this fraction of the device's
# time, because the host then begins to limit the speed.
_MIN_HOST = 0.7
# The maximum fraction of the GPU's memory that such a run may use. Recorded graphs keep memory that
# other work may need.
_MAX_MEMORY = 0.5


@dataclass(frozen=True)
class Grid:
    """The sizes of a run's process grid.

    Attributes:
        tensor: The number of tensor-parallel processes.
        context: The number of context-parallel processes.
        pipeline: The number of pipeline stages.
        data: The number of data-parallel processes.
        expert: The number of expert-parallel processes.
        expert_tensor: The number of tensor-parallel processes that split each expert.
        pipeline_before_data: Whether the pipeline rank varies faster than the data rank.
    """

    tensor: int
    context: int
    pipeline: int
    data: int
    expert: int
    expert_tensor: int
    pipeline_before_data: bool

    @classmethod
    def of(cls, config: RunConfig, world_size: int) -> Grid:
        """Return the sizes for a given number of processes."""
        sizes = config.parallel.sizes
        model = sizes["tensor"] * sizes["context"] * sizes["pipeline"]
        before_data = config.parallel.use_tp_pp_dp_mapping
        return cls(**sizes, data=world_size // model, pipeline_before_data=before_data)

    def weights(self, config: RunConfig, plan: ModelPlan) -> list[tuple[int, int, int]]:
        """Count the parameters of the largest stage, outside and inside experts.

        Experts are counted separately, because they are replicated over different processes.

        Returns:
            For parameters outside experts and then for experts: the number on one process, the
            number of copies, and the stride between the ranks of adjacent copies.
        """
        split = WeightSplit(
            tensor=self.tensor, expert=self.expert, expert_tensor=self.expert_tensor
        )
        parts, per_stage = plan_model(config.model, config.parallel), []
        for stage in range(self.pipeline):
            stage_parts = parts_of_stage(parts, stage, self.pipeline)
            parameters = sum(count_part_parameters(plan, part, split) for part in stage_parts)
            experts = sum(count_part_experts(plan, part, split) for part in stage_parts)
            per_stage.append((parameters - experts, experts))
        outside, experts = max(per_stage, key=sum)
        replicas = self.data * self.context
        divided = self.expert * self.expert_tensor
        # With the pipeline before data, neighboring copies of a stage are a whole pipeline apart.
        spread = self.pipeline if self.pipeline_before_data and self.data > 1 else 1
        return [
            (outside, replicas, spread * self.tensor),
            (experts, replicas * self.tensor // divided, spread * divided),
        ]


@dataclass(frozen=True)
class Prediction:
    """The estimated time and memory of an update. Times are in seconds.

    Attributes:
        seconds: The time of an update.
        stage: The times of the work that a device of the busiest pipeline stage does.
        host: The time that this device waits for the host.
        bubble: The time that this stage waits for other stages.
        gradients: The time of exposed messages between data-parallel processes.
        optimizer: The time of the optimizer.
        memory: The memory of the largest process.
        tokens: Tokens per GPU in an update.
        flops: Model FLOPs per token.
        peak: The machine's peak FLOP/s.
    """

    seconds: float
    stage: Seconds
    host: float
    bubble: float
    gradients: float
    optimizer: float
    memory: MemoryEstimate
    tokens: float
    flops: int
    peak: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second per GPU."""
        return self.tokens / self.seconds

    @property
    def tflops(self) -> float:
        """Model TFLOP/s per GPU."""
        return self.tokens_per_second * self.flops / 1e12

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization, as a fraction."""
        return 1e12 * self.tflops / self.peak

    @cached_property
    def parts(self) -> dict[str, float]:
        """The time of the update by activity, in seconds."""
        return {
            "products": self.stage.products,
            "attention": self.stage.attention,
            "elementwise": self.stage.memory,
            "exchange": self.stage.exchange,
            "host": self.host,
            "bubble": self.bubble,
            "data parallel": self.gradients,
            "optimizer": self.optimizer,
        }


def micro_batches_of(config: RunConfig, world_size: int) -> int:
    """Return the number of micro-batches that each pipeline processes per update.

    Raises:
        ConfigError: The micro-batches do not divide the global batch.
    """
    data, training = Grid.of(config, world_size).data, config.training
    count, remainder = divmod(training.global_batch_size, training.micro_batch_size * data)
    if remainder or not count:
        raise ConfigError(
            f"--global-batch-size {training.global_batch_size}: must be a multiple of "
            f"--micro-batch-size {training.micro_batch_size} x {data} data-parallel processes"
        )
    return count


def busiest_stage(
    config: RunConfig, plan: ModelPlan, layers: Sequence[PassTimes], head: PassTimes
) -> PassTimes:
    """Return the times of a micro-batch in the pipeline stage that takes longest.

    Raises:
        ConfigError: The layers do not fit the stages.
    """
    stages = config.parallel.pipeline_model_parallel_size
    parts = plan_model(config.model, config.parallel)
    return max(
        (_sum_of(parts_of_stage(parts, stage, stages), layers, head) for stage in range(stages)),
        key=lambda passes: max(passes.total, passes.host),
    )


def records_passes(config: RunConfig, plan: ModelPlan, world_size: int, machine: Machine) -> bool:
    """Return whether a run on GPUs records its passes as CUDA graphs.

    With --cuda-graph-impl auto, it does if the host would limit the speed, the run fits in half of
    the memory, and no other flag prevents recording.

    Raises:
        ConfigError: The layers do not fit the stages.
    """
    if config.training.cuda_graph_impl != "auto":
        return config.training.cuda_graph_impl == "local"
    slowest = busiest_stage(config, plan, *model_passes(config, plan, machine))
    if slowest.host < _MIN_HOST * slowest.total:
        return False
    recorded = replace(config, training=replace(config.training, cuda_graph_impl="local"))
    if find_problems(recorded, world_size):
        return False
    return largest_process(config, plan, world_size).total <= _MAX_MEMORY * machine.memory


def predict(
    config: RunConfig,
    plan: ModelPlan,
    world_size: int,
    machine: Machine,
    *,
    pipelines: Callable[..., Pipeline] = Pipeline,
) -> Prediction:
    """Return the estimated time and memory of an update.

    Args:
        config: The run's configuration.
        plan: The plan of the whole network.
        world_size: The number of processes.
        machine: The machine on which they run.
        pipelines: A function with the arguments of `Pipeline` that returns a pipeline, possibly one
            with cached times.

    Raises:
        ConfigError: The layers do not fit the stages, or the micro-batches do not divide the batch.
    """
    micro_batches = micro_batches_of(config, world_size)
    impl = "local" if records_passes(config, plan, world_size, machine) else "none"
    config = replace(config, training=replace(config.training, cuda_graph_impl=impl))
    layers, head = model_passes(config, plan, machine)
    slowest = busiest_stage(config, plan, layers, head)
    pipeline, counts, costs = pipeline_of(config, plan, world_size, machine, pipelines)
    stage = slowest.forward.plus(slowest.inputs, slowest.weights).times(micro_batches)
    gradients, optimizer, buckets = _update(
        config, plan, Grid.of(config, world_size), machine, slowest, micro_batches
    )
    host, bubble = UPDATE_LAUNCHES * machine.launch, 0.0
    is_scale_fixed = not config.precision.fp16 or config.precision.loss_scale is not None
    if pipeline.stages == 1 and is_scale_fixed:
        # The host waits only for the result of an update, and queues the next forward pass before
        # it does (training/step.py). The slower of host and device therefore limits the speed.
        host_time = host + buckets + micro_batches * slowest.host
        host = max(0.0, host_time - stage.total - gradients - optimizer)
    else:
        host_delay = micro_batches * max(0.0, slowest.host - slowest.total)
        bubble = max(0.0, pipeline.time(counts, costs) - stage.total - host_delay)
        host += host_delay
    sequence = config.data.sample_tokens * plan.head_spec.sequences
    return Prediction(
        seconds=stage.total + host + bubble + gradients + optimizer,
        stage=stage,
        host=host,
        bubble=bubble,
        gradients=gradients,
        optimizer=optimizer,
        memory=largest_process(config, plan, world_size),
        tokens=config.training.global_batch_size * sequence / world_size,
        flops=flops_per_token(
            plan,
            config.data.seq_length,
            config.data.decoder_seq_length,
            trains_adapters=config.model.lora_rank is not None,
        ),
        peak=machine.peak,
    )


def seconds_by_host(
    config: RunConfig, plan: ModelPlan, world_size: int, machine: Machine
) -> tuple[float, float]:
    """Return the time of an update on the fastest and on the slowest host that was measured.

    Hosts with the same GPUs differ so much that a single number would be wrong where launching
    kernels limits the speed. Both times are equal for a machine with its own launch time.

    Raises:
        ConfigError: The layers do not fit the stages, or the micro-batches do not divide the batch.
    """
    spread = HOST_SPREAD if machine.launch == Machine.launch else (1.0, 1.0)
    hosts = [replace(machine, launch=factor * machine.launch) for factor in spread]
    low, high = (predict(config, plan, world_size, host).seconds for host in hosts)
    return low, high


def pipeline_of(
    config: RunConfig,
    plan: ModelPlan,
    world_size: int,
    machine: Machine,
    pipelines: Callable[..., Pipeline] = Pipeline,
) -> tuple[Pipeline, tuple[int, ...], Costs]:
    """Return a run's pipeline, the number of layers in each of its parts, and the layers' times.

    The arguments and the errors are the same as for `predict`.
    """
    stages = config.parallel.pipeline_model_parallel_size
    counts = tuple(len(part.layers) for part in plan_model(config.model, config.parallel))
    chunks = len(counts) // stages
    kind = schedule_kind(config.parallel, chunks)
    message = stage_message(config, plan, machine, world_size)
    costs = Costs.from_passes(*model_passes(config, plan, machine), message)
    return pipelines(kind, stages, chunks, micro_batches_of(config, world_size)), counts, costs


def _sum_of(parts: Sequence[ModelPart], layers: Sequence[PassTimes], head: PassTimes) -> PassTimes:
    """Return the times of a micro-batch in the parts of a stage."""
    passes = [layers[i] for part in parts for i in part.layers]
    passes += [head] if parts[-1].head else []
    return PassTimes(
        Seconds().plus(*(part_passes.forward for part_passes in passes)),
        Seconds().plus(*(part_passes.inputs for part_passes in passes)),
        Seconds().plus(*(part_passes.weights for part_passes in passes)),
        sum(part_passes.host for part_passes in passes),
    )


def _update(
    config: RunConfig,
    plan: ModelPlan,
    layout: Grid,
    machine: Machine,
    passes: PassTimes,
    micro_batches: int,
) -> tuple[float, float, float]:
    """Return the times of an update outside its micro-batches.

    The three times are those of exposed data-parallel messages, of the optimizer, and of the host
    launching the messages of buckets.

    Args:
        config: The run's configuration.
        plan: The plan of the whole network.
        layout: The sizes of the process grid.
        machine: The machine on which the processes run.
        passes: The times of a micro-batch in the slowest pipeline stage.
        micro_batches: The number of micro-batches per update.
    """
    parallel, numbers = config.parallel, config.precision
    stage, width = parallel.zero_stage, numbers.weight_dtype.itemsize
    summed: float = 4 if numbers.accumulate_allreduce_grads_in_fp32 else width
    gathered: float = width
    if numbers.fp8_param_gather:
        gathered = 1
    trained = trained_share(config.model, plan, plan_model(config.model, parallel))
    summed *= trained
    packed_format = frozen_format(config.model)
    if stage < 3:  # stage 3 also gathers frozen weights
        gathered *= trained
    elif packed_format is not None:
        gathered = bytes_of(BLOCK, packed_format, width) / BLOCK
    fp8_share = len(numbers.fp8_layers(len(plan.layers))) / len(plan.layers)
    messages, updated, cast, launches = 0.0, 0.0, 0.0, 0.0
    backward = passes.inputs.total + passes.weights.total
    for parameters, size, stride in layout.weights(config, plan):
        updated += trained * parameters / (size if stage else 1)
        cast += fp8_share * parameters * (numbers.fp8_format is not None)
        if size == 1:
            continue
        link = machine.connection(size, stride)
        share = 1 - 1 / size
        # Gathering and reducing each send a parameter once. Averaging whole gradients does both.
        sent = {
            0: ((2 * summed, parallel.overlap_grad_reduce, backward),),
            1: (
                (summed, parallel.overlap_grad_reduce, backward),
                (gathered, parallel.overlap_param_gather, passes.forward.total),
            ),
            2: (
                (micro_batches * summed, True, micro_batches * backward),
                (gathered, parallel.overlap_param_gather, passes.forward.total),
            ),
            3: (
                (micro_batches * summed, True, micro_batches * backward),
                (2 * micro_batches * gathered, True, micro_batches * passes.total),
            ),
        }[stage]
        for bytes_each, overlaps, window in sent:
            size_in_bytes = parameters * bytes_each * share
            time = size_in_bytes / link.bandwidth
            buckets = -(-parameters * bytes_each // BUCKET_BYTES)
            time += link.latency * buckets
            launches += MESSAGE_LAUNCHES * buckets * (stage < 3)
            if overlaps:
                # Messages slow down the products with which they overlap.
                slowdown = IN_BUCKETS * size_in_bytes / machine.link.bandwidth
                time = max(time - window, 0.0) + min(slowdown, time)
            messages += time
        if stage == 3:
            copied = _COPIED_WHOLE + _COPIED_SHARD / size
            messages += micro_batches * parameters * copied / machine.copy
    # With FP8, every update casts the weights again.
    optimizer = (updated * OPTIMIZER_BYTES + cast * FP8_CAST) / machine.copy
    return messages, optimizer, launches * machine.launch


@dataclass(frozen=True)
class Failures:
    """The failures of a run and its recovery from them. Times are in seconds.

    Attributes:
        between: Mean time between failures of the whole run, M.
        checkpoint: Time that training waits for a checkpoint, C.
        restart: Time from a failure until training continues from the last checkpoint, R.
    """

    between: float
    checkpoint: float
    restart: float

    def goodput(self, interval: float) -> float:
        """Return the expected fraction of time spent on training that no failure undoes.

        Failures occur at a constant rate, even during checkpoints and restarts. A checkpoint
        follows each `interval` T of training, and a failure loses the training since the last
        checkpoint. The expected time of an interval is then M e^(R/M) (e^((T+C)/M) - 1).
        """
        rate = 1 / self.between
        exponent = rate * (interval + self.checkpoint)
        if exponent + rate * self.restart > 700:  # too large for a float: no progress is made
            return 0.0
        expected = self.between * math.exp(rate * self.restart) * math.expm1(exponent)
        return interval / expected

    @property
    def young(self) -> float:
        """Young's checkpoint interval (1974), sqrt(2 C M)."""
        return math.sqrt(2 * self.checkpoint * self.between)

    @property
    def daly(self) -> float:
        """Daly's higher-order checkpoint interval (2006)."""
        ratio = self.checkpoint / (2 * self.between)
        if ratio >= 1:
            return self.between
        return self.young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - self.checkpoint

    @property
    def best(self) -> float:
        """The checkpoint interval with the highest goodput, found by golden-section search."""
        low, high = min(1e-3, self.checkpoint), 10 * (self.young + self.between)
        shrink = (math.sqrt(5) - 1) / 2
        while high - low > 1e-6 * high:
            step = shrink * (high - low)
            if self.goodput(high - step) >= self.goodput(low + step):
                high = low + step
            else:
                low = high - step
        return (low + high) / 2
