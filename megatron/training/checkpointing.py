"""Between a run and its checkpoints: what is saved, and how a checkpoint becomes a run again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron.checkpoint.entries import Entry
from megatron.checkpoint.reader import Reader
from megatron.checkpoint.store import save
from megatron.config import RunConfig
from megatron.config.run import flatten
from megatron.config.yaml_file import to_dict
from megatron.errors import CheckpointError
from megatron.parallel.parameter import spec_of
from megatron.training.callbacks.base import Callback, Leave
from megatron.training.callbacks.terminal import say
from megatron.training.run import Run
from megatron.training.step import StepOutcome

# What gives the weights their shape: a checkpoint with other values is another model.
_SHAPE_FIELDS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "kv_channels",
    "group_query_attention",
    "num_query_groups",
    "max_position_embeddings",
    "position_embedding_type",
    "normalization",
    "swiglu",
    "add_bias_linear",
    "untie_embeddings_and_output_weights",
    "apply_layernorm_1p",
)


def save_run(run: Run) -> Path:
    """Write the run's state under `--save`. Collective."""
    assert run.config.checkpoint.save
    root = Path(run.config.checkpoint.save)
    path = save(root, run.progress.iteration, _entries(run), _meta(run), run.layout)
    if run.layout.world.rank == 0:
        say(f"  successfully saved checkpoint at iteration {run.progress.iteration:7d} to {path}")
    return path


def _entries(run: Run) -> dict[str, Entry]:
    entries = {
        f"model.{name}": _entry(parameter.detach(), parameter)
        for name, parameter in run.model.named_parameters()
    }
    if not run.config.checkpoint.no_save_optim:
        for name, (tensor, parameter) in run.optimizer.named_tensors().items():
            entries[f"optimizer.{name}"] = _entry(tensor, parameter)
    return entries


def _entry(tensor: Tensor, parameter: nn.Parameter) -> Entry:
    spec = spec_of(parameter)
    return Entry(tensor, spec.global_shape, spec.offset)


def _meta(run: Run) -> dict[str, Any]:
    return {
        "iteration": run.progress.iteration,
        "consumed_train_samples": run.progress.consumed_samples,
        "scheduled_samples": run.progress.scheduled_samples,
        "padded_vocab_size": run.padded_vocab_size,
        "optimizer": None if run.config.checkpoint.no_save_optim else run.optimizer.scalars(),
        "schedule": {
            **run.learning_rate.to_dict(),
            **run.weight_decay.to_dict(),
            "num_steps": run.progress.scheduled_samples,
        },
        # Dropout is drawn from (seed, sample number): together with the position, this is all
        # the random state there is.
        "rng": None if run.config.checkpoint.no_save_rng else {"seed": run.config.training.seed},
        "tokenizer": run.tokenizer.fingerprint(),
        "config": to_dict(run.config),
    }


def check_shapes(config: RunConfig, reader: Reader) -> None:
    """Refuse a checkpoint of a differently shaped network.

    Raises:
        CheckpointError: listing every flag that differs, with both values.
    """
    saved = reader.meta["config"].get("model", {})
    differing = [
        f"--{name.replace('_', '-')}: {getattr(config.model, name)} here, {saved[name]} in the "
        "checkpoint"
        for name in _SHAPE_FIELDS
        if name in saved and saved[name] != getattr(config.model, name)
    ]
    if differing:
        raise CheckpointError(
            f"--load {config.checkpoint.load}: the checkpoint's network is another one:\n  "
            + "\n  ".join(differing)
            + "\n  give its values, or --use-checkpoint-args to take them from the checkpoint"
        )


def load_weights(model: nn.Module, reader: Reader) -> None:
    """Copy every parameter of `model` from the checkpoint.

    Raises:
        CheckpointError: naming parameters that only one side has.
    """
    wanted = {f"model.{name}": parameter for name, parameter in model.named_parameters()}
    _check_names(wanted.keys(), {name for name in reader.names() if name.startswith("model.")})
    for name, parameter in wanted.items():
        _read_into(parameter.data, name, parameter, reader)


