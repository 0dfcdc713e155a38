"""A run's state as a checkpoint stores it, and the functions that save it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from megatron.checkpoint.background import SavedCheckpoint
from megatron.checkpoint.entries import (
    Entry,
    State,
    boxes_of_range,
    buffer_state,
    model_state,
)
from megatron.checkpoint.non_persistent import RUN
from megatron.checkpoint.retention import RetentionPolicy
from megatron.checkpoint.store import STATES, Snapshot, write_checkpoint
from megatron.command import print_line
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.yaml_file import to_dict
from megatron.data.text_stream import positions_state
from megatron.parallel.buckets import Span
from megatron.parallel.parameter import spec_of
from megatron.parallel.replicas import Gradients
from megatron.training.batches import evaluation_position
from megatron.training.run import Run


def save_run(run: Run) -> Path:
    """Write the run's state to a new checkpoint in --save, and return its folder. Collective.

    Older checkpoints are then deleted if the flags ask for that (`keep_of`).
    """
    options, iteration = run.config.checkpoint, run.progress.iteration
    assert options.save
    start_time = time.perf_counter()
    snapshot = Snapshot.take(iteration, state_of(run), meta_of(run), run.layout)
    path = writer_of(run)(options.save, snapshot, keep=keep_of(options))
    if run.layout.world.rank == 0:
        seconds = time.perf_counter() - start_time
        report_saved(SavedCheckpoint(iteration, path, snapshot.plan.total_bytes, seconds, seconds))
    return path


def keep_of(options: CheckpointConfig) -> RetentionPolicy | None:
    """Return the policy that deletes old checkpoints when a run saves, or `None` to keep all."""
    keep = RetentionPolicy(options.keep_latest, options.save_retain_interval)
    return None if keep == RetentionPolicy() else keep


def writer_of(run: Run) -> Callable[..., Path]:
    """Return the function that writes checkpoints in the run's --ckpt-format.

    Its arguments are those of `store.write_checkpoint`.
    """
    # Few runs need the other modules: see `open_folder`.
    if run.config.checkpoint.ckpt_format == "native":
        return write_checkpoint
    if run.config.checkpoint.ckpt_format == "torch_dist":
        from megatron.checkpoint.core.writer import CoreSaver

        return CoreSaver(run.config).write
    from megatron.checkpoint.legacy.writer import LegacySaver, LegacyWriter

    kind = LegacyWriter
    if run.config.checkpoint.ckpt_format == "torch":
        from megatron.checkpoint.core.torch_writer import CoreTorchWriter

        kind = CoreTorchWriter
    return LegacySaver(run.config, run.tokenizer.vocab_size, kind).write


def save_weights(run: Run, root: Path) -> Path:
    """Write the weights alone to `root`, replacing any earlier checkpoint in it. Collective."""
    run.optimizer.wait_for_weights()
    state = weights_state(run, in_compute_dtype=True)
    meta = {**meta_of(run), "optimizer": None, "average": None}
    snapshot = Snapshot.take(run.progress.iteration, state, meta, run.layout)
    return write_checkpoint(root, snapshot, keep=RetentionPolicy(1))


def report_saved(saved: SavedCheckpoint) -> None:
    """Print which checkpoint was published, its size and the duration of the save."""
    speed = f"{saved.size / 1e9:.3g} GB in {saved.seconds:.2f} s"
    print_line(
        f"  successfully saved checkpoint at iteration {saved.iteration:7d} to {saved.path} "
        f"({speed}; training waited {saved.pause:.2f} s)"
    )


def state_of(run: Run) -> State:
    """Return this process's tensors to save in a checkpoint, as the flags specify.

    These are the run's own tensors, not copies, with three exceptions: sharded weights are copied
    in the dtype of the forward pass, scaled optimizer states are decoded, and formats other than
    `native` receive optimizer states in fp32.

    Each optimizer state of a tied parameter is saved by a single stage. With a distributed
    optimizer, each stage shards its own gradient buffer. Two stages would cut a tied parameter at
    different offsets, so their pieces would overlap, and no reader could reassemble them.
    """
    run.optimizer.wait_for_weights()
    state = weights_state(run, in_compute_dtype=True)
    if run.optimizer.average is not None:
        state |= average_state(run, run.optimizer.average.tensor_sets(), copies=False)
    if not run.config.checkpoint.no_save_optim:
        named = run.optimizer.named_tensors()
        if run.config.checkpoint.ckpt_format != "native":  # other programs expect fp32
            named = {name: (tensor.float(), p) for name, (tensor, p) in named.items()}
        state |= optimizer_state(run, copies=False, named=named) | history_state(run)
    return state


def stable_names(run: Run) -> set[str]:
    """Return which entries of `state_of` stay as they are until the optimizer changes them.

    The others are or may be copies, whose memory the next passes need, or they change during those
    passes, such as the biases of routers and the history of fp8 scaling.
    """
    names = {f"{STATES}{name}" for name in run.optimizer.stored_names()}
    if not run.gradients.shares_weights:
        names |= {f"model.{name}" for name, _ in run.named_parameters()}
    return names


def shard_state(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    gradients: Gradients,
    *,
    in_compute_dtype: bool = False,
) -> State:
    """Return this process's shards of the parameters of a sharded model.

    Args:
        named_parameters: The global name of each parameter, and the parameter.
        gradients: The gradient buffers, which hold the shards.
        in_compute_dtype: Whether to return the shards in the dtype of the forward pass, as in
            checkpoints (copies if this dtype is 16-bit), instead of the fp32 or packed shards
            themselves.
    """
    return {
        f"model.{name}": _entries(
            gradients.part(p).to(gradients.compute_dtype(p))
            if in_compute_dtype
            else gradients.part(p),
            p,
            gradients.owned(p),
        )
        for name, p in named_parameters
    }


def weights_state(run: Run, *, in_compute_dtype: bool) -> State:
    """Return this process's weights: its parts of the model, or its shards with ZeRO stage 3.

    Args:
        run: The run.
        in_compute_dtype: Whether to return shards as checkpoints store them (`shard_state`).
    """
    if run.gradients.shares_weights:
        shards = shard_state(
            run.named_parameters(), run.gradients, in_compute_dtype=in_compute_dtype
        )
        return shards | buffer_state(run.parts)
    return model_state(run.parts)


def optimizer_state(
    run: Run,
    *,
    copies: bool = True,
    named: Mapping[str, tuple[Tensor, nn.Parameter]] | None = None,
) -> State:
    """Return the moments and master weights of all parameters on this process.

    Args:
        run: The run.
        copies: Whether to include tied parameters whose original is on another stage.
        named: The optimizer's `named_tensors`, if the caller needs the same tensors.
    """
    named = run.optimizer.named_tensors() if named is None else named
    return {
        f"{STATES}{name}": _entries(tensor, parameter, run.optimizer.gradients.owned(parameter))
        for name, (tensor, parameter) in named.items()
        if copies or not spec_of(parameter).is_copy
    }


def average_state(run: Run, sets: Mapping[str, Sequence[Tensor]], *, copies: bool = True) -> State:
    """Return this process's tensors of the averaged weights.

    Args:
        run: The run.
        sets: The tensors by name prefix (`WeightAverage.tensor_sets`).
        copies: Whether to include tied parameters whose original is on another stage.
    """
    return {
        name: _entries(tensor, parameter, run.gradients.owned(parameter))
        for name, (tensor, parameter) in run.optimizer.name_averages(sets).items()
        if copies or not spec_of(parameter).is_copy
    }


def history_state(run: Run) -> State:
    """Return the amax history of delayed fp8 scaling, which is training state."""
    named = run.amax_history.named_tensors().items()
    return {f"fp8.{name}": Entry.whole(tensor) for name, tensor in named}


def _entries(tensor: Tensor, parameter: nn.Parameter, span: Span) -> list[Entry]:
    """Return the entries for a tensor that holds the range `span` of a flattened parameter."""
    spec = spec_of(parameter)
    boxes = boxes_of_range(spec.shape, span.start, span.end)
    values = tensor.view(-1).split([box.volume for box in boxes])
    return [
        Entry(
            part.view(box.shape),
            spec.global_shape,
            tuple(map(sum, zip(spec.offset, box.offset, strict=True))),
        )
        for part, box in zip(values, boxes, strict=True)
    ]


def _working_folder() -> str | None:
    """Return the folder to which relative paths in the configuration refer, if it still exists."""
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return None


def meta_of(run: Run) -> dict[str, Any]:
    """Return a checkpoint's metadata as JSON: position, scalars and configuration. Collective."""
    progress, options, average = run.progress, run.config.checkpoint, run.optimizer.average
    return {
        "iteration": progress.iteration,
        "consumed_train_samples": progress.consumed_samples,
        "consumed_train_tokens": progress.consumed_tokens,
        "skipped_train_samples": progress.skipped_samples,
        "useful_seconds": run.useful_seconds,
        RUN: None if run.record is None else run.record.run,
        "padded_vocab_size": run.plan.embedding.vocabulary,
        "optimizer": None if options.no_save_optim else run.optimizer.scalars(),
        "average": None if average is None else {"kind": average.kind, "count": average.count},
        "schedule": run.schedules.to_dict(progress.scheduled_samples),
        # Dropout is drawn from the seed and the position in the sample order, so the seed and the
        # position above are the whole random state.
        "rng": None if options.no_save_rng else {"seed": run.progress.dropout_seed},
        "tokenizer": run.tokenizer.fingerprint(),
        "corpus": run.corpus,
        "text": positions_state(run.datasets.train, progress.consumed_samples, run.layout.world),
        "validation_text": positions_state(
            run.datasets.valid, evaluation_position(run, progress.iteration), run.layout.world
        ),
        "spikes": None if run.spikes is None else run.spikes.state(),
        "folder": _working_folder(),
        "config": to_dict(run.config),
    }
