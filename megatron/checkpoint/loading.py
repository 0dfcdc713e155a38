"""Open a checkpoint in the native format or in that of another program."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.checkpoint import find
from megatron.checkpoint.exchange import JsonExchange
from megatron.checkpoint.huggingface.files import is_model_folder
from megatron.checkpoint.manifest import MANIFEST
from megatron.checkpoint.reader import NativeReader, Reader
from megatron.checkpoint.trust import check_folder
from megatron.durable import TEMPORARY, UNVERIFIED
from megatron.errors import CheckpointError, warn
from megatron.parallel.layout import Axis, Layout

if TYPE_CHECKING:
    from megatron.checkpoint.huggingface.reader import HFReader


def open_checkpoint(
    root: Path | str,
    *,
    step: int | None = None,
    verify: bool = True,
    layout: Layout | None = None,
    allow_foreign: bool = False,
) -> Reader | None:
    """Open the first intact checkpoint of `find.list_checkpoints`, or return None if there is none.

    If `root` is a checkpoint's own folder (`iter_0000100`), or `step` is given, only that
    checkpoint is tried. With a layout, this is collective: the ranks share the verification and
    open the same checkpoint. The folder must be on a file system that all of them can see. A
    warning names the checkpoints that are skipped because they cannot be used.

    Args:
        root: Folder of checkpoints, or one of them.
        step: The iteration to open. None opens the one that the tracker names, or the next one that
            can be used.
        verify: Verify every digest, not only the manifest and the files' sizes.
        layout: The layout of the ranks that open it together. None opens it only on this rank.
        allow_foreign: Accept files owned by other users (--allow-foreign-checkpoints).

    Raises:
        CheckpointError: No checkpoint can be used (the message says what is wrong with each), there
            are only traces of checkpoints, or there is none for the requested iteration.
    """
    exchange = JsonExchange((layout or Layout.single()).world)
    root = Path(root).absolute()

    def candidates() -> list[find.CheckpointFolder]:
        if step is not None:
            return [find.checkpoint_of(root, step)]
        # A link may point outside a folder of checkpoints only if the user named the link itself.
        itself = find.checkpoint_at(root.resolve() if os.path.islink(root) else root)
        return find.list_checkpoints(root) if itself is None else [itself]

    problems: list[str] = []
    for kind, iteration, path in exchange.on_main(
        lambda: [
            [checkpoint.format, checkpoint.iteration, str(checkpoint.path)]
            for checkpoint in candidates()
        ]
    ):
        folder = find.CheckpointFolder(kind, iteration, Path(path))
        reader, problem = None, None
        try:
            reader = open_folder(
                folder, verify=verify, world=exchange.world, allow_foreign=allow_foreign
            )
        except CheckpointError as error:
            problem = str(error)
        failures = [text for text in exchange.gather(problem) if text is not None]
        if reader is not None and not failures:
            if problems and exchange.is_main:
                warn("\n  ".join([*problems, f"using {folder.path.name} instead"]))
            return reader
        problems.append(f"{folder.path} is not used: {failures[0]}")
    if not problems:
        return None
    if step is not None:  # the other checkpoints have not been examined
        remedy = "restore it from a copy, give another iteration, or drop the flag for the newest"
        raise CheckpointError(f"--ckpt-step {step}: {problems[0]}\n{remedy}")
    raise CheckpointError(
        f"{root}: none of its checkpoints can be used:\n  "
        + "\n  ".join(problems)
        + "\nrestore one from a copy, or start from scratch in a new folder"
    )


def open_folder(
    folder: find.CheckpointFolder,
    *,
    verify: bool = True,
    world: Axis | None = None,
    allow_foreign: bool = False,
) -> Reader:
    """Open one checkpoint, without falling back to another, and verify this rank's share of it.

    Args:
        folder: The checkpoint.
        verify: Verify digests.
        world: The ranks that open it together. None opens it only on this rank.
        allow_foreign: Accept files owned by other users.

    Raises:
        CheckpointError: The checkpoint is damaged or refused, or its content is not supported.
    """
    # Import readers only when they are needed: a run from scratch then starts up to 90 ms sooner.
    # Most of that time is pydantic's import.
    from megatron.checkpoint.meta import check_meta

    kinds = {"legacy": "Megatron-LM", "core": "Megatron Core", "deepspeed": "DeepSpeed"}
    with _damaged(f"not a {kinds.get(folder.format, folder.format)} checkpoint"):
        reader = _open(folder, verify, world or Layout.single().world, allow_foreign)
        check_meta(reader)
        return reader


def open_hf(root: Path, *, allow_foreign: bool = False) -> HFReader:
    """Open a Hugging Face folder.

    Args:
        root: The folder.
        allow_foreign: Accept files owned by other users.

    Raises:
        CheckpointError: The folder is damaged or refused, or its model is not supported.
    """
    from megatron.checkpoint.huggingface.reader import HFReader

    with _damaged(f"{root}: not a Hugging Face model"):
        return HFReader(root, allow_foreign=allow_foreign)


@contextmanager
def _damaged(kind: str) -> Iterator[None]:
    """Turn any exception except `MemoryError` into a `CheckpointError`.

    Damaged files can cause any exception.
    """
    try:
        yield
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{kind}: {what:.500}") from error


def _open(folder: find.CheckpointFolder, verify: bool, world: Axis, allow_foreign: bool) -> Reader:
    check_folder(folder.path, allow_foreign=allow_foreign)
    if folder.format == "legacy":
        from megatron.checkpoint.legacy.reader import LegacyReader

        return LegacyReader(folder.path, world, verify=verify, allow_foreign=allow_foreign)
    if folder.format == "core":
        from megatron.checkpoint.core.reader import COMMON, CoreReader

        core = CoreReader(folder.path, world, verify=verify, allow_foreign=allow_foreign)
        _check_iteration(folder, core, COMMON)
        return core
    if folder.format == "deepspeed":
        from megatron.checkpoint.deepspeed.reader import DeepSpeedReader

        saved = DeepSpeedReader(folder.path, world, verify=verify, allow_foreign=allow_foreign)
        _check_iteration(folder, saved, "mp_rank_00_model_states.pt")
        return saved
    reader = NativeReader(folder.path, allow_foreign=allow_foreign)
    _check_iteration(folder, reader, MANIFEST)
    if verify:
        reader.verify(world.rank, world.size)
    return reader


def _check_iteration(folder: find.CheckpointFolder, reader: Reader, file: str) -> None:
    """Check that the iteration in a file matches the folder's name, if the name contains one."""
    if reader.iteration != folder.iteration and folder.path.name.startswith(
        ("iter_", find.DEEPSPEED)
    ):
        raise CheckpointError(f"{file} is for iteration {reader.iteration}")


