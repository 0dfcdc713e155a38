"""Write a checkpoint: whole and durable, or not at all.

The order is what makes it safe. All files go into a temporary folder and are flushed; every rank
learns every rank's result; the manifest is written last; one rename publishes the folder; only
then does the tracker name it. A process killed at any point leaves the previous checkpoint as it
was and the tracker on it.

One job at a time may save into a folder (`lock.SaveLock`): a save removes what dead ones left.


One checkpoint as another, whatever formats both have; a few tensors at a time.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch

from megatron.checkpoint.entries import Box, Entry, Json, LazyTensor, State
from megatron.checkpoint.exchange import JsonExchange
from megatron.checkpoint.find import (
    RELEASE,
    REPLACED,
    TRACKER,
    iteration_folder,
    read_tracker,
    tracker_text,
    warn,
)
from megatron.checkpoint.lock import SaveLock
from megatron.checkpoint.manifest import (
    MANIFEST,
    FileInfo,
    Manifest,
    TensorInfo,
    TensorPiece,
    dump,
)
from megatron.checkpoint.plan import (
    Part,
    SavePlan,
    describe,
    files_of,
    keys_of,
    make_plan,
    share_of,
)
from megatron.checkpoint.reader import Reader
from megatron.checkpoint.retention import Keep, prune
from megatron.checkpoint.shard import THREADS, digest_of, plan_shard, write_shard
from megatron.config.run import ModelRun
from megatron.config.yaml_file import to_dict
from megatron.durable import (
    TEMPORARY,
    Check,
    check_unpublished,
    remove_tree,
    replace_file,
    storage_errors,
    sync_folder,
    unique_suffix,
    write_file,
)
from megatron.errors import CheckpointError, StorageError
from megatron.parallel.layout import AXES, Layout

_SPARE = 64 << 20  # bytes left free beside the checkpoint: manifest, tracker, logs


def save(
    root: Path | str,
    iteration: int,
    entries: State,
    meta: Json,
    layout: Layout,
    *,
    check: Check | None = None,
) -> Path:
    """Save a state. Collective over all ranks of `layout`; returns the checkpoint's folder.

    Ranks may hold the same part of a tensor (data-parallel copies): one of them writes it. A
    complete checkpoint of the same iteration is replaced: set aside, and deleted once the new one
    is published.

    Args:
        root: folder of checkpoints; made where missing.
        iteration: training steps taken.
        entries: this rank's tensors.
        meta: JSON value; rank 0's is saved.
        layout: who takes part.
        check: see `write_checkpoint`.

    Raises:
        StorageError: on every rank, when any rank cannot write. Nothing is published, the tracker
            stays, and temporary files are removed.
        ValueError: the ranks' entries do not make up whole tensors (our own mistake).
    """
    plan = agree(entries, layout)
    mine = share_of(plan, entries, layout.world.rank)
    return write_checkpoint(root, iteration, plan, mine, meta, layout, check=check)


def agree(entries: State, layout: Layout) -> SavePlan:
    """Who writes what of the ranks' entries. Collective.

    Raises:
        ValueError: they do not make up whole tensors.
    """
    return make_plan(JsonExchange(layout.world).gather(describe(entries)))


def write_checkpoint(
    root: Path | str,
    iteration: int,
    plan: SavePlan,
    mine: Mapping[str, torch.Tensor],
    meta: Json,
    layout: Layout,
    *,
    keep: Keep | None = None,
    check: Check | None = None,
) -> Path:
    """`save` from where it is settled who writes what.

    Args:
        mine: this rank's share of the plan; nobody changes it meanwhile.
        keep: delete older ones afterwards, but for these; None: none.
        check: rank 0's look at the checkpoint before it gets its name, see
            `durable.check_unpublished`.
    """
    exchange = JsonExchange(layout.world)
    root, folder = Path(root).absolute(), iteration_folder(iteration)
    before = read_tracker(root)[0] if exchange.is_main else None
    temporary = Path(exchange.on_main(lambda: prepare(root, folder, plan.total_bytes)))
    try:
        files = files_of(plan, layout.world.rank)
        reports = exchange.together(lambda: _write(temporary, files, mine))
        exchange.on_main(
            lambda: _publish(
                root, temporary, _manifest(iteration, layout, plan, reports, meta), check
            )
        )
    except BaseException:
        if exchange.is_main:
            remove_tree(temporary)
        raise
    if keep is not None and exchange.is_main:
        drop_older(root, iteration, keep, before)
    return root / folder


def drop_older(root: Path, newest: int, keep: Keep, before: str | None) -> None:
    """`prune`, of which a failure costs no more than space."""
    try:
        prune(root, newest, keep, before)
    except OSError as error:  # what was saved is saved
        warn(f"{error.filename or root}: an old checkpoint stays: {error.strerror}")
    except CheckpointError as error:  # of one process: the others are training on
        warn(f"{error}: old checkpoints stay")


def prepare(root: Path, folder: str, need: int, *, replaces_legacy: bool = False) -> str:
    """Tidy up, see that there is room for `need` bytes, and make the temporary folder.

    Args:
        root: folder of checkpoints; made where missing.
        folder: the checkpoint's name, `iter_0000100` or `release`.
        need: bytes.
        replaces_legacy: an older checkpoint of this name may be Megatron's.

    Raises:
        StorageError: there is no room, or the folder cannot be written.
        CheckpointError: a checkpoint of this name stands there that must not be replaced.
    """
    final = root / folder
    with storage_errors(root):
        if not root.is_dir():
            root.mkdir(parents=True)
            sync_folder(root.parent)
        reap(root)
        is_ours = replaces_legacy or (final / MANIFEST).exists()
        if final.exists() and not is_ours and any(final.iterdir()):
            raise CheckpointError(
                f"{final} holds a checkpoint that this program did not write and will not "
                "replace: give another folder to --save"
            )
        disk = os.statvfs(root)
        free = disk.f_bavail * disk.f_frsize
        if free < need + _SPARE:
            raise StorageError(
                f"{root}: the checkpoint needs {need:,} bytes, with {_SPARE:,} to spare, and "
                f"{free:,} are free: make room, or give another folder to --save"
            )
        temporary = final.with_name(final.name + unique_suffix(TEMPORARY))
        temporary.mkdir()
    return str(temporary)


def reap(root: Path) -> None:
    """Remove what dead runs left behind: temporaries, and replaced checkpoints.

    A replaced checkpoint whose successor never arrived gets its name back.
    """
    for path in list(root.iterdir()):
        if not path.name.startswith(("iter_", RELEASE, TRACKER)):
            continue
        if TEMPORARY in path.name:
            remove_tree(path) if path.is_dir() else path.unlink(missing_ok=True)
        elif REPLACED in path.name:
            final = path.with_name(path.name.split(REPLACED)[0])
            if final.exists():
                remove_tree(path)
            else:
                path.rename(final)


def _write(
    folder: Path, files: Mapping[str, list[str]], tensors: Mapping[str, torch.Tensor]
) -> Json:
    """Write this rank's files, all at a time, and tell what they hold."""
    if not files:
        return {"files": {}, "tensors": {}}
    threads = max(1, THREADS // len(files))

    def write(name: str) -> tuple[Json, Json]:
        share = {key: tensors[key] for key in files[name]}
        header, places = plan_shard(share)
        with storage_errors(folder / name):
            digests = write_shard(folder / name, share, header, places, threads)
        size = len(header) + sum(place.size for place in places.values())
        return [size, len(header), digest_of(header)], {
            key: [place.start, place.size, digests[key]] for key, place in places.items()
        }

    with ThreadPoolExecutor(len(files)) as pool:
        written = dict(zip(files, pool.map(write, files), strict=True))
    with storage_errors(folder):
        sync_folder(folder)
    return {
        "files": {name: info for name, (info, _) in written.items()},
        "tensors": {key: place for _, held in written.values() for key, place in held.items()},
    }


def _manifest(
    iteration: int, layout: Layout, plan: SavePlan, reports: list[Json], meta: Json
) -> Manifest:
    files = {name: FileInfo(*info) for report in reports for name, info in report["files"].items()}

    def piece(key: str, part: Part) -> TensorPiece:
        start, size, digest = reports[part.rank]["tensors"][key]
        return TensorPiece(part.file, part.box, start, size, digest)

    tensors = {
        name: TensorInfo(
            plan.dtypes[name],
            plan.shapes[name],
            tuple(map(piece, keys_of(name, parts), parts)),
        )
        for name, parts in plan.parts.items()
    }
    sizes = {"world": layout.world.size} | {axis: getattr(layout, axis).size for axis in AXES}
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return Manifest(iteration, created, sizes, files, tensors, meta)


def _publish(root: Path, temporary: Path, manifest: Manifest, check: Check | None) -> None:
    """Manifest, check, rename, tracker: each durable before the next."""
    with storage_errors(root):
        write_file(temporary / MANIFEST, dump(manifest))
    publish(root, temporary, iteration_folder(manifest.iteration), check)


def publish(root: Path, temporary: Path, folder: str, check: Check | None = None) -> None:
    """Give a complete folder its name, then let the tracker name it: each durable before the next.

    Raises:
        StorageError: it cannot be; what stood there before is back in its place.
    """
    final = root / folder
    check_unpublished(check, temporary, final)
    with storage_errors(root):
        sync_folder(temporary)
        replaced = _set_aside(final)
        try:
            os.rename(temporary, final)
        except OSError:
            if replaced is not None:
                with suppress(OSError):
                    os.rename(replaced, final)
            raise
        sync_folder(root)
        replace_file(root / TRACKER, tracker_text(folder))
        if replaced is not None:
            remove_tree(replaced)


def _set_aside(final: Path) -> Path | None:
    """Move an older checkpoint of this iteration out of the way; None where there is none."""
    if not final.exists():
        return None
    replaced = final.with_name(final.name + unique_suffix(REPLACED))
    os.rename(final, replaced)
    return replaced


WEIGHTS, STATES, HISTORIES = "model.", "optimizer.", "fp8."  # the last of delayed scaling


def state_of(reader: Reader, *, keep_optimizer: bool = False) -> State:
    """The model's parameters, perhaps with the training's states; each read when it is written."""
    rooms = (WEIGHTS, STATES, HISTORIES) if keep_optimizer else (WEIGHTS,)
    names = [name for name in reader.names() if name.startswith(rooms)]
    return {name: Entry.whole(_deferred(reader, name)) for name in names}


def _deferred(reader: Reader, name: str) -> LazyTensor:
    shape = reader.global_shape(name)
    read = partial(reader.read, name, Box.whole(shape), global_shape=shape)
    return LazyTensor(shape, reader.dtype(name), read)


def save_native(
    reader: Reader,
    root: Path,
    config: ModelRun,
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
