"""Who writes what of a checkpoint: a pure function of what every rank holds."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import torch

from megatron.checkpoint.entries import Box, Json, State, dtype_name, dtype_size, flatten, is_tiled
from megatron.checkpoint.manifest import keys_in_files

# The system lets one thread at a time write to a file: large shares go to several.
_FILES, _LARGE = 4, 1 << 30  # at most, and bytes of each at least


@dataclass(frozen=True)
class Part:
    """Which rank writes which part of a tensor, and into which of its files."""

    rank: int
    box: Box
    number: int = 0

    @property
    def file(self) -> str:
        """Name of the file."""
        return f"rank_{self.rank:05d}{f'_{self.number}' if self.number else ''}.safetensors"


@dataclass(frozen=True)
class SavePlan:
    """What the whole checkpoint will consist of; the same on every rank.

    Attributes:
        dtypes: safetensors' type name of every tensor.
        shapes: global shape of every tensor.
        parts: of every tensor, tiling it.
    """

    dtypes: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    parts: dict[str, list[Part]]

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(
            math.prod(self.shapes[name]) * dtype_size(self.dtypes[name]) for name in self.parts
        )


def describe(entries: State) -> Json:
    """What a rank holds: name, type, global shape, offset and shape of every entry."""
    return [
        [
            name,
            dtype_name(entry.tensor.dtype),
            list(entry.global_shape),
            list(entry.box.offset),
            list(entry.box.shape),
        ]
        for name, entry in flatten(entries)
    ]


def make_plan(held: list[Json]) -> SavePlan:
    """Who writes what, from what every rank holds (see `describe`), in rank order.

    What several ranks hold, the one writes that has the fewest bytes to write so far.

    Raises:
        ValueError: ranks differ about a tensor, or their parts leave gaps or overlap.
    """
    dtypes: dict[str, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    holders: dict[str, dict[Box, list[int]]] = {}
    for rank, description in enumerate(held):
        for name, dtype, shape, offset, part_shape in description:
            known = dtypes.setdefault(name, dtype), shapes.setdefault(name, tuple(shape))
            if known != (dtype, tuple(shape)):
                raise ValueError(f"ranks differ about {name}: {known} and {dtype, tuple(shape)}")
            box = Box(tuple(offset), tuple(part_shape))
            holders.setdefault(name, {}).setdefault(box, []).append(rank)
    for name, boxes in holders.items():
        if not is_tiled(shapes[name], boxes):
            raise ValueError(f"{name} {shapes[name]} is not made up by its parts: {list(boxes)}")
    writers = _share_out(holders, dtypes, len(held))
    numbers = _spread(writers, dtypes)
    parts = {
        name: [Part(rank := writers[name, box], box, numbers[rank, name]) for box in boxes]
        for name, boxes in holders.items()
    }
    return SavePlan(dtypes, shapes, parts)


def _share_out(
    holders: dict[str, dict[Box, list[int]]], dtypes: dict[str, str], ranks: int
) -> dict[tuple[str, Box], int]:
    """One writer for every part: first those without a choice, then the largest first."""
    parts = [
        (box.volume * dtype_size(dtypes[name]), name, box, candidates)
        for name, boxes in holders.items()
        for box, candidates in boxes.items()
    ]
    parts.sort(key=lambda part: (len(part[3]) > 1, -part[0]))
    writers, load = {}, [0] * ranks
    for size, name, box, candidates in parts:
        writer = min(candidates, key=lambda rank: (load[rank], rank))
        writers[name, box] = writer
        load[writer] += size
    return writers


def _spread(
    writers: dict[tuple[str, Box], int], dtypes: dict[str, str]
) -> dict[tuple[int, str], int]:
    """Into which of its files a rank writes its parts of a tensor: the largest first, into the one
    with the fewest bytes so far."""
    sizes, shares = Counter[tuple[int, str]](), Counter[int]()
    for (name, box), rank in writers.items():
        size = box.volume * dtype_size(dtypes[name])
        sizes[rank, name] += size
        shares[rank] += size
    loads = {rank: [0] * max(1, min(_FILES, size // _LARGE)) for rank, size in shares.items()}
    numbers = {}
    for (rank, name), size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        number = loads[rank].index(min(loads[rank]))
        loads[rank][number] += size
        numbers[rank, name] = number
    return numbers


def share_of(plan: SavePlan, entries: State, rank: int) -> dict[str, torch.Tensor]:
    """This rank's share of the plan, by key in its files."""
    held = {(name, entry.box): entry.tensor for name, entry in flatten(entries)}
    return {
        key: held[name, part.box]
        for name, parts in plan.parts.items()
        for key, part in zip(keys_of(name, parts), parts, strict=True)
        if part.rank == rank
    }


def files_of(plan: SavePlan, rank: int) -> dict[str, list[str]]:
    """The files that a rank writes, by name, each with its keys."""
    files: dict[str, list[str]] = {}
    for name, parts in plan.parts.items():
        for key, part in zip(keys_of(name, parts), parts, strict=True):
            if part.rank == rank:
                files.setdefault(part.file, []).append(key)
    return files


def keys_of(name: str, parts: list[Part]) -> list[str]:
    """Under which key each part of a tensor stands in its file; a rank has no key twice."""
    return keys_in_files(name, [part.file for part in parts])
