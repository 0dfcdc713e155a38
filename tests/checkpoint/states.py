"""Small states for the checkpoint tests, and ways to compare what was loaded."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch

from megatron.checkpoint.entries import Box, Entry, Json, State
from megatron.checkpoint.loading import open_checkpoint
from megatron.checkpoint.reader import Reader
from megatron.checkpoint.store import Snapshot, write_checkpoint
from megatron.parallel.layout import Layout


def make_state(seed: int, hidden: int = 8) -> State:
    """Return weights, moments and integers of several types and shapes, from one seed."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "model.layers.0.mlp.up.weight": Entry.whole(normal(4 * hidden, hidden)),
        "model.layers.0.mlp.up.bias": Entry.whole(normal(4 * hidden).bfloat16()),
        "model.norm.weight": Entry.whole(normal(hidden).half().t()),
        "optimizer.layers.0.mlp.up.weight.exp_avg": Entry.whole(normal(hidden, 4 * hidden).t()),
        "optimizer.count": Entry.whole(torch.tensor(seed)),
        "random": Entry.whole(torch.randint(0, 256, (37,), generator=generator).byte()),
        "mask": Entry.whole(normal(3, 5) > 0),
        "empty": Entry.whole(torch.empty(0, 4)),
    }


def save(root: Path | str, iteration: int, entries: State, meta: Json, layout: Layout) -> Path:
    """Save a state in the native format, with metadata like a run's. Collective over all ranks."""
    words = entries.get("model.embedding.word.weight")
    rows = words.global_shape[0] if isinstance(words, Entry) else 0
    meta = {**meta_of(iteration), "padded_vocab_size": rows, **meta}
    return write_checkpoint(root, Snapshot.take(iteration, entries, meta, layout))


def meta_of(iteration: int) -> dict[str, Json]:
    """Return the metadata that every checkpoint has."""
    numbers = {"iteration": iteration, "consumed_train_samples": 0, "padded_vocab_size": 0}
    return {**numbers, "config": {}}


def save_state(root: Path, iteration: int, state: State | None = None) -> Path:
    """Save one process's state; by default `make_state` of the iteration."""
    state = make_state(iteration) if state is None else state
    return save(root, iteration, state, {"iteration": iteration}, Layout.single())


def read_whole(reader: Reader, name: str) -> torch.Tensor:
    shape = reader.global_shape(name)
    return reader.read(name, Box.whole(shape), global_shape=shape)


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of the checkpoint that `folder` loads."""
    reader = open_checkpoint(folder)
    assert reader is not None
    return {name: read_whole(reader, name) for name in reader.names()}


def assert_holds(reader: Reader | None, state: State) -> None:
    """Check that the checkpoint holds exactly this state, bit for bit."""
    assert reader is not None
    assert reader.names() == sorted(state)
    for name, entry in state.items():
        found = read_whole(reader, name)
        assert found.dtype == entry.tensor.dtype
        assert torch.equal(found, entry.tensor), name


def assert_loads(root: Path, iterations: Iterable[int], *, allow_foreign: bool = False) -> int:
    """Check that the folder loads one of these iterations, whole and unmixed; return which one."""
    reader = open_checkpoint(root, allow_foreign=allow_foreign)
    assert reader is not None
    assert reader.iteration in set(iterations)
    assert reader.meta["iteration"] == reader.iteration
    assert_holds(reader, make_state(reader.iteration))
    return reader.iteration


def same_files(one: Path, other: Path) -> bool:
    """Return whether all files of `one` are in `other`, bit for bit."""
    names = [path.name for path in one.iterdir()]
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


def open_below(folder: Path) -> list[str]:
    """Return the paths in a folder that this process has open, one for each descriptor."""
    paths = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor of this listing
            paths.append(os.readlink(link))
    return sorted(path for path in paths if path.startswith(f"{folder.resolve()}/"))
