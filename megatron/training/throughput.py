"""Tokens per second and MFU.

MFU = tokens/s of one process x model FLOPs of one token / the device's dense 16-bit peak.
Model FLOPs of a token: `models.arithmetic.flops_per_token` (causal attention counted half,
recomputation not counted). Padding counts as tokens: it is computed.
"""

from __future__ import annotations


def tokens_per_second(samples: int, tokens: int, seconds: float, world_size: int) -> float:
    """Of one process.

    Args:
        tokens: of a sample.
    """
    return samples * tokens / seconds / world_size


def model_flops_utilization(
    tokens_per_second: float, flops_per_token: float, peak_flops: float | None
) -> float | None:
    """Share of the peak, 0 to 1; None where the peak is not known (a CPU)."""
    if peak_flops is None:
        return None
    return tokens_per_second * flops_per_token / peak_flops
