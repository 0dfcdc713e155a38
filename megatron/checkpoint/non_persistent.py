"""Frequent checkpoints on the machines' own disks or in their memory, or in a shared folder.

A machine may be lost together with its folder. Each machine's checkpoint folder therefore contains
the files of its own ranks, with --replication also copies of some other ranks' files, and the
manifest of the whole checkpoint. The files have digests, as in every native checkpoint. When a run
starts, the processes exchange lists of the files that they have. The newest checkpoint whose files
all exist, each on at least one machine, is completed on all machines and then read like any other.

    DIR/iter_0000120/manifest.json            the manifest of the whole checkpoint
    DIR/iter_0000120/rank_00003.safetensors   the file of a rank on this machine, or a copy
"""

from __future__ import annotations

import errno
import os
import platform
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron import durable
from megatron.checkpoint.entries import Json
from megatron.checkpoint.exchange import JsonExchange
from megatron.checkpoint.find import CheckpointFolder, iteration_folder, scan
from megatron.checkpoint.loading import open_folder
from megatron.checkpoint.lock import save_lock
from megatron.checkpoint.manifest import MANIFEST, MAX_BYTES, ManifestError, dump, parse
from megatron.checkpoint.reader import NativeReader
from megatron.checkpoint.retention import RetentionPolicy, prune
from megatron.checkpoint.shard import digest_of
from megatron.checkpoint.store import Snapshot, manifest_of, remove_leftovers, write_files
from megatron.checkpoint.trust import open_trusted
from megatron.errors import CheckpointError, StorageError, warn
from megatron.parallel.collectives import broadcast
from megatron.parallel.layout import Layout

KEEP_LATEST = 2  # a machine may be lost while the newest one is being published
RUN = "run"  # the metadata key that identifies the run
_PIECE = 64 << 20  # bytes sent at a time


