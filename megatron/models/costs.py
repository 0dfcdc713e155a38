"""Data types used to count the costs of a layer.

A layer's class counts the layer's weights, FLOPs and activation bytes. Besides the layer's plan
it needs `WeightSplit` and `MicroBatch`, and it returns FLOPs as `Flops`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Flops(NamedTuple):
    """Floating-point operations of the forward and backward passes for one sample.

    Attributes:
        products: FLOPs of matrix products with weights.
        scores: FLOPs of attention scores and of the weighted sums of values, or of a recurrence.
    """

    products: int
    scores: int = 0


@dataclass(frozen=True, kw_only=True)
class WeightSplit:
    """The numbers of processes over which weights are split.

    Attributes:
        tensor: Number of tensor-parallel processes, which split every layer except the experts.
        expert: Number of expert-parallel processes, which divide the experts of a mixture.
        expert_tensor: Number of tensor-parallel processes of each expert.
    """

    tensor: int = 1
    expert: int = 1
    expert_tensor: int = 1

    @property
    def of_experts(self) -> WeightSplit:
        """The split of a single expert."""
        return WeightSplit(tensor=self.expert_tensor)


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """The properties of a micro-batch that determine the activation memory of a process.

    Attributes:
        sequences: Number of sequences in the micro-batch.
        length: Number of tokens in each of the layer's sequences.
        encoder_length: Number of tokens in each encoder sequence that a decoder layer attends to.
        tensor: Number of tensor-parallel ranks.
        sequence: Number of ranks that share a sequence outside split layers; 1 without sequence
            parallelism.
        expert_tensor: Number of ranks that split each expert.
        context: Number of context-parallel ranks.
        width: Bytes per activation.
        keeps_scores: Whether attention keeps every score for the backward pass.
        recomputed: The parts of a layer that the backward pass recomputes (--recompute-modules).
        imbalance: Rows that this process's experts receive, as a multiple of an even share.
        losses: Number of micro-batches whose losses are in memory at the same time, waiting for
            their backward pass.
        chunked_loss: Whether the loss is computed in chunks, so that only part of the logits is in
            memory at any time.
    """

    sequences: int
    length: int
    encoder_length: int = 0
    tensor: int = 1
    sequence: int = 1
    expert_tensor: int = 1
    context: int = 1
    width: int = 4
    keeps_scores: bool = False
    recomputed: frozenset[str] = frozenset()
    imbalance: float = 1.0
    losses: int = 1
    chunked_loss: bool = False

    @property
    def tokens(self) -> int:
        """Number of tokens on this process."""
        return self.sequences * self.length // self.context

    @property
    def expert_tokens(self) -> int:
        """Number of tokens sent to experts by this process and the ranks that split its experts."""
        return self.tokens * self.expert_tensor // self.tensor

    @property
    def encoder_tokens(self) -> int:
        """Number of encoder tokens on this process."""
        return self.sequences * self.encoder_length // self.context
