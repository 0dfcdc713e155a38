"""Code shared by all recurrent mixers: forward pass, document indices, causal convolution.

Shapes: s sequence, b micro-batch, h hidden, g groups, c channels, k tokens that the convolution
reads, t tensor-parallel size, C context-parallel size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.kernels.recurrence import RecurrenceKernels
from megatron.kernels.rope import Rotation
from megatron.kernels.segments import Mask, Segments, number_segments
from megatron.models.attention import KeyValueCache
from megatron.parallel.build import BuildContext
from megatron.parallel.context.split import gather_sequences, scatter_sequences
from megatron.parallel.layers import Linear
from megatron.parallel.layout import Axis
from megatron.parallel.parameter import Init


class RecurrentMixer(nn.Module, ABC):
    """A mixer that passes states from token to token, between two linear projections.

    A subclass allocates both projections and implements `mix`, which continues sequences from their
    states. Training calls `mix` with whole sequences and no states. In inference, the cache calls
    it with each sequence's new tokens and states (`KeyValueCache.recur`).

    The rows of the input projection are ordered by group, and groups are independent of each other
    until the output projection. A tensor rank holds whole groups. With context parallelism, each
    rank computes some of these groups for whole sequences, between two all-to-all exchanges.

    Args:
        context: Layout, device, kernels and number formats.
        group: Width of a group in the input projection.

    Attributes:
        context: The context-parallel axis.
        input: Projection of the tokens.
        output: Projection of the mixed tokens.
    """

    input: Linear
    output: Linear

    def __init__(self, context: BuildContext, *, group: int) -> None:
        """Store the settings that the forward pass needs."""
        super().__init__()
        self.layer_number, self._group = context.layer, group
        self.context = context.layout.context
        self._kernels = context.kernels.recurrence.kernels

    @abstractmethod
    def mix(
        self,
        projected: Tensor,
        states: tuple[Tensor, ...] | None,
        documents: Tensor | None,
        axis: Axis,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute everything between the two projections for this rank's groups.

        Args:
            projected: [s, b, g, outputs of the input projection for a group].
            states: The states that `RecurrentPlan.states` describes, for each sequence; `None`
                means zeros.
            documents: The index of each token's document, [s, b]; `None` for a single document.
            axis: The context ranks, which divide the groups of a tensor rank; a single rank in
                inference.

        Returns:
            The mixed tokens [s, b, g, c] in the dtype of `projected`, and the states after them.
        """

    def forward(
        self,
        x: Tensor,
        mask: Mask | None,
        rotation: Rotation | None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Pass states from token to token, within documents or from the cache.

        Args:
            x: [s, b, h]; [s/t, b, h] with sequence parallelism.
            mask: The ends of documents, where states are reset; `None` for none.
            rotation: Ignored, because states follow the order of tokens.
            cache: States of earlier tokens, in inference.

        Returns:
            The output in the shape of x; the caller adds `bias_to_add`.
        """
        projected = self.input(x)
        if cache is not None:
            return self.output(cache.recur(self.layer_number, projected, self._continue))
        by_rank = projected.unflatten(2, (self.context.size, -1, self._group))
        by_group = gather_sequences(by_rank, self.context)
        mixed, _ = self.mix(by_group, None, documents_of(mask), self.context)
        return self.output(scatter_sequences(mixed, self.context).flatten(2))

    def kernels_for(
        self, projected: Tensor, states: tuple[Tensor, ...] | None
    ) -> RecurrenceKernels | None:
        """Return the kernels that `mix` uses for these tokens, or `None` for plain PyTorch."""
        kernels = self._kernels
        return kernels if kernels is not None and kernels.supports(projected, states) else None

    def _continue(
        self, projected: Tensor, states: tuple[Tensor, ...] | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the mixed tokens of sequences [s, b, g c], and the states after them."""
        mixed, states = self.mix(projected.unflatten(2, (-1, self._group)), states, None, Axis())
        return mixed.flatten(2), states

    @property
    def bias_to_add(self) -> Tensor | None:
        """Bias [h] to be added in the residual sum; `None` if there is none."""
        return self.output.bias_to_add


def documents_of(mask: Mask | None) -> Tensor | None:
    """Return the index of each token's document, int64 [s, b]; `None` without documents.

    States pass from token to token only within a document.

    Args:
        mask: The mask of attention layers. Only the ends of documents are used here.
    """
    if mask is None:
        return None
    assert isinstance(mask, Segments), "only GPT models have recurrent layers"
    return mask.shared("documents", lambda: number_segments(mask.ends, mask.shape).t())


class CausalConvolution(nn.Module):
    """A causal depthwise convolution over the last k tokens of each channel, followed by SiLU.

    Args:
        channels: Number of channels, which are split evenly over tensor ranks.
        tokens: Number of tokens that an output depends on, k.
        context: Layout, device, kernels and number formats.
        bias: Whether each channel has a bias.
    """

    def __init__(
        self, channels: int, tokens: int, context: BuildContext, *, bias: bool = True
    ) -> None:
        """Allocate this rank's channels."""
        super().__init__()
        init = Init("uniform", tokens**-0.5)  # like PyTorch's convolutions
        self.weight = context.new_parameter((channels, tokens), init=init, split_dim=0)
        self.bias = context.new_parameter((channels,), init=init, split_dim=0) if bias else None

    def forward(
        self,
        x: Tensor,
        state: Tensor | None,
        documents: Tensor | None,
        part: slice,
        kernels: RecurrenceKernels | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Convolve the channels of this rank that `part` selects, and apply SiLU.

        Args:
            x: [s, b, c].
            state: Inputs of the tokens before x, [b, k - 1, c]; `None` means zeros.
            documents: The index of each token's document, [s, b]; `None` for a single document.
            part: The slice of this rank's channels that x contains.
            kernels: The kernels to use for a single document of at least max(k, 2) tokens; `None`
                for PyTorch's operations.

        Returns:
            Results [s, b, c], and the state after x in the dtype of x. PyTorch's operations return
            results in fp32, and kernels in the dtype of x.
        """
        bias = None if self.bias is None else self.bias[part]
        length, history = len(x), self.weight.shape[1] - 1
        if kernels is not None and documents is None and length > max(1, history):
            return kernels.convolve(x, self.weight[part], bias, state)
        weight = self.weight[part].float()
        if state is None:
            padded = F.pad(x, (0, 0, 0, 0, history, 0))
        else:
            padded = torch.cat((state.transpose(0, 1).to(x.dtype), x))
        inputs = padded.float()
        result = None if bias is None else bias.float()
        for tap in range(history + 1):
            shifted = inputs[tap : tap + length]
            lag = history - tap
            if documents is not None and lag:
                previous = F.pad(documents, (0, 0, lag, 0), value=-1)[:length]
                shifted = shifted * (previous == documents).unsqueeze(-1)
            product = shifted * weight[:, tap]
            result = product if result is None else result + product
        assert result is not None
        return F.silu(result), padded[length:].transpose(0, 1)


def local_slice(size: int, axis: Axis) -> slice:
    """Return the slice of `size` channels, ordered by group, that this context rank computes."""
    share = size // axis.size
    return slice(axis.rank * share, (axis.rank + 1) * share)