def _check_names(wanted: Any, found: set[str]) -> None:
    missing, unexpected = sorted(set(wanted) - found), sorted(found - set(wanted))
    if missing:
        raise CheckpointError(
            f"the checkpoint lacks {len(missing)} parameter(s) of this network: "
            f"{', '.join(missing[:8])}; it has {len(unexpected)} that the network lacks: "
            f"{', '.join(unexpected[:8]) or 'none'}. Check the network flags against the "
            "checkpoint's, or give --use-checkpoint-args"
        )


def _read_into(target: Tensor, name: str, parameter: nn.Parameter, reader: Reader) -> None:
    spec = spec_of(parameter)
    value = reader.read(
        name,
        global_shape=spec.global_shape,
        offset=spec.offset,
        shape=tuple(target.shape),
    )
    with torch.no_grad():
        target.copy_(value)


def restore_run(run: Run, reader: Reader) -> None:
    """Weights, optimizer and position from the checkpoint, as the flags ask."""
    options = run.config.checkpoint
    load_weights(run.model, reader)
    if options.finetune or options.no_load_optim:
        run.optimizer.reload_masters()
    else:
        _load_optimizer(run, reader)
    if options.finetune:
        return
    meta = reader.meta
    _check_tokenizer(run, meta)
    run.progress.iteration = meta["iteration"]
    run.progress.consumed_samples = meta["consumed_train_samples"]
    run.progress.scheduled_samples = meta.get("scheduled_samples", meta["consumed_train_samples"])
    _report_changes(run, meta)


def _load_optimizer(run: Run, reader: Reader) -> None:
    tensors = run.optimizer.named_tensors()
    found = set(reader.names())
    missing = [name for name in tensors if f"optimizer.{name}" not in found]
    if missing or not reader.meta.get("optimizer"):
        raise CheckpointError(
            f"--load {run.config.checkpoint.load}: the checkpoint has no optimizer state for "
            f"{', '.join(missing[:4]) or 'this run'}: start with a fresh optimizer by "
            "--no-load-optim, or --finetune to start again at iteration 0"
        )
    for name, (tensor, parameter) in tensors.items():
        _read_into(tensor, f"optimizer.{name}", parameter, reader)
    run.optimizer.load_scalars(reader.meta["optimizer"])


def _check_tokenizer(run: Run, meta: dict[str, Any]) -> None:
    saved = meta.get("tokenizer")
    if saved and saved != run.tokenizer.fingerprint():
        raise CheckpointError(
            f"--load {run.config.checkpoint.load}: the checkpoint was trained with another "
            f"tokenizer (fingerprint {saved}, here {run.tokenizer.fingerprint()}): give its "
            "vocabulary files, or --finetune to go on with the new one"
        )


def _report_changes(run: Run, meta: dict[str, Any]) -> None:
    """One line for every setting that is not what the checkpoint was trained with."""
    if run.layout.world.rank or "data" not in meta["config"]:
        return
    now, then = flatten(run.config), flatten_dict(meta["config"])
    for name in sorted(now):
        section = name.split(".")[0]
        if section in ("checkpoint", "logging", "profiling"):
            continue
        if name in then and then[name] != now[name]:
            say(f"  changed since the checkpoint: {name} {then[name]} -> {now[name]}")


def flatten_dict(config: dict[str, Any]) -> dict[str, Any]:
    """`section.field` names of a nested configuration, lists as tuples."""
    return {
        f"{section}.{name}": tuple(value) if isinstance(value, list) else value
        for section, fields in config.items()
        for name, value in fields.items()
    }


class Checkpoints(Callback):
    """Saves every `--save-interval` iterations, when leaving and at the end; before evaluation."""

    def after_step(self, run: Run, outcome: StepOutcome, leave: Leave | None) -> None:
        interval = run.config.checkpoint.save_interval
        due = interval is not None and run.progress.iteration % interval == 0
        if due or leave is not None or run.finished:
            with run.timers.measure("save-checkpoint"):
                save_run(run)
