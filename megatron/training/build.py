"""Construction of a run from its configuration, each component after its dependencies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from megatron.checkpoint.entries import flatten
from megatron.checkpoint.exchange import JsonExchange
from megatron.checkpoint.find import iteration_folder
from megatron.checkpoint.reader import PaddedReader, Reader
from megatron.checkpoint.store import FOREIGN, foreign_iterations
from megatron.config import RunConfig
from megatron.config.stages import parts_of_stage, plan_model
from megatron.data.datasets import corpus_fingerprint
from megatron.device import Device
from megatron.durable import writing_to
from megatron.environment import local_world_size
from megatron.errors import CheckpointError, ConfigError
from megatron.models.adapters import initialize_adapters
from megatron.models.build import run_context
from megatron.models.freezing import check_frozen
from megatron.models.plan import ModelPlan
from megatron.models.plans import model_plan
from megatron.optimizer.groups import split_groups
from megatron.optimizer.optimizer import Optimizer
from megatron.optimizer.rules import rules_of
from megatron.optimizer.schedule import Schedules
from megatron.parallel.exchange import Exchange, GroupExchange
from megatron.parallel.fp8 import AmaxHistory, DelayedScaling
from megatron.parallel.gradients import GradientBuffer
from megatron.parallel.layout import Axis, Layout
from megatron.parallel.parameter import initialize, initialize_part, spec_of
from megatron.parallel.pipeline.p2p import PipelineChannel
from megatron.parallel.pipeline.schedule import schedule_kind
from megatron.parallel.pipeline.weight_gradients import WeightGradientQueue
from megatron.parallel.registry import LayerRegistry
from megatron.parallel.replicas import Gradients, TorchDataParallel, shares_weights
from megatron.parallel.tied import share_tables
from megatron.planner.machine import like_device
from megatron.planner.memory import largest_expert_message, largest_message
from megatron.planner.prediction import records_passes
from megatron.processes.ending import ExitRequest
from megatron.processes.groups import BACKSTOP
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.tokenizer.build import padded_vocab_size
from megatron.training import checkpointing, gradient_sharing, restoring
from megatron.training.batches import BatchPlan, batches_from, samples_needed
from megatron.training.branches import with_branch_length
from megatron.training.forward import DirectForward, TrainingForward
from megatron.training.passes import message_shape
from megatron.training.quorum import Quorum
from megatron.training.recipe import CountsEpochs, Recipe
from megatron.training.recorded_passes import RecordedPasses
from megatron.training.run import ParallelModel, Run
from megatron.training.run_record import RunRecord
from megatron.training.spikes import SpikeWatch
from megatron.training.timers import OperationClock, SaveClock, SectionClock, Timers

if TYPE_CHECKING:
    from megatron.parallel.symmetric_memory import SymmetricExchange


def build_run(config: RunConfig, recipe: Recipe, device: Device, layout: Layout) -> Run:
    """Build everything that a run needs, load its checkpoint, and open its data at its position.

    Collective.

    Args:
        config: The run's configuration.
        recipe: The recipe, which defines model, data and loss.
        device: The device on which this process computes.
        layout: The grid of processes as this process sees it.

    Raises:
        UserError: The run cannot be built, for a reason that the user can fix.
    """
    exit_request = ExitRequest(
        config.training.exit_signal_handler,
        config.training.exit_duration_in_mins,
        config.training.kill_switch_file,
    )
    tokenizer = build_tokenizer(config.tokenizer)
    vocabulary = padded_vocab_size(
        tokenizer.vocab_size, config.model.make_vocab_size_divisible_by, layout.tensor.size
    )
    config, reader = _open_checkpoint(config, layout, tokenizer, vocabulary)
    config = restoring.with_saved_rounding(config, reader)
    config, batches = _with_length(config, recipe, reader, tokenizer, layout)
    training, save = config.training, config.checkpoint.save
    start = restoring.progress_at_start(config, reader)
    planned = batches.iterations_of(training, start)
    train_iterations = config.data.retro_cyclic_train_iters or planned
    _check_saves(config, layout, start.iteration, train_iterations)
    model = parallelize(config, recipe, vocabulary, layout, device, is_loaded=reader is not None)
    samples = samples_needed(config, planned, start)
    has_corpus = layout.world.rank == 0 and not training.skip_train
    level, barrier = config.logging.timing_log_level, config.logging.barrier_with_l1_time
    sections = SectionClock(device, layout) if config.logging.log_straggler else None
    layout.journal.clock = sections
    run = Run(
        **vars(model),
        config=config,
        recipe=recipe,
        device=device,
        layout=layout,
        tokenizer=tokenizer,
        schedules=Schedules.from_config(
            config.schedule,
            config.optimizer,
            training,
            global_batch=batches.global_batch,
            seq_length=config.data.seq_length,
        ),
        channel=_connect(config, layout, device, len(model.parts), recipe.head.sequences),
        batches=batches,
        train_iterations=train_iterations,
        datasets=recipe.build_datasets(config, tokenizer, samples, layout),
        exit=exit_request,
        save_clock=SaveClock(config.checkpoint.save_interval_in_mins),
        timers=Timers(level, device, layout.world, barrier=barrier, sections=sections),
        spikes=None if training.on_spike == "none" else SpikeWatch(training),
        operation_clock=OperationClock(device, layout)
        if config.logging.log_pipeline_bubble
        else None,
        progress=start,
        record=None if save is None else RunRecord.of(save, layout),
        corpus=corpus_fingerprint(config.data) if has_corpus else None,
    )
    if reader is not None:
        restoring.restore_run(run, reader)
    # Processes forked later would inherit the reader and keep the checkpoint from being deleted.
    del reader
    if not training.skip_train:
        if run.datasets.train is None:
            raise ConfigError(
                f"--split {config.data.split}: the training split is empty: give it a share of "
                "the documents"
            )
        if config.reliability.torchft_lighthouse is not None:
            run.quorum = Quorum(run)  # opens the data once the replicas have agreed
        else:
            consumed = run.progress.consumed_samples
            run.train_batches = batches_from(run, run.datasets.train, consumed=consumed)
    return run


def _open_checkpoint(
    config: RunConfig, layout: Layout, tokenizer: Tokenizer, vocabulary: int
) -> tuple[RunConfig, PaddedReader | None]:
    """Open the checkpoint from which the run starts, if there is one. Collective.

    The reader presents vocabulary tables with `vocabulary` rows, regardless of their number in the
    checkpoint.

    Returns:
        The configuration, which names that checkpoint as --load, and the reader.
    """
    if config.checkpoint.load is not None:
        layout.journal.enter("loading of the checkpoint")
    config, reader = restoring.open_for_loading(config, layout)
    if reader is None:
        return config, None
    entries = restoring.stored_entries(reader, tokenizer.vocab_size)
    return config, PaddedReader(reader, rows=vocabulary, entries=entries)


def _with_length(
    config: RunConfig, recipe: Recipe, reader: Reader | None, tokenizer: Tokenizer, layout: Layout
) -> tuple[RunConfig, BatchPlan]:
    """Return the configuration with the length of the run, and the plan of its batches. Collective.

    The length depends on the checkpoint in a branch, and on the data with --train-epochs.
    """
    complete = with_branch_length(config, reader)
    batches = BatchPlan.from_config(complete, layout.data.size)
    return without_epochs(complete, recipe, batches, tokenizer, layout), batches


def _check_saves(config: RunConfig, layout: Layout, start: int, end: int) -> None:
    """Check that no folder in --save stands in the way of a later save. Collective.

    Only saves at the intervals and at the end are known in advance.

    Args:
        config: The run's configuration.
        layout: The grid of processes as this process sees it.
        start: The number of iterations before this start.
        end: The number of iterations of the whole run.

    Raises:
        CheckpointError: One of these saves would be refused, because it would replace files that
            this program did not write.
    """
    options, exits = config.checkpoint, config.training.exit_interval
    if options.save is None or options.ckpt_format != "native" or config.training.skip_train:
        return
    root, interval = Path(options.save), options.save_interval
    last = end if exits is None else min(end, (start // exits + 1) * exits)

    def check() -> None:
        with writing_to("--save", root):
            foreign = foreign_iterations(root)
        for iteration in foreign:
            is_due = iteration == last or (interval is not None and iteration % interval == 0)
            if start < iteration <= last and is_due:
                loads_root = options.load and Path(options.load).resolve() == root.resolve()
                other = (
                    "move it elsewhere" if loads_root else f"continue from it with --load {root}"
                )
                raise CheckpointError(
                    f"--save {root}: {iteration_folder(iteration)} contains {FOREIGN}, and this "
                    f"run would save at iteration {iteration}: {other}, or give another folder to "
                    "--save"
                )

    JsonExchange(layout.world).on_main(check)


def without_epochs(
    config: RunConfig, recipe: Recipe, batches: BatchPlan, tokenizer: Tokenizer, layout: Layout
) -> RunConfig:
    """Return the configuration with --train-epochs converted to iterations. Collective.

    Args:
        config: The run's configuration.
        recipe: The recipe, which determines the number of samples in an epoch.
        batches: The plan of the run's batches.
        tokenizer: The run's tokenizer.
        layout: The grid of processes as this process sees it.
    """
    if config.finetuning.train_epochs is None:
        return config
    assert isinstance(recipe, CountsEpochs), "a rule refuses --train-epochs"
    epoch_samples = recipe.epoch_samples(config, tokenizer, layout)
    return batches.in_iterations(config, config.finetuning.train_epochs * epoch_samples)


def parallelize(
    config: RunConfig,
    recipe: Recipe,
    vocabulary: int,
    layout: Layout,
    device: Device,
    *,
    is_loaded: bool,
) -> ParallelModel:
    """Build this process's parts of the model and prepare them to train in parallel.

    Collective. The order matters: each step needs those before it.

    Args:
        config: The run's configuration.
        recipe: The training recipe.
        vocabulary: The padded vocabulary size.
        layout: The grid of processes as this process sees it.
        device: The device on which this process computes.
        is_loaded: Whether a checkpoint will replace the initial weights.

    Raises:
        ConfigError: Weights are not initialized (--no-initialization) and not loaded, a pattern of
            frozen or adapted weights matches nothing, a process has no weights to train, or GPUs
            cannot map each other's memory for --tp-comm-overlap.
    """
    parallel, pipeline = config.parallel, layout.pipeline
    plan = model_plan(config.model, vocabulary, recipe.head)
    local_parts = parts_of_stage(plan_model(config.model, parallel), pipeline.rank, pipeline.size)

    # 1. Exchanges: one overlaps tensor-parallel communication with the matrix products of split
    #    layers, the other sends tokens to experts and back.
    exchange = new_exchange(config, layout, device, recipe.head.sequences)
    expert_exchange = new_expert_exchange(config, plan, layout, device)

    # 2. The parts, whose layers are split as their constructors specify and recompute as the plan
    # specifies. They ask their context for everything they need, now or later.
    layers, queue = LayerRegistry(), WeightGradientQueue()
    splits_backward = schedule_kind(parallel, len(local_parts)) == "zero-bubble"
    context = run_context(
        config,
        layout,
        device,
        exchange=exchange,
        expert_exchange=expert_exchange,
        weight_gradients=queue if splits_backward else None,
        registry=layers,
    )
    parts = [recipe.build_part(config, context, vocabulary, part) for part in local_parts]

    # 3. Ties within this process: parts share the embedding tables that they have in common.
    share_tables(parts)
    check_frozen(parts, config.model, layout, device.torch_device)

    # 4. Weight precision: with delayed scaling, fp8 layers scale by the amaxes of earlier updates.
    history = AmaxHistory.empty()
    if config.precision.fp8_format is not None and config.precision.fp8_recipe == "delayed":
        scaling = DelayedScaling.from_config(config.precision)
        history = layers.keep_history(
            gradient_sharing.named_parameters_of(parts), scaling, layout, device.torch_device
        )

    # 5. Gradient buckets, or shards of weights and gradients (ZeRO stage 3).
    gradients: Gradients
    if shares_weights(parallel, layout):
        gradients = gradient_sharing.shard_model(config, parts, layout, device)
    else:
        gradients = gradient_sharing.new_gradient_buffer(config, plan, parts, layers, layout)

    # 6. Ties across stages, which sum the gradients of copies. Then the initial weights.
    ties = gradient_sharing.tie_copies(config, plan, parts, gradients, layout, device)
    _initialize(parts, gradients, config, is_loaded=is_loaded)

    # 7. Recorded passes (CUDA graphs), PyTorch's data parallelism, or neither.
    forward = _new_forward(config, plan, recipe, parts, gradients, layers, layout, device)

    # 8. The weights that processes gather after sharded updates. Then the optimizer, which copies
    #    them.
    weights = gradients.share_weights(
        parts if parallel.overlap_param_gather else None,
        gradient_sharing.gathered_in_8_bits(config, layers),
    )
    groups = split_groups(
        gradient_sharing.named_parameters_of(parts),
        rules_of(config.optimizer),
        decouples=config.schedule.decoupled_lr is not None,
        decays_qk_norms=config.optimizer.apply_wd_to_qk_layernorm,
    )
    optimizer = Optimizer(
        groups,
        gradients,
        config.optimizer,
        config.precision,
        layout,
        weights=weights,
        count_zeros=config.logging.log_num_zeros_in_grad,
    )
    return ParallelModel(plan, parts, layers, ties, history, queue, gradients, forward, optimizer)


def _new_forward(
    config: RunConfig,
    plan: ModelPlan,
    recipe: Recipe,
    parts: Sequence[nn.Module],
    gradients: Gradients,
    layers: LayerRegistry,
    layout: Layout,
    device: Device,
) -> TrainingForward:
    """Return the recipe's forward pass, recorded or wrapped according to the flags."""
    machine = like_device(device.name, device.total_memory() or 0)
    if device.is_gpu and records_passes(config, plan, layout.world.size, machine):
        assert isinstance(gradients, GradientBuffer), "a rule refuses sharded weights"
        return RecordedPasses(
            recipe.forward,
            gradients,
            device.recorder(),
            journal=layout.journal,
            forget=layers.forget_weights,
            warm_up=config.training.cuda_graph_warmup_steps,
            may_fail=config.training.cuda_graph_impl == "auto",
        )
    if gradient_sharing.uses_torch_ddp(config, layout):
        return TorchDataParallel(parts[0], recipe.forward, layout.replica)
    return DirectForward(recipe.forward)


