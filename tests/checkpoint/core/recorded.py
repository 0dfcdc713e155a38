"""Logits that Megatron Core's own models computed on a CPU, and the same models in this package.

Every weight is a wave that depends on its name's place in the alphabet, so that a file can be
written again from the names and shapes alone.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.loading import open_checkpoint
from tests.checkpoint.core.core_files import write_core
from tests.checkpoint.states import read_whole
from tests.models.small import VOCAB, gpt

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