def open_root(
    root: Path,
    *,
    step: int | None = None,
    verify: bool = True,
    layout: Layout | None = None,
    allow_foreign: bool = False,
) -> Reader | None:
    """Open the checkpoint that --load names, or return None if there is none.

    Args:
        root: A Hugging Face folder, one checkpoint, or a folder of checkpoints.
        step: The iteration to open (--ckpt-step). None opens the one that the tracker names, or the
            next one that can be used.
        verify: Verify digests. Hugging Face files have none.
        layout: The layout of the ranks that open it together (collective). None opens it only on
            this rank.
        allow_foreign: Accept files owned by other users (--allow-foreign-checkpoints).

    Raises:
        CheckpointError: None of the checkpoints can be used, none is for the requested iteration,
            or `step` is given for a Hugging Face folder.
    """
    if not is_model_folder(root):
        return open_checkpoint(
            root, step=step, verify=verify, layout=layout, allow_foreign=allow_foreign
        )
    if step is not None:
        why = "is a Hugging Face folder, which has no iterations: drop --ckpt-step"
        raise CheckpointError(f"--ckpt-step {step}: {root} {why}")
    opened: list[Reader] = []
    exchange = JsonExchange((layout or Layout.single()).world)
    exchange.on_all_ranks(lambda: opened.append(open_hf(root, allow_foreign=allow_foreign)))
    return opened[0]


def open_any(path: Path, *, verify: bool = True, allow_foreign: bool = False) -> Reader:
    """Open the checkpoint at a path.

    Args:
        path: A folder of checkpoints (the one that the tracker names is opened, or the next one
            that can be used), a single checkpoint (`iter_0000100`), or a Hugging Face folder.
        verify: Verify digests. Hugging Face files have none.
        allow_foreign: Accept files owned by other users (--allow-foreign-checkpoints).

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged, or its format is not supported.
    """
    reader = None
    if not os.path.isfile(path):
        reader = open_root(path, verify=verify, allow_foreign=allow_foreign)
    if reader is None:
        raise CheckpointError(f"{path}: {why_no_checkpoint(path)}")
    return reader


def why_no_checkpoint(path: Path) -> str:
    """Return why there is no checkpoint at a path, and which folder in it has one, if any.

    If several folders have one, only the first of them is named.
    """
    if not path.exists():
        return "there is no such folder"
    if path.is_file():
        return "it is a file: give the folder of checkpoints"
    below = checkpoints_below(path)
    more = f", but its folder {below[0]} has one: give {path / below[0]}" if below else ""
    return f"there is no checkpoint in this folder{more}"


def checkpoints_below(root: Path) -> list[str]:
    """Return the names of the folders in `root` that look as if --load would accept them, sorted.

    Raises:
        CheckpointError: One of the folders contains checkpoints in two formats.
    """
    if not root.is_dir():
        return []

    def is_accepted(folder: Path) -> bool:
        is_root = find.read_tracker(folder)[0] is not None or is_model_folder(folder)
        return is_root or find.checkpoint_at(folder) is not None

    folders = (folder for folder in root.iterdir() if folder.is_dir())
    named = (
        folder
        for folder in folders
        if TEMPORARY not in folder.name and UNVERIFIED not in folder.name
    )
    return sorted(folder.name for folder in named if is_accepted(folder))