def new_exchange(
    config: RunConfig, layout: Layout, device: Device, sequences: int
) -> Exchange | None:
    """Return the exchange that overlaps tensor-parallel communication with matrix products.

    Collective over the tensor ranks, which are on one machine. The result is `None` if overlap is
    off or there is only one rank.

    Args:
        config: The run's configuration.
        layout: The grid of processes as this process sees it.
        device: The device on which this process computes.
        sequences: The number of sequences in a sample.

    Raises:
        ConfigError: The ranks' GPUs cannot map each other's memory.
    """
    if not config.parallel.tp_comm_overlap or layout.tensor.size == 1:
        return None
    if not device.is_gpu:
        return GroupExchange(layout.tensor)
    message = largest_message(config, layout, sequences)
    try:
        return _map_memory(config, layout.tensor, device, message)
    except RuntimeError as error:
        raise ConfigError(
            f"--tp-comm-overlap: the GPUs of tensor-parallel ranks {list(layout.tensor.ranks)} "
            f"cannot map each other's memory ({error}): drop the flag"
        ) from error


def new_expert_exchange(
    config: RunConfig, plan: ModelPlan, layout: Layout, device: Device
) -> Exchange | None:
    """Return the exchange that sends tokens to experts and back between the GPUs of a machine.

    Collective over the expert ranks. The result is `None` if collectives are used instead: on CPUs,
    across machines, if the GPUs cannot map each other's memory, and in the cases in which
    `largest_expert_message` is 0.

    Args:
        config: The run's configuration.
        plan: The plan of the whole network.
        layout: The grid of processes as this process sees it.
        device: The device on which this process computes.
    """
    axis, message = layout.expert, largest_expert_message(config, plan, layout)
    machines = {rank // local_world_size() for rank in axis.ranks}
    if message == 0 or not device.is_gpu or len(machines) > 1:
        return None
    try:
        return _map_memory(config, axis, device, message)
    except RuntimeError:
        return None


def _map_memory(
    config: RunConfig, axis: Axis, device: Device, message_bytes: int
) -> SymmetricExchange:
    from megatron.parallel.symmetric_memory import SymmetricExchange  # slow to import

    # The same timeout as the communication library's, which does not name the missing rank either.
    seconds = 60 * config.parallel.distributed_timeout_minutes + BACKSTOP.total_seconds()
    return SymmetricExchange(axis, device.torch_device, message_bytes, seconds=seconds)


def _connect(
    config: RunConfig, layout: Layout, device: Device, chunks: int, sequences: int
) -> PipelineChannel | None:
    """Return the channel to the neighboring stages, or `None` without a pipeline. Collective.

    Args:
        config: The run's configuration.
        layout: The grid of processes as this process sees it.
        device: The device on which this process computes.
        chunks: The number of model parts on each stage.
        sequences: The number of sequences in a sample.
    """
    if layout.pipeline.size == 1:
        return None
    return PipelineChannel(
        layout,
        ring=chunks > 1,
        device=device.torch_device,
        dtype=config.precision.stream_dtype,
        shape=message_shape(config, layout, config.data.sample_tokens, sequences),
    )


def _initialize(
    parts: list[nn.Module], gradients: Gradients, config: RunConfig, *, is_loaded: bool
) -> None:
    if not config.model.perform_initialization:
        if is_loaded:
            return
        raise ConfigError(
            "--no-initialization: no checkpoint is loaded, so the weights would be garbage: "
            "give --load with a checkpoint, or drop the flag"
        )
    seed, named_parameters = config.training.seed, gradient_sharing.named_parameters_of(parts)
    if gradients.shares_weights:
        specs = {f"model.{name}": spec_of(parameter) for name, parameter in named_parameters}
        for name, entry in flatten(checkpointing.shard_state(named_parameters, gradients)):
            spec = replace(specs[name], offset=entry.offset)
            initialize_part(name.removeprefix("model."), entry.tensor, spec, seed)
        for _, parameter in named_parameters:
            part, dtype = gradients.part(parameter), gradients.compute_dtype(parameter)
            if not parameter.requires_grad and part.dtype != dtype:
                part.copy_(part.to(dtype))  # rounded as in a checkpoint
    else:
        initialize(named_parameters, seed)
    initialize_adapters(parts)
