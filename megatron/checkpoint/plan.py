"""Plan which process writes which parts of a checkpoint, given the parts that each one holds."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron.checkpoint.entries import DTYPES, Box, Json, State, dtype_name, flatten, is_tiled
from megatron.checkpoint.manifest import keys_in_files

# The kernel lets only one thread at a time write to a file, so a large share is divided among
# several files: at most this many, of at least this many bytes each.
_FILES, _LARGE = 4, 1 << 30

_Writers = dict[tuple[str, Box], int]


@dataclass(frozen=True)
class Part:
    """A part of a tensor to write.

    Attributes:
        rank: The rank that writes it.
        box: The box of the whole tensor that it covers.
        file_index: The index of its file among the files of the rank.
    """

    rank: int
    box: Box
    file_index: int = 0

    @property
    def file(self) -> str:
        """The name of the file."""
        return f"rank_{self.rank:05d}{f'_{self.file_index}' if self.file_index else ''}.safetensors"


@dataclass(frozen=True)
class SavePlan:
    """The files and tensors of a checkpoint to write. Every rank has the same plan.

    Attributes:
        dtypes: Safetensors' name for the dtype of every tensor.
        shapes: The global shape of every tensor.
        parts: The parts of every tensor, which tile it.
    """

    dtypes: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    parts: dict[str, list[Part]]

    @property
    def total_bytes(self) -> int:
        """The total size of all tensors in bytes."""
        return sum(_bytes(self.dtypes[name], math.prod(self.shapes[name])) for name in self.parts)

    def keyed(self, name: str) -> Iterator[tuple[str, Part]]:
        """Yield (key, part) for each part of a tensor. The key is unique in the part's file."""
        parts = self.parts[name]
        return zip(keys_in_files(name, [part.file for part in parts]), parts, strict=True)

    def written_by(self, rank: int) -> Iterator[tuple[str, str, Part]]:
        """Yield (tensor name, key, part) for each part that a rank writes."""
        keyed = ((name, *pair) for name in self.parts for pair in self.keyed(name))
        return (part for part in keyed if part[2].rank == rank)


def describe(entries: State) -> Json:
    """Return the name, dtype, global shape, offset and shape of each of a rank's entries."""
    return [
        [name, dtype_name(entry.tensor.dtype), list(entry.global_shape), *map(list, entry.box)]
        for name, entry in flatten(entries)
    ]


def make_plan(descriptions: list[Json]) -> SavePlan:
    """Assign each part to one of the ranks that hold it, balancing the bytes that ranks write.

    Args:
        descriptions: The result of `describe` on each rank, in rank order.

    Raises:
        ValueError: Ranks disagree on a tensor's dtype or shape, or their parts leave gaps or
            overlap.
    """
    dtypes: dict[str, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    holders = defaultdict[str, dict[Box, list[int]]](dict)
    for rank, description in enumerate(descriptions):
        for name, dtype, shape, *box in description:
            claimed = dtype, tuple(shape)
            known = dtypes.setdefault(name, dtype), shapes.setdefault(name, claimed[1])
            if known != claimed:
                raise ValueError(f"ranks disagree about {name}: {known} and {claimed}")
            holders[name].setdefault(Box(*map(tuple, box)), []).append(rank)
    for name, boxes in holders.items():
        if not is_tiled(shapes[name], boxes):
            raise ValueError(f"{name} {shapes[name]} is not tiled by its parts: {list(boxes)}")
    writers = _choose_writers(holders, dtypes, len(descriptions))
    file_indices = _choose_files(writers, dtypes)
    parts = {
        name: [Part(rank := writers[name, box], box, file_indices[rank, name]) for box in boxes]
        for name, boxes in holders.items()
    }
    return SavePlan(dtypes, shapes, parts)


def _bytes(dtype: str, elements: int) -> int:
    return elements * DTYPES[dtype].itemsize


def _choose_writers(
    holders: dict[str, dict[Box, list[int]]], dtypes: dict[str, str], ranks: int
) -> _Writers:
    """Choose the rank with the least to write for each part.

    Parts that only one rank holds are assigned first, then the others by decreasing size.
    """
    parts = [
        (_bytes(dtypes[name], box.volume), name, box, candidates)
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


def _choose_files(writers: _Writers, dtypes: dict[str, str]) -> dict[tuple[int, str], int]:
    """Choose the file for each rank's parts of each tensor.

    Tensors are assigned by decreasing size, each to the file with the fewest bytes so far.
    """
    sizes, shares = Counter[tuple[int, str]](), Counter[int]()
    for (name, box), rank in writers.items():
        size = _bytes(dtypes[name], box.volume)
        sizes[rank, name] += size
        shares[rank] += size
    loads = {rank: [0] * max(1, min(_FILES, size // _LARGE)) for rank, size in shares.items()}
    file_indices = {}
    for (rank, name), size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        index = loads[rank].index(min(loads[rank]))
        loads[rank][index] += size
        file_indices[rank, name] = index
    return file_indices


def share_of(plan: SavePlan, entries: State, rank: int) -> dict[str, torch.Tensor]:
    """Return the tensors that a rank writes, by key in its files.

    Args:
        plan: The plan of all ranks.
        entries: The rank's own entries.
        rank: The rank.
    """
    tensors = {(name, entry.box): entry.tensor for name, entry in flatten(entries)}
    return {key: tensors[name, part.box] for name, key, part in plan.written_by(rank)}


def files_of(plan: SavePlan, rank: int) -> dict[str, list[str]]:
    """Return the keys of the tensors in each file that a rank writes, by file name."""
    files: dict[str, list[str]] = {}
    for _, key, part in plan.written_by(rank):
        files.setdefault(part.file, []).append(key)
    return files
