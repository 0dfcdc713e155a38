"""Processes that each hold a range of a tensor's elements, as several boxes."""

import torch
from safetensors.torch import load_file

from megatron.checkpoint.entries import Box, Entry, boxes_of_range
from megatron.checkpoint.loading import open_checkpoint
from megatron.checkpoint.reader import NativeReader, find_problems, restore
from tests.checkpoint.states import read_whole, save
from tests.distributed import run_distributed

WHOLE = torch.arange(5.0 * 4 * 3).reshape(5, 4, 3)


def _entries(values, rank, size):
    """Return uneven ranges, cut in the middle of rows, for up to four processes."""
    cuts = [0, 17, 31, 44, 60]
    start, end = cuts[rank], cuts[rank + 1] if rank < size - 1 else 60
    boxes = boxes_of_range((5, 4, 3), start, end)
    parts = values.flatten()[start:end].split([box.volume for box in boxes])
    return [
        Entry(part.view(box.shape), (5, 4, 3), box.offset)
        for part, box in zip(parts, boxes, strict=True)
    ]


def _save(layout, root):
    world = layout.world
    state = {"moment": _entries(WHOLE.clone(), world.rank, world.size)}
    return len(state["moment"]), str(save(root, 1, state, {}, layout))


def _load(layout, root):
    world, values = layout.world, torch.zeros(60)
    entries = {"moment": _entries(values, world.rank, world.size)}
    restore(open_checkpoint(root, layout=layout), entries)
    return values.tolist()


def test_ranges_of_four_processes_are_read_by_any_number(tmp_path):
    saved = run_distributed(4, _save, tmp_path)
    assert max(count for count, _ in saved) == 4
    reader = open_checkpoint(tmp_path)
    assert torch.equal(read_whole(reader, "moment"), WHOLE)
    part = reader.read("moment", Box((1, 1, 1), (3, 2, 2)), global_shape=(5, 4, 3))
    assert torch.equal(part, WHOLE[1:4, 1:3, 1:])
    for size in (1, 2, 3):
        held = torch.tensor(run_distributed(size, _load, tmp_path))
        assert torch.equal(held.amax(0), WHOLE.flatten())
        assert torch.equal(held.sum(0), WHOLE.flatten())


def test_boxes_in_one_file_have_keys_of_their_own(tmp_path):
    ((_, path),) = run_distributed(1, _save, tmp_path)
    assert set(load_file(f"{path}/rank_00000.safetensors")) == {"moment"}
    counts = [count for count, _ in run_distributed(2, _save, tmp_path)]
    manifest = NativeReader(tmp_path / "iter_0000001").manifest
    assert len(manifest.tensors["moment"].pieces) == sum(counts)
    for rank, count in enumerate(counts):
        keys = {"moment", *(f"moment#{i}" for i in range(1, count))}
        assert set(load_file(f"{path}/rank_{rank:05d}.safetensors")) == keys


def test_a_problem_of_several_entries_is_reported_once(tmp_path):
    run_distributed(1, _save, tmp_path)
    wrong = [Entry(part, (6, 4, 3), (i, 0, 0)) for i, part in enumerate(WHOLE[:2].split(1))]
    assert len(find_problems(open_checkpoint(tmp_path), {"moment": wrong})) == 1
