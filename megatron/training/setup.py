"""Building a run from its configuration, in the order in which the parts need each other."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from megatron.checkpoint.entries import flatten
from megatron.checkpoint.reader import PaddedReader
from megatron.config import RunConfig
from megatron.config.stages import parts_of_stage, plan_model
from megatron.data.datasets import corpus_fingerprint
from megatron.device import Device
from megatron.errors import ConfigError
from megatron.optimizer.groups import split_groups
from megatron.optimizer.optimizer import Optimizer
from megatron.optimizer.rules import rules_of
from megatron.optimizer.schedule import Schedules
from megatron.parallel.amax_history import AmaxHistory, DelayedScaling
from megatron.parallel.every_layer import attach_exchange, attach_history, forget_weights
from megatron.parallel.exchange import Exchange
from megatron.parallel.gradients import GradientBuffer
from megatron.parallel.initialization import initialize, initialize_part
from megatron.parallel.layout import Layout
from megatron.parallel.parameter import spec_of
from megatron.parallel.pipeline.p2p import PipelineChannel
from megatron.parallel.pipeline.schedule import schedule_kind
from megatron.parallel.replicas import Gradients
from megatron.parallel.tied import unite_copies
from megatron.parallel.torch_ddp import TorchDataParallel
from megatron.parallel.weight_gradients import WeightGradientQueue, attach
from megatron.processes.ending import ExitRequest
from megatron.processes.launch import Launch
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.tokenizer.build import padded_vocab_size
from megatron.training.batch_size import BatchPlan
from megatron.training.checkpointing import (
    entries_held,
    open_for_loading,
    restore_run,
    shard_state,
)
from megatron.training.data import batches_from, samples_needed
from megatron.training.gradient_sharing import gathered_in_8_bits, share_gradients, uses_torch_ddp
from megatron.training.operation_clock import OperationClock
from megatron.training.recipe import Batch, Recipe
from megatron.training.recorded_passes import Losses, RecordedPasses
from megatron.training.run import Progress, Run
from megatron.training.save_interval import SaveClock
from megatron.training.tensor_overlap import new_exchange
from megatron.training.timers import Timers


def build_run(
    config: RunConfig, recipe: Recipe, launch: Launch, device: Device, layout: Layout
) -> Run:
    """Everything a run needs, its checkpoint loaded and its data at the right position.

    Collective. Raises UserError subclasses for whatever the user can mend.
    """
    exit_request = ExitRequest(
        handle_signals=config.training.exit_signal_handler,
        duration_minutes=config.training.exit_duration_in_mins,
    )
    layout = replace(layout, sequence_parallel=config.parallel.sequence_parallel)
    tokenizer = build_tokenizer(config.tokenizer)
    vocabulary = padded_vocab_size(
        tokenizer.vocab_size, config.model.make_vocab_size_divisible_by, layout.tensor.size
    )
    reader = _open_checkpoint(config, layout, rows=vocabulary, entries=tokenizer.vocab_size)
    parts = _build_parts(config, recipe, layout, device, vocabulary)
    gradients, ties = share_gradients(config, recipe, parts, layout, device)
    named_parameters = [pair for part in parts for pair in part.named_parameters()]
    _initialize(named_parameters, gradients, config, loading=reader is not None)
    batches = BatchPlan.from_config(config.training, layout.data.size)
    train_iterations = _train_iterations(config, batches)
    samples = samples_needed(config, train_iterations)
    run = Run(
        config=config,
        recipe=recipe,
        launch=launch,
        device=device,
        layout=layout,
        tokenizer=tokenizer,
        padded_vocab_size=vocabulary,
        parts=parts,
        ties=ties,
        amax_history=_delayed_scaling(config, parts, layout, device),
        exchange=_tensor_exchange(config, recipe, parts, layout, device),
        gradients=gradients,
        torch_ddp=_torch_ddp(config, recipe, parts, layout),
        recorded=_recorded_passes(config, recipe, tokenizer, parts, gradients, layout, device),
        optimizer=_optimizer(config, parts, gradients, layout),
        schedules=Schedules.from_config(
            config.schedule, config.optimizer, config.training, global_batch=batches.global_batch
        ),
        channel=_connect(config, layout, device, chunks=len(parts), texts=recipe.head.sequences),
        weight_gradients=_deferred_weight_gradients(config, parts),
        batches=batches,
        train_iterations=train_iterations,
        datasets=recipe.build_datasets(config, tokenizer, samples, layout),
        exit=exit_request,
        save_clock=SaveClock(config.checkpoint.save_interval_in_mins),
        timers=_timers(config, device, layout),
        operation_clock=OperationClock(device, layout)
        if config.logging.log_pipeline_bubble
        else None,
        progress=Progress(dropout_seed=config.training.seed),
        corpus=_corpus(config, layout),
    )
    if reader is not None:
        restore_run(run, reader)
    del reader  # before processes are forked, which would keep the checkpoint from being deleted
    _open_training_data(run)
    return run


def _open_checkpoint(
    config: RunConfig, layout: Layout, *, rows: int, entries: int
) -> PaddedReader | None:
    """What --load names, its vocabulary of as many rows as this run's. Collective.

    Args:
        rows: of the vocabulary, padding included.
        entries: of the tokenizer.
    """
    reader = open_for_loading(config, layout)
    if reader is None:
        return None
    return PaddedReader(reader, rows=rows, entries=entries_held(reader, entries))


def _build_parts(
    config: RunConfig, recipe: Recipe, layout: Layout, device: Device, vocabulary: int
) -> list[torch.nn.Module]:
    """The parts of the model that this pipeline stage holds."""
    plan = plan_model(config.model, config.parallel)
    parts: list[torch.nn.Module] = [
        recipe.build_part(config, layout, device, vocabulary, part)
        for part in parts_of_stage(plan, layout.pipeline.rank, layout.pipeline.size)
    ]
    unite_copies(parts)
    return parts


def _optimizer(
    config: RunConfig, parts: list[torch.nn.Module], gradients: Gradients, layout: Layout
) -> Optimizer:
    weights = gradients.share_weights(
        parts if config.parallel.overlap_param_gather else None,
        gathered_in_8_bits(config, parts),
    )
    groups = split_groups(
        [pair for part in parts for pair in part.named_parameters()],
        rules_of(config.optimizer),
        decouples=config.schedule.decoupled_lr is not None,
    )
    return Optimizer(
        groups,
        gradients,
        config.optimizer,
        config.precision,
        layout,
        weights=weights,
        count_zeros=config.logging.log_num_zeros_in_grad,
    )


def _delayed_scaling(
    config: RunConfig, parts: list[torch.nn.Module], layout: Layout, device: Device
) -> AmaxHistory | None:
    """What the parts' fp8 layers scale by; None where they scale by what they hold."""
    if config.precision.fp8_format is None or config.precision.fp8_recipe != "delayed":
        return None
    scaling = DelayedScaling.from_config(config.precision)
    return attach_history(parts, scaling, layout, device.torch_device)


