"""Find the checkpoints in a folder, and the order in which to try them.

Folders follow Megatron's layout: `latest_checkpointed_iteration.txt` names an iteration (or
"release"), and `iter_0000100/` is that checkpoint. DeepSpeed's `latest` names `global_step100`. In
addition, we write the following files and folders:

    iter_0000100/manifest.json          marks a complete checkpoint: written before the rename
    iter_0000100/complete               the list of the files that we wrote in Megatron-LM's or
                                        Megatron Core's format
    iter_0000100.tmp-<unique>/          a save that did not finish; never read
    iter_0000100.old-<unique>/          replaced by a newer save of the same iteration; read only if
                                        iter_0000100 is missing, after a crash, or damaged
    iter_0000100.unverified-<unique>/   a conversion that failed its check; never read
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megatron.checkpoint.manifest import MANIFEST
from megatron.checkpoint.trust import open_plain
from megatron.durable import UNVERIFIED
from megatron.errors import CheckpointError, warn

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
COMPLETE = "complete"
REPLACED = ".old-"
DEEPSPEED = "global_step"  # prefix of DeepSpeed's folder names
_DEEPSPEED_TRACKER = "latest"

_FOLDER = re.compile(r"iter_(\d{7,12})(\.old-[0-9a-f]+)?")
_DEEPSPEED_FOLDER = re.compile(rf"{DEEPSPEED}(\d{{1,12}})")
_NAMED = 8  # a message lists at most this many iterations
_TRACKER_BYTES = 32  # more than any iteration needs; a longer tracker is damaged
_TRACKERS = {
    TRACKER: re.compile(rf"\s*(\d{{1,12}}|{RELEASE})\s*"),
    _DEEPSPEED_TRACKER: re.compile(rf"\s*({DEEPSPEED}\d{{1,12}})\s*"),
}
_STATES = "_states.pt"  # suffix of DeepSpeed's file names
_TWO_FORMATS = "holds both "  # start of the message about two formats
_MARKS = {
    "native": MANIFEST,
    "legacy": "mp_rank folders",
    "core": ".metadata",
    "deepspeed": "DeepSpeed's *_states.pt",
}


class CheckpointFolder(NamedTuple):
    """A checkpoint that looks complete. Only opening it shows whether it is intact.

    Attributes:
        format: "native", "legacy" (Megatron-LM's torch files), "core" (Megatron Core's
            torch_dist) or "deepspeed".
        iteration: The iteration in the folder's name; 0 for `release` and other names without one.
        path: The checkpoint's folder.
    """

    format: str
    iteration: int
    path: Path

    @property
    def name(self) -> str:
        """The folder's name, without the suffix that is added when a newer save replaces it."""
        return self.path.name.split(REPLACED)[0]


def iteration_folder(iteration: int) -> str:
    """Return Megatron's folder name for an iteration: "iter_0000100" for 100."""
    return f"iter_{iteration:07d}"


def iteration_of(folder: str) -> int:
    """Return the iteration in a folder's name; 0 for `release` and other names without one."""
    match = _FOLDER.fullmatch(folder) or _DEEPSPEED_FOLDER.fullmatch(folder)
    return int(match.group(1)) if match else 0


def tracker_text(folder: str) -> bytes:
    """Return the tracker's content for a folder: "100" for "iter_0000100", or "release"."""
    return (folder if folder == RELEASE else str(iteration_of(folder))).encode()


