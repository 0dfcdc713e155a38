"""Sentence maps kept on disk under Megatron-LM's names.

    <prefix>_<split>_indexmap_<samples>mns_<longest>msl_<short share>ssp_<seed>s.npy

The name leaves out what else decides a map: --split, whether two segments are needed, the data
itself. We write that as text behind the array, where numpy does not look, so that a map is never
taken for another; a second map that claims a name in use gets the text's digest into its own. Maps
that Megatron wrote have no such text: they are used if they can be the map that is asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.data.indexed import idx_path
from megatron.data.sentence_map import SentenceMapPlan
from megatron.durable import renamed_when_done
from megatron.errors import warn

Rows = NDArray[Any]


def describe_sentence_map(
    plan: SentenceMapPlan, name: str, bounds: tuple[int, int], sentences: int, tokens: int
) -> str:
    """Everything that decides a map.

    Args:
        bounds: documents of the split.
        sentences: of the dataset.
        tokens: of the dataset.
    """
    return (
        "Sentence map\n\n"
        f"Dataset name {name}\n"
        f"Documents {bounds[0]} to {bounds[1]}\n"
        f"Sentences {sentences}\n"
        f"Tokens {tokens}\n"
        f"Number of samples {plan.num_samples}\n"
        f"Longest sample {plan.max_length}\n"
        f"One short in {plan.short_ratio}\n"
        f"Fewest sentences {plan.min_sentences}\n"
        f"Random seed {plan.seed}\n"
    )


def load_or_build_sentence_map(
    prefix: str,
    name: str,
    plan: SentenceMapPlan,
    description: str,
    build: Callable[[], Rows],
    *,
    is_sound: Callable[[Rows], bool],
    data_cache_path: str | None,
    warns: bool,
) -> Rows:
    """The map that `description` tells, from disk, memory-mapped, or built and kept.

    Args:
        prefix: of the dataset; the map is kept beside it.
        is_sound: whether rows found on disk can be the map.
        data_cache_path: folder to keep the map in instead.
        warns: whether this process reports a folder that cannot be written to.
    """
    beside = _names(prefix, name, plan, description)
    own = beside
    if data_cache_path is not None:
        own = [Path(data_cache_path) / path.name for path in beside]
    source = idx_path(prefix)
    for path in dict.fromkeys([*beside, *own]):
        found = _load(path, description, source)
        if found is not None and is_sound(found):
            return found
    rows = build()
    path = own[1] if _is_in_use(own[0], source) else own[0]
    try:
        _save(path, rows, description)
    except OSError as error:
        if warns:
            warn(
                f"sentence map {path}: cannot write ({error.strerror}); it is kept in memory and "
                "built again at every start. Set --data-cache-path to a folder that can be "
                "written to"
            )
        return rows
    # Mapped pages are shared by all processes of a node; what was built is not.
    found = _load(path, description, source)
    return rows if found is None else found


def _names(prefix: str, name: str, plan: SentenceMapPlan, description: str) -> list[Path]:
    """Megatron's name, and the one for a map whose name is taken."""
    stem = (
        f"{prefix}_{name}_indexmap_{plan.num_samples}mns_{plan.max_length}msl_"
        f"{plan.short_seq_prob:0.2f}ssp_{plan.seed}s"
    )
    digest = hashlib.md5(description.encode(), usedforsecurity=False).hexdigest()[:8]
    return [Path(f"{stem}.npy"), Path(f"{stem}_{digest}.npy")]


def _is_in_use(path: Path, source: Path) -> bool:
    """Whether `path` holds another map of the dataset as it is now."""
    rows = _open(path, source)
    return rows is not None and rows.ndim == 2


def _open(path: Path, source: Path) -> np.memmap[Any, Any] | None:
    """The array in `path`; None where there is none, or it is older than `source`."""
    try:
        if path.stat().st_mtime < source.stat().st_mtime:
            return None
        rows = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return rows if isinstance(rows, np.memmap) else None


def _load(path: Path, description: str, source: Path) -> Rows | None:
    """The rows in `path`, if they are `[n, 3]` and nothing says that they are another map's."""
    rows = _open(path, source)
    if rows is None or rows.ndim != 2 or rows.shape[1] != 3 or rows.dtype.kind != "u":
        return None
    with path.open("rb") as file:
        file.seek(rows.offset + rows.nbytes)
        text = file.read()
    return rows.view(np.ndarray) if text in (b"", description.encode()) else None


def _save(path: Path, rows: Rows, description: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with renamed_when_done(path) as file:
        np.save(file, rows, allow_pickle=False)
        file.write(description.encode())
