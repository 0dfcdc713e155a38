"""One checkpoint as another, whatever formats both have; a few tensors at a time."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from megatron.checkpoint.deferred import DeferredTensor
from megatron.checkpoint.entries import Box, Entry, Json, State
from megatron.checkpoint.lock import SaveLock
from megatron.checkpoint.reader import Reader
from megatron.checkpoint.store import save
from megatron.config.run import RunConfig
from megatron.config.yaml_file import to_dict
from megatron.durable import Check
from megatron.parallel.layout import Layout

WEIGHTS, STATES, HISTORIES = "model.", "optimizer.", "fp8."  # the last of delayed scaling


def state_of(reader: Reader, *, keep_optimizer: bool = False) -> State:
    """The model's parameters, perhaps with the training's states; each read when it is written."""
    rooms = (WEIGHTS, STATES, HISTORIES) if keep_optimizer else (WEIGHTS,)
    names = [name for name in reader.names() if name.startswith(rooms)]
    return {name: Entry.whole(_deferred(reader, name)) for name in names}


def _deferred(reader: Reader, name: str) -> DeferredTensor:
    shape = reader.global_shape(name)
    read = partial(reader.read, name, Box.whole(shape), global_shape=shape)
    return DeferredTensor(shape, reader.dtype(name), read)


def save_native(
    reader: Reader,
    root: Path,
    config: RunConfig,
    extra: Json | None = None,
    *,
    keep_optimizer: bool = False,
    check: Check | None = None,
) -> Path:
    """Write a native checkpoint at the reader's iteration.

    From weights alone training goes on by `--finetune`, or with a fresh optimizer by
    `--no-load-optim`.

    Args:
        reader: an opened checkpoint; its vocabulary tables decide the padded vocabulary.
        root: folder of checkpoints.
        config: of the run that the checkpoint is to stand for.
        extra: further keys for the checkpoint's meta data.
        keep_optimizer: its states, and where its schedule stands, too.
        check: see `store.write_checkpoint`.

    Raises:
        StorageError: it cannot be written.
        CheckpointError: another job writes there, or the source turns out damaged.
    """
    kept = reader.meta if keep_optimizer else {}
    meta = {
        "iteration": reader.iteration,
        "consumed_train_samples": reader.meta.get("consumed_train_samples", 0),
        "skipped_train_samples": reader.meta.get("skipped_train_samples", 0),
        "padded_vocab_size": reader.global_shape(f"{WEIGHTS}embedding.word.weight")[0],
        "optimizer": kept.get("optimizer"),
        "schedule": kept.get("schedule"),
        "rng": kept.get("rng"),
        "corpus": kept.get("corpus"),
        "tokenizer": None,
        "config": to_dict(config),
        **(extra or {}),
    }
    state = state_of(reader, keep_optimizer=keep_optimizer)
    with SaveLock(root):
        return save(root, reader.iteration, state, meta, Layout.single(), check=check)