class NonPersistentStore:
    """The non-persistent checkpoints of a run. All methods are collective.

    Args:
        root: This process's folder for these checkpoints, created if it is missing.
        run: The run's identity. Checkpoints of other runs are never opened, but a save may delete
            or replace those in `root`, so the run should hold the `lock`.
        layout: The layout of the ranks that take part.
        copies: The number of folders in which each file is stored, including the rank's own. A copy
            is left out if it would go to the rank's own folder.
        jump: The distance in ranks from a rank to the one that stores its copy. `None` uses the
            number of ranks that share a folder, which puts the copy into the next folder.
        is_shared: Whether all ranks use the same folder, on all machines.

    Raises:
        StorageError: The folder of some rank cannot be created.
    """

    def __init__(
        self,
        root: Path | str,
        run: str,
        layout: Layout,
        *,
        copies: int = 1,
        jump: int | None = None,
        is_shared: bool = False,
    ) -> None:
        """Create the folders, and determine which ranks share a folder."""
        self.root, self.run, self._layout = Path(root).absolute(), run, layout
        self._flag = f"--non-persistent-{'global' if is_shared else 'local'}-ckpt-dir"
        self._exchange = JsonExchange(layout.world)

        def folder_id() -> Json:
            with durable.writing_to(self._flag, self.root):
                self.root.mkdir(parents=True, exist_ok=True)
                status = self.root.stat()
            return None if is_shared else [platform.node(), status.st_dev, status.st_ino]

        self._folder_ids = self._exchange.on_all_ranks(folder_id)
        rank = layout.world.rank
        self._sharing = [
            r for r, other in enumerate(self._folder_ids) if other == self._folder_ids[rank]
        ]
        self._is_leader = rank == self._sharing[0]
        self._jumps = [(jump or len(self._sharing)) * copy for copy in range(1, copies)]

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other jobs out of the folders inside the context. Entering it is collective.

        Raises:
            CheckpointError: Raised on every rank if another job uses one of the folders.
            StorageError: A folder cannot be written to.
        """
        with ExitStack() as stack:

            def acquire() -> None:
                if self._is_leader:
                    with durable.writing_to(self._flag, self.root):
                        stack.enter_context(save_lock(self.root, self._flag))

            self._exchange.on_all_ranks(acquire)
            yield

    def save(self, snapshot: Snapshot) -> Path:
        """Write a checkpoint, and return its folder on this machine.

        Of the checkpoints in the folder up to this iteration, only the newest two are kept.

        Raises:
            StorageError: Raised on every rank if any rank cannot write. Nothing is published,
                unless some machines failed only to publish what they had written.
        """
        exchange, name = self._exchange, iteration_folder(snapshot.iteration)
        final = self.root / name
        unique = exchange.on_main(lambda: durable.unique_sibling(final, durable.TEMPORARY).name)
        temporary = self.root / unique

        def write() -> Json:
            with durable.storage_errors(temporary):
                temporary.mkdir(exist_ok=True)
            return write_files(temporary, snapshot)

        def check_copies() -> None:
            failure = next(filter(None, problems), None)
            if failure is not None:
                raise StorageError(f"{failure.filename}: {failure.strerror}") from failure

        def publish() -> None:
            if not self._is_leader:
                return
            with durable.storage_errors(final):
                with durable.new_file(temporary / MANIFEST) as file:
                    file.write(text.encode())
                durable.remove_tree(final)
                os.rename(temporary, final)

        try:
            reports = exchange.on_all_ranks(write)
            problems = [self._copy(temporary, reports, jump) for jump in self._jumps]
            exchange.on_all_ranks(check_copies)
            text = exchange.on_main(lambda: dump(manifest_of(snapshot, reports)).decode())
            exchange.on_all_ranks(publish)
        finally:
            if self._is_leader:
                durable.remove_tree(temporary)
        if self._is_leader:
            with suppress(OSError, CheckpointError):  # a failure only wastes disk space
                prune(self.root, snapshot.iteration, RetentionPolicy(KEEP_LATEST))
        return final

    def _copy(self, folder: Path, reports: list[Json], jump: int) -> OSError | None:
        """Send this rank's files to rank + `jump`, and store the files of rank - `jump`.

        Returns:
            The first error of this rank's disk, or None. The transfers are completed regardless.
        """
        world = self._layout.world
        target, source = (world.rank + jump) % world.size, (world.rank - jump) % world.size
        failure: OSError | None = None

        def pieces(rank: int, peer: int) -> list[tuple[str, int, int]]:
            files = (
                reports[rank]["files"] if self._folder_ids[rank] != self._folder_ids[peer] else {}
            )
            return [
                (name, start, min(_PIECE, info[0] - start))
                for name, info in sorted(files.items())
                for start in range(0, info[0], _PIECE)
            ]

        sent, received = pieces(world.rank, target), pieces(source, world.rank)
        for index in range(max(len(sent), len(received))):
            transfers = []
            if index < len(sent):
                name, start, size = sent[index]
                data = torch.zeros(size, dtype=torch.uint8)
                try:
                    data = _read(folder / name, start, size)
                except OSError as error:
                    failure = failure or error
                work = dist.isend(data, world.ranks[target], group=world.group)
                transfers.append(world.journal.message("send", world.ranks[target], work))
            if index < len(received):
                name, start, size = received[index]
                buffer = torch.empty(size, dtype=torch.uint8)
                work = dist.irecv(buffer, world.ranks[source], group=world.group)
                transfers.append(world.journal.message("receive", world.ranks[source], work))
            for transfer in transfers:
                transfer.wait()
            if index < len(received):
                try:
                    _write(folder / name, start, buffer)
                except OSError as error:
                    failure = failure or error
        return failure

    def open_newest(self, after: int) -> NativeReader | None:
        """Open the run's newest intact checkpoint after iteration `after`, or return None.

        Files that a machine lacks are copied to it, and all files are verified. Checkpoints that
        cannot be used are skipped with a warning.
        """
        machines = [
            {digest: _LocalFiles(*checkpoint) for digest, checkpoint in files.items()}
            for files in self._exchange.gather(self._scan())
        ]
        newest = {digest: checkpoint for files in machines for digest, checkpoint in files.items()}
        for digest, checkpoint in sorted(
            newest.items(), key=lambda item: (-item[1].iteration, item[0])
        ):
            if checkpoint.iteration <= after:
                break
            present = [
                set(files[digest].present) if digest in files else set() for files in machines
            ]
            missing = sorted(checkpoint.sizes.keys() - set().union(*present))
            reader, problem = None, f"{missing[0]} was lost" if missing else None
            if problem is None:
                has_manifest = [digest in files for files in machines]
                reader, own_problem = self._open(
                    checkpoint.iteration, self._complete(checkpoint, present, has_manifest)
                )
                problem = next(filter(None, self._exchange.gather(own_problem)), None)
            if problem is None:
                return reader
            if self._exchange.is_main:
                message = (
                    f"the non-persistent checkpoint of iteration {checkpoint.iteration} is not used"
                )
                warn(f"{message}: {problem}")
        return None

    def delete_after(self, iteration: int) -> None:
        """Delete the run's checkpoints of later iterations, which it is about to repeat.

        Files that interrupted saves left behind are deleted, too.
        """
        if self._is_leader:
            with suppress(OSError):
                remove_leftovers(self.root)
            for checkpoint in self._scan().values():
                if checkpoint.iteration > iteration:
                    durable.remove_tree(self.root / iteration_folder(checkpoint.iteration))
        self._layout.world.barrier()

    def _scan(self) -> dict[str, _LocalFiles]:
        """Return the files of the run's checkpoints that this machine has, by manifest digest."""
        by_digest = {}
        for checkpoint in scan(self.root)[0]:
            try:
                with open_trusted(checkpoint.path / MANIFEST) as file:
                    data = file.read(MAX_BYTES)
                manifest = parse(data)
            except (OSError, CheckpointError, ManifestError):
                continue
            if manifest.meta.get(RUN) == self.run and manifest.iteration == checkpoint.iteration:
                sizes = {name: info.bytes for name, info in manifest.files.items()}
                present = [
                    name for name, size in sizes.items() if _size(checkpoint.path / name) == size
                ]
                by_digest[digest_of(data)] = _LocalFiles(checkpoint.iteration, present, sizes)
        return by_digest

    def _complete(
        self, checkpoint: _LocalFiles, present: list[set[str]], has_manifest: list[bool]
    ) -> str | None:
        """Copy the files of a checkpoint to the machines that lack them. Collective.

        Args:
            checkpoint: The checkpoint, as one of the machines that have its manifest lists it.
            present: The names of the files that each rank's machine has, by rank.
            has_manifest: Whether each rank's machine has the manifest, by rank.

        Returns:
            The last error of this rank's disk, or None.
        """
        folder, rank = self.root / iteration_folder(checkpoint.iteration), self._layout.world.rank
        leaders = sorted({self._folder_ids.index(folder_id) for folder_id in self._folder_ids})
        problem = None
        owner = has_manifest.index(True)
        try:
            text = (folder / MANIFEST).read_text() if rank == owner else None
            if self._is_leader and not has_manifest[rank]:
                durable.remove_tree(folder)  # another run's, or one without a manifest
                folder.mkdir()
        except OSError as error:
            text, problem = "", str(error)
        if not all(has_manifest):
            text = self._exchange.gather(text)[owner]
        for name, size in sorted(checkpoint.sizes.items()):
            if all(name in present[leader] for leader in leaders):
                continue
            owner = next(rank_index for rank_index, names in enumerate(present) if name in names)
            for start in range(0, size, _PIECE):
                data = torch.zeros(min(_PIECE, size - start), dtype=torch.uint8)
                try:
                    if rank == owner:
                        data = _read(folder / name, start, data.numel())
                except OSError as error:
                    problem = str(error)
                broadcast(data, self._layout.world, owner)
                try:
                    if self._is_leader and name not in present[rank]:
                        _write(folder / name, start, data)
                except OSError as error:
                    problem = str(error)
        try:
            if self._is_leader and not has_manifest[rank]:
                durable.replace_file(folder / MANIFEST, (text or "").encode())
        except OSError as error:
            problem = str(error)
        self._layout.world.barrier()
        return problem

    def _open(self, iteration: int, problem: str | None) -> tuple[NativeReader | None, str | None]:
        """Open a checkpoint and verify this rank's share of it, unless `problem` is set.

        Returns:
            The reader and None, or None and the problem.
        """
        path = self.root / iteration_folder(iteration)
        try:
            if problem is None:
                reader = open_folder(CheckpointFolder("native", iteration, path), verify=False)
                assert isinstance(reader, NativeReader)
                reader.verify(self._sharing.index(self._layout.world.rank), len(self._sharing))
                return reader, None
        except CheckpointError as error:
            problem = str(error)
        return None, problem


class _LocalFiles(NamedTuple):
    """The files of a checkpoint that a machine has.

    Attributes:
        iteration: The checkpoint's iteration.
        present: The names of the files that the machine has, with the right sizes.
        sizes: The sizes of all of the checkpoint's files in bytes.
    """

    iteration: int
    present: list[str]
    sizes: dict[str, int]


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return -1


def _read(path: Path, start: int, size: int) -> Tensor:
    data = bytearray(size)
    try:
        with open_trusted(path) as file:
            file.seek(start)
            if file.readinto(data) < size:
                raise OSError(errno.EIO, "shorter than its manifest says", str(path))
    except CheckpointError as error:  # the other ranks still wait for these bytes
        raise OSError(errno.EPERM, str(error), str(path)) from error
    return torch.frombuffer(data, dtype=torch.uint8)


def _write(path: Path, start: int, data: Tensor) -> None:
    """Write bytes into a file at an offset. At offset 0, replace any existing file."""
    if start == 0:
        path.unlink(missing_ok=True)
    with durable.create(path) if start == 0 else path.open("r+b") as file:
        file.seek(start)
        file.write(data.numpy().data)