def _tensor_exchange(
    config: RunConfig,
    recipe: Recipe,
    parts: list[torch.nn.Module],
    layout: Layout,
    device: Device,
) -> Exchange | None:
    """What split layers send their rows through beside their products; None: nothing. Collective
    over tensor ranks."""
    if not config.parallel.tp_comm_overlap or layout.tensor.size == 1:
        return None
    exchange = new_exchange(config, layout, device, recipe.head.sequences)
    for part in parts:
        attach_exchange(part, exchange)
    return exchange


def _recorded_passes(
    config: RunConfig,
    recipe: Recipe,
    tokenizer: Tokenizer,
    parts: list[torch.nn.Module],
    gradients: Gradients,
    layout: Layout,
    device: Device,
) -> RecordedPasses | None:
    """What records and runs again the passes of the model, which is whole here; None: nothing."""
    if config.training.cuda_graph_impl == "none":
        return None

    def forward(batch: Batch) -> Losses:
        losses = recipe.forward(parts[0], batch, None, config, tokenizer, layout)
        assert not isinstance(losses, torch.Tensor), "a rule refuses pipeline stages"
        return losses

    assert isinstance(gradients, GradientBuffer), "a rule refuses sharded weights"
    return RecordedPasses(
        forward,
        gradients,
        device.recorder(),
        journal=layout.journal,
        forget=partial(forget_weights, parts[0]),
        warm_up=config.training.cuda_graph_warmup_steps,
    )


