"""What the costs of a layer depend on, and what they are counted in.

A layer's class counts from its plan how many weights, operations and bytes it takes; these records
are the rest of what it needs to know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Work(NamedTuple):
    """Floating-point operations of the forward and backward passes for one sample.

    Attributes:
        products: Operations of matrix products with weights.
        scores: Operations of attention scores and of the weighted sums of values.
    """

    products: int
    scores: int = 0


@dataclass(frozen=True, kw_only=True)
class WeightSplit:
    """The numbers of processes that share weights.

    Attributes:
        tensor: Processes that split every layer except for experts.
        expert: Processes that divide the experts of a mixture.
        expert_tensor: Processes that split each expert.
    """

    tensor: int = 1
    expert: int = 1
    expert_tensor: int = 1

    @property
    def of_experts(self) -> WeightSplit:
        """The split of an MLP that is an expert."""
        return WeightSplit(tensor=self.expert_tensor)


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """The properties of a micro-batch that determine the activation memory of a process.

    Attributes:
        sequences: Sequences in the micro-batch.
        length: Tokens of each sequence in the layer.
        encoder_length: Tokens of each encoder sequence that a decoder layer attends to.
        tensor: Number of tensor-parallel ranks.
        sequence: Number of ranks that share a sequence outside split layers; 1 without sequence
            parallelism.
        expert_tensor: Number of ranks that split each expert.
        context: Number of context-parallel ranks.
        width: Bytes per activation.
        keeps_scores: Whether attention keeps every score for the backward pass.
        recomputed: The parts of a layer that the backward pass recomputes (--recompute-modules).
        imbalance: Rows of this process's experts, as a multiple of an even share.
        losses: Micro-batches whose losses are held until their backward pass.
        chunked_loss: Whether the loss is computed in chunks, so that it never holds all logits.
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
        """Tokens on this process."""
        return self.sequences * self.length // self.context

    @property
    def expert_tokens(self) -> int:
        """Tokens that this process sends to experts, or sends together with its expert ranks."""
        return self.tokens * self.expert_tensor // self.tensor

    @property
    def encoder_tokens(self) -> int:
        """Encoder tokens on this process."""
        return self.sequences * self.encoder_length // self.context
