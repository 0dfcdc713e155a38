"""Write a checkpoint completely and durably, or not at all.

The order of the steps makes a save safe. All files are written to a temporary folder and flushed;
all ranks exchange their results; the manifest is written last; one rename publishes the folder; the
tracker is updated only then. If a process is killed at any point, the previous checkpoint is
unchanged and the tracker still names it.

Only one job at a time may save into a folder (`lock.save_lock`), because a save removes the files
that interrupted saves left behind.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from torch import Tensor

from megatron import durable
from megatron.checkpoint import find
from megatron.checkpoint.entries import WORD_EMBEDDING, Entry, Json, LazyTensor, State
from megatron.checkpoint.exchange import JsonExchange
from megatron.checkpoint.lock import save_lock
from megatron.checkpoint.manifest import MANIFEST, FileInfo, Manifest, TensorInfo, TensorPiece, dump
from megatron.checkpoint.plan import SavePlan, describe, files_of, make_plan, share_of
from megatron.checkpoint.reader import Reader
from megatron.checkpoint.retention import RetentionPolicy, prune
from megatron.checkpoint.shard import THREADS, digest_of, plan_shard, write_shard
from megatron.config.checkpoint import AVERAGES, SNAPSHOTS
from megatron.config.run import ModelRun
from megatron.config.yaml_file import to_dict
from megatron.durable import Check
from megatron.errors import CheckpointError, StorageError, warn
from megatron.parallel.layout import AXES, Layout

WEIGHTS, STATES, HISTORIES = "model.", "optimizer.", "fp8."  # histories of delayed fp8 scaling

# Describes folders that a native checkpoint does not replace, for messages.
FOREIGN = "a checkpoint that this program did not write and will not replace"

_RESERVE = 64 << 20  # bytes to leave free in addition to the checkpoint: manifest, tracker, logs


@dataclass(frozen=True)
class Snapshot:
    """This rank's share of a checkpoint that is about to be written.

    Attributes:
        iteration: Training steps taken.
        plan: Which rank writes which parts.
        tensors: The tensors that this rank writes, by key in its files. They must not change until
            they are written.
        meta: A JSON value; rank 0's is saved.
        layout: The layout of the ranks that take part.
    """

    iteration: int
    plan: SavePlan
    tensors: Mapping[str, Tensor]
    meta: Json
    layout: Layout

    @classmethod
    def take(cls, iteration: int, entries: State, meta: Json, layout: Layout) -> Snapshot:
        """Plan a checkpoint of the ranks' entries. Collective over all ranks of `layout`.

        Args:
            iteration: Training steps taken.
            entries: This rank's entries.
            meta: A JSON value; rank 0's is saved.
            layout: The layout of the ranks that take part.

        Raises:
            ValueError: The ranks' entries do not tile the tensors, or disagree on a dtype or shape;
                or safetensors has no such dtype.
        """
        plan = plan_save(entries, layout)
        return cls(iteration, plan, share_of(plan, entries, layout.world.rank), meta, layout)


def plan_save(entries: State, layout: Layout) -> SavePlan:
    """Plan which rank writes which entries. Collective over all ranks of `layout`.

    Args:
        entries: This rank's entries.
        layout: The layout of the ranks that take part.

    Raises:
        ValueError: The ranks' entries do not tile the tensors, or disagree on a dtype or shape; or
            safetensors has no such dtype.
    """
    return make_plan(JsonExchange(layout.world).gather(describe(entries)))


def write_checkpoint(
    root: Path | str,
    snapshot: Snapshot,
    *,
    keep: RetentionPolicy | None = None,
    check: Check = None,
) -> Path:
    """Write and publish a checkpoint, and return its folder. Collective over the layout's ranks.

    If several ranks hold the same part of a tensor (data-parallel replicas), one of them writes it.
    An existing checkpoint of the same iteration is replaced: it is renamed, and deleted once the
    new one is published.

    Args:
        root: Folder of checkpoints, created if it is missing.
        snapshot: This rank's share of the checkpoint.
        keep: Which older checkpoints to keep. None keeps all of them.
        check: A check that rank 0 runs on the checkpoint before publishing it
            (`durable.check_unpublished`).

    Raises:
        StorageError: Raised on every rank if any rank cannot write. Temporary files are removed and
            the tracker is unchanged. Nothing is published, unless only the tracker's update failed.
        CheckpointError: The folder contains this iteration's checkpoint in another format.
        Exception: Any error that `check` raises.
    """
    exchange, reports = JsonExchange(snapshot.layout.world), list[Json]()

    def fill(temporary: Path) -> None:
        reports.extend(exchange.on_all_ranks(lambda: write_files(temporary, snapshot)))

    last_file = (MANIFEST, lambda _: dump(manifest_of(snapshot, reports)))
    folder, size = find.iteration_folder(snapshot.iteration), snapshot.plan.total_bytes
    return write_folder(root, folder, exchange, size, fill, last_file, keep, check)


def write_folder(
    root: Path | str,
    folder: str,
    exchange: JsonExchange,
    size: int,
    fill: Callable[[Path], None],
    last_file: tuple[str, Callable[[Path], bytes]],
    keep: RetentionPolicy | None,
    check: Check,
) -> Path:
    """Write a checkpoint in any format, following the protocol of this module. Collective.

    An old checkpoint that cannot be deleted causes only a warning.

    Args:
        root: Folder of checkpoints, created if it is missing.
        folder: The name of the checkpoint's folder, `iter_0000100` or `release`.
        exchange: The ranks that take part.
        size: Size of the folder in bytes, which must be free.
        fill: Function that writes and flushes files in a temporary folder. All ranks call it.
        last_file: The name of the file that rank 0 writes after all others, and a function that
            returns its content, given the temporary folder.
        keep: Which older checkpoints to keep. None keeps all of them.
        check: A check that rank 0 runs on the folder before publishing it.

    Returns:
        The path of the checkpoint's folder.

    Raises:
        StorageError: A file cannot be written, or there is not enough space. Temporary files are
            removed. Nothing is published, unless only the tracker's update failed.
        CheckpointError: A native checkpoint would replace one in another format.
        Exception: Any error that `check` raises.
    """
    root = Path(root).absolute()
    previous = find.read_tracker(root)[0] if exchange.is_main else None

    def finish() -> None:
        with durable.storage_errors(root), durable.new_file(temporary / last_file[0]) as file:
            file.write(last_file[1](temporary))
        _publish(root, temporary, folder, check)

    owns_manifest = last_file[0] == MANIFEST
    temporary = Path(exchange.on_main(lambda: _prepare(root, folder, size, owns_manifest)))
    try:
        fill(temporary)
        exchange.on_main(finish)
    except BaseException:
        if exchange.is_main:
            durable.remove_tree(temporary)
        raise
    if keep is not None and exchange.is_main:
        try:
            prune(root, find.iteration_of(folder), keep, previous)
        except OSError as error:  # the new checkpoint is safe: this costs only disk space
            warn(f"{error.filename or root}: an old checkpoint was not deleted: {error.strerror}")
        except CheckpointError as error:  # do not fail on rank 0 while others continue
            warn(f"{error}: old checkpoints were not deleted")
    return root / folder


def _prepare(root: Path, folder: str, size: int, owns_manifest: bool) -> str:
    """Remove leftovers, check that `size` bytes are free, and create the temporary folder.

    A native checkpoint replaces only native ones. A checkpoint in another format may replace any
    checkpoint.
    """
    final = root / folder
    with durable.storage_errors(root):
        if not root.is_dir():
            root.mkdir(parents=True)
            durable.sync_folder(root.parent)
        remove_leftovers(root)
        if owns_manifest and _is_foreign(final):
            raise CheckpointError(f"{final} contains {FOREIGN}: give another folder to --save")
        check_space(root, size)
        temporary = durable.unique_sibling(final, durable.TEMPORARY)
        temporary.mkdir(mode=0o775)
    return str(temporary)


def check_space(root: Path, size: int) -> None:
    """Check that there is space for a checkpoint.

    Args:
        root: The folder of the checkpoints.
        size: The size of the checkpoint's tensors in bytes.

    Raises:
        StorageError: There is not enough space, or the folder does not exist.
    """
    with durable.storage_errors(root):
        free = shutil.disk_usage(root).free
    if free < size + _RESERVE:
        what = f"a checkpoint needs {size:,} bytes, and {_RESERVE:,} bytes must stay free"
        remedy = "make room, or give another folder to --save"
        raise StorageError(f"{root}: {what}, but only {free:,} are free: {remedy}")


def foreign_iterations(root: Path) -> list[int]:
    """Return the iterations, in order, that cannot be saved to `root` in the native format.

    Their folders were written by another program, or by a run that saved in another format.

    Raises:
        OSError: The folder cannot be read.
    """
    if not root.is_dir():
        return []
    iterations = ((find.iteration_of(path.name), path) for path in root.iterdir())
    return sorted(
        iteration
        for iteration, path in iterations
        if path.name == find.iteration_folder(iteration) and _is_foreign(path)
    )


def _is_foreign(folder: Path) -> bool:
    """Return whether a folder exists and contains files, but no native checkpoint."""
    return folder.exists() and not (folder / MANIFEST).exists() and any(folder.iterdir())


def remove_leftovers(root: Path) -> None:
    """Remove temporary folders and replaced checkpoints that interrupted saves left behind.

    A replaced checkpoint is renamed back if its replacement was never published.
    """
    for path in list(root.iterdir()):
        if not path.name.startswith(("iter_", find.RELEASE, find.TRACKER)):
            continue
        if durable.TEMPORARY in path.name:
            durable.remove_tree(path) if path.is_dir() else path.unlink(missing_ok=True)
        elif find.REPLACED in path.name:
            final = path.with_name(path.name.split(find.REPLACED)[0])
            if final.exists():
                durable.remove_tree(path)
            else:
                path.rename(final)


def write_files(folder: Path, snapshot: Snapshot) -> Json:
    """Write this rank's files concurrently, and return their sizes and digests.

    Returns:
        `files`: size, header size (both in bytes) and header SHA-256 by file name. `tensors`:
        offset of the first byte, size in bytes and SHA-256 by key.

    Raises:
        StorageError: A file cannot be written.
    """
    files = files_of(snapshot.plan, snapshot.layout.world.rank)
    if not files:
        return {"files": {}, "tensors": {}}
    threads = max(1, THREADS // len(files))

    def write(name: str) -> tuple[Json, Json]:
        share = {key: snapshot.tensors[key] for key in files[name]}
        header, placements = plan_shard(share)
        with durable.storage_errors(folder / name):
            digests = write_shard(folder / name, share, header, placements, threads)
        size = len(header) + sum(placement.size for placement in placements.values())
        return [size, len(header), digest_of(header)], {
            key: [placement.start, placement.size, digests[key]]
            for key, placement in placements.items()
        }

    with ThreadPoolExecutor(len(files)) as pool:
        written = dict(zip(files, pool.map(write, files), strict=True))
    with durable.storage_errors(folder):
        durable.sync_folder(folder)
    return {
        "files": {name: info for name, (info, _) in written.items()},
        "tensors": {
            key: placement
            for _, digests_of_file in written.values()
            for key, placement in digests_of_file.items()
        },
    }


def manifest_of(snapshot: Snapshot, reports: list[Json]) -> Manifest:
    """Return a checkpoint's manifest.

    Args:
        snapshot: A rank's share of the checkpoint. Its metadata is stored.
        reports: The result of `write_files` on each rank, in rank order.
    """
    plan, layout = snapshot.plan, snapshot.layout
    files = {name: FileInfo(*info) for report in reports for name, info in report["files"].items()}
    tensors = {}
    for name in plan.parts:
        pieces = (
            TensorPiece(part.file, *part.box, *reports[part.rank]["tensors"][key])
            for key, part in plan.keyed(name)
        )
        tensors[name] = TensorInfo(plan.dtypes[name], plan.shapes[name], tuple(pieces))
    sizes = {"world": layout.world.size} | {axis: getattr(layout, axis).size for axis in AXES}
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return Manifest(snapshot.iteration, created, sizes, snapshot.meta, files, tensors)


def _publish(root: Path, temporary: Path, folder: str, check: Check) -> None:
    """Rename a complete folder to its final name, then update the tracker, flushing each step.

    If the rename fails, the previous checkpoint of that name is restored.
    """
    final, replaced = root / folder, None
    durable.check_unpublished(check, temporary, final)
    with durable.storage_errors(root):
        durable.sync_folder(temporary)
        if final.exists():
            replaced = durable.unique_sibling(final, find.REPLACED)
            os.rename(final, replaced)
        try:
            os.rename(temporary, final)
        except OSError:
            if replaced is not None:
                with suppress(OSError):
                    os.rename(replaced, final)
            raise
        durable.sync_folder(root)
        durable.replace_file(root / find.TRACKER, find.tracker_text(folder))
        if replaced is not None:
            durable.remove_tree(replaced)


def state_of(reader: Reader, *, keep_optimizer: bool, averages: bool = False) -> State:
    """Return a checkpoint's weights as lazy tensors, each read only when it is written.

    Args:
        reader: The opened checkpoint.
        keep_optimizer: Also return the optimizer states and fp8 histories.
        averages: Also return averages of the weights, and the snapshots from which they are
            computed.
    """
    prefixes: tuple[str, ...] = (WEIGHTS, STATES, HISTORIES) if keep_optimizer else (WEIGHTS,)
    prefixes += (AVERAGES, SNAPSHOTS) if averages else ()
    return {
        name: Entry.whole(
            LazyTensor(*meta, partial(reader.read, name), partial(reader.read_chunks, name))
        )
        for name, meta in sorted(reader.tensors.items())
        if name.startswith(prefixes)
    }


def convert_to_native(
    reader: Reader, root: Path, config: ModelRun, extra: Json, *, keep_optimizer: bool, check: Check
) -> Path:
    """Convert an opened checkpoint to the native format, a few tensors at a time.

    To continue training from a checkpoint that has only weights, use `--finetune`, or
    `--no-load-optim` for a fresh optimizer.

    Args:
        reader: The opened checkpoint. Its vocabulary tables determine the padded vocabulary size.
        root: Folder of checkpoints, created if it is missing.
        config: Configuration to store in the checkpoint.
        extra: Additional keys for the checkpoint's metadata.
        keep_optimizer: Also write the optimizer states, fp8 histories, averages of the weights, the
            position in the schedule, and the seed for dropout.
        check: A check to run on the checkpoint before publishing it.

    Returns:
        The checkpoint's folder.

    Raises:
        StorageError: The checkpoint cannot be written.
        CheckpointError: Another job is saving into the folder, or the source is damaged.
    """
    training = reader.meta if keep_optimizer else {}
    meta = {
        "iteration": reader.iteration,
        "consumed_train_samples": reader.meta.get("consumed_train_samples", 0),
        "skipped_train_samples": reader.meta.get("skipped_train_samples", 0),
        "padded_vocab_size": reader.global_shape(WORD_EMBEDDING)[0],
        **{key: training.get(key) for key in ("optimizer", "average", "schedule", "rng", "corpus")},
        **{key: reader.meta[key] for key in ("consumed_train_tokens",) if key in reader.meta},
        "tokenizer": None,
        "config": to_dict(config),
        **extra,
    }
    state = state_of(reader, keep_optimizer=keep_optimizer, averages=keep_optimizer)
    snapshot = Snapshot.take(reader.iteration, state, meta, Layout.single())
    with save_lock(root):
        return write_checkpoint(root, snapshot, check=check)
