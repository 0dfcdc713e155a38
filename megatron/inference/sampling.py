"""From logits to the next token."""

from __future__ import annotations

import torch
from torch import Tensor


def sample(
    logits: Tensor, *, temperature: float, top_k: int, generator: torch.Generator | None = None
) -> Tensor:
    """One token a row.

    Args:
        logits: [b, v].
        temperature: divides the logits; 0: the most likely token.
        top_k: only the so many most likely tokens; 0: all.
        generator: of the draw, on the logits' device.

    Returns:
        [b], int64.
    """
    if temperature == 0 or top_k == 1:
        return logits.argmax(dim=-1)
    logits = logits.float() / temperature
    if top_k:
        smallest_kept = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < smallest_kept, float("-inf"))
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator).squeeze(1)
