"""Plans of mixers that carry a state from token to token, such as Mamba-2.

In training, a recurrent mixer starts each sequence without a state. In inference, the engine keeps
the states of each sequence next to the KV cache (`inference.cache`). The mixer's plan describes
these states.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron.models.plan import AttentionPlan, MixerPlan


class StateSpec(NamedTuple):
    """A tensor that a mixer carries from token to token, for one sequence on one process.

    Attributes:
        name: Name of the state, for messages.
        shape: Shape of the tensor.
        dtype: The tensor's dtype; `None` means the dtype of the model's weights.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None


@dataclass(frozen=True, kw_only=True)
class RecurrentPlan(MixerPlan, ABC):
    """A mixer whose outputs depend on earlier tokens only through a state of constant size.

    Attributes:
        convolution: Number of tokens that the causal convolution before the recurrence reads.
        chunk: Number of tokens that are computed together in training and prefill. The chunk size
            affects only the last bits of the results.
    """

    convolution: int = 4
    chunk: int = 128

    @property
    @abstractmethod
    def convolved(self) -> int:
        """Number of channels that pass through the convolution."""

    @abstractmethod
    def states(self, tensor: int) -> tuple[StateSpec, ...]:
        """Return a sequence's states on one process, in the order in which the mixer uses them.

        Args:
            tensor: Number of tensor-parallel ranks.
        """

    def convolution_state(self, tensor: int) -> StateSpec:
        """Return the state of the convolution: the inputs of the last tokens, the latest one last.

        Args:
            tensor: Number of tensor-parallel ranks.
        """
        return StateSpec("convolution", (self.convolution - 1, self.convolved // tensor))


@dataclass(frozen=True, kw_only=True)
class MambaPlan(RecurrentPlan):
    """A Mamba-2 mixer (Dao and Gu, 2024), a state-space model with one scalar decay per head.

    Attributes:
        heads: Number of heads.
        head_size: Number of channels per head.
        groups: Number of groups of heads. The heads of a group share the vectors B and C.
        state: Size of the vectors B and C, and number of state values per channel.
        epsilon: Number added to the variance in the normalization before the output projection.
        normalizes: Whether there is a normalization before the output projection.
        factors: Factors applied to the gate z, the input x, the vectors B and C, and the time
            steps; empty for none.
    """

    kind: str = "mamba"
    bias: bool = False
    heads: int
    head_size: int
    groups: int
    state: int
    epsilon: float
    normalizes: bool = True
    factors: tuple[float, ...] = ()

    @property
    def inner(self) -> int:
        """Total number of channels in all heads."""
        return self.heads * self.head_size

    @property
    def widths(self) -> tuple[int, int, int, int, int]:
        """Widths of the input projection's gate z, input x, vectors B and C, and time steps."""
        vectors = self.groups * self.state
        return self.inner, self.inner, vectors, vectors, self.heads

    @property
    def convolved(self) -> int:
        """Number of channels of x, B and C, which pass through the convolution."""
        return self.inner + 2 * self.groups * self.state

    def states(self, tensor: int) -> tuple[StateSpec, ...]:
        """Return the states of the convolution and of the heads [n/t, head_size, state].

        Args:
            tensor: Number of tensor-parallel ranks.
        """
        shape = (self.heads // tensor, self.head_size, self.state)
        return self.convolution_state(tensor), StateSpec("heads", shape, torch.float32)


@dataclass(frozen=True, kw_only=True)
class ParallelMambaPlan(AttentionPlan):
    """Attention with a parallel Mamba-2 mixer, which reads the same input (Falcon-H1).

    Attributes:
        mamba: The plan of Mamba-2.
        attention_factor: Factor applied to the output of attention.
        mamba_factor: Factor applied to the output of Mamba-2.
    """

    kind: str = "parallel_mamba"
    mamba: MambaPlan
    attention_factor: float
    mamba_factor: float


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetPlan(RecurrentPlan):
    """A gated delta net (Yang et al., 2024). Its linear layers have no biases.

    Attributes:
        key_heads: Number of key heads, which equals the number of query heads.
        value_heads: Number of value heads, a multiple of `key_heads`. Consecutive value heads share
            a query head and a key head.
        key_size: Number of channels in a query or key.
        value_size: Number of channels in a value.
        epsilon: Number added to the variance in the normalization of each head's output.
    """

    kind: str = "gated_delta_net"
    bias: bool = False
    chunk: int = 64
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    epsilon: float

    @property
    def keys(self) -> int:
        """Total width of all keys, which is also that of all queries."""
        return self.key_heads * self.key_size

    @property
    def values(self) -> int:
        """Total width of all values."""
        return self.value_heads * self.value_size

    @property
    def widths(self) -> tuple[int, int, int, int, int, int]:
        """Widths of the input projection's queries, keys, values, gates, rates and decays."""
        heads = (self.value_heads,) * 2
        return self.keys, self.keys, self.values, self.values, *heads

    @property
    def convolved(self) -> int:
        """Number of channels of queries, keys and values, which pass through the convolution."""
        return 2 * self.keys + self.values

    def states(self, tensor: int) -> tuple[StateSpec, ...]:
        """Return the states of the convolution and of the heads [n/t, key_size, value_size].

        Args:
            tensor: Number of tensor-parallel ranks.
        """
        shape = (self.value_heads // tensor, self.key_size, self.value_size)
        return self.convolution_state(tensor), StateSpec("heads", shape, torch.float32)
