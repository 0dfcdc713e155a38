"""Save in Megatron-LM's format: whole and durable, or not at all, as `store.save` does.

Two ways lead here. A conversion has a checkpoint to read from. A training run has its state
spread over its ranks in whatever layout: it is written as a native checkpoint inside the temporary
folder first, from which every rank then makes its share of the files. That doubles what is
written, but asks nothing of the layout and holds one tensor at a time in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from megatron.checkpoint import store
from megatron.checkpoint.entries import Json
from megatron.checkpoint.exchange import Exchange
from megatron.checkpoint.find import COMPLETE, RELEASE, iteration_folder, read_tracker
from megatron.checkpoint.legacy.mark import mark_of
from megatron.checkpoint.legacy.writer import LegacyWriter
from megatron.checkpoint.lock import SaveLock
from megatron.checkpoint.plan import Plan
from megatron.checkpoint.reader import NativeReader, Reader
from megatron.checkpoint.retention import Keep
from megatron.checkpoint.vocabulary import PaddedReader
from megatron.config.run import RunConfig
from megatron.durable import Check, remove_tree, storage_errors, write_file
from megatron.parallel.layout import Layout

_STAGING = "native"


def write_legacy(
    root: Path | str,
    iteration: int,
    plan: Plan,
    mine: Mapping[str, Tensor],
    meta: Json,
    layout: Layout,
    *,
    config: RunConfig,
    vocabulary: int,
    keep: Keep | None = None,
) -> Path:
    """Save a run's state. Collective over all ranks of `layout`; returns the checkpoint's folder.

    Args:
        root: folder of checkpoints; made where missing.
        iteration: training steps taken.
        plan: who holds what; see `store.agree`.
        mine: this rank's share of the plan.
        meta: JSON value; rank 0's is saved.
        layout: who takes part.
        config: of the run.
        vocabulary: entries of the tokenizer, which Megatron pads by a rule of its own.
        keep: delete older ones afterwards, but for these; None: none.

    Raises:
        StorageError: on every rank, when any rank cannot write. Nothing is published, the tracker
            stays, and temporary files are removed.
        CheckpointError: Megatron's model has no place for a parameter.
    """
    exchange, folder = Exchange(layout.world), iteration_folder(iteration)

    def write(temporary: Path) -> None:
        staging = temporary / _STAGING
        store.write_checkpoint(staging, iteration, plan, mine, meta, layout)
        exchange.together(lambda: write_share(temporary, NativeReader(staging / folder)))
        exchange.on_main(lambda: remove_tree(staging))

    def write_share(temporary: Path, reader: Reader) -> None:
        rows = megatron_rows(vocabulary, config)
        padded = PaddedReader(reader, rows=rows, entries=vocabulary)
        writer = LegacyWriter(padded, config, data_parallel=layout.replica.size)
        writer.write(temporary, layout.world.rank, layout.world.size)

    need = plan.total_bytes  # twice: the staged checkpoint asks for its own room
    before = read_tracker(Path(root))[0] if exchange.is_main else None
    path = _save(Path(root).absolute(), folder, need, exchange, write)
    if keep is not None and exchange.is_main:
        store.drop_older(path.parent, iteration, keep, before)
    return path


def convert_to_legacy(
    reader: Reader,
    root: Path | str,
    config: RunConfig,
    *,
    keep_optimizer: bool,
    check: Check | None = None,
) -> Path:
    """Save an opened checkpoint; returns the new one's folder.

    A model that was not trained yet, as Hugging Face's, becomes a `release`, from which Megatron
    starts at iteration 0.

    Args:
        reader: the checkpoint; its vocabulary tables have the rows to write.
        root: folder of checkpoints; made where missing.
        config: see `LegacyWriter`.
        keep_optimizer: write its optimizer states too.
        check: see `store.write_checkpoint`.

    Raises:
        StorageError: it cannot be written. Nothing is left behind.
        CheckpointError: Megatron's model has no place for a parameter, another job writes there,
            or the source turns out damaged.
    """
    root = Path(root).absolute()
    writer = LegacyWriter(reader, config, keep_optimizer=keep_optimizer)
    folder = iteration_folder(reader.iteration) if reader.iteration else RELEASE
    exchange = Exchange(Layout.single().world)
    with SaveLock(root):
        return _save(root, folder, writer.total_bytes, exchange, writer.write, check)


def megatron_rows(vocabulary: int, config: RunConfig) -> int:
    """Rows of the word embedding by Megatron's rule: a multiple of --make-vocab-size-divisible-by
    times the tensor-parallel size."""
    multiple = config.model.make_vocab_size_divisible_by
    multiple *= config.parallel.tensor_model_parallel_size
    return -(-vocabulary // multiple) * multiple


def _save(
    root: Path,
    folder: str,
    need: int,
    exchange: Exchange,
    write: Callable[[Path], None],
    check: Check | None = None,
) -> Path:
    """The protocol: temporary folder, files, mark, check, rename, tracker. Collective."""
    temporary = Path(
        exchange.on_main(lambda: store.prepare(root, folder, need, replaces_legacy=True))
    )
    try:
        write(temporary)
        exchange.on_main(lambda: _publish(root, temporary, folder, check))
    except BaseException:
        if exchange.is_main:
            remove_tree(temporary)
        raise
    return root / folder


def _publish(root: Path, temporary: Path, folder: str, check: Check | None) -> None:
    with storage_errors(temporary):
        write_file(temporary / COMPLETE, mark_of(temporary))
    store.publish(root, temporary, folder, check)
