"""Tied word embeddings under a pipeline: two copies of one parameter, kept equal.

The first stage looks words up, the last one scores them. Both start with the same values (their
name is the same); adding their gradients before the update keeps them the same.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor, nn

from megatron.parallel.layout import Axis

TIED = "embedding.word.weight"


def share_tied_gradients(parts: Iterable[nn.Module], embedding: Axis) -> None:
    """Add the two copies' gradients. Collective over the axis of a pipeline's two ends.

    Nothing where the output has its own weights, or where both ends stand on one stage.
    """
    if embedding.size == 1:
        return
    held = [dict(part.named_parameters()) for part in parts]
    untied = any("output.weight" in names for names in held)
    for names in held:
        if TIED in names and not untied:
            gradient: Tensor = names[TIED].main_grad  # type: ignore[attr-defined]
            dist.all_reduce(gradient, group=embedding.group)
