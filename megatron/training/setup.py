"""Building a run from its configuration, in the order in which the parts need each other."""

from __future__ import annotations

import torch

from megatron.config import RunConfig
from megatron.device import Device
from megatron.environment import Launch
from megatron.errors import ConfigError
from megatron.optimizer.mixed import Optimizer
from megatron.optimizer.schedule import Schedules
from megatron.parallel.gradients import GradientBuffer
from megatron.parallel.initialization import initialize
from megatron.parallel.layout import Layout
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.vocabulary import padded_vocab_size
from megatron.training.batch_size import BatchPlan
from megatron.training.checkpointing import open_for_loading, restore_run
from megatron.training.data import batches_from, samples_needed
from megatron.training.exit import ExitRequest
from megatron.training.recipe import Recipe
from megatron.training.run import Progress, Run
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
    tokenizer = build_tokenizer(config.tokenizer)
    vocabulary = padded_vocab_size(
        tokenizer.vocab_size, config.model.make_vocab_size_divisible_by, layout.tensor.size
    )
    reader = open_for_loading(config, layout)
    model = recipe.build_model(config, layout, device, vocabulary)
    _initialize(model, config, loading=reader is not None)
    gradients = GradientBuffer(
        model.named_parameters(),
        layout,
        accumulate_in_fp32=config.precision.accumulate_allreduce_grads_in_fp32,
        zero_stage=config.parallel.zero_stage or 0,
        overlap=config.parallel.overlap_grad_reduce,
    )
    batches = BatchPlan.from_config(config.training, layout.data.size)
    train_iterations = _train_iterations(config, batches)
    run = Run(
        config=config,
        recipe=recipe,
        launch=launch,
        device=device,
        layout=layout,
        tokenizer=tokenizer,
        padded_vocab_size=vocabulary,
        model=model,
        gradients=gradients,
        optimizer=Optimizer(
            model.named_parameters(),
            gradients,
            config.optimizer,
            config.precision,
            layout,
            count_zeros=config.logging.log_num_zeros_in_grad,
            overlap_gather_in=[model] if config.parallel.overlap_param_gather else None,
        ),
        schedules=Schedules.from_config(
            config.schedule, config.optimizer, config.training, global_batch=batches.global_batch
        ),
        batches=batches,
        train_iterations=train_iterations,
        datasets=recipe.build_datasets(
            config, tokenizer, samples_needed(config, train_iterations), layout
        ),
        exit=exit_request,
        timers=Timers(
            level=config.logging.timing_log_level,
            device=device,
            world=layout.world,
            barrier=config.logging.barrier_with_l1_time,
        ),
        progress=Progress(dropout_seed=config.training.seed),
    )
    if reader is not None:
        restore_run(run, reader)
    _open_training_data(run)
    return run


def _train_iterations(config: RunConfig, batches: BatchPlan) -> int:
    training = config.training
    if training.train_samples is not None:
        return batches.iterations_for(training.train_samples)
    assert training.train_iters is not None
    return training.train_iters


def _initialize(model: torch.nn.Module, config: RunConfig, *, loading: bool) -> None:
    if loading and not config.model.perform_initialization:
        return
    if not config.model.perform_initialization:
        raise ConfigError(
            "--no-initialization: no checkpoint is loaded, so the weights would be garbage: "
            "give --load with a checkpoint, or drop the flag"
        )
    initialize(model.named_parameters(), config.training.seed)


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
