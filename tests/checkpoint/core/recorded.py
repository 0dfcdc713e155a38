"""Networks written in Megatron Core's format and read back, and logits of Core's own models.

Core's models computed the logits on a CPU. Every weight is a sine wave whose phase is the position
of its name in sorted order, so a file can be rebuilt from the names and shapes alone.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp

from megatron.checkpoint.loading import open_checkpoint
from megatron.training.checkpointing import save_run
from tests.checkpoint.core.core_files import write_core
from tests.checkpoint.states import read_all, read_whole
from tests.distributed import run_distributed
from tests.models.small import VOCAB, gpt
from tests.training.toy import build_toy

Shapes = Mapping[str, tuple[int, ...]]


def waves(shapes: Shapes) -> dict[str, Tensor]:
    """Return the weights of Core's model whose logits were recorded."""
    weights = {}
    for place, (name, shape) in enumerate(sorted(shapes.items())):
        index = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
        wave = 0.3 * torch.sin(1.7 * index + place).view(shape)
        is_scale = "norm" in name and name.endswith("weight")
        weights[name] = (1 + wave if is_scale else wave).float()
    return weights


def logits_here(
    folder: Path, weights: Mapping[str, Tensor], flags: Mapping[str, Any], args: Mapping[str, Any]
) -> Tensor:
    """Write Core's file, load it, and return the logits [8, 4] of our model.

    Args:
        folder: An empty folder.
        weights: The tensors of Core's file.
        flags: The flags of our model.
        args: Core's command line.
    """
    common = {"args": Namespace(consumed_train_samples=0, **args), "iteration": 3}
    write_core(folder / "iter_0000003", weights, common)
    reader = open_checkpoint(folder)
    model = gpt({**flags, **reader.meta["config"]["model"]}).eval()
    parameters = dict(model.named_parameters())
    assert {f"model.{name}" for name in parameters} == set(reader.names())
    tokens = 7 * torch.arange(8)[None] % VOCAB
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(read_whole(reader, f"model.{name}"))
        logits: Tensor = model(tokens)[0, :, :4]
    return logits


def resave(layout, source, words, target):
    """Load a checkpoint of ours and save it for Megatron Core."""
    words = [*words, "--load", str(source), "--save", str(target), "--ckpt-format", "torch_dist"]
    save_run(build_toy(layout, words))


def _reload(layout, source, words, target):
    """Load a checkpoint in Megatron Core's format and save it in ours."""
    save_run(build_toy(layout, [*words, "--load", str(source), "--save", str(target)]))


def resave_both_ways(native, words, folder, processes, sizes):
    """Check that saving for Megatron Core and loading that keeps every bit in a layout."""
    core, again = folder / "core", folder / "again"
    run_distributed(processes, resave, native, words, core, **sizes)
    run_distributed(processes, _reload, core, words, again, **sizes)
    expected = read_all(native)
    assert open_checkpoint(core).format == "core"
    for path in (core, again):
        found = read_all(path)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), (path.name, name)


def stored_tensors(folder):
    """Return all tensors that PyTorch's own loader reads from a folder, and its other names."""
    index = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    held = {
        name: torch.empty(one.size, dtype=one.properties.dtype)
        for name, one in index.items()
        if not isinstance(one, dcp.metadata.BytesStorageMetadata)
    }
    dcp.load(held, checkpoint_id=str(folder), no_dist=True)
    return held, index.keys() - held.keys()
