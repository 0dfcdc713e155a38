"""Open a checkpoint, wherever it lies and whoever wrote it: ours, Megatron-LM's, Hugging Face's."""

from __future__ import annotations

from pathlib import Path

from megatron.checkpoint.entries import Json
from megatron.checkpoint.exchange import JsonExchange
from megatron.checkpoint.find import (
    TRACKER,
    FoundCheckpoint,
    checkpoint_at,
    checkpoint_of,
    list_checkpoints,
)
from megatron.checkpoint.huggingface.files import is_model_folder
from megatron.checkpoint.manifest import (
    MANIFEST,
)
from megatron.checkpoint.reader import NativeReader, Reader
from megatron.durable import TEMPORARY, UNVERIFIED
from megatron.errors import CheckpointError, warn
from megatron.parallel.layout import Layout

_UNPUBLISHED = (TEMPORARY, UNVERIFIED)


def open_checkpoint(
    root: Path | str,
    *,
    step: int | None = None,
    verify: bool = True,
    layout: Layout | None = None,
) -> Reader | None:
    """The first checkpoint in `find.list_checkpoints` order that is sound; None in an empty folder.

    Where `root` is a checkpoint's own folder (`iter_0000100`), or an iteration is named, that one
    and no other.

    Collective over `layout`, where one is given: ranks share the work of verifying, and open the
    same checkpoint. The folder must be on a file system that all of them see.

    Args:
        root: folder of checkpoints, or one of them.
        step: the iteration of the one to open.
        verify: compare every digest; off: sizes and the manifest only.

    Raises:
        CheckpointError: all that there are, are damaged; says what is wrong with each. Or there is
            none of the iteration.
    """
    exchange = JsonExchange((layout or Layout.single()).world)
    root = Path(root).absolute()
    listed = exchange.on_main(lambda: [_to_json(one) for one in _candidates(root, step)])
    problems: list[str] = []
    for found in map(_from_json, listed):
        reader, problem = _try_open(found, exchange, verify)
        if reader is not None:
            if problems and exchange.is_main:
                warn("\n  ".join([*problems, f"using {found.path.name} instead"]))
            return reader
        problems.append(f"{found.path} is not used: {problem}")
    if not problems:
        return None
    if step is not None:  # the others have not been looked at
        raise CheckpointError(
            f"--ckpt-step {step}: {problems[0]}\n"
            "restore it from a copy, give another iteration, or drop the flag to take the newest"
        )
    raise CheckpointError(
        f"{root}: none of its checkpoints can be used:\n  "
        + "\n  ".join(problems)
        + "\nrestore one from a copy, or name an empty folder to start from scratch"
    )


def _candidates(root: Path, step: int | None) -> list[FoundCheckpoint]:
    if step is not None:
        return [checkpoint_of(root, step)]
    itself = checkpoint_at(root)
    return list_checkpoints(root) if itself is None else [itself]


def _to_json(found: FoundCheckpoint) -> Json:
    return [found.format, found.iteration, str(found.path)]


def _from_json(value: Json) -> FoundCheckpoint:
    return FoundCheckpoint(value[0], value[1], Path(value[2]))


def _try_open(
    found: FoundCheckpoint, exchange: JsonExchange, verify: bool
) -> tuple[Reader | None, str | None]:
    """A reader that every rank agrees on, or the first problem that any rank met. Collective."""
    reader: Reader | None = None
    problem = None
    try:
        reader = open_found(
            found, verify=verify, rank=exchange.world.rank, ranks=exchange.world.size
        )
    except CheckpointError as error:
        problem = str(error)
    problems = [text for text in exchange.gather(problem) if text is not None]
    return (None, problems[0]) if problems else (reader, None)


def open_found(
    found: FoundCheckpoint, *, verify: bool = True, rank: int = 0, ranks: int = 1
) -> Reader:
    """Open this one, without a fallback; verify this rank's share of it.

    Raises:
        CheckpointError: it is damaged, or of a kind that is not read.
    """
    if found.format == "legacy":
        from megatron.checkpoint.legacy.reader import LegacyReader

        try:
            return LegacyReader(found.path, verify=verify, rank=rank, ranks=ranks)
        except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
            # The tree comes from outside: what is no dict, or no number, can be anywhere in it.
            raise CheckpointError(f"not a tree of Megatron-LM: {error}") from error
    reader = NativeReader(found.path)
    if reader.iteration != found.iteration and found.path.name.startswith("iter_"):
        raise CheckpointError(f"{MANIFEST} is of iteration {reader.iteration}")
    if verify:
        reader.verify(rank, ranks)
    return reader


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
    from megatron.checkpoint.huggingface.reader import HFReader

    opened: list[Reader] = []
    exchange = JsonExchange((layout or Layout.single()).world)
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
