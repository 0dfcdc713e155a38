"""Open a checkpoint wherever it lies and whoever wrote it: ours, Megatron-LM's, Hugging Face's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megatron.checkpoint import find
from megatron.checkpoint.exchange import JsonExchange
from megatron.checkpoint.huggingface.files import is_model_folder
from megatron.checkpoint.huggingface.reader import HFReader
from megatron.checkpoint.legacy.reader import LegacyReader
from megatron.checkpoint.manifest import MANIFEST
from megatron.checkpoint.reader import NativeReader, Reader
from megatron.durable import TEMPORARY, UNVERIFIED
from megatron.errors import CheckpointError, warn
from megatron.parallel.layout import Layout

_UNPUBLISHED = (TEMPORARY, UNVERIFIED)


def open_checkpoint(
    root: Path | str, *, step: int | None = None, verify: bool = True, layout: Layout | None = None
) -> Reader | None:
    """Open the first sound checkpoint of `find.list_checkpoints`, or return None if there is none.

    If `root` is a checkpoint's own folder (`iter_0000100`), or an iteration is named, it is that
    one and no other. With a layout this is collective: ranks share the work of verifying, and open
    the same checkpoint. The folder must be on a file system that all of them see.

    Args:
        root: Folder of checkpoints, or one of them.
        step: The iteration of the one to open.
        verify: Compare every digest, instead of sizes and the manifest only.
        layout: The ranks that open it together.

    Raises:
        CheckpointError: All that there are, are damaged; the message says what is wrong with each.
            Or there is none of the iteration.
    """
    exchange = JsonExchange((layout or Layout.single()).world)
    root = Path(root).absolute()

    def candidates() -> list[find.FoundCheckpoint]:
        if step is not None:
            return [find.checkpoint_of(root, step)]
        itself = find.checkpoint_at(root)
        return find.list_checkpoints(root) if itself is None else [itself]

    listed = exchange.on_main(
        lambda: [[one.format, one.iteration, str(one.path)] for one in candidates()]
    )
    problems: list[str] = []
    for kind, iteration, path in listed:
        found = find.FoundCheckpoint(kind, iteration, Path(path))
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


def _try_open(
    found: find.FoundCheckpoint, exchange: JsonExchange, verify: bool
) -> tuple[Reader | None, str | None]:
    """Return a reader that every rank agrees on, or the first problem of any rank. Collective."""
    reader: Reader | None = None
    problem = None
    rank, ranks = exchange.world.rank, exchange.world.size
    try:
        reader = open_found(found, verify=verify, rank=rank, ranks=ranks)
    except CheckpointError as error:
        problem = str(error)
    problems = [text for text in exchange.gather(problem) if text is not None]
    return (None, problems[0]) if problems else (reader, None)


def open_found(
    found: find.FoundCheckpoint, *, verify: bool = True, rank: int = 0, ranks: int = 1
) -> Reader:
    """Open this checkpoint, without a fallback, and verify a rank's share of it.

    Args:
        found: The checkpoint.
        verify: Compare digests.
        rank: Which share of them.
        ranks: Into how many shares they are divided.

    Raises:
        CheckpointError: It is damaged, or of a kind that is not read.
    """
    if found.format == "legacy":
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
    """Open what --load names, or return None if there is nothing.

    Args:
        root: A Hugging Face folder, one checkpoint, or a folder of checkpoints.
        step: The iteration to open (--ckpt-step). None opens the newest.
        verify: Compare digests; Hugging Face files have none.
        layout: The ranks that open it together; collective if it is given.

    Raises:
        CheckpointError: There are checkpoints, but none that can be read, or none of the iteration.
    """
    if not is_model_folder(root):
        return open_checkpoint(root, step=step, verify=verify, layout=layout)
    if step is not None:
        raise CheckpointError(
            f"--ckpt-step {step}: {root} is a folder of Hugging Face, which has no iterations: "
            "drop --ckpt-step"
        )
    opened: list[Reader] = []
    exchange = JsonExchange((layout or Layout.single()).world)
    exchange.together(lambda: opened.append(HFReader(root)))
    return opened[0]


def open_any(path: Path, *, verify: bool = True) -> Reader:
    """Open the checkpoint that a path leads to.

    Args:
        path: A folder of checkpoints, of which the newest that is sound is taken; one of them
            (`iter_0000100`); or a Hugging Face folder.
        verify: Compare digests; Hugging Face files have none.

    Raises:
        CheckpointError: There is none, or it is damaged, or of a kind that is not read.
    """
    reader = None if path.is_file() else open_root(path, verify=verify)
    if reader is None:
        raise CheckpointError(f"{path}: {nothing_at(path)}")
    return reader


def nothing_at(path: Path) -> str:
    """Return why there is no checkpoint at a path, and where one may be."""
    if not path.exists():
        return "there is no such folder"
    if path.is_file():
        return "a file: give the folder of checkpoints"
    below = checkpoints_below(path)
    more = f", but in {below[0]} in it: give {path / below[0]}" if below else ""
    return f"there is no checkpoint in this folder{more}"


def checkpoints_below(root: Path) -> list[str]:
    """Return the names of the folders in `root` that --load would take if `root` is none."""
    if not root.is_dir():
        return []
    tests: tuple[Callable[[Path], object], ...] = (
        lambda folder: (folder / find.TRACKER).is_file(),
        is_model_folder,
        find.checkpoint_at,
    )
    folders = (one for one in root.iterdir() if one.is_dir())
    named = (one for one in folders if not any(word in one.name for word in _UNPUBLISHED))
    return sorted(one.name for one in named if any(test(one) for test in tests))
