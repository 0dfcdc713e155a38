"""Open a checkpoint wherever it lies and whoever wrote it: ours, Megatron-LM's, Hugging Face's."""

from __future__ import annotations

from pathlib import Path

from megatron.checkpoint.exchange import Exchange
from megatron.checkpoint.find import TRACKER, checkpoint_at
from megatron.checkpoint.hf.files import is_model_folder
from megatron.checkpoint.reader import Reader, open_checkpoint
from megatron.durable import TEMPORARY, UNVERIFIED
from megatron.errors import CheckpointError
from megatron.parallel.layout import Layout

_UNPUBLISHED = (TEMPORARY, UNVERIFIED)


def open_root(
    root: Path, *, step: int | None = None, verify: bool = True, layout: Layout | None = None
) -> Reader | None:
    """What --load names: a folder of Hugging Face, one checkpoint, or of a folder the newest, or
    that of the iteration `step` (--ckpt-step).

    Collective over `layout`, where one is given. None where there is nothing.

    Raises:
        CheckpointError: there are checkpoints, but none that can be read; or none of the iteration.
    """
    if not is_model_folder(root):
        return open_checkpoint(root, step=step, verify=verify, layout=layout)
    if step is not None:
        raise CheckpointError(
            f"--ckpt-step {step}: {root} is a folder of Hugging Face, which has no iterations: "
            "drop --ckpt-step"
        )
    from megatron.checkpoint.hf.reader import HFReader

    opened: list[Reader] = []
    exchange = Exchange((layout or Layout.single()).world)
    exchange.together(lambda: opened.append(HFReader(root)))
    return opened[0]


def open_any(path: Path, *, verify: bool = True) -> Reader:
    """The checkpoint that a path leads to.

    Args:
        path: a folder of checkpoints, of which the newest that is sound is taken; one of them
            (`iter_0000100`); or a folder of Hugging Face.
        verify: compare digests; files of Hugging Face have none.

    Raises:
        CheckpointError: there is none, or it is damaged, or of a kind that is not read.
    """
    reader = None if path.is_file() else open_root(path, verify=verify)
    if reader is None:
        raise CheckpointError(f"{path}: {nothing_at(path)}")
    return reader


def nothing_at(path: Path) -> str:
    """Why there is no checkpoint at a path, and where one may be."""
    if not path.exists():
        return "there is no such folder"
    if path.is_file():
        return "a file: give the folder of checkpoints"
    below = checkpoints_below(path)
    more = f", but in {below[0]} in it: give {path / below[0]}" if below else ""
    return f"there is no checkpoint in this folder{more}"


def checkpoints_below(root: Path) -> list[str]:
    """Names of the folders in `root` that --load would take, where `root` itself is none."""
    if not root.is_dir():
        return []
    folders = (one for one in root.iterdir() if one.is_dir())
    named = (one for one in folders if not any(mark in one.name for mark in _UNPUBLISHED))
    return sorted(one.name for one in named if _is_one(one))


def _is_one(folder: Path) -> bool:
    return (
        (folder / TRACKER).is_file() or is_model_folder(folder) or checkpoint_at(folder) is not None
    )