def list_checkpoints(root: Path, *, quiet: bool = False) -> list[CheckpointFolder]:
    """Return all complete checkpoints in the order in which to try them.

    The checkpoint that the tracker names comes first, then older ones, then newer ones, each newest
    first. Newer ones come last because they were never reported as saved, or someone moved the
    tracker back. If the tracker cannot be used, all checkpoints are returned, newest first.

    Args:
        root: Folder of checkpoints. If it does not exist, or contains no traces of a checkpoint,
            the list is empty.
        quiet: Do not warn if the tracker cannot be used.

    Raises:
        CheckpointError: There are traces of a checkpoint, such as a tracker or an incomplete
            folder, but no complete checkpoint; or the folder cannot be listed.
    """
    checkpoints, problems = scan(root)
    tracked, tracker_problem = read_tracker(root)
    if not checkpoints:
        lines = [f"{name} {problem}" for name, problem in problems.items()]
        if tracker_problem or (tracked is not None and tracked not in problems):
            missing = f"{_tracker_of(tracked)} names {tracked!r}, which does not exist"
            lines.insert(0, tracker_problem or missing)
        if lines:
            raise CheckpointError(
                f"{root}: no complete checkpoint: " + "; ".join(lines) + ". Restore one from a "
                "copy, or name an empty folder to start from scratch"
            )
        return []
    current = tracked_checkpoint(checkpoints, tracked)
    if current is None:
        if not quiet:
            problem = problems.get(tracked or "", "is missing or incomplete")
            reason = (
                f"{_tracker_of(tracked)} names {tracked}, which {problem}"
                if tracked
                else f"{TRACKER} is missing"
            )
            warn(f"{root}: {tracker_problem or reason}; trying the newest complete checkpoint")
        return checkpoints
    older = [
        checkpoint
        for checkpoint in checkpoints
        if checkpoint is not current and checkpoint.iteration <= current.iteration
    ]
    newer = [checkpoint for checkpoint in checkpoints if checkpoint.iteration > current.iteration]
    return [current, *older, *newer]


def tracked_checkpoint(
    checkpoints: Sequence[CheckpointFolder], tracked: str | None
) -> CheckpointFolder | None:
    """Return the checkpoint with the name that `read_tracker` returned, or `None`.

    Megatron-DeepSpeed writes both trackers, and Megatron's then stands for a `global_step...`.
    """
    if tracked is None:
        return None
    for name in (tracked, f"{DEEPSPEED}{iteration_of(tracked)}"):
        for checkpoint in checkpoints:  # a replaced one, with the same name, comes last
            if checkpoint.name == name:
                return checkpoint
    return None


def read_tracker(root: Path) -> tuple[str | None, str | None]:
    """Return the name of the folder that the tracker names, and the problem with the tracker.

    DeepSpeed's `latest` is read only if Megatron's tracker does not exist. At least one of the two
    results is None. Both are None if there is no tracker.
    """
    for name, pattern in _TRACKERS.items():
        try:
            with open_plain(root / name, follows=True) as file:
                data = file.read(_TRACKER_BYTES + 1)
        except FileNotFoundError:
            continue
        except CheckpointError:
            return None, f"{name} is not a regular file"
        except OSError as error:
            return None, f"{name} cannot be read ({error.strerror})"
        text = data.decode("ascii", errors="replace")
        match = pattern.fullmatch(text)
        if len(data) > _TRACKER_BYTES or match is None:
            content = f"it contains {text[:_TRACKER_BYTES]!r}, not an iteration"
            return None, f"{name} is damaged: {content}"
        value = match.group(1)
        return (iteration_folder(int(value)) if value.isdigit() else value), None
    return None, None


def _tracker_of(tracked: str | None) -> str:
    """Return the file from which `read_tracker` has read a folder's name."""
    return _DEEPSPEED_TRACKER if (tracked or "").startswith(DEEPSPEED) else TRACKER