def _torch_ddp(
    config: RunConfig, recipe: Recipe, parts: list[torch.nn.Module], layout: Layout
) -> TorchDataParallel | None:
    """PyTorch's data parallelism, where --DDP-impl asks for it."""
    if not uses_torch_ddp(config, layout):
        return None
    return TorchDataParallel(parts[0], recipe.forward, layout.replica)


def _train_iterations(config: RunConfig, batches: BatchPlan) -> int:
    training = config.training
    if training.train_samples is not None:
        return batches.iterations_for(training.train_samples)
    assert training.train_iters is not None, "a rule asks for a length"
    return training.train_iters


def _timers(config: RunConfig, device: Device, layout: Layout) -> Timers:
    return Timers(
        level=config.logging.timing_log_level,
        device=device,
        world=layout.world,
        barrier=config.logging.barrier_with_l1_time,
    )


def _connect(
    config: RunConfig, layout: Layout, device: Device, *, chunks: int, texts: int
) -> PipelineChannel | None:
    """The way to the neighbouring pipeline stages; None without a pipeline. Collective.

    Args:
        chunks: parts of the model on each stage.
        texts: sequences of a sample.
    """
    if layout.pipeline.size == 1:
        return None
    sequence = config.data.sample_tokens // layout.context.size
    if config.parallel.sequence_parallel:
        sequence //= layout.tensor.size
    return PipelineChannel.create(
        layout,
        ring=chunks > 1,
        device=device.torch_device,
        dtype=config.precision.stream_dtype,
        shape=(
            sequence,
            config.training.micro_batch_size * texts,
            config.model.hidden_size,
        ),
    )


def _deferred_weight_gradients(
    config: RunConfig, parts: list[torch.nn.Module]
) -> WeightGradientQueue | None:
    """Where a zero-bubble schedule keeps weight gradients for later; None for the others."""
    if schedule_kind(config.parallel, len(parts)) != "zero-bubble":
        return None
    queue = WeightGradientQueue()
    for part in parts:
        attach(part, queue)
    return queue


def _initialize(
    named_parameters: list[tuple[str, torch.nn.Parameter]],
    gradients: Gradients,
    config: RunConfig,
    *,
    loading: bool,
) -> None:
    if loading and not config.model.perform_initialization:
        return
    if not config.model.perform_initialization:
        raise ConfigError(
            "--no-initialization: no checkpoint is loaded, so the weights would be garbage: "
            "give --load with a checkpoint, or drop the flag"
        )
    seed = config.training.seed
    if not gradients.shares_weights:
        initialize(named_parameters, seed)
        return
    specs = {f"model.{name}": spec_of(parameter) for name, parameter in named_parameters}
    for name, entry in flatten(shard_state(named_parameters, gradients)):
        spec = replace(specs[name], offset=entry.offset)
        initialize_part(name.removeprefix("model."), entry.tensor, spec, seed)


def _corpus(config: RunConfig, layout: Layout) -> str | None:
    return (
        None if layout.world.rank or config.training.skip_train else corpus_fingerprint(config.data)
    )


def _open_training_data(run: Run) -> None:
    dataset = run.datasets[0]
    if run.config.training.skip_train:
        return
    if dataset is None:
        raise ConfigError(
            f"--split {run.config.data.split}: the training split is empty: give it a share of "
            "the documents"
        )
    run.train_batches = batches_from(run, dataset, consumed=run.progress.consumed_samples)