def scan(root: Path) -> tuple[list[CheckpointFolder], dict[str, str]]:
    """Return the complete checkpoints, newest first, and the problem of each other one by name.

    The others are incomplete, unverified, or hold two formats.

    Raises:
        CheckpointError: The folder cannot be listed.
    """
    checkpoints: list[CheckpointFolder] = []
    problems: dict[str, str] = {}
    if not _is_folder(root):
        return checkpoints, problems
    try:
        children = sorted(root.iterdir())
    except OSError as error:
        raise CheckpointError(f"{root}: cannot be read: {error.strerror}") from error
    for path in children:
        if path.name.startswith(("iter_", RELEASE)) and UNVERIFIED in path.name:
            problems[path.name] = "was not verified when it was converted"
        is_known = path.name == RELEASE or _FOLDER.fullmatch(path.name)
        if not (is_known or _DEEPSPEED_FOLDER.fullmatch(path.name)) or not path.is_dir():
            continue
        kind, problem = _classify(path)
        if kind is None:
            problems[path.name] = problem
        else:
            checkpoints.append(CheckpointFolder(kind, iteration_of(path.name), path))
    # A replaced checkpoint sorts after its replacement, because ".old-" makes its name longer.
    checkpoints.sort(
        key=lambda checkpoint: (
            -checkpoint.iteration,
            len(checkpoint.path.name),
            checkpoint.path.name,
        )
    )
    return checkpoints, problems


def checkpoint_at(path: Path) -> CheckpointFolder | None:
    """Return the checkpoint stored directly in a folder such as `iter_0000100`, or None.

    Raises:
        CheckpointError: The folder contains checkpoints in two formats, or a folder above it cannot
            be read.
    """
    kind, problem = _classify(path) if _is_folder(path) else (None, "")
    if problem.startswith(_TWO_FORMATS):
        raise CheckpointError(f"{path} {problem}")
    return CheckpointFolder(kind, iteration_of(path.name), path.absolute()) if kind else None


def checkpoint_of(root: Path, iteration: int) -> CheckpointFolder:
    """Return the complete checkpoint of an iteration, for --ckpt-step.

    Raises:
        CheckpointError: There is no such checkpoint (the message lists the newest iterations that
            exist), or `root` is itself a checkpoint or is not a folder.
    """
    flag = f"--ckpt-step {iteration}: {root}"
    if checkpoint_at(root) is not None:
        remedy = "give --load the folder that contains it, or drop --ckpt-step"
        raise CheckpointError(f"{flag} is a single checkpoint: {remedy}")
    if not root.is_dir():
        raise CheckpointError(f"{flag}: there is no such folder")
    checkpoints, problems = scan(root)
    for checkpoint in checkpoints:
        if checkpoint.iteration == iteration and checkpoint.path.name != RELEASE:
            return checkpoint
    folder = iteration_folder(iteration)
    why = f" ({folder} {problems[folder]})" if folder in problems else ""
    available = [
        tracker_text(name).decode()
        for name in dict.fromkeys(checkpoint.name for checkpoint in checkpoints)
        if name != RELEASE
    ]
    if len(available) > _NAMED:
        available[_NAMED:] = [f"{len(available) - _NAMED} older ones"]
    remedy = f"available iterations: {', '.join(available)}: give one of them"
    remedy = remedy if available else "the folder holds no checkpoint of any iteration"
    raise CheckpointError(f"{flag} holds no checkpoint of this iteration{why}: {remedy}")


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError as error:  # there is no permission to look into the folder above it
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def _classify(path: Path) -> tuple[str | None, str]:
    """Return a checkpoint folder's format and "", or None and the reason why it is not loaded."""
    try:
        matches = {
            "native": (path / MANIFEST).is_file(),
            "legacy": any(not child.name.endswith(_STATES) for child in path.glob("mp_rank_*")),
            "core": (path / ".metadata").exists(),
            "deepspeed": any(path.glob(f"*{_STATES}")),
        }
    except OSError as error:
        return None, f"cannot be read: {error.strerror}"
    kinds = [kind for kind, is_match in matches.items() if is_match]
    if len(kinds) == 1:
        return kinds[0], ""
    if kinds:
        return None, (
            f"{_TWO_FORMATS}{' and '.join(_MARKS[kind] for kind in kinds)}: Megatron-LM has saved "
            "into a checkpoint of this program, and there is no way to tell which one to load: "
            "move one of them elsewhere"
        )
    neither = f"has neither {MANIFEST} nor Megatron-LM's mp_rank folders"
    return None, f"{neither} nor Megatron Core's .metadata nor DeepSpeed's files"
